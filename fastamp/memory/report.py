"""The report of a step's memory: the same for an estimate and for a measured run."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastamp.memory._allocator import Placement, place
from fastamp.memory._sizes import format_bytes
from fastamp.memory._trace import CATEGORIES, Block, Trace

_KINDS = (
    ("attention", r"attention|_sdp"),
    ("convolution", r"conv"),
    ("normalization", r"norm"),
    ("dropout", r"dropout|bernoulli"),
    ("loss", r"log_softmax|nll_loss|cross_entropy|_loss"),
    ("softmax", r"softmax"),
    ("embedding", r"embedding"),
    ("matrix product", r"addmm|bmm|\bmm\b|\.mm\.|matmul|linear|baddbmm|einsum"),
    ("activation function", r"relu|gelu|silu|sigmoid|tanh|elu|softplus|mish|glu|threshold"),
    ("pooling", r"pool"),
    ("recurrent", r"lstm|gru|rnn"),
    ("type conversion", r"_to_copy|\.to\."),
    ("copy", r"clone|copy|contiguous|cat|stack|index|gather|pad"),
    ("codec", r"fastamp"),
)


def kind_of(op: str) -> str:
    """Which kind of activation an operator makes, such as "attention"."""
    name = op.removeprefix("aten.")
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "elementwise")


class Sample(NamedTuple):
    """The bytes of each category, in the order of `CATEGORIES`, from this moment on."""

    seconds: float
    phase: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Holder:
    """What holds memory at the peak: `bytes` in `count` tensors of one category, made by `op` in `module`."""

    category: str
    module: str
    op: str
    bytes: int
    count: int
    largest: str


@dataclass(frozen=True)
class Peak:
    """Where the step's memory is highest. `breakdown`: bytes of each category then."""

    bytes: int
    phase: str
    module: str
    op: str
    seconds: float
    breakdown: dict[str, int]
    holders: list[Holder]

    @property
    def where(self) -> str:
        place = f"in {self.module}" if self.module else "outside any module"
        return f"{self.phase}, {place} ({self.op})"


@dataclass
class Parameters:
    """Bytes and numbers of parameters. `adapter_rank`: of low-rank (LoRA-style) ones, where those train."""

    bytes: int = 0
    count: int = 0
    trainable_bytes: int = 0
    trainable_count: int = 0
    adapter_rank: int | None = None

    @property
    def frozen_bytes(self) -> int:
        return self.bytes - self.trainable_bytes


