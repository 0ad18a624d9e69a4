"""Activation checkpointing: `torch.utils.checkpoint` with its results, its arguments and fewer surprises.

The non-reentrant form runs on torch's own frame and saved-tensor hooks
(`torch.utils.checkpoint._CheckpointFrame` and its hooks), the reentrant one on torch's `CheckpointFunction`.
What is added sits around them: which tensors are kept and how, the state a recomputation starts from, and
checks that turn wrong gradients into errors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as _torch_checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError, noop_context_fn

from fastamp import _delta, _offload, profiling
from fastamp import storage as _storage
from fastamp._buffers import BufferRecord
from fastamp._torch_versions import is_exporting, is_non_strict_tracing

__all__ = ["checkpoint", "checkpoint_sequential", "checkpoint_stack"]

_TORCH_CHECKPOINT = _torch_checkpoint.checkpoint
_TORCH_ARGUMENTS = frozenset(inspect.signature(_TORCH_CHECKPOINT).parameters)
_DETERMINISM_CHECKS = ("default", "none", "values")
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
# From 2.14 on, torch itself can pass what selective checkpointing saves through hooks.
_SAC_HOOKS_IN_TORCH = "respect_saved_tensors_hooks" in _TORCH_ARGUMENTS


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool | str = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    storage: str | _storage.Policy = "exact",
    offload: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` and keep only its inputs; recompute the rest when backward needs it.

    A drop-in for `torch.utils.checkpoint.checkpoint`, with equal outputs, gradients and random state. Without
    a function it returns a decorator: `checkpoint(debug=True)(function)`.

    Args:
        function: a function or module. Its outputs may be anything; its inputs any arguments.
        use_reentrant: False, and also None (torch's None warns and means True), keeps the inputs through
            saved tensors and recomputes inside backward. True takes torch's older variant: positional tensors
            only, plain `backward()` only.
        preserve_rng_state: True recomputes under the forward's random state of the CPU and of the devices of
            the tensors passed; "all" also under Python's `random` and NumPy's global state; False under none,
            and a function that draws random numbers then warns once.
        context_fn: returns the context managers for the forward and for the recomputation; see
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`. Non-reentrant only.
        determinism_check: "default" compares shape, dtype and device of every recomputed tensor with the
            forward's, "values" also a 64-bit fingerprint of its bytes (slow: for finding non-determinism),
            "none" nothing.
        debug: record both runs' operators and print them if they differ. Non-reentrant only.
        early_stop: stop recomputing as soon as all that backward needs is there. Non-reentrant only.
        respect_saved_tensors_hooks: whether tensors selective checkpointing saves pass through the
            surrounding saved-tensor hooks; None is the installed torch's default. Non-reentrant only.
        storage: how the inputs kept for recomputing are stored: "exact", or to save memory at the price of
            approximate gradients "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2" or "int4", or a policy
            `(tensor, context) -> format`. It applies to floating activations of 4 KiB and more that are not
            leaves; bool masks are kept as bits, everything else as it is. Non-reentrant only.
        offload: "cpu" moves what `storage` keeps of CUDA activations and masks (after coding, also with
            "exact") to pinned host memory, on a stream of its own; backward fetches it back one ahead. For
            tensors in host memory it does nothing. Saved-tensor hooks do not see these. Non-reentrant only.
        args, kwargs: passed to `function`: tensors of any shape and dtype, containers of them, anything else.

    Beyond torch: tensors in kwargs and in nested containers (lists, tuples, dicts and whatever else is
    registered with `torch.utils._pytree`) are kept like positional ones, so saved-tensor hooks see them and
    an in-place write between forward and backward raises; so does one that the function makes to a tensor it
    saved itself. Buffers that the function's modules write, such as BatchNorm's statistics, are written once.

    Under torch.compile and other tracers this is torch's checkpoint, with exact storage.

    Raises:
        ValueError, TypeError: for arguments that are unknown or do not go together; nothing has run then.
        CheckpointError: in backward, if the recomputation differs from the forward.
        RuntimeError: in backward, if a kept tensor was modified in place.

    Does not synchronise with a device, except to save device random state as torch does.
    """
    config = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
        "storage": storage,
        "offload": offload,
    }
    if function is None and not args:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        return functools.partial(_Checkpointed, config)
    return _call(function, args, kwargs, config)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    keyframe_every: int = 16,
    **kwargs: Any,
) -> Any:
    """Run `functions` one after another on `input`, in `segments` chunks of which all but the last are
    checkpointed.

    A drop-in for `torch.utils.checkpoint.checkpoint_sequential` (`use_reentrant=None` means False here).

    Args:
        functions: an `nn.Sequential` or a sequence of modules and functions, each taking the previous one's
            output.
        segments: number of chunks, between 1 and `len(functions)`.
        input: what the first function takes: a tensor of any shape and dtype, or anything else.
        use_reentrant: see `checkpoint`.
        keyframe_every: for the difference formats of `storage`, see `checkpoint_stack`.
        kwargs: `preserve_rng_state`, and any other of `checkpoint`'s own keywords; `storage` may also be one
            of `checkpoint_stack`'s difference formats.

    Raises:
        ValueError: an unknown keyword, a number of segments that does not fit; and as `checkpoint`.

    Does not synchronise with a device, except as `checkpoint` does.
    """
    unknown = kwargs.keys() - _OWN_ARGUMENTS
    if unknown:
        raise ValueError("Unexpected keyword arguments: " + ",".join(sorted(unknown)))
    if isinstance(functions, torch.nn.Sequential):
        functions = list(functions.children())
    if not 1 <= segments <= len(functions):
        raise ValueError(
            f"checkpoint_sequential: segments must be between 1 and the number of functions "
            f"({len(functions)}), got {segments}"
        )
    size = len(functions) // segments
    last = size * (segments - 1)
    chunks = [_Chain(functions[start : start + size]) for start in range(0, last, size)]
    config = _configuration(use_reentrant=use_reentrant, **kwargs)
    input = _run_stack(chunks, input, (), {}, config, keyframe_every)
    return _Chain(functions[last:])(input)


