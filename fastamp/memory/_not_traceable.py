"""Why a step does not run on fake tensors: because they are fake, or because of a mistake in it."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from torch import nn
from torch._subclasses import fake_tensor as _fake

from fastamp.memory._users_code import is_users


class NotTraceable(RuntimeError):
    """A step that does not run on fake tensors; the error that stopped it is its `__cause__`, if there was one.

    Attributes:
        module: name of the module that stopped it, "" if none did.
        fake_tensors_are_the_limit: whether the same step may run on real tensors: it reads a value, say, or calls an
            operator without a fake kernel. If not, it is a mistake that real tensors would meet as well.
    """

    def __init__(self, message: str, module: str = "", fake_tensors_are_the_limit: bool = True) -> None:
        super().__init__(message)
        self.module = module
        self.fake_tensors_are_the_limit = fake_tensors_are_the_limit


_LIMITS = (
    _fake.DataDependentOutputException,
    _fake.DynamicOutputShapeException,
    _fake.UnsupportedFakeTensorException,
    _fake.UnsupportedOperatorException,
    _fake.UnsupportedMutationAliasingException,
)
# What torch raises as a plain RuntimeError or NotImplementedError for tensors without memory.
_LIMIT_PHRASES = (
    "There was no fake impl registered",
    ".numpy() is not supported for tensor subclasses",
    "Cannot access data pointer of Tensor",
    "data is not allocated yet",
    "Not available for 'meta' device type",
    "out of meta tensor",
    "Couldn't swap",  # module.to(device) on fake parameters
    "FakeTensor",
)


# What torch's kernels for shapes raise when they refuse their arguments, as the real kernels would; other errors are
# failures of these kernels themselves.
_REFUSALS = (RuntimeError, ValueError, IndexError)


def _is_of_a_fake_kernel(problem: BaseException) -> bool:
    """Whether an operator's kernel for fake tensors failed: one that is not written, is wrong, or is the user's own."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(problem.__traceback__)]
    if _fake.__file__ not in files:
        return False
    kernel = files[files.index(_fake.__file__) :]
    refused = isinstance(problem, _REFUSALS) and not isinstance(problem, NotImplementedError)
    return not refused or any(map(is_users, kernel))


def is_limit_of_fake_tensors(problem: BaseException | None) -> bool:
    """Whether an error, or one that it was made of, is about tensors being fake."""
    while problem is not None:
        if isinstance(problem, NotTraceable):
            return problem.fake_tensors_are_the_limit
        if isinstance(problem, _LIMITS):
            return True
        if isinstance(problem, RuntimeError) and any(phrase in str(problem) for phrase in _LIMIT_PHRASES):
            return True
        if _is_of_a_fake_kernel(problem):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


class explained:
    """`with explained(model):` turns what a step raises into NotTraceable, with the module that it came from."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}

    def __enter__(self) -> None:
        # Fake tensors log a traceback of their own for what is raised here in better words.
        self.level = _fake_log.level
        _fake_log.setLevel(logging.CRITICAL)

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        _fake_log.setLevel(self.level)
        if problem is None or not isinstance(problem, Exception) or isinstance(problem, NotTraceable):
            return
        name, made = "", ""
        for frame, _ in traceback.walk_tb(trace):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.names:
                name, made = self.names[id(owner)], type(owner).__name__
        where = (
            f"module {name!r} ({made})" if name else f"the model ({made})" if made else "the step outside any module"
        )
        limit = is_limit_of_fake_tensors(problem)
        what = f"cannot run on fake tensors: {_reason(problem)}" if limit else f"raised {_named(problem)}"
        raise NotTraceable(f"{where} {what}", name, limit) from problem


def _named(problem: Exception) -> str:
    text = str(problem).strip().split("\n\n")[0]
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def _reason(problem: Exception) -> str:
    text = str(problem).strip().split("\n\n")[0]
    if isinstance(problem, _fake.DataDependentOutputException):
        text += " reads a value (as .item(), bool() and if do), and fake tensors have none"
    elif isinstance(problem, _fake.DynamicOutputShapeException):
        text = f"the shape of what {text} returns depends on values, and fake tensors have none"
    elif isinstance(problem, _fake.UnsupportedOperatorException):
        text += " has no kernel for fake tensors (torch.library.register_fake adds one to an operator of your own)"
    elif not isinstance(problem, _fake.UnsupportedFakeTensorException):
        text = _named(problem)
    return f'{text.removesuffix(".")}. fallback="measure" runs it for real, and so does fastamp.memory.track.'
