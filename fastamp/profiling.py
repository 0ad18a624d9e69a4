"""Watching fastamp at work: NVTX ranges for Nsight Systems, and what `python -m fastamp run --report` counts.

The scaler and the storage layer mark their work with `span("unscale")`, `span("check")`,
`span("step")`, `span("update")`, `span("pack")` and `span("unpack")`. Nobody watching, that costs a function call.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Observer",
    "add_observer",
    "disable_nvtx",
    "enable_nvtx",
    "nvtx_enabled",
    "remove_observer",
    "span",
]


class Observer:
    """What can be watched: subclass it and override what is wanted. Methods are called on the thread that does
    the work and must not raise."""

    def begin(self, name: str) -> None:
        """Work of this name begins."""

    def end(self, name: str) -> None:
        """Work of this name, which began last on this thread, has ended, also where it raised."""

    def updated(self, scaler: Any, before: Tensor, found_infs: list[Tensor]) -> None:
        """`scaler.update()` has ended an iteration. `before`: a copy of the scale that it had. `found_infs`: the
        optimizers' flags, one for each device of each. All are 0-dim float32, on their devices; nothing has waited
        for them."""

    def checkpointed(self) -> None:
        """`fastamp.checkpoint` was called, outside of any compiled graph."""

    def stored(self, form: str, before: int, after: int) -> None:
        """An activation of `before` bytes is kept as `after` bytes, in the format `form`."""


# Replaced as a whole, never changed in place: spans read it without a lock.
_observers: tuple[Observer, ...] = ()


def add_observer(observer: Observer) -> None:
    """Has `observer` called from now on, for all threads. Does nothing if it is already."""
    global _observers
    if observer not in _observers:
        _observers = (*_observers, observer)


def remove_observer(observer: Observer) -> None:
    """Has `observer` called no more. Does nothing if it was not."""
    global _observers
    _observers = tuple(other for other in _observers if other is not observer)


class _Span:
    __slots__ = ("_name", "_observers")

    def __init__(self, name: str, observers: tuple[Observer, ...]) -> None:
        self._name = name
        self._observers = observers

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.begin(self._name)

    def __exit__(self, *exception: Any) -> None:
        for observer in reversed(self._observers):
            observer.end(self._name)


_UNWATCHED = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """`with span(name):` marks work for whoever watches. Nothing synchronises."""
    observers = _observers
    return _Span(name, observers) if observers else _UNWATCHED  # type: ignore[return-value]


def observed() -> bool:
    """Whether anybody watches."""
    return bool(_observers)


def updated(scaler: Any, before: Tensor, found_infs: list[Tensor]) -> None:
    for observer in _observers:
        observer.updated(scaler, before, found_infs)


def checkpointed() -> None:
    for observer in _observers:
        observer.checkpointed()


def stored(form: str, values: Tensor, kept: Iterable[Tensor]) -> None:
    for observer in _observers:
        observer.stored(form, values.nbytes, sum(tensor.nbytes for tensor in kept))


class _Nvtx(Observer):
    def begin(self, name: str) -> None:
        torch.cuda.nvtx.range_push(f"fastamp::{name}")

    def end(self, name: str) -> None:
        torch.cuda.nvtx.range_pop()


_nvtx = _Nvtx()


def enable_nvtx() -> None:
    """Puts NVTX ranges around fastamp's work, so that Nsight Systems shows it: `fastamp::unscale`,
    `fastamp::check`, `fastamp::step`, `fastamp::update`, `fastamp::pack` and `fastamp::unpack`, on the thread
    that does the work. They mark when it is launched; nothing synchronises. FASTAMP_NVTX=1 in the environment
    has them from the start.

    Raises:
        RuntimeError: this torch has no NVTX (a CPU build).
    """
    try:
        torch.cuda.nvtx.range_push("fastamp::enable_nvtx")
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        raise RuntimeError(
            f"enable_nvtx: torch {torch.__version__} has no NVTX ({error}); they need a CUDA build of torch"
        ) from error
    add_observer(_nvtx)


def disable_nvtx() -> None:
    """Takes the ranges away again."""
    remove_observer(_nvtx)


def nvtx_enabled() -> bool:
    """Whether the ranges are in effect."""
    return _nvtx in _observers


if os.environ.get("FASTAMP_NVTX", "0") not in ("", "0"):
    try:
        enable_nvtx()
    except RuntimeError as error:
        warnings.warn(f"FASTAMP_NVTX is set, but {error}", RuntimeWarning, stacklevel=2)
