"""How a tensor that autograd needs later is kept until then.

A `Codec` turns a tensor into the tensors that are kept and back. `codec_for(tensor, storage, context)`
applies the rules about what may be kept in which form, and `Kept` holds one tensor: it passes what it keeps
through autograd's saved-tensor hooks (so `save_on_cpu` and enclosing checkpoints see it), and refuses to
serve a tensor that was written after it was packed.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastamp import _offload, ops, profiling

__all__ = [
    "FORMATS",
    "MIN_BYTES",
    "Codec",
    "Context",
    "Kept",
    "Packed",
    "Policy",
    "check_storage",
    "codec_for",
]

# Below this a codec's own bookkeeping costs more than the bytes it saves.
MIN_BYTES = 4096


class Packed(NamedTuple):
    """What a codec made of a tensor: the tensors to keep, and how the original lay in memory."""

    tensors: tuple[Tensor, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Codec:
    """One way to keep a tensor. `name` is the format's name.

    pack(tensor) -> Packed: takes a strided tensor of any shape, runs without autograd, leaves it untouched.
    unpack(packed) -> Tensor: a new tensor of the same shape, strides, dtype and device; may be called
    repeatedly. A codec that works on a run of elements only writes `encode` and `decode`: the first gets the
    elements in memory order (1-D, every element once), the second returns them.
    """

    name: str

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether tensors of `dtype` can be kept so, and become smaller by it."""
        return True

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Packed:
        kept = self.pack_values(lambda: memory_order(tensor))
        return Packed(kept, tensor.shape, tensor.stride(), tensor.dtype)

    def pack_values(self, values_of: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """`encode` of what `values_of` gives, seen by whoever watches."""
        with profiling.span("pack"):
            values = values_of()
            kept = self.encode(values)
        if kept:
            profiling.stored(self.name, values, kept)
        return kept

    @torch.no_grad()
    def unpack(self, packed: Packed) -> Tensor:
        numel = math.prod(_distinct(packed.shape, packed.stride))
        with profiling.span("unpack"):
            values = self.decode(packed.tensors, numel, packed.dtype)
            return from_memory_order(values, packed.shape, packed.stride)


def _distinct(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The shape with expanded dimensions, which hold one element over and over, taken as one element long."""
    return [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]


def distinct_bytes(tensor: Tensor) -> int:
    return math.prod(_distinct(tensor.shape, tensor.stride())) * tensor.element_size()


def _by_stride(stride: Sequence[int]) -> list[int]:
    return sorted(range(len(stride)), key=stride.__getitem__, reverse=True)


def memory_order(tensor: Tensor) -> Tensor:
    """The distinct elements of a tensor, 1-D, in the order they have in memory: a view where that has no
    gaps."""
    shape, stride = _distinct(tensor.shape, tensor.stride()), tensor.stride()
    values = tensor.detach()
    for dim, size in enumerate(shape):
        if size != tensor.size(dim):
            values = values.narrow(dim, 0, size)
    return values.permute(_by_stride(stride)).reshape(-1)


def from_memory_order(values: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The tensor of that shape and those strides whose `memory_order` is `values`."""
    distinct, order = _distinct(shape, stride), _by_stride(stride)
    tensor = values.view([distinct[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
    # Strides of dimensions of one element say nothing.
    if any(size > 1 and a != b for size, a, b in zip(distinct, tensor.stride(), stride, strict=True)):
        # A slice with gaps: the gaps were not kept, but kernels choose their path by strides.
        spaced = torch.empty_strided(distinct, stride, dtype=values.dtype, device=values.device)
        tensor = spaced.copy_(tensor)
    return tensor.expand(shape)


class _Exact(Codec):
    """Keeps the tensor itself; coding is for moving it elsewhere."""

    name = "exact"

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values,)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return kept[0]


class _Cast(Codec):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values.to(self.dtype),)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return kept[0].to(dtype)

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize > 2


class _Bits(Codec):
    """A bool mask at one bit an element, exact."""

    name = "bits"

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (ops.pack_bits(values),)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return ops.unpack_bits(kept[0], (numel,))


class Blockwise(Codec):
    """Coded by `fastamp.ops.quantize_blockwise`. Both ways take a base, to which the code is then
    relative."""

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self.block_size = block_size

    def encode(self, values: Tensor, base: Tensor | None = None) -> tuple[Tensor, ...]:
        return ops.quantize_blockwise(values, format=self.name, block_size=self.block_size, base=base)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
        payload, scales = kept
        return ops.dequantize_blockwise(payload, scales, (numel,), dtype, base=base)

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16, torch.bfloat16)


BLOCKWISE = {
    "int8": Blockwise("int8", 128),
    "fp8_e4m3": Blockwise("fp8_e4m3", 128),
    "fp8_e5m2": Blockwise("fp8_e5m2", 128),
    "int4": Blockwise("int4", 64),
}
FORMATS: dict[str, Codec] = {
    "exact": _Exact(),
    "bf16": _Cast("bf16", torch.bfloat16),
    "fp16": _Cast("fp16", torch.float16),
    **BLOCKWISE,
}
_EXACT = FORMATS["exact"]
_BITS = _Bits()


@dataclasses.dataclass(frozen=True)
class Context:
    """What a policy is told about a tensor besides the tensor.

    name: where it came from, such as `args[0]` or `kwargs['mask']`.  function: the checkpointed function.
    """

    name: str
    function: Any = None


Policy = Callable[[Tensor, Context], str]


def check_storage(storage: str | Policy) -> None:
    """Raise ValueError or TypeError unless `storage` is the name of a format or a policy."""
    if isinstance(storage, str):
        if storage not in FORMATS:
            raise ValueError(f"storage must be one of {', '.join(FORMATS)} or a policy, got {storage!r}")
    elif not callable(storage):
        raise TypeError(
            f"storage must be a format's name or a callable (tensor, context) -> name, got {type(storage).__name__}"
        )


# What a recomputation is given in place of activations. They are leaves, and what is kept of them inside (a checkpoint
# in a checkpoint) has to be what was kept of the activations themselves.
_restored: WeakIdKeyDictionary = WeakIdKeyDictionary()


def restore(values: Tensor, requires_grad: bool) -> Tensor:
    """`values`, just decoded, as the tensor that was kept."""
    if requires_grad:
        values.requires_grad_()
        _restored[values] = None
    return values


def is_leaf(tensor: Tensor) -> bool:
    """Whether no operator made the tensor, nor the one that it stands for."""
    return tensor.is_leaf and not (_restored and tensor in _restored)


def is_activation(tensor: Tensor, min_bytes: int = MIN_BYTES) -> bool:
    """Whether a tensor may be kept inexactly: a plain floating-point tensor of some size that is no leaf.

    Parameters and other leaves stay as they are, because a copy would lose their identity and would not free
    them; a leaf that needs no gradient is the user's own data or a mask that several calls share.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and not is_leaf(tensor)
        and tensor.nbytes >= min_bytes
    )


def exceeds_its_memory(tensor: Tensor) -> bool:
    """Whether a view has more elements than there are in memory, as of windows that overlap. All of them, coded one by
    one, could take more than the memory that keeping the view keeps."""
    return distinct_bytes(tensor) > tensor.untyped_storage().nbytes()


def codec_for(
    tensor: Tensor,
    storage: str | Policy,
    context: Context | Callable[[], Context],
    min_bytes: int = MIN_BYTES,
) -> Codec:
    """The codec to keep `tensor` with: the one `storage` asks for where the rules allow it, else exact.

    Bool masks of `min_bytes` and more are kept as bits, whatever `storage` is; other than that only what
    `is_activation` says is kept inexactly, and only in a format that makes it smaller. context may be a
    function that makes it, which is called for a policy only.
    """
    if not is_activation(tensor, min_bytes):
        mask = type(tensor) is Tensor and tensor.dtype is torch.bool and tensor.layout is torch.strided
        return _BITS if mask and tensor.nbytes >= min_bytes else _EXACT
    if not isinstance(storage, str):
        where = context() if callable(context) else context
        chosen = storage(tensor, where)
        if chosen not in FORMATS:
            raise ValueError(
                f"the storage policy must return one of {', '.join(FORMATS)}, got {chosen!r} for {where.name}"
            )
        storage = chosen
    codec = FORMATS[storage]
    return codec if codec.takes(tensor.dtype) else _EXACT


# A tensor that several calls keep (an encoder's output, say) is packed once while any of them still keeps it.
_shared: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Payload:
    __slots__ = ("__weakref__", "codec", "packed", "version")

    def __init__(self, codec: Codec, packed: Packed, version: int) -> None:
        self.codec = codec
        self.packed = packed
        self.version = version


def _payload(tensor: Tensor, codec: Codec) -> _Payload:
    reference = _shared.get(tensor)
    payload = reference() if reference is not None else None
    if payload is None or payload.codec is not codec or payload.version != tensor._version:
        payload = _Payload(codec, codec.pack(tensor), tensor._version)
        _shared[tensor] = weakref.ref(payload)
    return payload


def _version_probe(tensor: Tensor) -> Tensor:
    """An empty tensor that shares `tensor`'s version counter and nothing of its memory."""
    with torch.no_grad():
        probe = tensor.detach()
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


class InPlaceCheck:
    """Raises if a tensor was written since this was made. Keeps none of the tensor's memory."""

    __slots__ = ("_name", "_probe", "_version")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._name = name
        self._probe = _version_probe(tensor)
        self._version = tensor._version

    def __call__(self) -> None:
        if self._probe._version != self._version:
            raise RuntimeError(
                f"{self._name} has been modified by an inplace operation since it was kept for backward (it "
                f"is at version {self._probe._version}, expected {self._version}); modify a clone instead"
            )


class Kept:
    """One tensor kept by a codec other than exact, or offloaded.

    save: keeps a tensor for backward and returns an object whose `unpack()` gives it back (autograd's own, so
    that saved-tensor hooks apply).  offload: keep the code in host memory instead.
    """

    __slots__ = ("_check", "_codec", "_packed", "_parts", "_payload", "_requires_grad")

    def __init__(
        self, tensor: Tensor, codec: Codec, name: str, save: Callable[[Tensor], Any], offload: bool = False
    ) -> None:
        payload = _payload(tensor, codec)
        # Hooks may move the kept tensors elsewhere, and then nothing here may hold on to them.
        self._payload = None if offload or hooks_are_active() else payload
        self._codec = codec
        self._packed = payload.packed._replace(tensors=())
        parts = payload.packed.tensors
        self._parts: Any = _offload.HostCopy(parts) if offload else [save(part) for part in parts]
        self._requires_grad = tensor.requires_grad
        self._check = InPlaceCheck(tensor, name)

    def unpack(self) -> Tensor:
        self._check()
        offloaded = isinstance(self._parts, _offload.HostCopy)
        parts = self._parts.unpack_all() if offloaded else tuple(part.unpack() for part in self._parts)
        packed = self._packed._replace(tensors=parts)
        return restore(self._codec.unpack(packed), self._requires_grad)


def hooks_are_active() -> bool:
    """Whether saved tensors go through hooks here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
