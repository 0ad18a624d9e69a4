"""`python -m fastamp memory train.py:make`: the memory report of a user's model, and a plan for a budget."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_DESCRIPTION = """\
Prints where the memory of a training step of your model goes. The step is not run, and the model not even built: your
function is called on fake tensors. A function that needs values is called for real, and a model that needs them is
measured in one real step; an error of your own is shown as it is.

TARGET is script.py:function or package.module:function. The file is imported, so keep what it runs as a program under
  if __name__ == "__main__":
The function is called without arguments and returns
  (model, inputs)   or   (model, inputs, loss)   or   a dict with "model", "inputs" and any of "loss", "targets",
  "optimizer", "precision", "mode"
where inputs is one argument of the model, a tuple of arguments or a dict of keyword arguments, and loss(output) or
loss(output, targets) gives the loss. Options given here go before what the function says.

examples:
  python -m fastamp memory train.py:make
  python -m fastamp memory train.py:make --precision bf16-amp --checkpoint all --plot memory.png
  python -m fastamp memory package.train:make --budget 10GB --options keep,checkpoint,store:int8"""

_FORMATS = """\
a FORMAT is how activations are kept:
  exact, bf16, fp16, int8, fp8_e4m3, fp8_e5m2 or int4       all but exact make gradients approximate
  delta-bf16, delta-int8 or delta-int4                      relative to the block before; of checkpointed blocks only