def checkpoint_stack(
    blocks: Iterable[Callable[..., Any]],
    x: Any,
    *args: Any,
    storage: str | _storage.Policy = "delta-int8",
    keyframe_every: int = 16,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool | str = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    offload: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run `x = block(x, *args, **kwargs)` for each block, each checkpointed, and return the last x.

    Like calling `checkpoint` on each, but what is kept of one block's input can be relative to the one before
    it. With "delta-int8" and "delta-int4" that is the difference between a block's input and what decoding
    gives for the one before, block-quantised: made for residual blocks, where differences are small, so that
    the error is several times smaller than that of "int8" and "int4" at the same size. Every `keyframe_every`
    inputs one is coded by itself (as int8 with an int8 correction; for int4 as int8); decoding an input reads
    the codes back to the last such keyframe, whatever the order of backward. Forward holds one decoded input
    besides. Where a block's output is much smaller than its input, the difference is as large as the input, and so
    is its error: a step of 10 down costs some 5% in gradients, one of 100 some 40%. Take "int8" there.

    Args:
        blocks: modules or functions, each taking the previous one's output and `args` and `kwargs`.
        x: what the first block takes. Differences are coded of float32, float16 or bfloat16 activations of
            4 KiB or more, of any shape; everything else is kept as it is (bool masks as bits).
        args, kwargs: passed to every block.
        storage: "delta-int8", "delta-int4", or anything that `checkpoint` takes.
        keyframe_every: at least 1, which makes every input a keyframe.
        use_reentrant, preserve_rng_state, context_fn, determinism_check: see `checkpoint`.
        debug, early_stop, respect_saved_tensors_hooks, offload: see `checkpoint`.

    Raises:
        ValueError: a `keyframe_every` that is no integer of at least 1; and as `checkpoint`.

    Does not synchronise with a device, except as `checkpoint` does.
    """
    config = _configuration(
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        storage=storage,
        offload=offload,
    )
    return _run_stack(blocks, x, args, kwargs, config, keyframe_every)


def _run_stack(
    blocks: Iterable[Callable[..., Any]],
    x: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: dict[str, Any],
    keyframe_every: int,
) -> Any:
    if not isinstance(keyframe_every, int) or keyframe_every < 1:
        raise ValueError(f"checkpoint: keyframe_every must be an integer of at least 1, got {keyframe_every!r}")
    storage = config["storage"]
    if isinstance(storage, str) and storage in _delta.FORMATS:
        config = {**config, "storage": _delta.DeltaChain(storage, keyframe_every)}
    for block in blocks:
        x = _call(block, (x, *args), kwargs, config)
    return x


class _Chain:
    """Functions applied one after another."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions = functions

    def __call__(self, input: Any) -> Any:
        for function in self.functions:
            input = function(input)
        return input


_OWN_ARGUMENTS = frozenset(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"}
_DEFAULTS = {name: inspect.signature(checkpoint).parameters[name].default for name in _OWN_ARGUMENTS}


def _configuration(**chosen: Any) -> dict[str, Any]:
    return {**_DEFAULTS, **chosen}


class _Checkpointed:
    """A function that runs checkpointed: what the decorator form makes."""

    def __init__(self, config: dict[str, Any], function: Callable[..., Any]) -> None:
        self.config = config
        self.function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.function, args, kwargs, self.config)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bind = getattr(self.function, "__get__", None)
        if instance is None or bind is None:
            return self
        return _Checkpointed(self.config, bind(instance, owner))


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], config: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():
        # An exported program has no backward to recompute for.
        if is_exporting():
            return function(*args, **kwargs)
        return _traced(function, args, kwargs, config)
    return _eager(function, args, kwargs, **config)


