"""Puts fastamp's scaler and checkpoint where programs look for torch's, without touching the programs.

`patch()` replaces `torch.amp.GradScaler`, `torch.cuda.amp.GradScaler`, `torch.cpu.amp.GradScaler`, FSDP's
`ShardedGradScaler` and `torch.utils.checkpoint.checkpoint` and `checkpoint_sequential` by stand-ins: in
torch, in every module that has bound the same objects to a name, and in every `functools.partial` around
them. `unpatch()` takes the stand-ins back out, also of modules that were imported in between.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint

import fastamp.cuda.amp
from fastamp import checkpointing, grad_scaler, storage

__all__ = ["is_patched", "patch", "patched", "unpatch"]


class StandIn(abc.ABCMeta):  # users' own subclasses may be abstract
    """A class that stands in for one of torch's: instances of torch's class count as its instances too."""

    _stands_for: type
    # Whose fastamp scalers count as well. torch.cuda.amp's and torch.cpu.amp's classes are for one type of
    # device, torch.amp's for any (None).
    _device_types: tuple[str, ...] | None = None

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if namespace["__module__"].partition(".")[0] == "torch":
            # A class of torch's, in a module imported while patched, derives from torch's as ever.
            return type(name, tuple(vars(base).get("_stands_for", base) for base in bases), namespace)
        return super().__new__(mcs, name, bases, namespace)

    def __instancecheck__(cls, instance: Any) -> bool:
        if "_stands_for" not in cls.__dict__:
            return super().__instancecheck__(instance)
        return isinstance(instance, cls._stands_for) or (
            isinstance(instance, grad_scaler.GradScaler)
            and (cls._device_types is None or instance._device in cls._device_types)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "_stands_for" not in cls.__dict__:
            return super().__subclasscheck__(subclass)
        return issubclass(subclass, cls._stands_for)


class AmpGradScaler(grad_scaler.GradScaler, metaclass=StandIn):
    """`fastamp.GradScaler` in the place of `torch.amp.GradScaler`, with the options given to `patch()`."""

    _stands_for = torch.amp.GradScaler

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **policies: Any,
    ) -> None:
        policies = {**scaler_options(), **policies}
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, **policies)


class CudaGradScaler(fastamp.cuda.amp.GradScaler, metaclass=StandIn):
    """`fastamp.cuda.amp.GradScaler` in the place of torch's, with the options given to `patch()`."""

    _stands_for = torch.cuda.amp.GradScaler
    _device_types = ("cuda",)

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **policies: Any,
    ) -> None:
        policies = {**scaler_options(), **policies}
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled, **policies)


class CpuGradScaler(grad_scaler.GradScaler, torch.cpu.amp.GradScaler, metaclass=StandIn):
    """`fastamp.GradScaler` in the place of `torch.cpu.amp`'s, with the options given to `patch()`."""

    _stands_for = torch.cpu.amp.GradScaler
    _device_types = ("cpu",)

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **policies: Any,
    ) -> None:
        policies = {**scaler_options(), **policies}
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled, **policies)


def checkpoint(*args: Any, **kwargs: Any) -> Any:
    """`fastamp.checkpoint` in the place of torch's, with the options given to `patch()`."""
    return checkpointing.checkpoint(*args, **_with_checkpoint_options(kwargs))


def checkpoint_sequential(*args: Any, **kwargs: Any) -> Any:
    """`fastamp.checkpoint_sequential` in the place of torch's, with the options given to `patch()`."""
    # use_reentrant may come as the fourth positional argument.
    if len(args) > 3:
        args, kwargs = args[:3], {"use_reentrant": args[3], **kwargs}
    return checkpointing.checkpoint_sequential(*args, **_with_checkpoint_options(kwargs))


# Compilers and libraries read the signature to tell checkpoint's own arguments from its function's.
checkpoint.__signature__ = inspect.signature(checkpointing.checkpoint)  # type: ignore[attr-defined]
checkpoint_sequential.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    checkpointing.checkpoint_sequential
)

# (torch's, what stands in for it)
_STAND_INS: list[tuple[Any, Any]] = [
    (torch.amp.GradScaler, AmpGradScaler),
    (torch.cuda.amp.GradScaler, CudaGradScaler),
    (torch.cpu.amp.GradScaler, CpuGradScaler),
    (torch.utils.checkpoint.checkpoint, checkpoint),
    (torch.utils.checkpoint.checkpoint_sequential, checkpoint_sequential),
]


# ---- options -----------------------------------------------------------------------------------------------


def _keyword_only(function: Any) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


_SCALER_OPTIONS = _keyword_only(grad_scaler.GradScaler.__init__)
_CHECKPOINT_OPTIONS = _keyword_only(checkpointing.checkpoint) - {"use_reentrant", "context_fn"}


def _check_options(options: dict[str, Any]) -> None:
    unknown = sorted(options.keys() - _SCALER_OPTIONS - _CHECKPOINT_OPTIONS)
    if unknown:
        raise TypeError(
            f"patch: unknown option {', '.join(unknown)}; the scaler takes "
            f"{', '.join(sorted(_SCALER_OPTIONS))}, checkpoint takes {', '.join(sorted(_CHECKPOINT_OPTIONS))}"
        )
    # What the scripts' own calls would stumble over later.
    grad_scaler.GradScaler("cpu", **{k: v for k, v in options.items() if k in _SCALER_OPTIONS})
    storage.check_storage(options.get("storage", "exact"))


def _options() -> dict[str, Any]:
    layers = _layers
    return layers[-1].options if layers else {}


def scaler_options() -> dict[str, Any]:
    return {name: value for name, value in _options().items() if name in _SCALER_OPTIONS}


