"""Difference coding along a stack of blocks: each kept activation is coded relative to the one before it.

In a residual stream `x[i + 1] = x[i] + f(x[i])` a difference is much smaller than a value, and so is the
error of coding it with as many bits. The loop is closed: with `r[i]` what decoding gives for `x[i]`, the code
of `x[i + 1]` is that of `x[i + 1] - r[i]`, so errors do not add up along the stack. Every `keyframe_every`
activations one is coded by itself, a keyframe; decoding any activation starts at the last keyframe before it,
so that it gives the same bits in whatever order backward asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastamp import profiling
from fastamp import storage as _storage


class _TwoStage(_storage.Blockwise):
    """A code of the values, and a code of what it misses: twice the bytes, the step squared."""

    def encode(self, values: Tensor, base: Tensor | None = None) -> tuple[Tensor, ...]:
        first = super().encode(values, base)
        return (*first, *super().encode(values, super().decode(first, values.numel(), values.dtype, base)))

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
        return super().decode(kept[2:], numel, dtype, super().decode(kept[:2], numel, dtype, base))


_INT8 = _storage.BLOCKWISE["int8"]
# name -> (codec of differences, codec of keyframes). A keyframe as coarse as "int8" would be the largest
# error of a stack of int8 differences, and is a small one among int4's.
FORMATS = {
    "delta-int8": (_INT8, _TwoStage("int8", _INT8.block_size)),
    "delta-int4": (_storage.BLOCKWISE["int4"], _INT8),
}


class _Link:
    """One activation of a chain: its code, and the link its code is relative to (None: a keyframe)."""

    __slots__ = ("_base", "_codec", "_loaded", "_parts")

    def __init__(
        self,
        codec: _storage.Blockwise,
        kept: tuple[Tensor, ...],
        base: _Link | None,
        save: Callable[[Tensor], Any],
    ) -> None:
        self._codec = codec
        self._base = base
        self._parts = [save(part) for part in kept]
        # Later links read this one too, while an enclosing checkpoint hands out what it recomputed only once.
        self._loaded: tuple[Tensor, ...] | None = None if _storage.hooks_are_active() else ()

    def _load(self) -> tuple[Tensor, ...]:
        if self._loaded:
            return self._loaded
        parts = tuple(part.unpack() for part in self._parts)
        if self._loaded is None:
            self._loaded = parts
        return parts

    def decode(self, numel: int, dtype: torch.dtype) -> Tensor:
        path: list[_Link] = []
        link: _Link | None = self
        while link is not None:
            path.append(link)
            link = link._base
        values = None
        for link in reversed(path):
            values = link._codec.decode(link._load(), numel, dtype, base=values)
        assert values is not None
        return values


class KeptInChain:
    __slots__ = ("_check", "_dtype", "_link", "_requires_grad", "_shape", "_stride")

    def __init__(self, tensor: Tensor, link: _Link, name: str) -> None:
        self._link = link
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._dtype = tensor.dtype
        self._requires_grad = tensor.requires_grad
        self._check = _storage.InPlaceCheck(tensor, name)

    @torch.no_grad()
    def unpack(self) -> Tensor:
        self._check()
        with profiling.span("unpack"):
            values = self._link.decode(self._shape.numel(), self._dtype)
        return _storage.restore(_storage.from_memory_order(values, self._shape, self._stride), self._requires_grad)


class DeltaChain:
    """Keeps activations one after another. It holds the last one decoded, so drop it when the stack ends.

    format: "delta-int8" or "delta-int4".  keyframe_every: activations from one keyframe to the next, at least
    1.
    """

    def __init__(self, format: str, keyframe_every: int) -> None:
        self._codec, self._keyframe_codec = FORMATS[format]
        self._keyframe_every = keyframe_every
        self._links = 0  # since the last keyframe
        self._last: _Link | None = None
        self._decoded: Tensor | None = None
        self._layout: tuple[Any, ...] = ()

    @torch.no_grad()
    def keep(self, tensor: Tensor, name: str, save: Callable[[Tensor], Any]) -> Any:
        """An object whose `unpack()` gives the tensor back, about; exactly, if the rules do not let it be
        coded."""
        codec = self._codec
        if not (_storage.is_activation(tensor) and codec.takes(tensor.dtype)):
            self._last = self._decoded = None
            return save(tensor)
        layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        values = _storage.memory_order(tensor)
        if values.numel() != tensor.numel():
            return _storage.Kept(tensor, codec, name, save)  # expanded: small already
        if self._last is None or self._links >= self._keyframe_every or layout != self._layout:
            self._last = self._decoded = None
            self._links = 0
            codec = self._keyframe_codec
        with profiling.span("pack"):
            kept = codec.encode(values, base=self._decoded)
            self._decoded = codec.decode(kept, values.numel(), tensor.dtype, base=self._decoded)
        profiling.stored(codec.name, values, kept)
        self._last = _Link(codec, kept, self._last, save)
        self._links += 1
        self._layout = layout
        return KeptInChain(tensor, self._last, name)
