"""What one checkpointed call costs beyond the function's own forward, recomputation and backward.

    python benchmarks/bench_checkpoint.py [--rounds 60] [--json FILE]

For each case: the time of forward and backward through `torch.utils.checkpoint.checkpoint` and through
`fastamp.checkpoint`, less the time of the same without a checkpoint and of one more forward (the
recomputation). The functions are tiny, so that what is left is the cost of checkpointing itself. Variants run
interleaved, in an order that rotates from round to round, single-threaded; the numbers are medians over
rounds of the process's CPU time, which other load on the machine disturbs less than the clock, in
microseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.utils.checkpoint as torch_checkpoint
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


def measure(forward: Callable[[Run], Tensor], torch_run: Run, our_run: Run, rounds: int) -> dict[str, float]:
    variants: dict[str, Callable[[], object]] = {
        "forward": lambda: forward(plain),
        "plain": lambda: forward(plain).sum().backward(),
        "torch": lambda: forward(torch_run).sum().backward(),
        "fastamp": lambda: forward(our_run).sum().backward(),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    repeats = 20
    for round_number in range(rounds + 2):
        for name in names[round_number % 4 :] + names[: round_number % 4]:
            variant = variants[name]
            start = time.process_time()
            for _ in range(repeats):
                variant()
            if round_number >= 2:  # the first two rounds warm up
                times[name].append((time.process_time() - start) / repeats * 1e6)
    median = {name: statistics.median(values) for name, values in times.items()}
    own = median["plain"] + median["forward"]
    result = {name: round(value, 2) for name, value in median.items()}
    result["torch_adds"] = round(median["torch"] - own, 2)
    result["fastamp_adds"] = round(median["fastamp"] - own, 2)
    result["ratio"] = round((median["fastamp"] - own) / (median["torch"] - own), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of 20 calls per variant (default 60)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{'case':22}{'torch adds':>12}{'fastamp adds':>14}{'ratio':>8}   (microseconds a call)")
    for name, case in cases().items():
        results[name] = measure(*case, options.rounds)
        row = results[name]
        print(f"{name:22}{row['torch_adds']:12.1f}{row['fastamp_adds']:14.1f}{row['ratio']:8.2f}")
    if options.json:
        report = {
            "what": "checkpoint call overhead, microseconds, medians",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rounds": options.rounds,
            "cases": results,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