def _traced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], config: dict[str, Any]) -> Any:
    """torch's own checkpoint, which compilers know how to trace."""
    own: dict[str, Any] = {"use_reentrant": bool(config["use_reentrant"])}
    if config["preserve_rng_state"] is not True:
        own["preserve_rng_state"] = bool(config["preserve_rng_state"])
    # Dynamo takes these for choices to trace, so pass on only those the caller made.
    if config["context_fn"] is not noop_context_fn:
        own["context_fn"] = config["context_fn"]
    if config["determinism_check"] == "none":
        own["determinism_check"] = "none"
    if config["debug"]:
        own["debug"] = True
    if not config["early_stop"]:
        own["early_stop"] = False
    if _SAC_HOOKS_IN_TORCH and config["respect_saved_tensors_hooks"] is not None:
        own["respect_saved_tensors_hooks"] = config["respect_saved_tensors_hooks"]
    # Dynamo knows the one that torch's module holds at the moment, which fastamp.patch() may have replaced.
    if torch.compiler.is_dynamo_compiling():
        return _torch_checkpoint.checkpoint(function, *args, **own, **kwargs)
    return _TORCH_CHECKPOINT(function, *args, **own, **kwargs)


# As in torch: a compiler that breaks its graph at a checkpoint must not compile the innards of checkpointing.
@torch._disable_dynamo
def _eager(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    use_reentrant: bool | None,
    preserve_rng_state: bool | str,
    context_fn: Callable[[], tuple[Any, Any]],
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    respect_saved_tensors_hooks: bool | None,
    storage: str | _storage.Policy | _delta.DeltaChain,
    offload: str | None,
) -> Any:
    profiling.checkpointed()
    if not callable(function):
        raise TypeError(f"checkpoint: function must be callable, got {type(function).__name__}")
    if isinstance(preserve_rng_state, str) and preserve_rng_state != "all":
        raise ValueError(f"checkpoint: preserve_rng_state must be True, False or 'all', got {preserve_rng_state!r}")
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(
            f"checkpoint: determinism_check should be one of {list(_DETERMINISM_CHECKS)}, but got {determinism_check!r}"
        )
    _offload.check_offload(offload, "checkpoint")
    exact = isinstance(storage, str) and storage == "exact"
    if not exact and not isinstance(storage, _delta.DeltaChain):
        if isinstance(storage, str) and storage in _delta.FORMATS:
            raise ValueError(
                f"checkpoint: storage {storage!r} codes one input relative to another, so it needs "
                "checkpoint_stack or checkpoint_sequential"
            )
        _storage.check_storage(storage)
    if use_reentrant:
        if context_fn is not noop_context_fn or debug or respect_saved_tensors_hooks is not None:
            raise ValueError(
                "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported when "
                "use_reentrant=False."
            )
        if not exact or offload is not None:
            raise ValueError("Passing `storage` or `offload` is only supported when use_reentrant=False.")
        if kwargs:
            raise ValueError(
                f"Unexpected keyword arguments: {','.join(kwargs)} (keyword arguments for the function need "
                "use_reentrant=False)"
            )
        call = _ReentrantCall(function, args, preserve_rng_state, determinism_check == "values")
        if not call.adds_something:
            call = function
        return _torch_checkpoint.CheckpointFunction.apply(call, bool(preserve_rng_state), *args)
    if torch._C._get_dispatch_mode(_PROXY_MODE) is not None or is_non_strict_tracing() or _is_fx_tracing():
        config = dict(
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )
        return _traced(function, args, kwargs, config)

    error_cb = None
    forced_debug = _torch_checkpoint._checkpoint_debug_enabled
    if debug if forced_debug is None else forced_debug:
        if context_fn is not noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        context_fn, error_cb = _torch_checkpoint._get_debug_context_and_cb()
    if context_fn is noop_context_fn:
        forward_context = recompute_context = None
    else:
        forward_context, recompute_context = context_fn()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    inputs = _Inputs(args, kwargs)
    check_values = determinism_check == "values"
    record = BufferRecord(function, inputs.values)
    state = _ForwardState(inputs.leaves, preserve_rng_state)
    region = _Region(function, inputs, state, record, recompute_context)
    forced_early_stop = _torch_checkpoint._enable_checkpoint_early_stop
    frame = _Frame(
        region,
        early_stop if forced_early_stop is None else forced_early_stop,
        error_cb,
        _Fingerprints(record) if check_values else _METADATA[determinism_check],
    )
    frame.kept = frame.input_saver = _KeptInputs(inputs, storage, function, offload is not None)
    if forward_context is not None:
        _route_sac(forward_context, respect_saved_tensors_hooks)
    unpreserved = None
    if not preserve_rng_state and forward_context is None:
        unpreserved = _UnpreservedRandomness.watch(state.device_tensors)

    finished = False
    with _checkpoint_hook(frame):
        if forward_context is None:
            output = function(*args, **kwargs)
            finished = True
        else:
            with forward_context:
                output = function(*args, **kwargs)
                finished = True
    if not finished:
        raise RuntimeError(
            "checkpoint: the forward context provided by context_fn suppressed an exception raised during "
            "the checkpointed forward. This is not supported because checkpoint cannot return a value for a "
            "failed forward."
        )
    frame.finish_forward()
    region.buffers = record.finish()
    state.forward_finished()
    inputs.forget()
    if unpreserved is not None:
        unpreserved.warn_if_used()
    return output


