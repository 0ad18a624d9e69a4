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
    """One scaler's iterations: how many overflowed, and when the scale changed."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        # The step at whose end each scale was set; the first was there before.
        self.changes: list[tuple[int, float]] = []
        self._unread: list[list[torch.Tensor]] = []

    def iteration(self, before: torch.Tensor, found_infs: list[torch.Tensor], after: torch.Tensor) -> None:
        overflow = torch.zeros((), device=after.device)
        for flag in found_infs:
            overflow = torch.maximum(overflow, flag.detach().reshape(()).to(overflow, non_blocking=True))
        # update(new_scale) may end an iteration in which nothing was checked.
        stepped = torch.full_like(overflow, len(found_infs) > 0)
        self._unread.append([before.reshape(()), overflow, stepped, after.detach().clone().reshape(())])
        if len(self._unread) >= _READ_EVERY:
            self.read()

    def read(self) -> None:
        if not self._unread:
            return
        rows = torch.stack([torch.stack(row) for row in self._unread]).tolist()
        self._unread = []
        for before, overflow, stepped, after in rows:
            self._note(before)
            self.steps += stepped != 0
            self.skipped += overflow != 0
            self._note(after)

    def _note(self, scale: float) -> None:
        if not self.changes or self.changes[-1][1] != scale:
            self.changes.append((self.steps, scale))


class Report(profiling.Observer):
    """Counts from `start()` to `stop()`. Times are the host's: on a GPU, what it took to launch the work and
    to wait for it where torch's scaler waits too.

    storage, store: the formats that were asked for; the report says where they came to nothing.
    """

    def __init__(self, storage: str | None = None, store: str | None = None) -> None:
        self.storage, self.store = storage, store
        self.optimizer_steps = 0
        self.checkpoints = 0
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

    def updated(self, scaler: GradScaler, before: torch.Tensor, found_infs: list[torch.Tensor]) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        with self._lock:
            record = self._scalers.get(id(scaler))
            if record is None:
                record = self._scalers[id(scaler)] = _ScalerRecord()
                # Keeps the id from being used again.
                self._alive.append(scaler)
            assert scaler._scale is not None
            record.iteration(before, found_infs, scaler._scale)

    def checkpointed(self) -> None:
        with self._lock:
            self.checkpoints += 1

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
        if self.checkpoints:
            lines.append(f"  checkpoint: {self.checkpoints} call{'s' * (self.checkpoints != 1)}")
        elif self.storage is not None:
            lines.append(
                f"  checkpoint: never called, so that --storage {self.storage} had nothing to store. To store without "
                f"recomputing, use --store"
            )
        return lines + self._storage_lines()

    def _storage_lines(self) -> list[str]:
        if not self.formats:
            asked = [f"--{name} {form}" for name, form in (("storage", self.storage), ("store", self.store)) if form]
            why = f"; {' and '.join(asked)} found nothing large enough to store" if asked and self._may_store() else ""
            return [f"  storage: every activation was kept as it is{why}"]
        before = sum(counts[1] for counts in self.formats.values())
        after = sum(counts[2] for counts in self.formats.values())
        tensors = ", ".join(f"{counts[0]} in {form}" for form, counts in sorted(self.formats.items()))
        a_step = f", {_size((before - after) / self.optimizer_steps)} a step" if self.optimizer_steps else ""
        return [f"  storage: {_size(before - after)} saved{a_step}: {_size(before)} as {_size(after)} ({tensors})"]

    def _may_store(self) -> bool:
        return self.store is not None or (self.storage not in (None, "exact") and self.checkpoints > 0)


def _history(changes: list[tuple[int, float]]) -> str:
    (_, first), *later = changes
    # Ten digits show every power of two that a float32 scale is likely to be.
    shown = [f"{first:.10g}", *(f"{scale:.10g} (step {step})" for step, scale in later)]
    if len(shown) > _SHOWN_CHANGES:
        half = _SHOWN_CHANGES // 2
        shown = [*shown[:half], f"... {len(shown) - 2 * half} more ...", *shown[-half:]]
    return " -> ".join(shown)


def _size(count: float) -> str:
    if abs(count) < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
