"""`store_activations`: whatever autograd saves in a region is kept smaller, without recomputing anything.

It works through saved-tensor hooks. Packing decides how a tensor is kept (`_Region.codec`), looks up whether its
memory was packed before (`_Storage`), and returns a handle; unpacking decodes, or finds what another handle
decoded that is still in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fastamp import _offload, ops, profiling
from fastamp.storage import (
    MIN_BYTES,
    Codec,
    Context,
    InPlaceCheck,
    Packed,
    Policy,
    check_storage,
    codec_for,
    distinct_bytes,
    is_leaf,
)

__all__ = ["StorageStats", "store_activations"]

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]
Never = Tensor | Callable[[Tensor], bool] | Iterable[Tensor | Callable[[Tensor], bool]]


def store_activations(
    format: str | Policy = "exact",
    *,
    min_bytes: int = MIN_BYTES,
    offload: str | None = None,
    never: Never = (),
) -> contextlib.AbstractContextManager[StorageStats]:
    """A region in which what autograd saves for backward is kept in fewer bytes.

        with fastamp.store_activations("int8") as stats:
            loss = model(x)
        print(stats)
        loss.backward()

    Nothing is recomputed. The forward's results are untouched; gradients are those of the stored values, so
    they are exact with "exact" and otherwise off by about the format's rounding.

    Args:
        format: how activations are kept: "exact" (as they are), "bf16", "fp16", "int8", "fp8_e4m3",
            "fp8_e5m2", "int4", or a policy `(tensor, context) -> format` that is asked for each of them;
            `context.name` is the autograd node that made the tensor, such as "MulBackward0". inf and NaN are
            kept in every format.
        min_bytes: smaller tensors are kept as they are.
        offload: "cpu" moves what is kept of CUDA tensors (after coding) to pinned host memory, on a stream
            of its own; backward fetches it back one ahead. For tensors that are in host memory already it
            does nothing. The buffers are pooled for the process.
        never: tensors that are kept as they are, matched by the memory they share (so views of them too), or
            predicates `tensor -> bool` that say so, or an iterable of both. For router scores, say, or where
            backward divides by a saved value.

    Kept as they are, whatever the format: parameters and other leaves, views and autocast copies of
    parameters; integers, complex and float64 values (float64 except as "bf16" and "fp16"); tensor subclasses;
    log-probabilities, attention's log-sum-exps and the statistics that normalisations save; roots, reciprocals and
    distances, which backward divides by. Of other values "bf16", "int8" and "int4" keep which are
    positive, so that ReLU passes the gradients that it would have passed. Masks are kept as bits in every
    format, exactly: bool ones and those of zeros and one constant that dropout on the CPU makes.

    One payload is kept for one memory, however many views of it are saved. A payload covers the whole memory
    where the saved view is a quarter of it or more, since plain autograd would hold all of it as well.
    Unpacking may be repeated (`retain_graph`, double backward) and happen in any thread.

    With other hooks around saved tensors the innermost decides. Inside `checkpoint`, a region keeps its
    tensors and they are not recomputed; around `checkpoint` (fastamp's or torch's) it stores the checkpoint's
    inputs; an inner region replaces an outer one. Other hooks around a region, such as `save_on_cpu`, get what
    the region keeps of activations and masks, in its coded form; `offload` goes before them.

    Yields a `StorageStats`. As a decorator the region is each call. Like any saved-tensor hooks it applies to
    the thread that enters it, and not to backward graphs that were made outside.

    What an `autograd.Function` computes and saves itself has no history that would tell it from data, and stays
    as it is; so do the intermediates of a function compiled by torch.compile. A region inside a compiled function
    breaks its graph.

    In an approximate format the results that backward compares with their input, or subtracts from it (logsumexp,
    amax and its kin, vector norms), are computed once more from the stored input. Extrema of a stored x are then
    those of the stored values: where several became equal, they share the gradient. `median` may find another element.
    Not so `scatter_reduce` and `index_reduce`: put an x whose extrema they take on the `never` list.

    What backward multiplies by something large, or divides by, comes out as much less accurate: `sin(200 * x)`,
    `grid_sample` in pixels, the difference of two nearly equal tensors. A loss that divides by a single probability
    is right only to the rounding of the whole softmax: leave the loss outside of the region, or put what it uses on
    the `never` list. In "fp16", values beyond 65504 become infinite.

    Raises:
        ValueError, TypeError: for an unknown format, a `min_bytes` that is negative, an unknown `offload`, a
            `never` that is none of the above; nothing has been entered then. In forward, ValueError if a policy
            returns no format; tensors are untouched and the region can be left and entered again.
        RuntimeError: in backward, if a saved tensor was modified in place after it was saved, as in plain
            autograd.

    Does not synchronise with a device.
    """
    check_storage(format)
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
        raise TypeError(f"store_activations: min_bytes must be an int, got {type(min_bytes).__name__}")
    if min_bytes < 0:
        raise ValueError(f"store_activations: min_bytes must not be negative, got {min_bytes}")
    _offload.check_offload(offload, "store_activations")
    # A compiler breaks its graph at a region.
    region = torch._disable_dynamo(_region) if torch.compiler.is_dynamo_compiling() else _region
    return region(format, min_bytes, offload == "cpu", _never_list(never))


def _never_list(never: Never) -> list[Any]:
    items = [never] if isinstance(never, Tensor) or callable(never) else never
    if not isinstance(items, Iterable):
        raise TypeError(f"store_activations: never must hold tensors or predicates, got {type(never).__name__}")
    items = list(items)
    for item in items:
        if not (isinstance(item, Tensor) or callable(item)):
            raise TypeError(f"store_activations: never must hold tensors or predicates, got {type(item).__name__}")
    return items


@contextlib.contextmanager
def _region(format: str | Policy, min_bytes: int, offload: bool, never: list[Any]) -> Iterator[StorageStats]:
    region = _Region(format, min_bytes, offload, never)
    hooks: _Hooks = (region.pack, _unpack)
    if "torch._dynamo" in sys.modules:  # which otherwise would compile them, where compiled functions call them
        hooks = (torch.compiler.disable(hooks[0]), torch.compiler.disable(hooks[1]))
    with saved_tensors_hooks(*hooks):
        yield region.stats


# --- what is counted


@dataclasses.dataclass
class Bytes:
    """count: tensors.  before: bytes plain autograd would hold.  after: bytes held here."""

    count: int = 0
    before: int = 0
    after: int = 0


class StorageStats:
    """What a region kept. `print(stats)` shows it as a table. All sizes are in bytes.

    Attributes:
        kinds: by name an object with `count` (tensors), `before` and `after` (bytes), summed up over the region.
            "parameters" are leaves that require a gradient: no memory of their own, and not part of the
            totals. "duplicates" are tensors whose memory was saved before; `before` is their own size. Plain
            autograd shares that memory too, so neither are they part of the totals. "masks" are bits; "int8"
            and so on the payloads of each format; "scales" what the formats need besides; "kept" is kept as
            it is.
        held, peak_held: what is held now and at most so far, of what `after` counts.
        peak_unpacked: the most that backward had decoded at a time. It comes on top of what is held.
        offloaded: what of `after` went to host memory.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Bytes] = {}
        self.held = 0
        self.peak_held = 0
        self.peak_unpacked = 0
        self.offloaded = 0
        self._unpacked: list[tuple[StorageWeakRef, int]] = []
        # Payloads end in backward's threads, or by a garbage collection at any allocation.
        self._lock = threading.RLock()

    @property
    def before(self) -> int:
        """What plain autograd would hold, in total. A memory of which only a part was saved counts as a whole,
        as plain autograd would hold it."""
        return sum(kind.before for kind in self._totalled())

    @property
    def after(self) -> int:
        """What is held in place of it."""
        return sum(kind.after for kind in self._totalled())

    @property
    def ratio(self) -> float:
        """after / before; 1.0 if nothing was saved."""
        before = self.before
        return self.after / before if before else 1.0

    def _totalled(self) -> list[Bytes]:
        return [kind for name, kind in self.kinds.items() if name not in ("parameters", "duplicates")]

    def _add(self, name: str, before: int, after: int) -> None:
        kind = self.kinds.setdefault(name, Bytes())
        kind.count += 1
        kind.before += before
        kind.after += after

    def _hold(self, nbytes: int) -> None:
        with self._lock:
            self.held += nbytes
            self.peak_held = max(self.peak_held, self.held)

    def _unpacking(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            self._unpacked = [entry for entry in self._unpacked if not entry[0].expired()]
            self._unpacked.append((StorageWeakRef(storage), storage.nbytes()))
            self.peak_unpacked = max(self.peak_unpacked, sum(nbytes for _, nbytes in self._unpacked))

    def __str__(self) -> str:
        rows = [(name, *dataclasses.astuple(kind)) for name, kind in self.kinds.items()]
        last = ["parameters", "duplicates"]
        rows.sort(key=lambda row: (row[0] in last, -row[2] - row[3]))
        total = ("total", sum(row[1] for row in rows if row[0] not in last), self.before, self.after)
        rows.insert(sum(row[0] not in last for row in rows), total)
        lines = [f"{'kind':<12}{'tensors':>9}{'before MiB':>13}{'after MiB':>12}{'ratio':>8}"]
        for name, count, before, after in rows:
            ratio = f"{after / before:.3f}" if before else ""
            lines.append(f"{name:<12}{count:>9}{before / 2**20:>13.3f}{after / 2**20:>12.3f}{ratio:>8}")
        more = f"held now {self.held / 2**20:.3f} MiB, at most {self.peak_held / 2**20:.3f} MiB"
        more += f"; unpacked at a time at most {self.peak_unpacked / 2**20:.3f} MiB"
        if self.offloaded:
            more += f"; offloaded {self.offloaded / 2**20:.3f} MiB"
        return "\n".join([*lines, more])


class _Token:
    """Counts as held while it lives."""

    __slots__ = ("__weakref__", "_nbytes", "_stats")

    def __init__(self, stats: StorageStats, nbytes: int) -> None:
        self._stats = stats
        self._nbytes = nbytes
        stats._hold(nbytes)

    def __del__(self) -> None:
        self._stats._hold(-self._nbytes)


# --- codecs that only a region needs


class _ScaledMask(Codec):
    """A mask of zeros and one constant at one bit an element, exact. `encode` returns nothing for any other
    tensor."""

    name = "masks"

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        payload, value = ops.pack_scaled_mask(values)
        return () if value.isnan() else (payload, value)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return ops.unpack_bits(kept[0], (numel,), kept[1])


class _Whole(Codec):
    """The values as they are, for what moves elsewhere."""

    name = "kept"

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values,)

    def decode(self, kept: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return kept[0]


_SCALED_MASK = _ScaledMask()
_WHOLE = _Whole()

# Their results are logarithms, which backward raises to powers; or are divided by; or are compared with inputs.
_EXACT_RESULTS = frozenset(
    name + "Backward0"
    for name in (
        "LogSoftmax LogSoftmaxBackwardData Logsumexp Logcumsumexp Sqrt Rsqrt Reciprocal Amax Amin Norm "
        "LinalgVectorNorm LinalgCholeskyEx LinalgEigh LinalgSvd LinalgQr LinalgInvEx LinalgLuFactorEx LinalgSolveEx "
        "Cdist EuclideanDist Pdist CtcLoss CudnnCtcLoss"
    ).split()
)


# Their backward takes the result from the input, or looks for it there.
_RESULTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "LogsumexpBackward0": lambda x, node: x.logsumexp(_dims(node._saved_dim), node._saved_keepdim),
    "LogcumsumexpBackward0": lambda x, node: x.logcumsumexp(_dim(node._saved_dim)),
    "AmaxBackward0": lambda x, node: x.amax(_dims(node._saved_dim), node._saved_keepdim),
    "AminBackward0": lambda x, node: x.amin(_dims(node._saved_dim), node._saved_keepdim),
    "AminmaxBackward0": lambda x, node: x.aminmax(dim=_dim(node._saved_dim), keepdim=node._saved_keepdim),
    "LinalgVectorNormBackward0": lambda x, node: torch.linalg.vector_norm(
        x, node._saved_ord, _dims(node._saved_dim), node._saved_keepdim
    ),
    "MaxBackward1": lambda x, node: x.max(),
    "MinBackward1": lambda x, node: x.min(),
    "MedianBackward0": lambda x, node: x.median(),
    "NanmedianBackward0": lambda x, node: x.nanmedian(),
}


