"""How the cost grows: python benchmarks/bench_sizes.py

`unscale_` and `update` of the scaler for 10 to 10,000 gradients of 16 elements, and the operators on one float32
gradient of 1 KiB up to the memory's end: three quarters of what is free, on a CPU 64 GiB at most, since each pass over
more takes minutes. benchmarks/make_plots.py draws the curves.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from _harness import arguments, progress, ratio, report, time_interleaved
from _loop import SCALE, ScalerLoop

import fastamp
from fastamp import ops

COUNTS = (10, 30, 100, 300, 1000, 3000, 10000)
MOST_ON_A_CPU = 64 * 2**30


def memory_end(device: str) -> int:
    """Bytes of the largest gradient."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] * 3 // 4
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free * 3 // 4, MOST_ON_A_CPU)


def sizes(end: int) -> list[int]:
    """Each four times the one before, and the end, to whole MiB."""
    found = [2**power for power in range(10, end.bit_length(), 2)]
    last = end >> 20 << 20
    return found if last <= found[-1] else [*found, last]


def count_case(options: Any, count: int) -> dict[str, Any]:
    device = options.device
    parameters = [torch.nn.Parameter(torch.zeros(16, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(16, device=device)
    rounds: dict[str, Any] = dict(rounds=2, min_seconds=0.0) if options.quick else dict(rounds=20, min_seconds=1.0)
    timing = time_interleaved(
        {
            name: ScalerLoop(kind, parameters, device).unscale_update
            for name, kind in (("torch", torch.amp.GradScaler), ("fastamp", fastamp.GradScaler))
        },
        device=device,
        calls=max(1, 1000 // count),
        **rounds,
    )
    ratios = {"against torch": ratio(timing, "torch", "fastamp")}
    return {"case": f"{count} x 16: unscale_ + update", "count": count, "timing": timing, "ratios": ratios}


def bytes_case(options: Any, nbytes: int) -> dict[str, Any]:
    # Few values over and over: random ones would take longer to make than to measure.
    grads = [torch.randn(256, device=options.device).repeat(nbytes // 1024)]
    found_inf = torch.zeros((), device=options.device)
    inv_scale = torch.tensor(SCALE, device=options.device)
    large = nbytes >= 2**28
    timing = time_interleaved(
        {
            "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale),
            "mul_": lambda: grads[0].mul_(SCALE),
            "fastamp": lambda: ops.unscale_(grads, found_inf, inv_scale),
        },
        device=options.device,
        calls=max(1, 2**16 // nbytes),
        rounds=3 if options.quick or large else 30,
        min_seconds=0.0 if options.quick or nbytes >= 2**32 else 0.5,
        warmup=1 if large else 3,
    )
    ratios = {"against torch": ratio(timing, "torch", "fastamp"), "against mul_": ratio(timing, "mul_", "fastamp")}
    size = f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"
    return {"case": f"unscale_, one float32 tensor, {size}", "bytes": nbytes, "timing": timing, "ratios": ratios}


def main() -> int:
    options = arguments("sizes", __doc__, devices=("cpu", "cuda"))
    end = 2**20 if options.quick else memory_end(options.device)
    cases = [functools.partial(count_case, options, count) for count in COUNTS]
    cases += [functools.partial(bytes_case, options, nbytes) for nbytes in sizes(end)]
    return report("sizes", list(progress(cases)), options)


if __name__ == "__main__":
    sys.exit(main())
