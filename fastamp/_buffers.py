"""Module buffers that a checkpointed function writes: written once, and recomputed from what they held.

A recomputation runs the forward a second time, so BatchNorm would update its running statistics twice, and a
module that reads what it writes (spectral norm's power iteration, a vector quantiser's codebook) would
recompute something else than its forward computed. `BufferRecord` notes which buffers a forward wrote and
what they held before; `BufferRecord.recomputing()` then lets the recomputing thread, and only that thread,
work on private copies of them.

Modules are found where a checkpointed function can hold them without being run: the function itself, a bound
method's object, `functools.partial`, a closure, default arguments, the globals and attributes its code names,
and the call's own arguments.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_BatchNorm = nn.modules.batchnorm._BatchNorm
_Buffers = MutableMapping[str, Tensor | None]

# A buffer met for the first time is copied before the forward, because only the forward shows whether it is
# written; larger ones are not, as the copy could cost more than the checkpoint saves.
_FIRST_COPY_BYTES = 16 << 20
# Kernels can write a buffer behind its version counter's back, as batch_norm's do. Buffers of the names it is
# called with count as written; others are compared by value, once, where that does not wait for a device.
_STATISTICS = frozenset({"running_mean", "running_var"})
_COMPARE_NUMEL = 1 << 16

# module -> {(buffer name, module.training): does a forward write it}
_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


class _Search:
    """Finds the outermost modules a function can reach without running it (see the module docstring)."""

    def __init__(self, function: Any, args: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        # torch.compile reads buffers below Python, so these need another way of restoring them.
        self.compiled: list[nn.Module] = []
        if isinstance(function, nn.Module):
            self.modules.append(function)
        else:
            self._callable(function, self.modules, 3)
        for value in args:
            if type(value) not in _PLAIN:
                self._value(value, self.modules, 2)

    def _callable(self, function: Any, found: list[nn.Module], depth: int) -> None:
        while isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self._value(value, found, depth)
            function = function.func
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            function, found = original, self.compiled
        owner = None
        if isinstance(function, types.MethodType):
            owner, function = function.__self__, function.__func__
        elif not isinstance(function, types.FunctionType):
            owner, function = function, getattr(type(function), "__call__", None)  # noqa: B004
        if isinstance(owner, nn.Module):
            found.append(owner)
            return
        if not isinstance(function, types.FunctionType):
            return  # a builtin: it holds no modules
        for cell in function.__closure__ or ():
            try:
                self._value(cell.cell_contents, found, depth)
            except ValueError:  # a variable of the enclosing scope that is not set yet
                pass
        for value in function.__defaults__ or ():
            self._value(value, found, depth)
        attributes = getattr(owner, "__dict__", {})
        for name in function.__code__.co_names:
            value = attributes.get(name)
            if value is None:
                value = function.__globals__.get(name)
                if isinstance(value, types.FunctionType):
                    continue  # most names in most code are helpers; following them all would cost too much
            self._value(value, found, depth)

    def _value(self, value: Any, found: list[nn.Module], depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            return
        if isinstance(value, nn.Module):
            found.append(value)
        elif depth > 0:
            if kind is list or kind is tuple:
                for item in value:
                    self._value(item, found, depth - 1)
            elif kind is dict:
                for item in value.values():
                    self._value(item, found, depth - 1)
            elif kind in _CALLABLES:
                self._callable(value, found, depth - 1)


_PLAIN = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, bytes, type, types.ModuleType})
_CALLABLES = frozenset({types.FunctionType, types.MethodType, functools.partial})


class _Seen:
    """One buffer as it was before the forward."""

    __slots__ = ("before", "buffer", "in_place", "key", "module", "version")

    def __init__(
        self, module: nn.Module, name: str, training: bool, buffer: Tensor, in_place: bool, version: int | None = None
    ) -> None:
        self.module = module
        self.key = (name, training)
        self.buffer = buffer
        self.version = buffer._version if version is None else version
        self.in_place = in_place
        self.before: Tensor | None = None


class BufferRecord:
    """The buffers a forward can write. Make it before the forward, call `finish()` after it.

    function, args: what will be called.
    """

    __slots__ = ("_finished", "_seen")

    def __init__(self, function: Any, args: Iterable[Any]) -> None:
        self._finished = False
        self._seen: list[_Seen] = []
        search = _Search(function, args)
        visited: set[int] = set()
        for in_place, stack in ((False, search.modules), (True, search.compiled)):
            while stack:
                module = stack.pop()
                if module is None or id(module) in visited:
                    continue
                # Straight from the dictionary: this runs for every module of every call.
                state = module.__dict__
                children = state["_modules"]
                if not in_place and _may_be_compiled(state, children) and _is_compiled(module):
                    search.compiled.append(module)
                    continue
                visited.add(id(module))
                if state["_buffers"]:
                    self._note(module, state["_buffers"], in_place)
                if children:
                    stack.extend(children.values())

    def _note(self, module: nn.Module, buffers: _Buffers, in_place: bool) -> None:
        training = module.training
        # BatchNorm's output does not depend on the statistics it writes: recomputing needs no earlier value.
        copy = not (training and isinstance(module, _BatchNorm))
        known = _known.get(module)
        if known is None:
            with _known_lock:
                known = _known.setdefault(module, {})
        for name, buffer in buffers.items():
            if buffer is None:
                continue
            if is_lazy(buffer):
                # Its module fills it in now, and counts this call already. There is no value to copy yet.
                self._seen.append(_Seen(module, name, training, buffer, in_place, version=-1))
                continue
            if buffer.is_inference():  # those have no versions
                continue
            seen = _Seen(module, name, training, buffer, in_place)
            writes = known.get(seen.key)
            if copy and (writes or (writes is None and buffer.nbytes <= _FIRST_COPY_BYTES)):
                seen.before = buffer.detach().clone()
            self._seen.append(seen)

    @property
    def has_buffers(self) -> bool:
        return bool(self._seen)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is one of these buffers."""
        return any(seen.buffer is tensor for seen in self._seen)

    def finish(self) -> BufferRecord | None:
        """Keep only what the forward wrote; None where that is nothing."""
        self._seen = [seen for seen in self._seen if self._wrote(seen)]
        self._finished = True
        return self if self._seen else None

    def _wrote(self, seen: _Seen) -> bool:
        module, buffer = seen.module, seen.buffer
        name, training = seen.key
        wrote = _buffer(module, name) is not buffer or buffer._version != seen.version
        if not wrote and training and isinstance(module, _BatchNorm):
            # Kernels write the statistics behind the version counter's back. The count of batches is written
            # by the module itself, so it tells whether this forward ran it.
            count = module.num_batches_tracked
            return count is None or any(
                other.buffer is count and other.version != count._version for other in self._seen
            )
        known = _known[module]
        before = known.get(seen.key)
        if not wrote and training:
            if before is not None:
                wrote = before
            elif name in _STATISTICS:
                wrote = True
            elif seen.before is not None and buffer.is_cpu and buffer.numel() <= _COMPARE_NUMEL:
                wrote = not torch.equal(seen.before, buffer)
        known[seen.key] = wrote or bool(before)
        return wrote

    def recomputing(self) -> _Recomputing:
        """A context in which this thread sees, and writes, private copies of the written buffers."""
        if self._finished:
            return _Recomputing(self._seen)
        return _Recomputing([seen for seen in self._seen if self._wrote(seen)])  # backward inside the forward


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    buffers = module._buffers  # a script module's has no get()
    return buffers[name] if name in buffers else None


