"""``python -m fastamp``: diagnostics, and the commands of COMMANDS."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence

from fastamp._version import __version__

# Name: the module whose main(argv) runs it and returns the exit code, and what --help says of it.
COMMANDS = {
    "demo": (
        "fastamp.demo",
        "train a small GPT with torch's GradScaler and with fastamp's, and compare them",
    ),
    "memory": ("fastamp.memory.cli", "where the memory of your model's training step goes, and a plan that fits"),
    "run": ("fastamp.run", "run an unmodified program with fastamp's scaler and checkpoint for torch's"),
}


def main(argv: Sequence[str] | None = None) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m fastamp",
        description="Without a command: print versions, devices, what was built and what loaded, and what\n"
        "to do if something did not. The exit code is 1 if fastamp cannot be used.",
        epilog=f"commands (each has a --help of its own):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastamp {__version__}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="command", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.usage = "python -m fastamp [-h] [--version] [command ...]"
    with _a_closed_pipe_ends_it():
        parsed = parser.parse_args(argv)
        module = COMMANDS[parsed.command][0] if parsed.command else "fastamp._diagnostics"
        command = importlib.import_module(module).main
        if parsed.command != "run":
            return command(parsed.arguments)
    # What a closed pipe means to a program is the program's own affair.
    return command(parsed.arguments)


@contextlib.contextmanager
def _a_closed_pipe_ends_it() -> Iterator[None]:
    """Exits with 1 and without a word where `| head` has seen enough, as the documentation of Python's `signal`
    recommends."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
