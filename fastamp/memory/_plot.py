"""The picture of a report: the step's memory over time, stacked by category, and who holds it at the peak."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from fastamp.memory._sizes import format_bytes
from fastamp.memory._trace import CATEGORIES
from fastamp.memory.report import MemoryReport

COLOURS = {
    "parameters": "#33658a",
    "buffers": "#86bbd8",
    "optimizer states": "#55828b",
    "gradients": "#9b5094",
    "inputs": "#b8b8aa",
    "activations": "#e09f3e",
    "outputs": "#f2cc8f",
    "recomputed": "#c1666b",
    "temporaries": "#9e2a2b",
}
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def check_path(path: Any) -> None:
    """Raises TypeError or ValueError for what cannot be the name of a picture, ImportError if none can be drawn."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'plot: path must be the name of a file such as "memory.png", got {type(path).__name__}')
    known = sorted(_figure_class()().canvas.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in known:
        raise ValueError(f"plot: path must end with one of .{', .'.join(known)}, got {os.fspath(path)!r}")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # not pyplot: no window system, no global state
    except ImportError as error:
        raise ImportError("plot needs matplotlib; get it with: python -m pip install matplotlib") from error
    return Figure


def draw(report: MemoryReport, path: str | Path) -> None:
    if not report.timeline:
        raise ValueError("plot: this report has no timeline (nothing was recorded yet)")
    check_path(path)
    import matplotlib

    style: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style}):
        figure = _figure_class()(figsize=(13, 5), dpi=150, facecolor="white", layout="constrained")
        timeline, holders = figure.subplots(1, 2, width_ratios=[2.2, 1])
        divisor, unit = next((d, u) for d, u in _UNITS if report.peak.bytes >= d or d == 1)
        _draw_timeline(timeline, report, divisor, unit)
        _draw_holders(holders, report, divisor, unit)
        figure.suptitle(report.title, fontsize=12)
        figure.savefig(path)


def _draw_timeline(axes: Any, report: MemoryReport, divisor: int, unit: str) -> None:
    measured = report.source == "measured"
    first = report.timeline[0].seconds
    times = [
        (sample.seconds - first) * 1e3 if measured else float(number) for number, sample in enumerate(report.timeline)
    ]
    times.append(times[-1] + max(times[-1] / 200, 1e-3))  # the last state has a width too
    columns = list(zip(*(sample.bytes for sample in report.timeline), strict=True))
    base = [0.0] * len(times)
    for category, column in zip(CATEGORIES, columns, strict=True):
        if not any(column):
            continue
        heights = [size / divisor for size in column]
        top = [b + h for b, h in zip(base, [*heights, heights[-1]], strict=True)]
        visible = max(heights) > 0.002 * report.peak.bytes / divisor
        axes.fill_between(
            times,
            base,
            top,
            step="post",
            color=COLOURS[category],
            linewidth=0,
            label=category if visible else None,
        )
        base = top
    peak = max(range(len(report.timeline)), key=lambda n: sum(report.timeline[n].bytes))
    height = report.peak.bytes / divisor
    axes.set(xlim=(times[0], times[-1]), ylim=(0, height * 1.28), ylabel=f"bytes alive ({unit})")
    axes.set_xlabel("time (ms, slowed by recording)" if measured else "allocations and frees, in the order of the step")
    _draw_phases(axes, report, times, height)
    reserved = report.measured.get("peak reserved")
    if reserved:
        axes.axhline(reserved / divisor, color="black", linewidth=1, linestyle="--", label="reserved (device)")
    on_the_right = times[peak] > (times[0] + times[-1]) / 2
    axes.annotate(
        f"peak {format_bytes(report.peak.bytes)}: {report.peak.phase}"
        + (f", {_shortened(report.peak.module, 30)}" if report.peak.module else ""),
        (times[peak], height),
        xytext=(-12 if on_the_right else 12, 12),
        textcoords="offset points",
        ha="right" if on_the_right else "left",
        fontweight="bold",
        arrowprops={"arrowstyle": "-|>", "color": "black", "shrinkB": 1},
    )
    axes.set_title(f"Memory over time, {report.source}", loc="left", pad=22)
    axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.13), fontsize=9, handlelength=1.2)


def _draw_phases(axes: Any, report: MemoryReport, times: list[float], height: float) -> None:
    start = 0
    shaded = False
    for phase, run in itertools.groupby(report.timeline, key=lambda sample: sample.phase):
        stop = start + len(list(run))
        if shaded:
            axes.axvspan(times[start], times[stop], color="black", alpha=0.05, linewidth=0, zorder=0)
        if times[stop] - times[start] > 0.05 * (times[-1] - times[0]):
            middle = (times[start] + times[stop]) / 2
            axes.text(middle, height * 1.3, phase, ha="center", va="bottom", fontsize=9, color="0.35")
        shaded = not shaded
        start = stop


def _draw_holders(axes: Any, report: MemoryReport, divisor: int, unit: str) -> None:
    groups: dict[tuple[str, str], int] = {}
    for holder in report.peak.holders:
        module = ".".join(holder.module.split(".")[:3])
        key = (holder.category, "" if holder.category in ("parameters", "optimizer states") else module)
        groups[key] = groups.get(key, 0) + holder.bytes
    for category in ("parameters", "optimizer states"):  # whole, also what is not among the largest holders
        if report.peak.breakdown[category]:
            groups[category, ""] = report.peak.breakdown[category]
    largest = sorted(groups.items(), key=lambda item: -item[1])[:12]
    labels = [_shortened(module, 26) if module else category for (category, module), _ in largest]
    places = range(len(largest))
    axes.barh(
        places,
        [size / divisor for _, size in largest],
        color=[COLOURS[c] for (c, _), _ in largest],
        height=0.7,
    )
    axes.set_yticks(places, labels, fontsize=9)
    axes.invert_yaxis()
    for place, (_, size) in zip(places, largest, strict=True):
        axes.annotate(
            format_bytes(size),
            (size / divisor, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.margins(x=0.2)
    axes.set(xlabel=f"bytes at the peak ({unit})")
    axes.set_title("Who holds it at the peak", loc="left")


def _shortened(name: str, limit: int) -> str:
    return name if len(name) <= limit else "…" + name[-limit + 1 :]