def _may_be_compiled(state: dict[str, Any], children: Any) -> bool:
    return "forward" in state or "_compiled_call_impl" in state or "_c" in state or "_orig_mod" in children


def _is_compiled(module: nn.Module) -> bool:
    """Whether compiled code reads this module's buffers, and those of the modules in it, below Python."""
    return (
        module.__dict__.get("_compiled_call_impl") is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        or isinstance(module, torch.jit.ScriptModule)
    )


class _Recomputing:
    __slots__ = ("_private", "_restore", "_written")

    def __init__(self, written: list[_Seen]) -> None:
        self._written = written
        self._private: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._restore: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        copies: dict[int, Tensor] = {}
        for seen in self._written:
            name = seen.key[0]
            current = _buffer(seen.module, name)
            start = seen.before if seen.before is not None else current
            if start is None:
                continue
            if not seen.in_place:
                # One copy for modules that share a buffer. What it requires decides what operators save.
                if id(seen.buffer) not in copies:
                    copies[id(seen.buffer)] = start.detach().clone().requires_grad_(seen.buffer.requires_grad)
                self._private.setdefault(seen.module, {})[name] = copies[id(seen.buffer)]
            elif current is not None:
                self._restore.append((current, current.detach().clone()))
                current.data.copy_(start)
        for module, private in self._private.items():
            _PrivateBuffers.enter(module, private)

    def __exit__(self, *exc: object) -> None:
        for module in self._private:
            _PrivateBuffers.leave(module)
        for buffer, value in self._restore:
            # Through .data: the buffer holds again what it held, so graphs that saved it must not see a
            # write.
            buffer.data.copy_(value)


class _PrivateBuffers(MutableMapping):
    """Stands in for a module's `_buffers` while threads recompute: each sees its own copies of some buffers.

    Everything else goes to the module's own dictionary, which comes back when the last thread leaves, so
    other threads (a forward that updates the same statistics, say) lose nothing.
    """

    _install = threading.Lock()

    def __init__(self, shared: _Buffers) -> None:
        self.shared = shared
        self.private: dict[int, list[dict[str, Tensor | None]]] = {}

    @classmethod
    def enter(cls, module: nn.Module, private: dict[str, Tensor | None]) -> None:
        with cls._install:
            buffers = module.__dict__["_buffers"]
            if not isinstance(buffers, cls):
                buffers = module.__dict__["_buffers"] = cls(buffers)
            buffers.private.setdefault(threading.get_ident(), []).append(private)

    @classmethod
    def leave(cls, module: nn.Module) -> None:
        with cls._install:
            buffers = module.__dict__["_buffers"]
            mine = buffers.private[threading.get_ident()]
            mine.pop()
            if not mine:
                del buffers.private[threading.get_ident()]
            if not buffers.private:
                module.__dict__["_buffers"] = buffers.shared

    def _of(self, name: str) -> _Buffers:
        for private in reversed(self.private.get(threading.get_ident(), ())):
            if name in private:
                return private
        return self.shared

    def __getitem__(self, name: str) -> Tensor | None:
        return self._of(name)[name]

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        self._of(name)[name] = value

    def __delitem__(self, name: str) -> None:
        del self.shared[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared)

    def __len__(self) -> int:
        return len(self.shared)

    def __contains__(self, name: object) -> bool:
        return name in self.shared

    def copy(self) -> dict[str, Tensor | None]:
        return dict(self.shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.shared),)  # a copy or a pickle of the module gets its plain buffers
