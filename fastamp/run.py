"""`python -m fastamp run train.py args...`: runs a program with fastamp in torch's place.

The program is not changed and does not know: it runs as `__main__`, with its own `sys.argv` and `sys.path`,
and `fastamp.patch()` in effect; so do the processes that it starts with `multiprocessing`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import json
import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

# Tells processes that the program spawns what to run and how.
_ENVIRONMENT = "FASTAMP_RUN"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp run",
        usage="python -m fastamp run [options] (script.py | -m module) [arguments of the program ...]",
        description="Runs a program as it is, with fastamp's GradScaler and checkpoint in place of torch's.\n"
        "Options come before the script; what follows it is the program's own.",
        epilog="Under a launcher:\n"
        "  torchrun --nproc-per-node 2 -m fastamp run train.py\n"
        "  accelerate launch -m fastamp run train.py\n\n"
        "A FORMAT is exact, bf16, fp16, int8, fp8_e4m3, fp8_e5m2 or int4; all but exact make gradients\n"
        "approximate.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--storage", metavar="FORMAT", help="how checkpoints keep their inputs (default: exact)")
    parser.add_argument(
        "--store",
        metavar="FORMAT",
        help="how everything that autograd saves is kept, without recomputing; exact packs masks to bits",
    )
    parser.add_argument("--min-scale", type=float, metavar="X", help="never back the scale off below X")
    parser.add_argument("--max-scale", type=float, metavar="X", help="never let the scale grow above X")
    parser.add_argument(
        "--hysteresis",
        type=int,
        metavar="N",
        help="back off only at the N-th overflow without a clean step between",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print steps, skipped steps, the scale's history, the scaler's time and bytes saved at the end",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """run's own options, and the program with its arguments (["train.py", ...] or ["-m", "module", ...])."""
    with_value = {"--storage", "--store", "--min-scale", "--max-scale", "--hysteresis"}
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] not in ("-m", "--"):
        index += 2 if argv[index] in with_value else 1
    # As elsewhere "--" ends the options and is none of the program's arguments.
    return list(argv[:index]), list(argv[index + (argv[index : index + 1] == ["--"]) :])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` and returns the exit code. An exception of the program's comes through,
    and so does its `SystemExit`."""
    own, program = _split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(own)
    is_module = program[:1] == ["-m"]
    target = program[1:] if is_module else program
    if not target:
        parser.error("the name of a script or -m and the name of a module is missing")
    if not is_module and not Path(target[0]).exists():
        parser.error(f"there is no file {target[0]!r}")
    if is_module and (why := _cannot_run(target[0])):
        parser.error(why)
    try:
        with _in_effect(vars(options)):
            _propagate(vars(options), target[0], is_module)
            if is_module:
                sys.argv = target
                runpy.run_module(target[0], run_name="__main__", alter_sys=True)
            else:
                _run_script(target)
    except _BadOption as error:
        parser.error(str(error))
    return 0


def _cannot_run(module: str) -> str | None:
    """Why `python -m module` could not run it; None if it can."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
            if spec is None:
                return f"{module!r} is a package without a __main__ module"
    except ModuleNotFoundError as error:
        # Of the program's own imports Python's traceback tells more.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            return None
        spec = None
    except ValueError:
        return None
    return f"there is no module {module!r}" if spec is None else None


def _run_script(target: list[str]) -> None:
    sys.argv = target
    # `python -m` has put the working directory there, `python train.py` would have put the script's.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(target[0]).resolve().parent)
    runpy.run_path(target[0], run_name="__main__")


class _BadOption(Exception):
    pass


@contextlib.contextmanager
def _in_effect(options: dict[str, Any]) -> Iterator[None]:
    """fastamp in torch's place while this is entered, as the options say. An out-of-memory error is explained."""
    import fastamp
    from fastamp._last_call import watching

    policies = {
        name: options[name] for name in ("storage", "min_scale", "max_scale", "hysteresis") if options[name] is not None
    }
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(fastamp.patched(**policies))
            if options["store"] is not None:
                stack.enter_context(fastamp.store_activations(options["store"]))
        except (TypeError, ValueError) as error:
            raise _BadOption(str(error)) from error
        if options["report"]:
            stack.enter_context(_reporting(options["storage"], options["store"]))
        stack.enter_context(watching())
        yield


@contextlib.contextmanager
def _reporting(storage: str | None, store: str | None) -> Iterator[None]:
    from fastamp._report import Report

    report = Report(storage, store)
    report.start()
    try:
        yield
    finally:
        report.stop()
        # All ranks run the same steps: one speaks for all.
        if (int(os.environ.get("RANK") or 0) or report.rank) == 0:
            print("\n".join(report.lines()), flush=True)


# ---- processes that the program spawns ---------------------------------------------------------------------


def _propagate(options: dict[str, Any], target: str, is_module: bool) -> None:
    """Has `multiprocessing` start children, which begin with a fresh interpreter and import the main program
    again, by way of `_spawned.py`."""
    original = multiprocessing.spawn.get_preparation_data
    os.environ[_ENVIRONMENT] = json.dumps(
        {
            "options": options,
            "target": target if is_module else str(Path(target).resolve()),
            "module": is_module,
        }
    )

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if data.pop("init_main_from_name", None) or data.pop("init_main_from_path", None):
            data["init_main_from_path"] = str(Path(__file__).with_name("_spawned.py"))
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def enter_spawned() -> dict[str, Any]:
    """In a spawned process: puts fastamp in place and imports the main program. Returns its globals."""
    spec = json.loads(os.environ[_ENVIRONMENT])
    context = _in_effect(spec["options"])
    context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    _propagate(spec["options"], spec["target"], spec["module"])
    run = runpy.run_module if spec["module"] else runpy.run_path
    return run(spec["target"], run_name="__mp_main__")
