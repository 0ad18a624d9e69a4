"""What modules hold in their attributes, however deeply nested: copied before a simulated step, put back after it."""

from __future__ import annotations

import enum
import functools
import operator
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# So many values are looked into for others within them: a model may hold its data set.
_MOST = 1_000_000

_CONTAINERS = (OrderedDict, dict, list, deque, set, tuple)
# What a value is to the walk, beside one of the containers.
_LEAF, _TENSOR, _OBJECT, _SHARED = range(4)


class Held:
    """The attributes of `roots` (objects and classes) and the contents of each container and object within their
    reach, as they are now.

    Left alone are objects of Python's library and of torch, but for modules and distributions, and an object that holds
    a lock or a thread, which others may be changing.

    complete: false if there was more than is looked into, so that something may have been missed.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.complete = True
        self._saved: list[tuple[Any, Any, Any]] = []
        self._with_tensors: list[tuple[Any, Any, Any]] = []
        roots = list(roots)
        self._seen, self._left = set(map(id, roots)), _MOST
        self._waiting: deque[tuple[Any, Any]] = deque()
        for root in roots:
            if isinstance(root, type):
                self._add(root, type)
            else:
                self._add(_attributes(root), dict)
        while self._waiting:
            thing, kind = self._waiting.popleft()
            if kind is not _OBJECT:
                self._add(thing, kind)
                continue
            attributes = _attributes(thing)
            if _SHARED in map(_kind, map(type, attributes.values())) and not isinstance(thing, nn.Module):
                continue
            self._add(attributes, dict)
            if _slots(type(thing)):
                self._add(thing, object)
            container = next((each for each in _CONTAINERS if isinstance(thing, each)), None)
            if container is not None:
                self._add(thing, container)

    def _add(self, thing: Any, form: Any) -> None:
        copy = _copy(thing, form)
        if form is not tuple:
            self._saved.append((thing, form, copy))
        if not copy or all(_kind(kind) in (_LEAF, _SHARED) for kind in set(map(type, _values(copy)))):
            return
        if len(copy) > self._left:
            self.complete = False
            return
        self._left -= len(copy)
        if self._wait_for(_values(copy)) and form is not tuple:
            self._with_tensors.append((thing, form, copy))

    def _wait_for(self, values: Iterable[Any]) -> bool:
        """Has them looked into; whether there are tensors among them, or tuples, in which they may be."""
        found = False
        for value in values:
            kind = _kind(type(value))
            if kind is _LEAF or kind is _SHARED:
                continue
            found = found or kind is _TENSOR or kind is tuple
            if kind is not _TENSOR and id(value) not in self._seen:
                self._seen.add(id(value))
                self._waiting.append((value, kind))
        return found

    def replace(self, swap: Callable[[Tensor], Tensor]) -> None:
        """Puts `swap(tensor)` in the place of each tensor, and a tuple of such in the place of a tuple."""
        for thing, form, copy in self._with_tensors:
            if form is set:
                _restore(thing, set, {_swapped(value, swap) for value in copy})
            elif form in (list, deque):
                _restore(thing, form, [_swapped(value, swap) for value in copy])
            else:
                _restore(thing, form, {key: _swapped(value, swap) for key, value in copy.items()})

    def restore(self) -> None:
        """All is as it was when this was made."""
        for thing, form, copy in self._saved:
            _restore(thing, form, copy)


def classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """The classes whose own attributes a step of these may change."""
    bases = dict.fromkeys(base for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__)
    return [base for base in bases if _is_looked_into(base)]


def _swapped(value: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return swap(value)
    if isinstance(value, tuple):
        items = [_swapped(item, swap) for item in value]
        if not _same(items, value):
            made_in_c = hasattr(value, "n_sequence_fields")  # what torch.max returns, say
            return type(value)(items) if made_in_c else tuple.__new__(type(value), items)
    return value


# --- what is looked into ---


def _kind_of(kind: type) -> Any:
    if issubclass(kind, Tensor):
        return _TENSOR
    if issubclass(kind, tuple):
        return tuple
    if kind in _CONTAINERS:
        return kind
    if kind.__module__.partition(".")[0] in ("_thread", "threading", "queue", "multiprocessing", "concurrent"):
        return _SHARED
    return _OBJECT if _is_looked_into(kind) else _LEAF


_kind: Callable[[type], Any] = functools.lru_cache(maxsize=4096)(_kind_of)


def _is_looked_into(kind: type) -> bool:
    if issubclass(kind, nn.Module):
        return kind is not nn.Module
    if issubclass(kind, (type, enum.Enum, threading.Thread, torch.optim.Optimizer)):
        return False
    package = kind.__module__.partition(".")[0]
    if package in ("torch", "fastamp"):
        return kind.__module__.startswith("torch.distributions")
    if package in sys.stdlib_module_names:
        return package == "collections" or kind.__name__ == "SimpleNamespace"
    return bool(kind.__dictoffset__ or _slots(kind)) or issubclass(kind, _CONTAINERS)


_NO_ATTRIBUTES: dict[str, Any] = {}


def _attributes(thing: Any) -> dict[str, Any]:
    """An object's own `__dict__`, whatever its class makes of that name."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return _NO_ATTRIBUTES
    return found if type(found) is dict else _NO_ATTRIBUTES


def _slots_of(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if hasattr(getattr(kind, name, None), "__set__"))


_slots: Callable[[type], tuple[str, ...]] = functools.lru_cache(maxsize=4096)(_slots_of)


# --- by the methods of the containers themselves: a subclass may do more in its own ---


def _copy(thing: Any, form: Any) -> Any:
    if form is dict:
        return dict.copy(thing)
    if form is OrderedDict:
        return dict(OrderedDict.items(thing))
    if form is type:
        return dict(vars(thing))
    if form is object:
        return {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name)}
    if form is set:
        return set(set.__iter__(thing))
    return list(form.__iter__(thing))


def _values(copy: Any) -> Iterable[Any]:
    return copy.values() if type(copy) is dict else copy


def _same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return all(map(operator.is_, first, second))


def _restore(thing: Any, form: Any, copy: Any) -> None:
    now = _copy(thing, form)
    if len(now) == len(copy) and (now == copy if form is set else _same(_values(now), _values(copy))):
        if form in (set, list, deque) or _same(now, copy):
            return
    if form in (object, type):
        for name in now.keys() - copy.keys():
            form.__delattr__(thing, name)
        for name, value in copy.items():
            if name not in now or now[name] is not value:
                form.__setattr__(thing, name, value)
    elif form is list:
        list.__setitem__(thing, slice(None), copy)
    elif form is OrderedDict:
        OrderedDict.clear(thing)
        for key, value in copy.items():
            OrderedDict.__setitem__(thing, key, value)
    else:
        form.clear(thing)
        (form.extend if form is deque else form.update)(thing, copy)
