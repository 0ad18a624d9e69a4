"""What `python -m fastamp run --report` prints when the program ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastamp import profiling
from fastamp.grad_scaler import GradScaler

# Iterations whose scale and outcome stay on the device before the host reads them all at once.
_READ_EVERY = 64
# A longer history of the scale is shortened in the middle.
_SHOWN_CHANGES = 16


class _ScalerRecord:
    """One scaler's iterations: how many were skipped, and when the scale changed."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.changes: list[tuple[int, float]] = []
        self._unread: list[tuple[torch.Tensor, torch.Tensor]] = []

    def iteration(self, scaler: Any) -> None:
        scale = scaler._scale
        history = scaler._history
        outcomes = list(history.steps.values()) if history is not None else []
        skipped = torch.zeros((), device=scale.device)
        for outcome in outcomes:
            flags = [torch.full((), float(outcome))] if isinstance(outcome, bool) else outcome
            for flag in flags:
                skipped = torch.maximum(skipped, flag.detach().reshape(()).to(skipped, non_blocking=True))
        self._unread.append((scale.detach().clone().reshape(()), skipped))
        if len(self._unread) >= _READ_EVERY:
            self.read()

    def read(self) -> None:
        if not self._unread:
            return
        columns = [torch.stack(column).tolist() for column in zip(*self._unread, strict=True)]
        self._unread = []
        for scale, skipped in zip(*columns, strict=True):
            self.steps += 1
            self.skipped += skipped != 0
            if not self.changes or self.changes[-1][1] != scale:
                self.changes.append((self.steps, scale))


class Report(profiling.Observer):
    """Counts from `start()` to `stop()`. Times are the host's: on a GPU, what it took to launch the work and
    to wait for it where torch's scaler waits too."""

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self.scaler_seconds = 0.0
        self.formats: dict[str, list[int]] = {}
        self.rank = 0
        self._scalers: dict[int, _ScalerRecord] = {}
        self._alive: list[Any] = []
        self._local = threading.local()
        self._lock = threading.Lock()
        self._hooks: list[Any] = []
        self._started = 0.0
        self.seconds = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()
        profiling.add_observer(self)
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._started
        profiling.remove_observer(self)
        for hook in self._hooks:
            hook.remove()
        for record in self._scalers.values():
            record.read()

    # ---- what is counted -----------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        if name in ("pack", "unpack"):
            return
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0:
            self._local.began = time.perf_counter()

    def end(self, name: str) -> None:
        if name in ("pack", "unpack"):
            return
        self._local.depth -= 1
        if self._local.depth == 0:
            self._add_scaler_time()

    def _add_scaler_time(self) -> None:
        with self._lock:
            self.scaler_seconds += time.perf_counter() - self._local.began

    def _optimizer_begins(self, *unused: Any) -> None:
        # The optimizer's own time within scaler.step() is not the scaler's.
        if getattr(self._local, "depth", 0):
            self._add_scaler_time()

    def _optimizer_ends(self, *unused: Any) -> None:
        with self._lock:
            self.optimizer_steps += 1
        if getattr(self._local, "depth", 0):
            self._local.began = time.perf_counter()

    def updated(self, scaler: GradScaler) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        with self._lock:
            record = self._scalers.get(id(scaler))
            if record is None:
                record = self._scalers[id(scaler)] = _ScalerRecord()
                # Keeps the id from being used again.
                self._alive.append(scaler)
            record.iteration(scaler)

    def stored(self, form: str, before: int, after: int) -> None:
        with self._lock:
            counts = self.formats.setdefault(form, [0, 0, 0])
            counts[0] += 1
            counts[1] += before
            counts[2] += after

    # ---- what is printed -----------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        lines = [f"fastamp report ({self.seconds:.1f} s)"]
        for number, record in enumerate(self._scalers.values(), 1):
            name = "scaler" if len(self._scalers) == 1 else f"scaler {number}"
            lines.append(f"  {name}: {record.steps} steps, {record.skipped} skipped")
            lines.append(f"  {name}: scale {_history(record.changes)}")
        if self._scalers:
            steps = sum(record.steps for record in self._scalers.values())
            share = 100.0 * self.scaler_seconds / self.seconds
            lines.append(
                f"  scaler time: {self.scaler_seconds:.3f} s on the host, "
                f"{1e3 * self.scaler_seconds / steps:.3f} ms a step, {share:.1f}% of the run"
            )
        else:
            lines.append(f"  no gradient scaler was in use: {self.optimizer_steps} optimizer steps")
        lines += _storage_lines(self.formats, self.optimizer_steps)
        return lines


def _history(changes: list[tuple[int, float]]) -> str:
    shown = [f"{scale:g}" if step == 1 else f"{scale:g} (step {step})" for step, scale in changes]
    if len(shown) > _SHOWN_CHANGES:
        half = _SHOWN_CHANGES // 2
        shown = [*shown[:half], f"... {len(shown) - 2 * half} more ...", *shown[-half:]]
    return " -> ".join(shown)


def _storage_lines(formats: dict[str, list[int]], steps: int) -> list[str]:
    if not formats:
        return ["  storage: every activation was kept as it is"]
    before = sum(counts[1] for counts in formats.values())
    after = sum(counts[2] for counts in formats.values())
    tensors = ", ".join(f"{counts[0]} in {form}" for form, counts in sorted(formats.items()))
    a_step = f", {_size((before - after) / steps)} a step" if steps else ""
    return [f"  storage: {_size(before - after)} saved{a_step}: {_size(before)} as {_size(after)} ({tensors})"]


def _size(count: float) -> str:
    if abs(count) < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
