"""The small operators, whose cost is that of calling them: python benchmarks/bench_scale.py

`scale_losses` multiplies losses by the scale; `update_scale_` is the end of a step, with the overflow flags of several
devices combined.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from _harness import arguments, progress, ratio, report, time_interleaved

import fastamp
from fastamp import ops


def measured(options: Any, name: str, functions: dict[str, Any]) -> dict[str, Any]:
    rounds: dict[str, Any] = dict(rounds=3, min_seconds=0.0) if options.quick else dict(rounds=100, min_seconds=0.5)
    timing = time_interleaved(functions, device=options.device, calls=50, **rounds)
    ratios = {f"against {other}": ratio(timing, other, "fastamp") for other in functions if other != "fastamp"}
    return {"case": name, "timing": timing, "ratios": ratios}


def loss_case(options: Any, count: int) -> dict[str, Any]:
    losses = [torch.rand((), device=options.device, requires_grad=True) for _ in range(count)]
    given: Any = losses[0] if count == 1 else losses
    theirs, ours = (kind(options.device) for kind in (torch.amp.GradScaler, fastamp.GradScaler))
    return measured(
        options,
        f"scaler.scale of {'a loss' if count == 1 else f'{count} losses'}",
        {"torch": lambda: theirs.scale(given), "fastamp": lambda: ours.scale(given)},
    )


def update_case(options: Any, flags: int) -> dict[str, Any]:
    scale = torch.full((), 1024.0, device=options.device)
    tracker = torch.zeros((), dtype=torch.int32, device=options.device)
    found = [torch.zeros((), device=options.device) for _ in range(flags)]
    grows = (2.0, 0.5, 2**30)

    def torchs() -> None:
        combined = found[0]
        for other in found[1:]:
            combined = combined + other
        torch._amp_update_scale_(scale, tracker, combined, *grows)

    return measured(
        options,
        f"update_scale_, {flags} flag{'s' if flags > 1 else ''}",
        {"torch": torchs, "fastamp": lambda: ops.update_scale_(scale, tracker, found, *grows)},
    )


def main() -> int:
    options = arguments("scale", __doc__, devices=("cpu", "cuda"))
    cases = [functools.partial(loss_case, options, count) for count in (1, 8)]
    cases += [functools.partial(update_case, options, flags) for flags in (1, 4)]
    return report("scale", list(progress(cases)), options)


if __name__ == "__main__":
    sys.exit(main())
