"""The demo's plot: losses, loss scale and the scaler's time, a panel each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastamp.demo.report import Result

COLOURS = ("#4c566a", "#d1495b", "#2a7f9e", "#e09f3e")
PHASE_COLOURS = {"unscale_": "#264653", "clip": "#2a9d8f", "step": "#e9c46a", "update": "#e76f51"}
# torch: broad and pale, so that a curve that coincides with it shows both.
BENEATH = {"linewidth": 6, "alpha": 0.35}
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def write(found: Sequence[Result], path: str) -> str:
    """Writes the PNG; returns one line that says what became of it."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot, which would look for a window system
    except ImportError:
        return "plot:    not drawn, matplotlib is missing; to get it: python -m pip install matplotlib"
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        panels = [draw_losses, draw_scales, draw_times]
        if "saved_bytes" in found[0]:
            panels.append(draw_memory)
        figure = Figure(figsize=(1 + 4 * len(panels), 4.2), dpi=150, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr,call-arg]
        for draw, axes in zip(panels, figure.subplots(1, len(panels)), strict=True):
            draw(axes, found)
        figure.savefig(path)
    return f"plot:    {path}"


def draw_losses(axes: Any, found: Sequence[Result]) -> None:
    gap = 4 * (len(found) - 2)
    for index, result in enumerate(found):
        # Dashes that leave room for each other.
        line: dict[str, Any] = {"linewidth": 1.6, "linestyle": (4 * index, (4, gap)) if gap else "solid"}
        steps = range(1, len(result["losses"]) + 1)
        look = line if index else BENEATH
        axes.plot(steps, result["losses"], color=COLOURS[index], label=result["name"], **look)
    axes.set(title="Training loss", xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.legend()


def draw_scales(axes: Any, found: Sequence[Result]) -> None:
    for index, result in enumerate(found[:2]):
        steps = range(1, len(result["scales"]) + 1)
        look: dict[str, Any] = {"color": COLOURS[index], "where": "post", "label": result["name"]}
        axes.step(steps, result["scales"], **look, **({"linewidth": 1.6} if index else BENEATH))
    skipped = found[0]["skipped"]
    scales = [found[0]["scales"][step] for step in skipped]
    axes.plot([step + 1 for step in skipped], scales, "kx", markersize=6, label="overflow, step skipped")
    axes.set_yscale("log", base=2)
    axes.set(title="Loss scale", xlabel="optimizer step", ylabel="scale")
    axes.grid(alpha=0.25)
    axes.legend()


def draw_times(axes: Any, found: Sequence[Result]) -> None:
    """A stacked bar per recipe: what the scaler takes of a step, by phase."""
    tops = [0.0] * len(found)
    for phase, colour in PHASE_COLOURS.items():
        heights = [result["scaler_us"][phase] for result in found]
        axes.bar(bar_names(found), heights, bottom=tops, color=colour, width=0.6, label=phase)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for position, (result, top) in enumerate(zip(found, tops, strict=True)):
        total = f"{result['scaler_us']['total']:,.0f} µs"
        axes.annotate(total, (position, top), ha="center", va="bottom", fontweight="bold")
    axes.set(title="Scaler, without the optimizer", ylabel="median time per step (µs)")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def draw_memory(axes: Any, found: Sequence[Result]) -> None:
    saved = [result["saved_bytes"] / 1e6 for result in found]
    axes.bar(bar_names(found), saved, color=COLOURS[: len(found)], width=0.6)
    for position, (result, top) in enumerate(zip(found, saved, strict=True)):
        error = f"\nerror {result['gradient_error']:.0e}" if result["gradient_error"] else ""
        axes.annotate(f"{top:.2f} MB{error}", (position, top), ha="center", va="bottom", fontweight="bold")
    axes.set(title="Saved for the backward pass", ylabel="memory per micro-batch (MB)")
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def bar_names(found: Sequence[Result]) -> list[str]:
    return [result["name"].replace(", ", ",\n").replace(" checkpoint", "\ncheckpoint") for result in found]
