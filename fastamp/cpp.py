"""For C++ programs: where the headers and the library are. examples/cpp shows a CMake project that uses them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["include_paths", "library_path"]


def include_paths() -> list[str]:
    """Folders to search for headers (`-I`): `#include <fastamp/launchers.h>` is the one to start from.

    The headers are torch-free: they describe tensors as pointers and sizes, and work as a stream. Each says what
    its functions compute. `fastamp_launchers(cuda)` gives the table of functions for CPU or CUDA memory.

    Raises:
        FileNotFoundError: the package was not built; the message says how.
    """
    folder = Path(__file__).with_name("include")
    if not (folder / "fastamp" / "launchers.h").is_file():
        raise FileNotFoundError(f"include_paths: {folder} holds no headers; {_how_to_build()}")
    return [str(folder)]


def library_path() -> str:
    """The operator library to link: it holds the kernels behind `fastamp_launchers`, and registers torch's
    operators of the namespace `fastamp` in the program that loads it. It needs libtorch_cpu and libc10 (with
    CUDA kernels also libtorch_cuda and libcudart), and no Python.

    Raises:
        FileNotFoundError: the package was not built; the message says how.
    """
    spec = importlib.util.find_spec("fastamp._ops")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"library_path: fastamp/_ops*.so is missing; {_how_to_build()}")
    return spec.origin


def _how_to_build() -> str:
    return "build fastamp, in a checkout with: pip install --no-build-isolation -e ."