def _is_fx_tracing() -> bool:
    module = torch.fx._symbolic_trace
    current = getattr(module, "_get_is_fx_tracing", None)
    return current() if current is not None else module._is_fx_tracing_flag


# --- what is kept for the recomputation


# Types that hold no tensors: telling so by type is cheaper than asking pytree.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device})


class _Inputs:
    """A call's arguments as a flat list of leaves, with the tensors in kwargs and nested containers among
    them.

    values: the arguments one by one; leaves: the same with every container that holds tensors replaced by
    what it holds. A container without tensors stays the object it is, as in torch.
    """

    __slots__ = ("_keys", "_positional", "_specs", "leaves", "values")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positional = len(args)
        self._keys = tuple(kwargs)
        self._specs: dict[int, pytree.TreeSpec] = {}
        self.values = [*args, *kwargs.values()] if kwargs else args
        self.leaves: list[Any] = []
        for index, value in enumerate(self.values):
            if type(value) not in _PLAIN and not isinstance(value, Tensor):
                leaves, spec = pytree.tree_flatten(value)
                if not spec.is_leaf() and any(isinstance(leaf, Tensor) for leaf in leaves):
                    self._specs[index] = spec
                    self.leaves.extend(leaves)
                    continue
            self.leaves.append(value)

    def forget(self) -> None:
        """Drop the arguments themselves; what `rebuild` and `name` need stays."""
        self.values = ()
        self.leaves = []

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """args and kwargs made of `leaves`; containers are new objects each time."""
        values = leaves
        if self._specs:
            rest = iter(leaves)
            values = []
            for index in range(self._positional + len(self._keys)):
                spec = self._specs.get(index)
                if spec is None:
                    values.append(next(rest))
                else:
                    values.append(pytree.tree_unflatten([next(rest) for _ in range(spec.num_leaves)], spec))
        if not self._keys:
            return values, {}
        return values[: self._positional], dict(zip(self._keys, values[self._positional :], strict=True))

    def name(self, leaf: int) -> str:
        """How the caller knows leaf number `leaf`, such as `args[1]` or `kwargs['masks'][0]`."""
        first = 0
        for index in range(self._positional + len(self._keys)):
            spec = self._specs.get(index)
            count = 1 if spec is None else spec.num_leaves
            if leaf < first + count:
                top = (
                    f"args[{index}]"
                    if index < self._positional
                    else f"kwargs[{self._keys[index - self._positional]!r}]"
                )
                if spec is None:
                    return top
                positions = pytree.tree_unflatten(list(range(count)), spec)
                path = next(path for path, at in pytree.tree_flatten_with_path(positions)[0] if at == leaf - first)
                return top + pytree.keystr(path)
            first += count
        raise IndexError(leaf)

    def nested(self) -> list[int]:
        """The leaves that are tensors inside containers."""
        inside, first = [], 0
        for index in range(self._positional + len(self._keys)):
            spec = self._specs.get(index)
            count = 1 if spec is None else spec.num_leaves
            if spec is not None:
                inside += [leaf for leaf in range(first, first + count) if isinstance(self.leaves[leaf], Tensor)]
            first += count
        return inside