def _with_checkpoint_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in _options().items() if name in _CHECKPOINT_OPTIONS}
    kwargs = {**options, **kwargs}
    if kwargs.get("use_reentrant") and options.get("storage", "exact") != "exact":
        _warn_of_reentrant()
        kwargs["use_reentrant"] = False
    return kwargs


@functools.cache
def _warn_of_reentrant() -> None:
    warnings.warn(
        "patch: storage= needs checkpoints that are not reentrant, so calls with use_reentrant=True run as "
        "with use_reentrant=False.",
        RuntimeWarning,
        stacklevel=4,
    )


# ---- putting in and taking out -----------------------------------------------------------------------------


class _Layer:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


# patch() owns the first layer where there is one, each `with patched()` another; the last one's options
# apply. Replaced as a whole, never changed in place: stand-ins read it without the lock.
_layers: tuple[_Layer, ...] = ()
_patch_layer: _Layer | None = None
_lock = threading.RLock()


def patch(**options: Any) -> None:
    """Puts fastamp in place of torch's GradScaler and checkpoint, in this process, until `unpatch()`.

    Covers `torch.amp.GradScaler`, `torch.cuda.amp.GradScaler`, `torch.cpu.amp.GradScaler`, FSDP's
    `ShardedGradScaler` (which combines over its process group as ever), `torch.utils.checkpoint.checkpoint`
    and `checkpoint_sequential`, under every name that a loaded module has for them
    (`from torch.amp import GradScaler`), and `functools.partial` objects around the two functions wherever
    they are (a model whose gradient checkpointing was enabled before). Modules imported later find the
    stand-ins in torch. Scalers that exist already stay what they are.

    `isinstance` keeps working: instances of torch's classes are instances of the stand-ins, and scalers made
    while patched stay instances of torch's classes after `unpatch()`.

    A second call replaces the first one's options. Thread-safe.

    Args:
        options: keyword-only arguments of `fastamp.GradScaler` (`min_scale`, `max_scale`, `hysteresis`,
            `process_group`, `allow_fp16_grads`) and of `fastamp.checkpoint` (`storage`, `preserve_rng_state`,
            `determinism_check`, `debug`, `early_stop`, ...): defaults for scalers made and checkpoints run
            while patched, where the caller does not pass them. With a `storage` other than "exact",
            checkpoints that ask for `use_reentrant=True` run as non-reentrant ones (warns once).

    Raises:
        TypeError, ValueError: an unknown option or an unsuitable value. Nothing has been patched then.
    """
    global _layers, _patch_layer
    _check_options(options)
    with _lock:
        layer = _Layer(options)
        _layers = (layer, *(other for other in _layers if other is not _patch_layer))
        _patch_layer = layer
        _bind_stand_ins()
    _load_sharded()


def unpatch() -> None:
    """Gives torch its own back, in every module, whatever `patch()` and `with patched()` are in effect. Does
    nothing where none is."""
    global _layers, _patch_layer
    with _lock:
        if _layers:
            _layers, _patch_layer = (), None
            _bind_originals()


@contextlib.contextmanager
def patched(**options: Any) -> Iterator[None]:
    """`patch(**options)` for a `with` block, and for all threads while it lasts.

    Blocks nest and may overlap between threads: the latest one's options apply, and torch's own comes back
    when the last has ended, unless `patch()` is in effect.

    Args and Raises as `patch`.
    """
    global _layers
    _check_options(options)
    layer = _Layer(options)
    with _lock:
        if not _layers:
            _bind_stand_ins()
        _layers = (*_layers, layer)
    try:
        _load_sharded()
        yield
    finally:
        with _lock:
            if layer in _layers:
                _layers = tuple(other for other in _layers if other is not layer)
                if not _layers:
                    _bind_originals()


def is_patched() -> bool:
    """Whether fastamp's scaler and checkpoint are in torch's place."""
    return bool(_layers)


def _bind_stand_ins() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _rebind({id(original): stand_in for original, stand_in in _STAND_INS})


def _bind_originals() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _rebind({id(stand_in): original for original, stand_in in _STAND_INS})


# ---- FSDP's scaler, which takes long to import and few programs need ----------------------------------------

_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


def _load_sharded() -> None:
    """Without the lock: another thread may be importing FSDP and wait for it in `add_stand_in`."""
    if sys.modules.get(_SHARDED) is not None:
        importlib.import_module("fastamp._sharded")


class _ShardedFinder(importlib.abc.MetaPathFinder):
    """Finds FSDP's module as Python does, and has it followed by the stand-in's when it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == _SHARDED else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _load_sharded()

            loader.exec_module = exec_module
        return spec


_finder = _ShardedFinder()


def add_stand_in(original: type, stand_in: type) -> None:
    with _lock:
        _STAND_INS.append((original, stand_in))
        if _layers:
            _bind_stand_ins()


# ---- every name ---------------------------------------------------------------------------------------------


def _rebind(replacements: dict[int, Any]) -> None:
    # torch's own modules first: what another thread is importing meanwhile then finds the new objects there.
    modules = sorted(sys.modules.items(), key=lambda item: item[0].partition(".")[0] != "torch")
    for name, module in modules:
        if name.partition(".")[0] == "fastamp":
            continue
        # Not getattr: modules that load lazily would load.
        try:
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        # sys.modules may hold anything.
        if not isinstance(namespace, dict):
            continue
        for key, value in list(namespace.items()):
            if id(value) in replacements:
                namespace[key] = replacements[id(value)]
    functions = [old for pair in _STAND_INS for old in pair if id(old) in replacements and not isinstance(old, type)]
    for holder in gc.get_referrers(*functions):
        if type(holder) is functools.partial and id(holder.func) in replacements:
            state = (replacements[id(holder.func)], holder.args, holder.keywords, holder.__dict__)
            holder.__setstate__(state)  # type: ignore[attr-defined]