The exit code is 0, 1 if nothing fits the budget or your own code raised an error, or 2 for a bad command line."""


class _BadCommand(Exception):
    """What is wrong with the command line, in words for the person who typed it."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp memory",
        usage="python -m fastamp memory TARGET [options]",
        description=_DESCRIPTION,
        epilog=_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="script.py:function or package.module:function")
    step = parser.add_argument_group("the step")
    step.add_argument("--optimizer", metavar="NAME", help="one of torch.optim (adamw, sgd, ...), or none")
    step.add_argument(
        "--precision",
        metavar="P",
        help="fp32, fp16 or bf16 (parameters in that type), fp16-amp or bf16-amp (autocast); default: as the model is",
    )
    step.add_argument(
        "--mode",
        choices=["train", "finetune", "inference"],
        help="finetune is train for a model with frozen parameters (default: train)",
    )
    step.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="whose kernels (default: cuda)")
    step.add_argument("--accumulation", type=int, metavar="N", help="micro-batches to one optimizer step (default: 1)")
    step.add_argument(
        "--checkpoint",
        metavar="BLOCKS",
        help="recompute these in backward: all, a number n for every n-th, or names,of,modules.*",
    )
    step.add_argument("--store", metavar="FORMAT", help="keep the activations of all repeated blocks in this FORMAT")
    plan = parser.add_argument_group("a plan", "the fastest treatment of blocks, and cut of the batch, that fits")
    plan.add_argument("--budget", metavar="SIZE", help='plan for this much memory: "10GB", 512MiB or a number of bytes')
    plan.add_argument(
        "--options",
        metavar="LIST",
        help="what may be done to a block, any of keep, checkpoint, offload (to the host), store:FORMAT and "
        "checkpoint:FORMAT (default: keep,checkpoint)",
    )
    other = parser.add_argument_group("other")
    other.add_argument("--real", action="store_true", help="build the model for real from the start")
    other.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    other.add_argument("--plot", metavar="FILE", help="also draw the step's timeline (.png, .svg, .pdf)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit code: 0, 1 if nothing fits the budget or the user's own code
    raised an error, 2 for bad arguments."""
    options = _parser().parse_args(argv)
    from fastamp.memory import DoesNotFit, NotTraceable

    try:
        _check(options)
        _print_report(options)
    except DoesNotFit as problem:
        print(problem, file=sys.stderr)
        return 1
    except NotTraceable as problem:
        mistake = not problem.fake_tensors_are_the_limit
        if mistake:
            print(_own_traceback(problem.__cause__), end="", file=sys.stderr)
        print(f"python -m fastamp memory: {problem}", file=sys.stderr)
        return 1 if mistake else 2
    except _BadCommand as problem:
        print(f"python -m fastamp memory: {problem}", file=sys.stderr)
        return 2
    except Exception as problem:
        own = _own_traceback(problem)
        if own:
            print(own, end="", file=sys.stderr)
            return 1
        if not isinstance(problem, (ImportError, OSError, TypeError, ValueError)):
            raise
        print(f"python -m fastamp memory: {problem}", file=sys.stderr)
        return 2
    return 0


def _own_traceback(problem: BaseException | None) -> str:
    """The traceback of an error as far as it runs through the user's files; "" if it does not."""
    from fastamp.memory._users_code import is_users

    told = traceback.TracebackException.from_exception(problem) if problem is not None else None
    part, found = told, isinstance(problem, SyntaxError)
    while part is not None:
        own = [frame for frame in part.stack if is_users(frame.filename)]
        part.stack = traceback.StackSummary.from_list(own)
        found = found or bool(own)
        part = part.__cause__ or part.__context__
    return "".join(told.format()) if told is not None and found else ""


def _check(options: argparse.Namespace) -> None:
    """Raises _BadCommand, or what the library raises, for options that are wrong or do not go together.

    Before the step is estimated, which may take minutes.
    """
    from fastamp.memory._plot import check_path
    from fastamp.memory._sizes import parse_bytes
    from fastamp.memory.plan import check_options

    for name in ("json", "plot"):
        if getattr(options, name) is not None:
            _check_file(name, Path(getattr(options, name)))
    if options.plot is not None:
        check_path(options.plot)
    if options.budget is None:
        if options.options is not None:
            raise _BadCommand(f"--options {options.options} is about what a plan may do: give it a --budget too")
        return
    for name, instead in (
        ("checkpoint", "--options keep,checkpoint"),
        ("store", "--options keep,store:FORMAT"),
        ("accumulation", "nothing, the plan cuts the batch where that helps"),
    ):
        if getattr(options, name) is not None:
            raise _BadCommand(
                f"--{name} {getattr(options, name)} settles what the plan for a --budget is to choose: leave one of "
                f"them out (with --budget, in place of --{name}: {instead})"
            )
    parse_bytes(options.budget)
    check_options(_allowed(options), options.device)


def _check_file(name: str, path: Path) -> None:
    where, problem = path, ""
    if path.is_dir():
        problem = "Is a directory"
    elif not path.parent.is_dir():
        where, problem = path.parent, "Not a directory" if path.parent.exists() else "No such directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "Permission denied"
    if problem:
        raise _BadCommand(f"--{name} {path}: cannot be written, {str(where)!r}: {problem}")


def _allowed(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(part.strip() for part in (options.options or "keep,checkpoint").split(","))


def _print_report(options: argparse.Namespace) -> None:
    from fastamp.memory import NotTraceable, estimate, plan

    function = _function(options.target)
    made, note = _make(function, options.real)
    model, inputs, settings = _understood(made)
    settings.update(_chosen(options))
    treated = {
        "checkpoint": _blocks(options.checkpoint),
        "store": options.store,
        "accumulation": 1 if options.accumulation is None else options.accumulation,
    }
    try:
        report = estimate(model, inputs, **treated, **settings)
    except NotTraceable as problem:
        if not problem.fake_tensors_are_the_limit:
            raise
        if not options.real:  # made on fake tensors: measuring needs real ones
            model, inputs, made_settings = _understood(function())
            settings = {**made_settings, **_chosen(options)}
        report = estimate(model, inputs, **treated, **settings, fallback="measure")
    if note:
        report.notes.append(note)
    print(report)
    if options.json:
        report.to_json(options.json)
    if options.plot:
        report.plot(options.plot)
    if options.budget is not None:
        print()
        print(plan(model, inputs, options.budget, options=_allowed(options), fallback="measure", **settings))


def _function(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise _BadCommand(f"the target must be script.py:function or package.module:function, got {target!r}")
    module = _script(place) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise _BadCommand(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return function


def _script(place: str) -> ModuleType:
    path = Path(place)
    try:
        path.read_bytes()
    except OSError as problem:
        raise _BadCommand(f"cannot read {place!r}: {problem.strerror}") from problem
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _module(place: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as problem:
        if problem.name is None or f"{place}.".startswith(f"{problem.name}."):
            raise _BadCommand(f"cannot import {place!r}: {problem}") from problem
        raise  # what the module itself imports


def _make(function: Callable[[], Any], real: bool) -> tuple[Any, str]:
    """What the function returns, on fake tensors if it can be called so, and a note if it cannot."""
    if real:
        return function(), ""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fastamp.memory._not_traceable import is_limit_of_fake_tensors

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            # Copies of modules (nn.Transformer makes its layers so) look whether a tensor has memory.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor is deprecated")
            return function(), ""
    except Exception as problem:
        if not is_limit_of_fake_tensors(problem):
            name = getattr(function, "__name__", "the function")
            print(
                f"python -m fastamp memory: {name} raised the error below, called on fake tensors. If those are the "
                "reason, --real calls it on real ones.",
                file=sys.stderr,
            )
            raise
        first = str(problem).strip().split("\n")[0]
        return function(), f"the model was built for real: on fake tensors it raised {type(problem).__name__}: {first}"


def _understood(made: Any) -> tuple[Any, Any, dict[str, Any]]:
    from torch import nn

    settings: dict[str, Any] = {}
    if isinstance(made, Mapping):
        settings = dict(made)
        known = {"model", "inputs", "loss", "targets", "optimizer", "precision", "mode"}
        unknown = sorted(set(settings) - known)
        if unknown or not {"model", "inputs"} <= set(settings):
            raise _BadCommand(
                f'the function\'s dict must have "model" and "inputs" and may have {", ".join(sorted(known))}; '
                f"got {', '.join(map(str, settings))}"
            )
        model, inputs = settings.pop("model"), settings.pop("inputs")
    elif isinstance(made, tuple) and len(made) in (2, 3):
        model, inputs = made[:2]
        if len(made) == 3:
            settings["loss"] = made[2]
    else:
        raise _BadCommand(f"the function must return (model, inputs) or a dict, it returned {type(made).__name__}")
    if not isinstance(model, nn.Module):
        raise _BadCommand(f"the function's model must be an nn.Module, got {type(model).__name__}")
    return model, inputs, settings


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """estimate's arguments that were given on the command line."""
    chosen: dict[str, Any] = {"device": options.device}
    for name in ("optimizer", "precision", "mode"):
        if getattr(options, name) is not None:
            chosen[name] = getattr(options, name)
    if chosen.get("optimizer") == "none":
        chosen["optimizer"] = None
    return chosen


def _blocks(text: str | None) -> Any:
    if text is None or text == "all":
        return True if text else None
    with contextlib.suppress(ValueError):
        return int(text)
    return [part.strip() for part in text.split(",")]
