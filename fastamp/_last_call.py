"""The last model that a program called, remembered so that running out of memory can be explained.

Imports nothing heavy: `fastamp.memory`, which does the explaining, is loaded when that happens.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

_PHRASES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that memory ran out: CUDA's, the CPU allocator's or Python's own."""
    if isinstance(problem, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(phrase in str(problem) for phrase in _PHRASES)


def origins(problem: BaseException) -> Iterator[BaseException]:
    """An exception, the one that it was raised from or while handling, and so on."""
    seen: set[int] = set()
    current: BaseException | None = problem
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def out_of_memory_error(problem: BaseException) -> BaseException | None:
    """The error that says that memory ran out: the exception itself, or one that it comes from."""
    return next(filter(is_out_of_memory, origins(problem)), None)


@dataclass(frozen=True)
class Call:
    """args, kwargs: tensors are on the meta device. grad: whether autograd was on. autocast: its dtype, None if off."""

    model: weakref.ref[nn.Module]
    args: Any
    kwargs: Any
    grad: bool
    autocast: torch.dtype | None


def call_of(model: nn.Module, args: Any, kwargs: Any, grad: bool, autocast: torch.dtype | None) -> Call:
    return Call(weakref.ref(model), _shapes(args), _shapes(kwargs), grad, autocast)


def _shapes(values: Any) -> Any:
    def shape(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, shape, values)


last: Call | None = None
_inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of models seen before, and so not models themselves


def _remember(module: nn.Module, args: Any) -> None:
    global last
    if torch.compiler.is_compiling():  # modules inside a compiled one: nothing to trace here
        return
    again = last is not None and last.model() is module
    if module in _inner and not again:
        return
    parameter = next(module.parameters(), None)
    if parameter is None:  # a loss, say: no model whose memory would be worth explaining
        return
    if not again:
        _inner.update(module.modules())
    kind = parameter.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # A hook of all modules is not given keyword arguments; they are in the frame that calls it.
    kwargs = sys._getframe(1).f_locals.get("kwargs")
    last = call_of(module, args, kwargs if isinstance(kwargs, dict) else {}, torch.is_grad_enabled(), autocast)


@contextlib.contextmanager
def watching(file: TextIO | None = None) -> Iterator[None]:
    """While this is entered, the last model called is remembered; an out-of-memory error that leaves it, or that an
    error which does comes from, is explained on `file` (standard error by default). The error goes on unchanged.

    Keeps a weak reference to the outermost module and the shapes of its arguments, at a few microseconds a module call.
    """
    global last
    # Compiled modules run this hook once more, which does no harm.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    hook = register_module_forward_pre_hook(_remember)
    try:
        yield
    except Exception as problem:
        hook.remove()
        if out_of_memory_error(problem) is not None:
            _explain(problem, file or sys.stderr)
        raise
    finally:
        hook.remove()
        last = None
        _inner.clear()


def _explain(problem: Exception, file: TextIO) -> None:
    try:
        from fastamp.memory.oom import print_explanation
    except Exception as reason:  # the program's own error is what matters
        print(f"fastamp: could not explain the lack of memory: {type(reason).__name__}: {reason}", file=file)
    else:
        print_explanation(problem, file=file)
