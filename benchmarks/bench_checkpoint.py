"""What one checkpointed call costs beyond the function's own forward, recomputation and backward.

    python benchmarks/bench_checkpoint.py

For each case: the time of forward and backward through `torch.utils.checkpoint.checkpoint` and through
`fastamp.checkpoint`, less the time of the same without a checkpoint and of one more forward (the
recomputation). The functions are tiny, so that what is left is the cost of checkpointing itself. Variants run
interleaved, in an order that rotates from round to round, single-threaded; the numbers are medians over
rounds of the process's CPU time, which other load on the machine disturbs less than the clock, in
microseconds. DeepSpeed's checkpoint, which is a reentrant one, takes part where it can be imported.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from _baselines import deepspeed_checkpoint, version
from _harness import arguments, progress, report, summary
from torch import Tensor, nn

from fastamp.checkpointing import checkpoint

Run = Callable[..., Tensor]


def torchs(function: Run, *args, **kwargs) -> Tensor:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def torchs_reentrant(function: Run, *args) -> Tensor:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)


def ours_reentrant(function: Run, *args) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def plain(function: Run, *args, **kwargs) -> Tensor:
    return function(*args, **kwargs)


class Block(nn.Module):
    """Some modules and parameters, no buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def cases() -> dict[str, tuple[Callable[[Run], Tensor], Run, Run]]:
    """name -> (one forward through a given way to run, torch's way, ours)."""
    x = torch.randn(16, 16, requires_grad=True)
    w = torch.randn(16, 16)
    block = Block(16)
    norm = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    return {
        "function": (lambda run: run(torch.sin, x), torchs, checkpoint),
        "module": (lambda run: run(block, x), torchs, checkpoint),
        "keyword argument": (lambda run: run(lambda x, w: x * w, x, w=w), torchs, checkpoint),
        "nested arguments": (
            lambda run: run(lambda x, ws: x * ws["w"][0], x, {"w": [w]}),
            torchs,
            checkpoint,
        ),
        "BatchNorm": (lambda run: run(norm, x), torchs, checkpoint),
        "function, reentrant": (lambda run: run(torch.sin, x), torchs_reentrant, ours_reentrant),
        "module, reentrant": (lambda run: run(block, x), torchs_reentrant, ours_reentrant),
    }


def measure(
    name: str, forward: Callable[[Run], Tensor], torch_run: Run, our_run: Run, rounds: int, deepspeed: Run | None
) -> dict[str, Any]:
    ways = {"torch": torch_run, "fastamp": our_run, "plain": plain}
    if deepspeed is not None:
        ways["DeepSpeed"] = deepspeed
    for way in ways.values():
        torch.testing.assert_close(forward(way), forward(plain))
    variants: dict[str, Callable[[], object]] = {
        way: functools.partial(lambda run: forward(run).sum().backward(), run) for way, run in ways.items()
    }
    variants["forward"] = lambda: forward(plain)
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    repeats = 20
    for round_number in range(rounds + 2):
        names.append(names.pop(0))
        for variant in names:
            start = time.process_time()
            for _ in range(repeats):
                variants[variant]()
            if round_number >= 2:  # the first two rounds warm up
                times[variant].append((time.process_time() - start) / repeats * 1e6)
    timing = {variant: summary(values) for variant, values in times.items()}

    def added(way: str) -> float:
        """Over the two forward passes and the backward pass that any checkpoint takes, by rounds."""
        rounds = zip(times[way], times["plain"], times["forward"], strict=True)
        return round(statistics.median(total - own - again for total, own, again in rounds), 1)

    adds = {way: added(way) for way in ways if way != "plain"}
    result: dict[str, Any] = {"case": name, "timing": timing, "adds": adds}
    result["ratios"] = {
        f"{way} adds / fastamp adds": round(adds[way] / adds["fastamp"], 3) for way in adds if way != "fastamp"
    }
    # fastamp may add at most 1.15 of what torch adds.
    result["target"] = {"torch adds / fastamp adds": 0.87}
    return result


def columns(results: list[dict[str, Any]]) -> list[str]:
    return ["a checkpoint of", *(f"{way} adds, us" for way in results[0]["adds"]), "fastamp / torch", "at most"]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for result in results:
        share = result["adds"]["fastamp"] / result["adds"]["torch"]
        adds = [f"{microseconds:.0f}" for microseconds in result["adds"].values()]
        found.append([result["case"], *adds, f"{share:.2f}", "1.15" + (" (missed)" if share > 1.15 else "")])
    return found


def main() -> int:
    options = arguments("checkpoint", __doc__)
    torch.set_num_threads(1)
    rounds = 3 if options.quick else 60
    deepspeed = deepspeed_checkpoint()
    peer, outcome = (None, f"not run: {deepspeed}") if isinstance(deepspeed, str) else (deepspeed, version("deepspeed"))
    runs = [functools.partial(measure, name, *case, rounds, peer) for name, case in cases().items()]
    results = list(progress(runs))
    facts = {"columns": columns(results), "rows": rows(results), "baselines": {"DeepSpeed": outcome}}
    return report("checkpoint", results, options, facts)


if __name__ == "__main__":
    sys.exit(main())