def _dim(saved: int | None) -> Any:
    """A node shows a negative dimension as an unsigned number of 64 bits."""
    return saved - 2**64 if saved is not None and saved >= 2**63 else saved


def _dims(saved: tuple[int, ...] | None) -> Any:
    return None if saved is None else [_dim(dim) for dim in saved]


def _is_sensitive(root: Tensor) -> bool:
    """Whether a tensor that is no view was made by a node whose backward does not bear approximation, or is a
    copy of a parameter, as autocast makes."""
    node = root.grad_fn
    if node is None:
        return False
    name = node.name()
    if name in _EXACT_RESULTS:
        return True
    if name == "ToCopyBackward0":
        source = node.next_functions[0][0]
        return source is not None and isinstance(getattr(source, "variable", None), torch.nn.Parameter)
    # Statistics, log-sum-exps, workspaces: what operators return besides their result. Functions of the user's
    # own may well return two activations.
    return root.output_nr > 0 and not isinstance(node, torch.autograd.function.BackwardCFunction)


# --- what is kept


class _Here:
    """Parts of a payload, kept as they are."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self._parts = parts

    def unpack_all(self) -> tuple[Tensor, ...]:
        return self._parts


class _ThroughHooks:
    """Parts of a payload, kept by the hooks around the region."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, parts: tuple[Tensor, ...], hooks: _Hooks) -> None:
        self._packed = [hooks[0](part) for part in parts]
        self._unpack = hooks[1]

    def unpack_all(self) -> tuple[Tensor, ...]:
        return tuple(map(self._unpack, self._packed))


