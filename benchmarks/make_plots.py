"""Draws the plots of README and docs from benchmarks/results/*.json: python benchmarks/make_plots.py [--check]

Each NAME.png is drawn from NAME.json alone, on an opaque white ground, so that it reads the same in light and dark
pages, and holds the JSON file's digest: `--check` draws nothing and exits with 1 where a picture is not of its results.
Needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_readme import setting

RESULTS = Path(__file__).resolve().parent / "results"
BLUE, ORANGE, GREY, RED = "#2a7f9e", "#e09f3e", "#6b7280", "#d1495b"
COLOURS = {"torch": ORANGE, "fastamp": BLUE, "mul_": GREY}


def axes_of(title: str, count: int = 1, height: float = 4.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4 * count, height), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def sizes(content: dict[str, Any]) -> Any:
    figure, (counts, nbytes) = axes_of(f"The cost of unscaling, {setting(content['machine'])}", 2)
    for axes, key in ((counts, "count"), (nbytes, "bytes")):
        results = [result for result in content["results"] if key in result]
        at = [result[key] for result in results]
        for what in results[0]["timing"]:
            times = [result["timing"][what] for result in results]
            axes.plot(
                at, [each["median"] / 1000 for each in times], "o-", markersize=3, color=COLOURS[what], label=what
            )
            low, high = ([each[edge] / 1000 for each in times] for edge in ("p20", "p80"))
            axes.fill_between(at, low, high, color=COLOURS[what], alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", ylabel="time (ms), median and p20 to p80")
        axes.legend(frameon=False)
    counts.set(title="scaler.unscale_ + update, gradients of 16 elements", xlabel="number of gradients")
    nbytes.set(title="unscale_ of one float32 gradient", xlabel="size (bytes)")
    return figure


def activation_storage(content: dict[str, Any]) -> Any:
    from matplotlib.patches import Patch

    figure, (kept, time) = axes_of(f"A 12-layer GPT's training step, {setting(content['machine'])}", 2, 4.6)
    cases = content["cases"]
    plain = cases["plain autograd"]
    names = list(reversed(cases))
    torchs = {"plain autograd", "torch checkpoint", "save_on_cpu"}
    colours = [ORANGE if name in torchs or name.startswith("hooks in torch") else BLUE for name in names]
    for axes, values, form in (
        (kept, [cases[name]["saved"] / plain["saved"] for name in names], "{:.3f}"),
        (time, [cases[name]["time"] for name in names], "{:.2f}"),
    ):
        bars = axes.barh(range(len(names)), values, color=colours)
        axes.axvline(1, color="black", linewidth=0.6)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # where a label crosses the line
        axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=7, bbox=ground)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
    kept.set_yticks(range(len(names)), names, fontsize=7)
    time.set_yticks([])
    kept.set(title="bytes kept for backward", xlabel="relative to plain autograd")
    time.set(title="time", xlabel="relative to plain autograd")
    legend = [Patch(color=ORANGE, label="PyTorch alone"), Patch(color=BLUE, label="with fastamp")]
    kept.legend(handles=legend, frameon=False, loc="lower right")
    return figure


PLOTS: dict[str, Callable[[dict[str, Any]], Any]] = {"sizes": sizes, "activation_storage": activation_storage}
KEY = "Source"  # of the PNG's text fields


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def drawn_from(path: Path) -> str:
    """The digest that a picture holds: its text chunk, without a library for pictures."""
    if not path.is_file():
        return ""
    _, found, rest = path.read_bytes().partition(b"tEXt" + KEY.encode() + b"\0")
    return rest[:16].decode("ascii", "replace") if found else ""


def main() -> int:
    stale = []
    for name, plot in PLOTS.items():
        source = RESULTS / f"{name}.json"
        picture = source.with_suffix(".png")
        if drawn_from(picture) == digest(source):
            continue
        stale.append(picture)
        if "--check" not in sys.argv:
            plot(json.loads(source.read_text())).savefig(picture, metadata={KEY: digest(source)})
    for picture in stale:
        print(f"{picture.name}: {'not of its results' if '--check' in sys.argv else 'drawn'}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
