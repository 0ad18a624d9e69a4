"""A step and variants of it: other treatments of blocks, a part of the batch, another precision."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fastamp.memory._cost import Rates, rates_of
from fastamp.memory._trace import Trace
from fastamp.memory.estimate import Setting, Simulated


class Variants:
    """Simulates the step once with its optimizer, and variants without: the optimizer's part is the same in each.

    plain: the step as it is.    states: bytes of optimizer states.    seconds, optimizer_seconds: estimated times of
    forward and backward, and of the optimizer's step.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.batch = batch_size((setting.args, setting.kwargs))
        self.rates: Rates = rates_of(setting.device_type)
        self.plain = setting.run({}, cost=self.rates.cost)
        trace = self.plain.trace
        device = trace.main_device()
        states = (b for b in trace.blocks() if b.category == "optimizer states" and b.device == device)
        self.states = sum(block.bytes for block in states)
        self._optimizer_peak = 0
        self.seconds = ended = 0.0
        for event, now in zip(trace.events, trace.totals(device), strict=True):
            if event.phase == "optimizer":
                self._optimizer_peak = max(self._optimizer_peak, sum(now.values()))
                ended = event.seconds
            elif event.phase != "before":
                self.seconds = event.seconds
        # Two optimizer steps were simulated, one of which made the states.
        self.optimizer_seconds = max(0.0, ended - self.seconds) / 2

    def with_pieces(self, pieces: int) -> Setting:
        """The setting of one micro-batch, of which there are `pieces`."""
        if pieces == 1:
            return self.setting
        args, kwargs, targets = sliced(
            (self.setting.args, self.setting.kwargs, self.setting.targets), self.batch, 0, self.batch // pieces
        )
        accumulation = pieces if self.setting.mode != "inference" else 1
        return changed(self.setting, args=args, kwargs=kwargs, targets=targets, accumulation=accumulation)

    def run(self, setting: Setting, treatments: Mapping[str, str], watch: Collection[str] = ()) -> Simulated:
        """Forward and backward of one micro-batch, the last of them if `setting` has several."""
        gradients = self.plain.gradients if setting.accumulation > 1 else None
        return setting.run(treatments, optimizer=False, gradients=gradients, watch=watch, cost=self.rates.cost)

    def peak(self, trace: Trace) -> int:
        """The peak of a whole step whose forward and backward are `trace`."""
        highest = max(sum(now.values()) for now in trace.totals(trace.main_device()))
        return max(highest + self.states, self._optimizer_peak)


def changed(setting: Setting, **changes: Any) -> Setting:
    """A copy of a setting with other attributes."""
    variant = copy.copy(setting)
    for name, value in changes.items():
        setattr(variant, name, value)
    return variant


def batch_size(batch: Any) -> int:
    """The first dimension of the first tensor that has one; 1 if none has."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return 1


def sliced(batch: Any, size: int, start: int, stop: int) -> Any:
    """`batch` with each tensor whose first dimension is `size` cut to `start:stop`."""

    def cut(value: Any) -> Any:
        return value[start:stop] if value.ndim and value.shape[0] == size else value

    return pytree.tree_map_only(Tensor, cut, batch)