class _Payload:
    """One memory, or one view of it, in coded form.

    layout: shape and strides of the view; None if this stands for a whole memory of `numel` elements.
    """

    __slots__ = (
        "__weakref__",
        "_codec",
        "_decoded",
        "_dtype",
        "_layout",
        "_numel",
        "_parts",
        "_stats",
        "_token",
        "version",
    )

    def __init__(
        self, codec: Codec, parts: Any, nbytes: int, tensor: Tensor, numel: int, layout: Any, stats: StorageStats
    ) -> None:
        self._codec = codec
        self._parts = parts
        self._dtype = tensor.dtype
        self._numel = numel
        self._layout = layout
        self.version = tensor._version
        self._stats = stats
        self._token = _Token(stats, nbytes)
        self._decoded: StorageWeakRef | None = None

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: Any) -> Tensor:
        """A view of the memory that this stands for: of the same one as before, if anything still uses that."""
        reference = self._decoded  # another thread may replace it meanwhile
        if reference is not None:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
                return tensor.set_(storage, offset, shape, stride)  # type: ignore[call-overload]
        tensor = self._decode(self._parts.unpack_all())
        storage = tensor.untyped_storage()
        self._decoded = StorageWeakRef(storage)
        self._stats._unpacking(storage)
        return tensor.as_strided(shape, stride, offset)

    def _decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        if self._layout is None:
            with profiling.span("unpack"):
                tensor = self._codec.decode(parts, self._numel, self._dtype)
        else:
            shape, stride = self._layout
            tensor = self._codec.unpack(Packed(parts, shape, stride, self._dtype))
        if tensor.storage_offset() != 0:  # hooks may return a view of anything
            moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            tensor = moved.copy_(tensor)
        return tensor


