"""`track`: the memory of a live training step, with who holds it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from torch import nn

from fastamp.memory import _optimizers
from fastamp.memory._cpu_kernels import scratch_bytes
from fastamp.memory._recorder import Recorder
from fastamp.memory._step import precision_of
from fastamp.memory.report import MemoryReport, fill


def track(model: nn.Module, optimizer: Any = None, *, inputs: Any = None, rss_every: float | None = 0.002) -> Tracking:
    """`with track(model, optimizer) as report:` records the memory of the steps inside.

    The report is filled when the block ends, also when it ends with an exception. Everything is counted that
    operators allocate, on any device, by what it is for: parameters, gradients, optimizer states,
    activations, temporaries. What a kernel allocates and frees within itself is not seen (but for the columns of
    the CPU's half-precision convolutions and the scratchpad of its LSTMs, which are known); `report.measured` has the
    device's own counters beside it: on CUDA bytes allocated and reserved at most (the difference is fragmentation), on
    the CPU the growth of the resident set.

    Recording costs tens of microseconds an operator, keeps nothing alive and does not synchronise. Optimizer
    states that exist already are counted from the start, so the first step and later ones differ.

    Args:
        model: the module whose step runs inside. Others that run there are counted too, without names.
        optimizer: the optimizer that steps inside, or None.
        inputs: tensors (in any nesting) to count as inputs from the start; without it an input is counted
            from the operator that first reads it.
        rss_every: seconds between looks at the resident set (CPU only); None to leave that out.

    Returns:
        A context manager; entering it gives the `MemoryReport`, which is filled on leaving.

    Raises:
        TypeError: a model that is no module, an optimizer that is none.
        RuntimeError: tracks are nested.
    """
    return Tracking(model, optimizer, inputs=inputs, rss_every=rss_every)


class Tracking:
    """The context manager that `track` returns; `.report` is what entering it gives."""

    def __init__(
        self, model: nn.Module, optimizer: Any = None, *, inputs: Any = None, rss_every: float | None = 0.002
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"track: model must be an nn.Module, got {type(model).__name__}")
        optimizer = _optimizers.unwrapped(optimizer)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"track: optimizer must be a torch optimizer or None, got {type(optimizer).__name__}")
        self.model = model
        self.optimizer = optimizer
        self.inputs = inputs
        self.report = MemoryReport(source="measured")
        self._rss_every = rss_every

    def __enter__(self) -> MemoryReport:
        global _active
        if _active:
            raise RuntimeError("track: another track is active; end it first")
        self._recorder = Recorder(self.model, self.optimizer, scratch=scratch_bytes)
        self._recorder.note_inputs(self.inputs)
        self._counters = _Counters(self._recorder.trace.main_device(), self._rss_every)
        self._counters.start()
        self._recorder.__enter__()
        _active = True
        return self.report

    def __exit__(self, *exc: Any) -> None:
        global _active
        _active = False
        self._recorder.__exit__(*exc)
        report = self.report
        report.measured = self._counters.stop()
        report.seconds = time.perf_counter() - self._recorder.began
        fill(report, self._recorder.finish())
        _describe(report, self.model, self.optimizer)


_active = False


def _describe(report: MemoryReport, model: nn.Module, optimizer: Any) -> None:
    from fastamp.memory.estimate import describe_parameters

    trained = report.whole["gradients"] > 0 or optimizer is not None
    mode = "train" if trained else "inference"
    report.parameters, report.regime = describe_parameters(model, mode, precision_of(None))
    name = f", {type(optimizer).__name__}" if optimizer is not None else ""
    report.title = f"{type(model).__name__}{name}, on {report.device}"


class _Counters:
    """What the device itself says: the CUDA allocator's statistics, or the process's resident set."""

    def __init__(self, device: str, every: float | None) -> None:
        self.device = device
        self.cuda = device.startswith("cuda") and torch.cuda.is_available()
        self.every = None if self.cuda else every
        self._stop = threading.Event()
        self._highest = self._first = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.every is not None and _resident_bytes():
            self._first = self._highest = _resident_bytes()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self.every):
            self._highest = max(self._highest, _resident_bytes())

    def stop(self) -> dict[str, int]:
        if self.cuda:
            stats = torch.cuda.memory_stats(self.device)
            return {
                "peak allocated": stats.get("allocated_bytes.all.peak", 0),
                "peak reserved": stats.get("reserved_bytes.all.peak", 0),
                "peak of free pieces in segments in use": stats.get("inactive_split_bytes.all.peak", 0),
            }
        if self._thread is None:
            return {}
        self._stop.set()
        self._thread.join()
        self._highest = max(self._highest, _resident_bytes())
        return {"growth of the resident set": self._highest - self._first}


def _resident_bytes() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