class _SaveByFunction(torch.autograd.Function):
    """Keeps one tensor in a node of its own, for torch versions that cannot make a saved tensor directly."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node only keeps a tensor")


class _SavedByFunction:
    __slots__ = ("_holder",)

    def __init__(self, tensor: Tensor) -> None:
        with torch.enable_grad():  # what is coded is kept from inside no_grad
            self._holder = _SaveByFunction.apply(torch.empty(0, requires_grad=True), tensor)

    def unpack(self) -> Tensor:
        return self._holder.grad_fn.saved_tensors[0]


_make_saved_tensor = getattr(torch._C._autograd, "_make_saved_tensor", None)
_Saved = _SavedByFunction if _make_saved_tensor is None else torch._C._autograd.SavedTensor


def _save(tensor: Tensor) -> Any:
    """`tensor` kept as autograd keeps it: versioned, and through the saved-tensor hooks that are in
    effect."""
    if _make_saved_tensor is None:
        return _SavedByFunction(tensor)
    return _make_saved_tensor(tensor, is_output=False)


def _save_on_host(tensor: Tensor) -> Any:
    return _offload.HostCopy([tensor])


_KEPT = (_Saved, _storage.Kept, _delta.KeptInChain, _offload.HostCopy)
_AnyStorage = str | _storage.Policy | _delta.DeltaChain


def _is_saved(leaf: Any) -> bool:
    """Whether autograd keeps a leaf. It takes no inference tensors, which have no versions either."""
    return isinstance(leaf, Tensor) and not leaf.is_inference()


class _KeptInputs:
    """The leaves of a call's arguments, kept until the recomputation."""

    __slots__ = ("_inputs", "_kept")

    def __init__(self, inputs: _Inputs, storage: _AnyStorage, function: Any, offload: bool = False) -> None:
        self._inputs = inputs
        if isinstance(storage, str) and storage == "exact" and not offload:
            self._kept = [_save(leaf) if _is_saved(leaf) else leaf for leaf in inputs.leaves]
        else:
            self._kept = [
                self._keep(index, leaf, storage, function, offload) if _is_saved(leaf) else leaf
                for index, leaf in enumerate(inputs.leaves)
            ]

    def _keep(self, index: int, tensor: Tensor, storage: _AnyStorage, function: Any, offload: bool) -> Any:
        name = f"checkpoint: {self._inputs.name(index)}"
        offload = offload and _offload.is_offloadable(tensor)
        if isinstance(storage, _delta.DeltaChain):
            if index == 0:
                return storage.keep(tensor, name, _save_on_host if offload else _save)
            storage = "exact"
        context = functools.partial(self._context, index, function)
        codec = _storage.codec_for(tensor, storage, context)
        if codec.name != "exact" and _storage.exceeds_its_memory(tensor):
            codec = _storage.FORMATS["exact"]
        if codec.name == "exact" and not (offload and _storage.is_activation(tensor)):
            return _save(tensor)
        return _storage.Kept(tensor, codec, name, _save, offload)

    def _context(self, index: int, function: Any) -> _storage.Context:
        return _storage.Context(self._inputs.name(index), function)

    def get(self) -> list[Any]:
        return [self._unpack(index, kept) if isinstance(kept, _KEPT) else kept for index, kept in enumerate(self._kept)]

    def _unpack(self, index: int, kept: Any) -> Tensor:
        try:
            return kept.unpack()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error) or not isinstance(kept, _Saved):
                raise
            raise RuntimeError(
                f"checkpoint: {self._inputs.name(index)} has been modified by an inplace operation since the "
                f"forward, which needs it again to recompute; modify a clone instead. {error}"
            ) from error

    # Before torch 2.11 or so the hook asks an autograd node for the inputs, in these words.
    @property
    def grad_fn(self) -> _KeptInputs:
        return self

    saved_tensors = None

    def get_args(self, saved_tensors: None) -> list[Any]:
        return self.get()


# --- the state a recomputation starts from


def _host_random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def _set_host_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def _autocast_state(device_type: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


class _ForwardState:
    """Random state, autocast and default device as the forward found them."""

    __slots__ = (
        "_autocast",
        "_cpu_state",
        "_default_device",
        "_device_ids",
        "_device_module",
        "_device_states",
        "_device_type",
        "_host_state",
        "_initialized",
        "device_tensors",
    )

    def __init__(self, leaves: Sequence[Any], preserve_rng_state: bool | str) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_cpu]
        self.device_tensors = tensors
        if tensors:
            self._device_type = _torch_checkpoint._infer_device_type(*tensors)
        else:
            self._device_type = _torch_checkpoint.DefaultDeviceType.get_device_type()
        self._autocast = {"cpu": _autocast_state("cpu")}
        if self._device_type != "cpu" and torch.amp.is_autocast_available(self._device_type):
            self._autocast[self._device_type] = _autocast_state(self._device_type)
        self._default_device = None
        if torch._C._len_torch_function_stack():
            self._default_device = _default_device()
        self._cpu_state = self._host_state = None
        self._device_ids: list[int] = []
        self._device_states: list[Tensor] = []
        self._device_module = None
        if preserve_rng_state:
            self._cpu_state = torch.get_rng_state()
            if preserve_rng_state == "all":
                self._host_state = _host_random_state()
            if self._device_type != "cpu":
                self._device_module = _torch_checkpoint._get_device_module(self._device_type)
                # A device that is not in use yet has no state, and asking for it would start the device.
                self._initialized = bool(getattr(self._device_module, "_initialized", False))
                if self._initialized and tensors:
                    self._device_ids, self._device_states = _torch_checkpoint.get_device_states(*tensors)

    def forward_finished(self) -> None:
        self.device_tensors = []
        if self._device_module is None or self._initialized:
            return
        if getattr(self._device_module, "_initialized", False):
            raise RuntimeError(
                f"checkpoint: {self._device_type} was first used inside the checkpointed function, so its "
                f"random state before the forward is not known; use the device once before "
                f"(torch.{self._device_type}.init()), or pass preserve_rng_state=False"
            )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Bring the state back, until `stack` closes."""
        if self._cpu_state is not None:
            if self._device_ids:
                stack.enter_context(torch.random.fork_rng(devices=self._device_ids, device_type=self._device_type))
                _torch_checkpoint.set_device_states(
                    self._device_ids, self._device_states, device_type=self._device_type
                )
            else:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self._cpu_state)
        if self._host_state is not None:
            stack.callback(_set_host_random_state, _host_random_state())
            _set_host_random_state(self._host_state)
        for device_type, state in self._autocast.items():
            if _autocast_state(device_type) != state:
                enabled, dtype, cache = state
                stack.enter_context(torch.amp.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache))

    def restore_device(self, stack: contextlib.ExitStack) -> None:
        if self._default_device is not None:
            stack.enter_context(torch.device(self._default_device))


def _default_device() -> torch.device | None:
    """What `with torch.device(...)` or `torch.set_default_device` has set."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