class _Coded:
    """A saved tensor that is a view of what a payload stands for."""

    __slots__ = ("_offset", "_payload", "_probe", "_shape", "_stride", "_version")

    def __init__(self, tensor: Tensor, payload: _Payload, offset: Any) -> None:
        self._payload = payload
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = offset
        # Shares the tensor's version counter and nothing of its memory.
        self._probe = tensor.detach()
        self._probe.data = _empty(tensor.dtype, tensor.device)
        self._version = tensor._version

    def unpack(self) -> Tensor:
        if self._probe._version != self._version:
            raise _modified(self._probe, self._shape, self._version)
        return self._payload.view(self._shape, self._stride, self._offset)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _AsIs:
    """A saved tensor that is kept as it is."""

    __slots__ = ("_tensor", "_token", "_version")

    def __init__(self, tensor: Tensor, token: _Token | None) -> None:
        # An alias: keeping the result of the node that saves it would be a cycle. A leaf has no node, and a parameter
        # may be given other memory (`.data`) to free this, frozen ones too.
        itself = tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter))
        self._tensor = tensor if itself else tensor.detach()
        self._version = tensor._version
        self._token = token

    def unpack(self) -> Tensor:
        if self._tensor._version != self._version:
            raise _modified(self._tensor, self._tensor.shape, self._version)
        return self._tensor


def _made_by(tensor: Tensor) -> str:
    return "a leaf" if tensor.grad_fn is None else tensor.grad_fn.name()


def _modified(tensor: Tensor, shape: torch.Size, expected: int) -> RuntimeError:
    return RuntimeError(
        f"store_activations: a saved {tensor.dtype} tensor of shape {list(shape)} has been modified by an inplace "
        f"operation since it was kept for backward (it is at version {tensor._version}, expected {expected}); modify "
        "a clone instead"
    )


