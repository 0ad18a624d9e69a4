"""A step and variants of it: other treatments of blocks, a part of the batch, another precision."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fastamp.memory._cost import Rates, rates_of
from fastamp.memory._profile import NotAStack
from fastamp.memory._real import Timed, record, timed
from fastamp.memory._recorder import RecordedStep
from fastamp.memory._trace import Trace
from fastamp.memory.estimate import Setting

_REPEATS = 5


class Variants:
    """Runs the step once with its optimizer, and variants without: the optimizer's part is the same in each.

    for_real: on copies of the model instead of fake tensors.    plain: the step as it is.    states: bytes of optimizer
    states.    seconds, optimizer_seconds: estimated times of forward and backward, and of the optimizer's step.
    """

    def __init__(self, setting: Setting, for_real: bool = False) -> None:
        self.setting = setting
        self.batch = batch_size((setting.args, setting.kwargs))
        self.rates: Rates = rates_of(setting.device_type)
        self.for_real = for_real
        self.plain = record(setting, {}) if for_real else setting.run({}, cost=self.rates.cost)
        self.seconds, self.optimizer_seconds = self.plain.seconds, self.plain.optimizer_seconds
        trace = self.plain.trace
        device = trace.main_device()
        states = (b for b in trace.blocks() if b.category == "optimizer states" and b.device == device)
        self.states = sum(block.bytes for block in states)
        self._optimizer_peak = 0
        for event, now in zip(trace.events, trace.totals(device), strict=True):
            if event.phase == "optimizer":
                self._optimizer_peak = max(self._optimizer_peak, sum(now.values()))

    def with_pieces(self, pieces: int) -> Setting:
        """The setting of one micro-batch, of which there are `pieces`."""
        if pieces == 1:
            return self.setting
        args, kwargs, targets = sliced(
            (self.setting.args, self.setting.kwargs, self.setting.targets), self.batch, 0, self.batch // pieces
        )
        accumulation = pieces if self.setting.mode != "inference" else 1
        return changed(self.setting, args=args, kwargs=kwargs, targets=targets, accumulation=accumulation)

    def run(self, setting: Setting, treatments: Mapping[str, str], watch: Collection[str] = ()) -> RecordedStep:
        """Forward and backward of one micro-batch, the last of them if `setting` has several."""
        gradients = self.plain.gradients if setting.accumulation > 1 else None
        if self.for_real:
            return record(setting, treatments, optimizer=False, gradients=gradients, watch=watch)
        return setting.run(treatments, optimizer=False, gradients=gradients, watch=watch, cost=self.rates.cost)

    def with_real_times(
        self, setting: Setting, runs: Sequence[RecordedStep], options: Sequence[Mapping[str, str]]
    ) -> list[RecordedStep]:
        """`runs`, each under one of `options`, with the times of the same step run for real."""
        watch = list(dict.fromkeys(mark.name for mark in runs[0].marks))
        return [_timed_so(run, real) for run, real in zip(runs, timed(setting, options, watch, _REPEATS), strict=True)]

    def peak(self, trace: Trace) -> int:
        """The peak of a whole step whose forward and backward are `trace`."""
        highest = max(sum(now.values()) for now in trace.totals(trace.main_device()))
        return max(highest + self.states, self._optimizer_peak)


def _timed_so(run: RecordedStep, real: Timed) -> RecordedStep:
    if [mark[:2] for mark in real.marks] != [mark[:2] for mark in run.marks]:
        raise NotAStack("blocks are not run in the same order each time")
    marks = [mark._replace(seconds=own.seconds) for mark, own in zip(run.marks, real.marks, strict=True)]
    return run._replace(marks=marks, seconds=real.seconds, optimizer_seconds=real.optimizer_seconds)


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