@dataclass
class MemoryReport:
    """The memory of one step, in bytes; made by `estimate` and `track`. `print(report)` shows it as a table.

    Attributes:
        source: "estimated" or "measured".
        title: model, precision, optimizer and device, in words.
        regime: what is trained, in words.
        device: whose memory this is.
        parameters: bytes and numbers of parameters: `bytes`, `count`, `trainable_bytes`, `trainable_count`,
            `frozen_bytes`.
        whole: the most of each category in the step.
        peak: where the sum is highest: `bytes`, `phase`, `module`, `op`, `breakdown` by category, `holders`.
        first_step_peak: the first step's, before optimizer states exist; None if not known.
        activations_by_module, activations_by_kind: what forward leaves for backward, by the module that made
            it and by the kind of operator.
        cuda: what the CUDA caching allocator makes of the step (simulated).
        measured: what the device's own counters said (a live run): allocated, reserved, resident bytes.
        other_devices: the most bytes on each other device; offloaded activations are on "host (offloaded)".
        seconds: recorded time of a live run.
        timeline: the bytes of each category over the step.
        notes: what the reader of the numbers should know.
    """

    source: str = "estimated"
    title: str = ""
    regime: str = ""
    device: str = "cpu"
    parameters: Parameters = field(default_factory=Parameters)
    whole: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    peak: Peak = field(default_factory=lambda: Peak(0, "", "", "", 0.0, dict.fromkeys(CATEGORIES, 0), []))
    first_step_peak: int | None = None
    activations_by_module: dict[str, int] = field(default_factory=dict)
    activations_by_kind: dict[str, int] = field(default_factory=dict)
    cuda: Placement | None = None
    measured: dict[str, int] = field(default_factory=dict)
    other_devices: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    timeline: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    # --- reading it ---

    @property
    def activations(self) -> int:
        """What forward leaves for backward."""
        return self.whole["activations"]

    @property
    def gradients(self) -> int:
        """The most that gradients of parameters take."""
        return self.whole["gradients"]

    @property
    def optimizer_states(self) -> int:
        """The most that the optimizer's states take."""
        return self.whole["optimizer states"]

    @property
    def temporaries_at_peak(self) -> int:
        """Temporaries and recomputed activations at the peak."""
        return self.peak.breakdown["temporaries"] + self.peak.breakdown["recomputed"]

    @property
    def fragmentation(self) -> int | None:
        """What the CUDA allocator reserved at most above what it allocated at most, measured; None but for a live run
        on CUDA."""
        if not self.measured.get("peak reserved"):
            return None
        return self.measured["peak reserved"] - self.measured["peak allocated"]

    def by_module(self, depth: int = 2) -> dict[str, int]:
        """Activation bytes by module, largest first; modules deeper than `depth` names are added to their
        ancestor."""
        return _summed((".".join(name.split(".")[:depth]), size) for name, size in self.activations_by_module.items())

    # --- writing it ---

    def as_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts."""
        plain = asdict(self)
        plain["timeline"] = {
            "categories": list(CATEGORIES),
            "samples": [[round(s.seconds, 6), s.phase, *s.bytes] for s in self.timeline],
        }
        return plain

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text, also written to `path` if given."""
        text = json.dumps(self.as_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def plot(self, path: str | Path) -> None:
        """Draws the stacked timeline of the step into the picture `path` (.png, .svg, .pdf). Needs matplotlib.

        Raises:
            ImportError: matplotlib is missing.
            TypeError: `path` is no name of a file.
            ValueError: the report has no timeline, or `path` is no kind of picture that matplotlib writes.
        """
        from fastamp.memory._plot import draw

        draw(self, path)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        yield (
            f"Memory of one step, {self.source}: {self.title}" if self.title else f"Memory of one step, {self.source}"
        )
        if self.regime:
            yield self.regime
        yield ""
        yield f"{'':22}{'in the step':>14}{'at the peak':>14}"
        for category in CATEGORIES:
            if self.whole[category] or category in ("parameters", "activations", "temporaries"):
                at_peak = self.peak.breakdown[category]
                yield f"{category:22}{format_bytes(self.whole[category]):>14}{format_bytes(at_peak):>14}"
        yield f"{'peak':22}{'':14}{format_bytes(self.peak.bytes):>14}"
        if self.peak.phase:
            yield f"The peak falls in {self.peak.where}."
        if self.first_step_peak is not None and self.first_step_peak != self.peak.bytes:
            first = format_bytes(self.first_step_peak)
            yield f"The first step, which makes the optimizer states, peaks at {first}."
        if self.seconds is not None:
            yield f"Recorded time: {self.seconds * 1e3:,.1f} ms (recording slows the step)."
        for device, size in self.other_devices.items():
            yield f"Elsewhere: at most {format_bytes(size)} on {device}."
        if self.cuda is not None:
            yield (
                f"CUDA caching allocator (simulated): {format_bytes(self.cuda.allocated)} allocated after "
                f"rounding, {format_bytes(self.cuda.reserved)} reserved,"
            )
            yield (
                f"  so {format_bytes(self.cuda.fragmentation)} is the margin for fragmentation; with "
                f"expandable_segments:True {format_bytes(self.cuda.expandable_reserved)} reserved."
            )
        yield from self._measured_lines()
        yield from self._activation_lines()
        if self.peak.holders:
            yield ""
            yield "Held at the peak, largest first"
            for holder in self.peak.holders[:8]:
                where = holder.module or "-"
                yield (
                    f"{format_bytes(holder.bytes):>12}  {holder.category:17}{where}  {holder.op}"
                    f"  ({holder.count} x, largest {holder.largest})"
                )
        for note in self.notes:
            yield f"Note: {note}"

    def _measured_lines(self) -> Iterable[str]:
        measured = dict(self.measured)
        if self.fragmentation is not None:
            allocated, reserved = measured.pop("peak allocated"), measured.pop("peak reserved")
            yield (
                f"CUDA caching allocator (measured): at most {format_bytes(allocated)} allocated and "
                f"{format_bytes(reserved)} reserved,"
            )
            share = self.fragmentation / reserved
            yield f"  so {format_bytes(self.fragmentation)} ({share:.0%}) beyond what tensors needed: fragmentation."
        for name, size in measured.items():
            yield f"Measured {name}: {format_bytes(size)}"

    def _activation_lines(self) -> Iterable[str]:
        if not self.activations:
            return
        modules = list(self.by_module(3).items())
        kinds = list(self.activations_by_kind.items())
        yield ""
        yield f"{'Activations by module':38}{'Activations by kind'}"
        rows = 8
        if len(modules) > rows:
            rest = sum(size for _, size in modules[rows - 1 :])
            modules = [*modules[: rows - 1], (f"{len(modules) - rows + 1} others", rest)]
        for row in range(max(len(modules), min(len(kinds), rows))):
            left = right = ""
            if row < len(modules):
                name = modules[row][0] or "outside any module"
                left = f"{format_bytes(modules[row][1]):>12}  {name if len(name) < 23 else '…' + name[-21:]}"
            if row < len(kinds):
                right = f"{format_bytes(kinds[row][1]):>12}  {kinds[row][0]}"
            yield f"{left:38}{right}".rstrip()


def fill(report: MemoryReport, trace: Trace, samples: int = 2000) -> MemoryReport:
    """Computes from a resolved trace everything that can be."""
    device = report.device = trace.main_device()
    best, best_number = -1, -1
    breakdown = dict.fromkeys(CATEGORIES, 0)
    series: list[Sample] = []
    starts = set(trace.backward_starts)
    waiting, waiting_number, before = -1, -1, 0
    for number, now in enumerate(trace.totals(device)):
        event = trace.events[number]
        if number in starts and before > waiting:
            waiting, waiting_number = before, number - 1
        before = now["activations"]
        if event.phase == "before" and trace.events[-1].phase != "before":
            continue
        total = sum(now.values())
        if total > best:
            best, best_number, breakdown = total, number, dict(now)
        for category, size in now.items():
            report.whole[category] = max(report.whole[category], size)
        series.append(Sample(event.seconds, event.phase, tuple(now.values())))
    report.timeline = _thinned(series, samples)
    if best_number < 0:
        return report
    at = trace.events[best_number]
    report.peak = Peak(
        best, at.phase, at.module, at.op, at.seconds, breakdown, _holders(trace.alive(best_number, device))
    )
    # What forward leaves for backward is read at the moment backward begins: the maximum of the timeline
    # could count tensors that a loss keeps alive only for a while.
    held = [(b, size) for b, category, size in trace.alive(waiting_number, device) if category == "activations"]
    report.whole["activations"] = sum(size for _, size in held)
    report.activations_by_module = _summed((block.module, size) for block, size in held)
    report.activations_by_kind = _summed((kind_of(block.op), size) for block, size in held)
    others = {block.device for block in trace.blocks()} - {device}
    report.other_devices = {other: max(sum(now.values()) for now in trace.totals(other)) for other in sorted(others)}
    report.cuda = place(best, _actions(trace, device))
    return report


def _actions(trace: Trace, device: str) -> Iterable[tuple[int, int]]:
    for event in trace.events:
        if event.block.device == device and event.bytes and event.action in ("alloc", "free"):
            yield id(event.block), event.bytes


def _holders(alive: Iterable[tuple[Block, str, int]]) -> list[Holder]:
    groups: dict[tuple[str, str, str], list[tuple[int, Block]]] = defaultdict(list)
    for block, category, size in alive:
        groups[category, block.module, block.op].append((size, block))
    found = []
    for (category, module, op), members in groups.items():
        largest = max(members, key=lambda member: member[0])[1]
        shape = "x".join(map(str, largest.shape)) or "scalar"
        total = sum(size for size, _ in members)
        found.append(Holder(category, module, op, total, len(members), f"{shape} {largest.dtype}"))
    return sorted(found, key=lambda holder: -holder.bytes)[:40]


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for name, size in pairs:
        sums[name] += size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _thinned(series: list[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples, of every stretch the highest, so that no peak is lost."""
    if len(series) <= limit:
        return series
    step = len(series) / limit
    cuts = [int(n * step) for n in range(limit)] + [len(series)]
    return [max(series[a:b], key=lambda s: sum(s.bytes)) for a, b in itertools.pairwise(cuts)]
