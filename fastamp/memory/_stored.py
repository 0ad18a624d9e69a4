"""What `fastamp.store_activations` and `checkpoint(storage=)` would hold, on fake tensors.

The real ones keep tensor subclasses, and so fake tensors, as they are. This one follows their rules (and asks their own
code where it can) with payloads that are fake too: the sizes are those of the codecs' fake kernels.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastamp import _delta, ops, storage, store
from fastamp.memory._cost import transfer
from fastamp.memory._recorder import host_copies

_Coded = tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], Tensor]]


class SimulatedStorage:
    """Saved-tensor hooks. form: a name of `storage.FORMATS`. offload: payloads lie in host memory."""

    def __init__(self, form: str, offload: bool = False) -> None:
        self._codec = storage.FORMATS[form]
        self._offload = offload
        # storage -> {stretch of it -> its payload, as long as something needs that}
        self._payloads: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # storage -> bytes of it that were coded in parts
        self._parts: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def pack(self, tensor: Tensor) -> Any:
        root = tensor if tensor._base is None else tensor._base
        if tensor.layout is not torch.strided or tensor.nbytes < storage.MIN_BYTES:
            return tensor
        if root.is_leaf and (root.requires_grad or isinstance(root, torch.nn.Parameter)):
            return tensor
        memory = tensor.untyped_storage()
        parts = self._parts.get(memory, 0) + storage.distinct_bytes(tensor)
        whole = store._worth_whole(parts, tensor, root, memory)
        key: Any = None if whole else (tensor.storage_offset(), tensor.shape, tensor.stride())
        stretches = self._payloads.setdefault(memory, weakref.WeakValueDictionary())
        payload = stretches.get((key, tensor._version))
        if payload is None:
            with torch.no_grad():
                if whole:
                    values = tensor.detach().as_strided((memory.nbytes() // tensor.element_size(),), (1,), 0)
                else:
                    values = storage.memory_order(tensor.detach())
                coded = self._coded(tensor, root, values)
            if coded is None:
                return tensor
            payload = stretches[key, tensor._version] = _Payload(coded, self._offload)
            if not whole:
                self._parts[memory] = parts
        return payload, tensor.shape, tensor.stride(), tensor.storage_offset() if whole else 0, whole

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        payload, shape, stride, offset, whole = packed
        values = payload.values()
        with torch.no_grad():
            if whole:
                return values.as_strided(shape, stride, offset)
            return storage.from_memory_order(values, shape, stride)

    def _coded(self, tensor: Tensor, root: Tensor, values: Tensor) -> _Coded | None:
        """The payload and what decodes it; None for what stays as it is."""
        numel, dtype = values.numel(), tensor.dtype
        if dtype is torch.bool:
            return (ops.pack_bits(values),), lambda kept: ops.unpack_bits(kept[0], (numel,))
        if tensor.is_leaf:
            # Dropout's mask of zeros and a constant; see `store`.
            if not (tensor.is_floating_point() and tensor._version > 0):
                return None
            return ops.pack_scaled_mask(values), lambda kept: ops.unpack_bits(kept[0], (numel,), kept[1])
        codec = self._codec
        exact = codec.name == "exact" or not tensor.is_floating_point() or not codec.takes(dtype)
        if exact or store._is_sensitive(root):
            return ((values.clone(),), lambda kept: kept[0].clone()) if self._offload else None
        return codec.encode(values), lambda kept: codec.decode(kept, numel, dtype)


class _Payload:
    def __init__(self, coded: _Coded, offload: bool) -> None:
        parts, self._decode = coded
        self._offload = offload
        self._decoded: weakref.ref[Tensor] | None = None
        with torch.no_grad(), self._moving():
            self._parts = tuple(part.clone() for part in parts) if offload else parts

    def values(self) -> Tensor:
        """The decoded elements: those of the last call while anything still uses them."""
        values = self._decoded() if self._decoded is not None else None
        if values is None:
            with torch.no_grad():
                parts = self._parts
                if self._offload:
                    with transfer():
                        parts = tuple(part.clone() for part in parts)
                values = self._decode(parts)
            self._decoded = weakref.ref(values)
        return values

    @contextlib.contextmanager
    def _moving(self) -> Any:
        if self._offload:
            with host_copies(), transfer():
                yield
        else:
            yield


class SimulatedChain:
    """What `_delta.DeltaChain` holds. Saved-tensor hooks for a checkpoint, which keep its first activation so."""

    def __init__(self, form: str, keyframe_every: int) -> None:
        self._codec, self._keyframe_codec = _delta.FORMATS[form]
        self._keyframe_every = keyframe_every
        self._links = 0
        self._last: _Link | None = None
        self._decoded: Tensor | None = None

    def hooks(self) -> Any:
        """The context of one checkpoint."""
        # Autograd keeps hooks as long as what they packed, and with them the chain if it were not taken out.
        waiting = [self]

        def pack(tensor: Tensor) -> Any:
            if not waiting or tensor.is_leaf or not waiting[0]._takes(tensor):
                return tensor
            return waiting.pop()._keep(tensor), tensor.shape, tensor.stride()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            link, shape, stride = packed
            with torch.no_grad():
                return storage.from_memory_order(link.decode(), shape, stride)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _takes(self, tensor: Tensor) -> bool:
        plain = tensor.layout is torch.strided and tensor.is_floating_point() and tensor.nbytes >= storage.MIN_BYTES
        return plain and self._codec.takes(tensor.dtype)

    def _keep(self, tensor: Tensor) -> _Link:
        if self._links % self._keyframe_every == 0:
            self._last = self._decoded = None
        codec = self._keyframe_codec if self._last is None else self._codec
        with torch.no_grad():
            values = storage.memory_order(tensor.detach())
            parts = codec.encode(values, base=self._decoded)
            self._last = _Link(codec, parts, values.numel(), tensor.dtype, self._last)
            self._decoded = codec.decode(parts, values.numel(), tensor.dtype, base=self._decoded)
        self._links += 1
        return self._last


class _Link(NamedTuple):
    codec: storage.Blockwise
    parts: tuple[Tensor, ...]
    numel: int
    dtype: torch.dtype
    base: Any  # the link that this one is relative to, None for a keyframe

    def decode(self) -> Tensor:
        path = [self]
        while path[-1].base is not None:
            path.append(path[-1].base)
        values = None
        while path:
            link = path.pop()
            values = link.codec.decode(link.parts, self.numel, self.dtype, base=values)
        assert values is not None
        return values