class _Recomputed:
    """In the place of a saved result, the same of what is stored of its input."""

    __slots__ = ("_check", "_result")

    def __init__(self, tensor: Tensor, result: _AsIs) -> None:
        self._check = InPlaceCheck(tensor, f"store_activations: a saved {tensor.dtype} tensor")
        self._result = result

    def unpack(self) -> Tensor:
        self._check()
        return self._result.unpack()


def _unpack(handle: _Coded | _AsIs | _Recomputed) -> Tensor:
    return handle.unpack()


class _Storage:
    """What is known of one memory: its payloads, by what they cover, and the token of its being kept as it is."""

    __slots__ = ("_payloads", "as_is", "coded_in_parts", "reference")

    def __init__(self, reference: StorageWeakRef) -> None:
        # While there is a weak reference to a storage no other can have its address.
        self.reference = reference
        self._payloads: dict[Any, weakref.ref[_Payload]] = {}
        self.as_is: weakref.ref[_Token] | None = None
        self.coded_in_parts = 0  # bytes, before coding

    def get(self, what: Any, version: int) -> _Payload | None:
        reference = self._payloads.get(what)
        payload = None if reference is None else reference()
        return payload if payload is not None and payload.version == version else None

    def put(self, what: Any, payload: _Payload) -> None:
        self._payloads[what] = weakref.ref(payload)