class _UnpreservedRandomness:
    """Warns, once a process, that a function drew random numbers that its recomputation will draw anew."""

    warned = False

    def __init__(self, device_tensors: list[Tensor]) -> None:
        self._device_tensors = device_tensors
        self._before = self._states()

    @classmethod
    def watch(cls, device_tensors: list[Tensor]) -> _UnpreservedRandomness | None:
        # While a CUDA graph is captured nobody may ask for the generator's state.
        if cls.warned or (device_tensors and torch.cuda.is_current_stream_capturing()):
            return None
        return cls(device_tensors)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device_tensors:
            device_module = _torch_checkpoint._get_device_module(
                _torch_checkpoint._infer_device_type(*self._device_tensors)
            )
            if getattr(device_module, "_initialized", False):
                states += _torch_checkpoint.get_device_states(*self._device_tensors)[1]
        return states

    def warn_if_used(self) -> None:
        if all(map(torch.equal, self._before, self._states())) or _UnpreservedRandomness.warned:
            return
        _UnpreservedRandomness.warned = True
        _warn(
            "checkpoint: the function drew random numbers (an active dropout?) under "
            "preserve_rng_state=False, so its recomputation will draw others and the gradients will be "
            "wrong; leave preserve_rng_state=True"
        )


def _warn(message: str) -> None:
    """A warning that points at the first caller outside this module and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((__file__, torch.__path__[0])):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


# --- the non-reentrant form: torch's frame, extended


class _Region:
    """One checkpointed call, to be run again by backward."""

    __slots__ = ("_context", "_function", "_inputs", "_state", "buffers")

    def __init__(
        self, function: Any, inputs: _Inputs, state: _ForwardState, buffers: BufferRecord, context: Any
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._state = state
        self._context = context
        self.buffers: BufferRecord | None = buffers

    def recompute(self, *leaves: Any) -> None:
        args, kwargs = self._inputs.rebuild(leaves)
        with contextlib.ExitStack() as stack:
            self._state.restore(stack)
            if self.buffers is not None:
                stack.enter_context(self.buffers.recomputing())
            if self._context is not None:
                stack.enter_context(self._context)
            self._state.restore_device(stack)
            self._function(*args, **kwargs)


class _RecomputedTensors(weakref.WeakKeyDictionary):
    """torch's handle -> tensor mapping, which serves a tensor only as it was when it was saved.

    Hooks take the place of autograd's own check, so without this one a function that overwrites what it saved
    gets wrong gradients where it would get an error without checkpointing.
    """

    comparing = False

    def __setitem__(self, handle: Any, tensor: Tensor) -> None:
        handle.version = tensor._version
        super().__setitem__(handle, tensor)

    def __getitem__(self, handle: Any) -> Tensor:
        tensor = super().__getitem__(handle)
        if tensor._version != handle.version and not self.comparing:
            raise RuntimeError(
                "checkpoint: one of the variables needed for gradient computation has been modified by an "
                f"inplace operation inside the checkpointed function: {tensor.type()} {list(tensor.shape)} "
                f"is at version {tensor._version}; expected version {handle.version} instead. Modify a clone."
            )
        return tensor


class _Frame(_torch_checkpoint._CheckpointFrame):
    kept: _KeptInputs
    input_saver: _KeptInputs  # what torch before 2.11 calls it
    recomputed: defaultdict[Any, _RecomputedTensors]  # type: ignore[assignment]

    def __init__(self, region: _Region, early_stop: bool, error_cb: Any, metadata_fn: Any) -> None:
        super().__init__(region.recompute, early_stop, error_cb, metadata_fn)
        self.recomputed = defaultdict(_RecomputedTensors)

    def get_inputs(self) -> list[Any]:
        return self.kept.get()

    def finish_forward(self) -> None:
        self.forward_completed = True
        if isinstance(self.metadata_fn, _Fingerprints):
            self.metadata_fn.settle()
        # Stopping at the last saved tensor stops before the operator that saves it has run. RReLU's operator
        # fills its saved noise only then, so stopping there hands out uninitialised memory. The noise is
        # saved next to the input and looks like it; running on costs at most the operators after the last
        # save.
        if self.early_stop and len(self.x_metadatas) > 1:
            last, before = self.x_metadatas[-1], self.x_metadatas[-2]
            if _shape_of(last) == _shape_of(before):
                self.early_stop = False

    def check_recomputed_tensors_match(self, gid: Any) -> None:
        tensors = self.recomputed[gid]
        tensors.comparing = True
        try:
            super().check_recomputed_tensors_match(gid)
        finally:
            tensors.comparing = False
            if isinstance(self.metadata_fn, _Fingerprints):
                self.metadata_fn.settle()


class _NotCompared:
    """Metadata that equals any other."""

    __slots__ = ("shape",)

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _shape_of(metadata: Any) -> torch.Size:
    return metadata["shape"] if isinstance(metadata, dict) else metadata.shape


_METADATA = {"default": _torch_checkpoint._allowed_determinism_checks_to_fns["default"], "none": _NotCompared}


class _Fingerprint:
    """A saved tensor's metadata and a fingerprint of its bytes."""

    __slots__ = ("_digest", "_metadata", "_tensor", "_version", "shape")

    def __init__(self, tensor: Tensor, with_values: bool) -> None:
        self._metadata = _METADATA["default"](tensor)
        self.shape = tensor.shape
        self._tensor = tensor if with_values else None
        self._version = tensor._version
        self._digest: Tensor | None = None

    def settle(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is not None and tensor._version == self._version:
            self._digest = _digest(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Fingerprint):
            return NotImplemented
        self.settle()
        other.settle()
        if self._metadata != other._metadata:
            return False
        return self._digest is None or other._digest is None or torch.equal(self._digest, other._digest)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        self.settle()
        digest = None if self._digest is None else "".join(f"{part & 0xFFFFFFFF:08x}" for part in self._digest.tolist())
        return repr({**self._metadata, "fingerprint of values": digest})


class _Fingerprints:
    """Makes fingerprints, each a little late: an operator can save a tensor that it fills only afterwards.

    Buffers are left out: BatchNorm saves the statistics that it is about to write.
    """

    def __init__(self, buffers: BufferRecord) -> None:
        self._buffers = buffers
        self._open: list[_Fingerprint] = []

    def __call__(self, tensor: Tensor) -> _Fingerprint:
        fingerprint = _Fingerprint(tensor, not self._buffers.holds(tensor))
        self._open.append(fingerprint)
        if len(self._open) > 4:
            self._open.pop(0).settle()
        return fingerprint

    def settle(self) -> None:
        for fingerprint in self._open:
            fingerprint.settle()
        self._open.clear()


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor | None:
    """Two 32-bit sums over a tensor's bytes, of which the second depends on their order; None if it has no
    bytes."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if values.nbytes % dtype.itemsize == 0 and values.element_size() % dtype.itemsize == 0:
            values = values.view(dtype)
            break
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, values.numel(), _DIGEST_CHUNK):
        part = values[start : start + _DIGEST_CHUNK].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=tensor.device)
        # Odd multipliers lose no bits; folding the upper half down lets every bit reach the lower 32.
        mixed = part * -7046029254386353131
        mixed = (mixed ^ (mixed >> 29)) * (2 * position + 1) * -4658895280553007687
        sums[0] += part.sum()
        sums[1] += (mixed ^ (mixed >> 32)).sum()
    return (sums ^ (sums >> 32)) & 0xFFFFFFFF


_DIGEST_CHUNK = 1 << 18


# --- selective checkpointing and saved-tensor hooks


class _CheckpointHookBefore214(_torch_checkpoint._checkpoint_hook):
    """torch's hook, which also knows the user's hooks beneath it, as torch's own does from 2.14 on."""

    pack_hook: Any

    def __enter__(self) -> None:
        self.pack_hook._user_hooks = _user_hooks()
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        del self.pack_hook._user_hooks  # the graph keeps pack_hook, and must not keep these
        super().__exit__(*args)


_checkpoint_hook = _torch_checkpoint._checkpoint_hook if _SAC_HOOKS_IN_TORCH else _CheckpointHookBefore214


_Hooks = tuple[Callable[..., Any], Callable[..., Any]]
_INTERNAL_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")


def _user_hooks() -> _Hooks | None:
    """The saved-tensor hooks in effect, a checkpoint's own left out."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(_INTERNAL_HOOKS):
        hooks = getattr(hooks[0], "_user_hooks", None)
    return hooks


def _route_sac(forward_context: Any, respect_hooks: bool | None) -> None:
    """Make selective checkpointing pass what it saves through the user's saved-tensor hooks, or not."""
    if not isinstance(forward_context, _torch_checkpoint._CachingTorchDispatchMode):
        return
    if _SAC_HOOKS_IN_TORCH:
        setattr(forward_context, "respect_saved_tensors_hooks", respect_hooks)  # noqa: B010
    elif respect_hooks:
        hooks = _user_hooks()
        if hooks is not None:
            entries = _HookedList if forward_context.storage.default_factory is list else _HookedDict
            forward_context.storage.default_factory = functools.partial(entries, hooks)


class _HookedValue(_torch_checkpoint._VersionWrapper):
    def __init__(self, value: Any, unpack: Callable[[Any], Any]) -> None:
        super().__init__(value)
        self._unpack = unpack

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        return self._unpack(super().get_val(allow_cache_entry_mutation))


def _through_hooks(hooks: _Hooks, entry: Any) -> Any:
    def pack(leaf: Any) -> Any:
        if isinstance(leaf, _torch_checkpoint._VersionWrapper) and isinstance(leaf.val, Tensor):
            return _HookedValue(hooks[0](leaf.val), hooks[1])
        return leaf

    return pytree.tree_map(pack, entry)


class _HookedDict(dict):
    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks

    def __setitem__(self, index: int, entry: Any) -> None:
        super().__setitem__(index, _through_hooks(self._hooks, entry))


class _HookedList(list):
    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks

    def append(self, entry: Any) -> None:
        super().append(_through_hooks(self._hooks, entry))


# --- the reentrant form: torch's CheckpointFunction around this


class _ReentrantCall:
    """What `CheckpointFunction` runs: the forward the first time, a recomputation every later time."""

    def __init__(
        self, function: Any, args: tuple[Any, ...], preserve_rng_state: bool | str, check_values: bool
    ) -> None:
        self._function = function
        self._record: BufferRecord | None = BufferRecord(function, args)
        self._host_state = _host_random_state() if preserve_rng_state == "all" else None
        self._check_values = check_values
        self._fingerprints: list[_Fingerprint] = []
        self._ran = False
        # torch holds containers as they are, so this only has to notice writes to what they hold.
        self._nested: list[tuple[str, Tensor, int]] = []
        self._unpreserved = None
        if not preserve_rng_state or not all(type(arg) in _PLAIN for arg in args):
            inputs = _Inputs(args, {})
            for leaf in inputs.nested():
                tensor = inputs.leaves[leaf]
                if _is_saved(tensor):
                    self._nested.append((inputs.name(leaf), tensor, tensor._version))
            if not preserve_rng_state:
                tensors = [leaf for leaf in inputs.leaves if isinstance(leaf, Tensor) and not leaf.is_cpu]
                self._unpreserved = _UnpreservedRandomness.watch(tensors)

    @property
    def adds_something(self) -> bool:
        """Whether running the function itself would be another thing."""
        watches = self._nested or self._host_state is not None or self._unpreserved is not None
        return bool(watches or self._check_values or (self._record is not None and self._record.has_buffers))

    def __call__(self, *args: Any) -> Any:
        return self._recompute(args) if self._ran else self._forward(args)

    def _forward(self, args: tuple[Any, ...]) -> Any:
        output = self._function(*args)
        self._ran = True
        self._record = self._record.finish() if self._record is not None else None
        if self._check_values:
            self._fingerprints = _output_fingerprints(output)
        if self._unpreserved is not None:
            self._unpreserved.warn_if_used()
            self._unpreserved = None
        return output

    def _recompute(self, args: tuple[Any, ...]) -> Any:
        for name, tensor, version in self._nested:
            if tensor._version != version:
                raise RuntimeError(
                    f"checkpoint: {name} has been modified by an inplace operation since the forward, which "
                    "needs it again to recompute; modify a clone instead"
                )
        if self._record is None and self._host_state is None:
            output = self._function(*args)
        else:
            with contextlib.ExitStack() as stack:
                if self._host_state is not None:
                    stack.callback(_set_host_random_state, _host_random_state())
                    _set_host_random_state(self._host_state)
                if self._record is not None:
                    stack.enter_context(self._record.recomputing())
                output = self._function(*args)
        if self._check_values:
            recomputed = _output_fingerprints(output)
            if recomputed != self._fingerprints:
                raise CheckpointError(
                    "checkpoint: the recomputed outputs differ from the forward's:\n"
                    f"forward: {self._fingerprints}\nrecomputed: {recomputed}"
                )
        return output


def _output_fingerprints(output: Any) -> list[_Fingerprint]:
    fingerprints = [_Fingerprint(leaf, True) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    for fingerprint in fingerprints:
        fingerprint.settle()
    return fingerprints
