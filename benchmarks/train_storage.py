"""Does lossy storage change what a model learns? The example of examples/train_gpt.py, trained for 300 steps with its
block boundaries stored in different formats, from three seeds:

    python benchmarks/train_storage.py          # ten minutes on two cores

Runs of one seed start from the same weights and see the same batches, so that their losses can be compared in pairs.
`exact` must end with the weights of torch.utils.checkpoint, bit for bit; the exit code is 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, machine

import fastamp
from fastamp.demo.command import parse
from fastamp.demo.model import checkpoint_with_fastamp, checkpoint_with_torch
from fastamp.demo.report import table
from fastamp.demo.text import batches, standard_library
from fastamp.demo.training import Job, Recipe, training_step

FORMATS = ("exact", "bf16", "int8", "delta-int4")
COLUMNS = [
    "storage of block boundaries",
    "validation loss, mean of seeds (nats/byte)",
    "lowest .. highest",
    "against exact, same seed: mean",
    "largest",
]
MODEL = ["--device=cpu", "--dtype=fp32", "--layers=6", "--width=64", "--seq=64", "--batch=8", "--accumulation=1"]
# The loss is in nats per sequence of 64 bytes; 64 clips as 1 does where it is in nats per byte.
TRAINING = ["--lr=3e-3", "--max-norm=64", "--init-scale=1024", "--growth-interval=1000"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements of validation loss")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--json", type=Path, default=RESULTS / "train_storage.json", help="where to write the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    runs, different = [], []
    for seed in range(options.seeds):
        torchs = train("torch", Recipe("torch", torch.amp.GradScaler, checkpoint_with_torch), seed, options)
        runs.append(torchs)
        for storage in FORMATS:
            recipe = Recipe(storage, fastamp.GradScaler, checkpoint_with_fastamp(storage))
            runs.append(train(storage, recipe, seed, options))
            if storage == "exact" and not same_weights(torchs, runs[-1]):
                different.append(seed)
    for run in runs:
        del run["weights"]

    rows = summary(runs)
    print("\n" + table([COLUMNS, *rows]))
    print(f"exact is bit-identical to torch.utils.checkpoint: {f'NO, seeds {different}' if different else 'yes'}")
    content = {
        "benchmark": "train_storage",
        "machine": machine(),
        "options": [*MODEL, *TRAINING],
        "exact_is_bit_identical_to_torch": not different,
        "what": "300 steps from each of three seeds",
        "columns": COLUMNS,
        "rows": rows,
        "runs": runs,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    plot(runs, options.json.with_suffix(".png"))
    print(f"written to {options.json} and {options.json.with_suffix('.png')}")
    return 1 if different else 0


def train(name: str, recipe: Recipe, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: validation loss every few steps, and the weights it ends with."""
    settings = parse([*MODEL, *TRAINING, f"--seed={seed}", f"--steps={options.steps}"])
    text = standard_library()
    # The same validation batches for every seed, so that seeds differ by what they learned alone.
    held_out = list(batches(text.validation, 16, parse([*MODEL, "--seed=0"])))
    job, stream = Job(recipe, settings), batches(text.train, options.steps, settings)
    validation, begin = {}, time.perf_counter()
    for step in range(1, options.steps + 1):
        job.run(training_step, [next(stream)], seed=seed + step)
        if step % options.every == 0 or step == options.steps:
            validation[step] = job.evaluate(held_out)
    took = time.perf_counter() - begin
    print(f"seed {seed}  {name:10}  validation loss {validation[options.steps]:.4f}  {took:5.0f} s", flush=True)
    return {
        "storage": name,
        "seed": seed,
        "validation": validation,
        "skipped": len(job.skipped),
        "weights": list(job.model.parameters()),
    }


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))
    return same and a["validation"] == b["validation"]


def final(runs: list[dict[str, Any]], storage: str) -> list[float]:
    """Each seed's last validation loss."""
    return [run["validation"][max(run["validation"])] for run in runs if run["storage"] == storage]


def summary(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for storage in ("torch", *FORMATS):
        losses = final(runs, storage)
        gaps = [mine - exact for mine, exact in zip(losses, final(runs, "exact"), strict=True)]
        name = {"torch": "torch.utils.checkpoint", "exact": "exact (bit-identical)"}.get(storage, storage)
        rows.append(
            [
                name,
                f"{statistics.mean(losses):.4f}",
                f"{min(losses):.4f} .. {max(losses):.4f}",
                f"{statistics.mean(gaps):+.4f}",
                f"{max(gaps, key=abs):+.4f}",
            ]
        )
    return rows


def curves(runs: list[dict[str, Any]], storage: str) -> Iterator[tuple[int, list[float]]]:
    """Step, and each seed's validation loss after it."""
    mine = [run["validation"] for run in runs if run["storage"] == storage]
    for step in mine[0]:
        yield step, [validation[step] for validation in mine]


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    colours = dict(zip(FORMATS, ("#4c566a", "#2a7f9e", "#e09f3e", "#d1495b"), strict=True))
    figure = Figure(figsize=(11, 4.2), dpi=150, facecolor="white", layout="constrained")
    learned, gaps = figure.subplots(1, 2)
    for storage, colour in colours.items():
        steps, losses = zip(*curves(runs, storage), strict=True)
        style: dict[str, Any] = {"linewidth": 6, "alpha": 0.35} if storage == "exact" else {"linewidth": 1.6}
        learned.plot(steps, [statistics.mean(each) for each in losses], color=colour, label=storage, **style)
    steps, losses = zip(*curves(runs, "exact"), strict=True)
    lowest, highest = [min(each) for each in losses], [max(each) for each in losses]
    learned.fill_between(steps, lowest, highest, color=colours["exact"], alpha=0.15, label="spread of exact's seeds")
    learned.set(title="Validation loss, mean of seeds", xlabel="optimizer step", ylabel="loss (nats per byte)")
    learned.legend(frameon=False)

    exact = final(runs, "exact")
    half = (max(exact) - min(exact)) / 2
    gaps.axhspan(-half, half, color=colours["exact"], alpha=0.15, label="spread of exact's seeds")
    for position, storage in enumerate(FORMATS):
        values = [mine - other for mine, other in zip(final(runs, storage), exact, strict=True)]
        gaps.plot([position] * len(values), values, "o", color=colours[storage], markersize=7)
    gaps.axhline(0, color="black", linewidth=0.8)
    gaps.set_xticks(range(len(FORMATS)), FORMATS)
    gaps.set(
        title="Last validation loss minus exact's of the same seed",
        xlabel="storage of block boundaries",
        ylabel="difference (nats per byte)",
    )
    gaps.margins(x=0.15)
    gaps.legend(frameon=False)
    for axes in (learned, gaps):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