class _Region:
    def __init__(self, format: str | Policy, min_bytes: int, offload: bool, never: list[Any]) -> None:
        self.stats = StorageStats()
        self._format = format
        self._min_bytes = min_bytes
        self._offload = offload
        self._predicates = [item for item in never if not isinstance(item, Tensor)]
        self._never = {
            reference.cdata: reference
            for reference in (StorageWeakRef(item.untyped_storage()) for item in never if isinstance(item, Tensor))
        }
        self._outer = _outer_hooks()
        self._storages: dict[int, _Storage] = {}
        self._sweep_at = 512

    def pack(self, tensor: Tensor) -> _Coded | _AsIs | _Recomputed:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            self.stats._add("kept", 0, 0)  # what a subclass holds, only it knows
            return _AsIs(tensor, None)
        root = tensor if tensor._base is None else tensor._base
        if is_leaf(root) and (root.requires_grad or isinstance(root, torch.nn.Parameter)):
            self.stats._add("parameters", tensor.nbytes, tensor.nbytes)
            return _AsIs(tensor, None)
        memory = tensor.untyped_storage()
        storage, known = self._storage(memory)
        # An operator saves its result before anything else can; others that save it want it as it is.
        again = None if known else self._of_what_is_stored(tensor)
        if again is not None:
            return again
        if storage.as_is is None or storage.as_is() is None:
            codec = self._codec(tensor, root, memory)
            if codec is not None:
                handle = self._pack_coded(tensor, root, memory, storage, known, codec)
                if handle is not None:
                    return handle
        return self._keep(tensor, memory, storage, known)

    def _of_what_is_stored(self, tensor: Tensor) -> _Recomputed | None:
        """A result that its node's backward compares with the input, or subtracts from it: computed again from what is
        stored of the input, so that both still belong together."""
        node = tensor.grad_fn
        compute = None if node is None or self._format == "exact" else _RESULTS.get(node.name())
        # A view has the name of a node of its own.
        if compute is None or tensor._base is not None:
            return None
        values = node._saved_self  # type: ignore[union-attr]
        if values.nbytes < max(self._min_bytes, 1) or type(values) is not Tensor:
            return None
        with torch.no_grad():
            result = compute(values.detach(), node)
        if not isinstance(result, Tensor):
            result = result[tensor.output_nr]
        if result.dtype != tensor.dtype or result.shape != tensor.shape:
            return None
        memory = result.untyped_storage()
        storage, known = self._storage(memory)
        return _Recomputed(tensor, self._keep(result, memory, storage, known))

    def _storage(self, memory: torch.UntypedStorage) -> tuple[_Storage, bool]:
        """The record of a memory, and whether it was saved before."""
        storage = self._storages.get(memory._cdata)
        if storage is not None:
            return storage, True
        if len(self._storages) >= self._sweep_at:
            self._storages = {
                key: storage for key, storage in self._storages.items() if not storage.reference.expired()
            }
            self._sweep_at = 512 + 2 * len(self._storages)
        storage = _Storage(StorageWeakRef(memory))
        self._storages[memory._cdata] = storage
        return storage, False

    def _codec(self, tensor: Tensor, root: Tensor, memory: torch.UntypedStorage) -> Codec | None:
        """How to keep a tensor; None: as it is and where it is."""
        if min(tensor.nbytes, memory.nbytes()) < max(self._min_bytes, 1) or tensor.is_neg() or tensor.is_conj():
            return None
        moves = self._outer is not None or (self._offload and _offload.is_offloadable(tensor))
        as_is = _WHOLE if moves else None
        if memory._cdata in self._never or any(predicate(tensor) for predicate in self._predicates):
            return as_is
        if is_leaf(tensor):
            # An operator may save a tensor of noise that it fills only afterwards (RReLU); one that has been
            # written since it was made holds what it holds. On other devices dropout keeps a bool mask, and
            # asking about the constant would wait for the device.
            if tensor.is_cpu and tensor.is_floating_point() and tensor._version > 0:
                return _SCALED_MASK
        elif _is_sensitive(root):
            return as_is
        codec = codec_for(tensor, self._format, lambda: Context(_made_by(tensor)), self._min_bytes)
        if codec.name != "exact":
            return codec
        return None if is_leaf(tensor) else as_is

    def _pack_coded(
        self, tensor: Tensor, root: Tensor, memory: torch.UntypedStorage, storage: _Storage, known: bool, codec: Codec
    ) -> _Coded | None:
        version = tensor._version
        whole = (codec.name, tensor.dtype)
        view = (*whole, tensor.storage_offset(), tensor.shape, tensor.stride())
        for what, offset in ((whole, tensor.storage_offset()), (view, 0)):
            payload = storage.get(what, version)
            if payload is not None:
                self.stats._add("duplicates", tensor.nbytes, 0)
                return _Coded(tensor, payload, offset)
        # Packing runs without autograd, and so does whatever it calls.
        part = distinct_bytes(tensor)
        if _worth_whole(storage.coded_in_parts + part, tensor, root, memory):
            what, offset, layout = whole, tensor.storage_offset(), None
            numel = memory.nbytes() // tensor.element_size()
            tensors = codec.pack_values(lambda: tensor.as_strided((numel,), (1,), 0))
        else:
            what, offset, layout = view, 0, (tensor.shape, tensor.stride())
            numel = tensor.numel()
            storage.coded_in_parts += part
            tensors = codec.pack(tensor).tensors
        if not tensors:
            return None
        nbytes = sum(part.nbytes for part in tensors)
        if self._offload and _offload.is_offloadable(tensor):
            parts: Any = _offload.HostCopy(tensors)
            self.stats.offloaded += nbytes
        elif self._outer is not None:
            parts = _ThroughHooks(tensors, self._outer)
        else:
            parts = _Here(tensors)
        payload = _Payload(codec, parts, nbytes, tensor, numel, layout, self.stats)
        storage.put(what, payload)
        before = 0 if known else memory.nbytes()
        if codec.name in ("masks", "bits"):
            self.stats._add("masks", before, nbytes)
        else:
            self.stats._add(codec.name, before, tensors[0].nbytes)
            if len(tensors) > 1:
                self.stats._add("scales", 0, nbytes - tensors[0].nbytes)
        return _Coded(tensor, payload, offset)

    def _keep(self, tensor: Tensor, memory: torch.UntypedStorage, storage: _Storage, known: bool) -> _AsIs:
        token = storage.as_is() if storage.as_is is not None else None
        if token is None:
            token = _Token(self.stats, memory.nbytes())
            storage.as_is = weakref.ref(token)
            self.stats._add("kept", 0 if known else memory.nbytes(), memory.nbytes())
        else:
            self.stats._add("duplicates", tensor.nbytes, 0)
        return _AsIs(tensor, token)


def _worth_whole(parts: int, tensor: Tensor, root: Tensor, memory: torch.UntypedStorage) -> bool:
    """Whether to code all of a tensor's memory: if the tensor and the parts that were coded before are much of it
    (windows that overlap would soon be more than it), and all of it is known to be values of one tensor. Other bytes,
    never written perhaps, could spoil the scales of the blocks they are in."""
    return (
        root.dtype == tensor.dtype
        and root.nbytes == memory.nbytes()
        and 0 not in root.stride()
        and 4 * parts >= memory.nbytes()
    )


def _outer_hooks() -> _Hooks | None:
    """The hooks around a region that get what it keeps: none if these are a checkpoint's, which would pair
    what they get with what a recomputation saves; those around it if they are another region's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[0], "__qualname__", "").startswith(("_checkpoint_hook.", "_recomputation_hook.")):
        return None
    region = getattr(getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0]), "__self__", None)
    return region._outer if isinstance(region, _Region) else hooks
