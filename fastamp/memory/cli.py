"""`python -m fastamp memory train.py:make`: the memory report of a user's model, and a plan for a budget."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Prints where the memory of a training step of your model goes, without running the step and, where the function lets
itself be called on fake tensors, without building the model either. A model that does not run on fake tensors is built
and measured in a real step.

TARGET is script.py:function or package.module:function. The function is called without arguments and returns
  (model, inputs)   or   (model, inputs, loss)   or   a dict with "model", "inputs" and any of "loss", "targets",
  "optimizer", "precision", "mode"
where inputs is one argument of the model, a tuple of arguments or a dict of keyword arguments."""


class _BadTarget(Exception):
    """What is wrong with the target, in words for the person who typed it."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp memory",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="script.py:function or package.module:function")
    parser.add_argument("--optimizer", metavar="NAME", help="a torch optimizer (adamw, sgd, ...) or none")
    parser.add_argument("--precision", metavar="P", help="fp32, fp16, bf16, fp16-amp or bf16-amp")
    parser.add_argument("--mode", choices=["train", "finetune", "inference"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="whose kernels (default: cuda)")
    parser.add_argument(
        "--checkpoint", metavar="BLOCKS", help="all, a number n for every n-th block, or names,of,modules.*"
    )
    parser.add_argument("--store", metavar="FORMAT", help="how blocks store activations: bf16, int8, ...")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches in a step")
    parser.add_argument("--budget", metavar="SIZE", help='plan for this much memory, such as "10GB"')
    parser.add_argument(
        "--options",
        metavar="LIST",
        default="keep,checkpoint",
        help="what the plan may do to blocks (default: keep,checkpoint)",
    )
    parser.add_argument("--real", action="store_true", help="build the model for real, not on fake tensors")
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw the step's timeline")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit code: 0, 1 if the budget is too small, 2 for bad arguments."""
    options = _parser().parse_args(argv)
    from fastamp.memory import DoesNotFit, NotTraceable, estimate, plan

    try:
        function = _function(options.target)
        made, note = _make(function, options.real)
        model, inputs, settings = _understood(made)
        settings.update(_chosen(options))
        treated = {
            "checkpoint": _blocks(options.checkpoint),
            "store": options.store,
            "accumulation": options.accumulation,
        }
        try:
            report = estimate(model, inputs, **treated, **settings)
        except NotTraceable:
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
        if options.budget:
            print()
            allowed = tuple(part.strip() for part in options.options.split(","))
            print(plan(model, inputs, options.budget, options=allowed, **settings))
    except DoesNotFit as problem:
        print(problem, file=sys.stderr)
        return 1
    except (_BadTarget, NotTraceable, ImportError, TypeError, ValueError) as problem:
        print(f"python -m fastamp memory: {problem}", file=sys.stderr)
        return 2
    return 0


def _function(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise _BadTarget(f"the target must be script.py:function or package.module:function, got {target!r}")
    if place.endswith(".py"):
        path = Path(place)
        if not path.exists():
            raise _BadTarget(f"there is no file {place!r}")
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as problem:
            raise _BadTarget(f"cannot import {place!r}: {problem}") from problem
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise _BadTarget(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return function


def _make(function: Callable[[], Any], real: bool) -> tuple[Any, str]:
    """What the function returns, on fake tensors if it can be called so, and a note if it cannot."""
    if real:
        return function(), ""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return function(), ""
    except Exception as problem:  # whatever a function that loads or looks at weights raises
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
            raise _BadTarget(
                f'the function\'s dict must have "model" and "inputs" and may have {", ".join(sorted(known))}; '
                f"got {', '.join(map(str, settings))}"
            )
        model, inputs = settings.pop("model"), settings.pop("inputs")
    elif isinstance(made, tuple) and len(made) in (2, 3):
        model, inputs = made[:2]
        if len(made) == 3:
            settings["loss"] = made[2]
    else:
        raise _BadTarget(f"the function must return (model, inputs) or a dict, it returned {type(made).__name__}")
    if not isinstance(model, nn.Module):
        raise _BadTarget(f"the function's model must be an nn.Module, got {type(model).__name__}")
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
