"""How a tensor that autograd needs later is kept until then.

A `Codec` turns a tensor into the tensors that are kept and back. `codec_for(tensor, storage, context)`
applies the rules about what may be kept in which form, and `Kept` holds one tensor: it passes what it keeps
through autograd's saved-tensor hooks (so `save_on_cpu` and enclosing checkpoints see it), and refuses to
serve a tensor that was written after it was packed.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["FORMATS", "MIN_BYTES", "Codec", "Context", "Kept", "Packed", "check_storage", "codec_for"]

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
    repeatedly. Subclasses that work on a run of elements only write `encode` and `decode`: the first gets the
    elements in memory order (1-D, every element once), the second returns them.
    """

    name: str

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Packed:
        values = _without_repeats(tensor.detach())
        order = _memory_order(values)
        return Packed(
            self.encode(values.permute(order).reshape(-1)), tensor.shape, tensor.stride(), tensor.dtype
        )

    @torch.no_grad()
    def unpack(self, packed: Packed) -> Tensor:
        shape = [1 if step == 0 else size for size, step in zip(packed.shape, packed.stride, strict=True)]
        skeleton = torch.empty_strided(shape, packed.stride, dtype=packed.dtype, device="meta")
        order = _memory_order(skeleton)
        values = self.decode(packed.tensors, skeleton.numel(), packed.dtype)
        values = values.view([shape[dim] for dim in order])
        values = values.permute([order.index(dim) for dim in range(len(order))])
        if not _same_strides(values, packed.stride):
            # A slice with gaps: the gaps were not kept, but kernels choose their path by strides.
            spaced = torch.empty_strided(shape, packed.stride, dtype=values.dtype, device=values.device)
            values = spaced.copy_(values)
        return values.expand(packed.shape)


def _without_repeats(tensor: Tensor) -> Tensor:
    """Expanded dimensions hold one element over and over: keep one."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _memory_order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _same_strides(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """Strides of dimensions of one element say nothing."""
    return all(size <= 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True))


class _Exact(Codec):
    """Keeps the tensor itself."""

    name = "exact"


class _Cast(Codec):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values.to(self.dtype),)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return kept[0].to(dtype)


class _Bits(Codec):
    """A bool mask at one bit an element, exact."""

    name = "bits"

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        padded = torch.nn.functional.pad(values.view(torch.uint8), (0, -values.numel() % 8)).view(-1, 8)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
        return ((padded * weights).sum(1, dtype=torch.uint8),)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8, device=kept[0].device)
        return (kept[0][:, None] >> shifts).bitwise_and_(1).reshape(-1)[:numel].to(torch.bool)


class _Blockwise(Codec):
    """Block-quantised by `fastamp.ops.quantize_blockwise`."""

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self.block_size = block_size

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        from fastamp import ops  # needs the compiled library, which the other formats do without

        return tuple(ops.quantize_blockwise(values, format=self.name, block_size=self.block_size))

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        from fastamp import ops

        return ops.dequantize_blockwise(*kept, (numel,), dtype)


FORMATS: dict[str, Codec] = {
    "exact": _Exact(),
    "bf16": _Cast("bf16", torch.bfloat16),
    "fp16": _Cast("fp16", torch.float16),
    "int8": _Blockwise("int8", 128),
    "fp8_e4m3": _Blockwise("fp8_e4m3", 128),
    "fp8_e5m2": _Blockwise("fp8_e5m2", 128),
    "int4": _Blockwise("int4", 64),
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
            f"storage must be a format's name or a callable (tensor, context) -> name, got "
            f"{type(storage).__name__}"
        )


def codec_for(
    tensor: Tensor,
    storage: str | Policy,
    context: Context | Callable[[], Context],
    min_bytes: int = MIN_BYTES,
) -> Codec:
    """The codec to keep `tensor` with, whatever `storage` asks for where the rules allow it.

    Kept as they are: parameters and other leaves (a copy would lose their identity, and would not free them),
    tensor subclasses, integers and complex numbers, tensors under `min_bytes`, and those the format does not
    make smaller. Bool masks are kept as bits. context may be a function that makes it, called for a policy
    only.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < min_bytes:
        return _EXACT
    if tensor.dtype is torch.bool:
        return _BITS
    # A leaf that needs no gradient is the user's own data or a mask that several calls share.
    if not tensor.is_floating_point() or tensor.is_leaf:
        return _EXACT
    if not isinstance(storage, str):
        where = context() if callable(context) else context
        chosen = storage(tensor, where)
        if chosen not in FORMATS:
            raise ValueError(
                f"the storage policy must return one of {', '.join(FORMATS)}, got {chosen!r} for {where.name}"
            )
        storage = chosen
    codec = FORMATS[storage]
    if tensor.element_size() <= 1 or (isinstance(codec, _Cast) and tensor.element_size() <= 2):
        return _EXACT
    return codec


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


class Kept:
    """One tensor kept by a codec other than exact. `save` keeps a tensor for backward and returns an object
    whose `unpack()` gives it back (autograd's own, so that saved-tensor hooks apply)."""

    __slots__ = ("_packed", "_parts", "_payload", "_probe", "_requires_grad", "_version", "codec", "name")

    def __init__(self, tensor: Tensor, codec: Codec, name: str, save: Callable[[Tensor], Any]) -> None:
        payload = _payload(tensor, codec)
        self.codec = codec
        self.name = name
        # Hooks may move the kept tensors elsewhere, and then nothing here may hold on to them.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        self._payload = None if hooked else payload
        self._packed = payload.packed._replace(tensors=())
        self._parts = [save(part) for part in payload.packed.tensors]
        self._requires_grad = tensor.requires_grad
        self._probe = _version_probe(tensor)
        self._version = tensor._version

    def unpack(self) -> Tensor:
        if self._probe._version != self._version:
            raise RuntimeError(
                f"{self.name} has been modified by an inplace operation since it was kept for backward (it "
                f"is at version {self._probe._version}, expected {self._version}); modify a clone instead"
            )
        packed = self._packed._replace(tensors=tuple(part.unpack() for part in self._parts))
        return self.codec.unpack(packed).requires_grad_(self._requires_grad)
