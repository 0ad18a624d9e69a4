"""What tests ask of a loaded emulator: which schedule to use, and what was launched."""

import contextlib
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The schedules every test of a kernel should pass: in order, two random ones, two that starve warps.
SCHEDULES = [
    {},
    {"schedule": "shuffled", "seed": 1},
    {"schedule": "shuffled", "seed": 7, "resident_blocks": 3, "preempt_one_in": 2},
    {"schedule": "starving", "seed": 2},
    {"schedule": "starving", "seed": 12, "resident_blocks": 3},
]


def schedule_id(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values()) or "in_order"


class Emulator:
    """Controls the emulator inside one shared library that build.py made."""

    def __init__(self, library: Path | str) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.cuda_emulator_configure.restype = ctypes.c_char_p
        self._library.cuda_emulator_launches.restype = ctypes.c_char_p
        self._library.cuda_emulator_switches.restype = ctypes.c_uint64

    def configure(self, **settings: Any) -> None:
        """Sets the named settings (struct Settings of cuda_emulator.h); others return to their defaults."""
        text = " ".join(f"{name}={value}" for name, value in settings.items())
        error = self._library.cuda_emulator_configure(text.encode()).decode()
        if error:
            raise ValueError(f"emulator settings: {error}")

    @contextlib.contextmanager
    def settings(self, **settings: Any) -> Iterator[None]:
        """configure() for a `with` block; the defaults come back after it."""
        self.configure(**settings)
        try:
            yield
        finally:
            self.configure()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[dict[str, Any]]]:
        """Yields a list that holds the launches of the `with` block once it has ended."""
        launches: list[dict[str, Any]] = []
        self._library.cuda_emulator_clear_launches()
        yield launches
        launches += json.loads(self._library.cuda_emulator_launches().decode())

    @contextlib.contextmanager
    def edge_blocks(self, count: int, total: int, **settings: Any) -> Iterator[None]:
        """Runs only the first and last `count` of the `total` blocks that the `with` block launches."""
        self._library.cuda_emulator_clear_launches()
        with self.settings(skip_from=count, skip_to=max(count, total - count), **settings):
            yield

    @contextlib.contextmanager
    def dry_run(self, **settings: Any) -> Iterator[list[dict[str, Any]]]:
        """Like record(), but no block runs."""
        with self.settings(skip_from=0, skip_to=2**63, **settings), self.record() as launches:
            yield launches

    @property
    def switches(self) -> int:
        """How often a thread was resumed since the library was loaded."""
        return self._library.cuda_emulator_switches()
