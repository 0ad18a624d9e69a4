"""Loads the compiled parts of fastamp, and remembers what did not load and why.

`_ops` holds the operators on the LibTorch stable ABI: one binary for torch 2.10 and later. `_host` is the pybind11
module that walks optimizer.param_groups in C++; it is built against one torch and one Python, and where it does not
load a Python path gives the same results, slower.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import warnings
from types import ModuleType

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps .    (in the checkout; with -e where it was)"


def _load_ops() -> str:
    spec = importlib.util.find_spec("fastamp._ops")
    if spec is None or spec.origin is None:
        raise ImportError(
            "fastamp's operator library (fastamp/_ops*.so) is missing: the package was not built. Build it with\n"
            f"    {REBUILD}"
        )
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise ImportError(
            f"fastamp's operator library {spec.origin} does not load with torch {torch.__version__}: {error}\n"
            f"It needs torch 2.10 or later. Rebuild it with\n    {REBUILD}"
        ) from error
    return spec.origin


ops_path: str = _load_ops()
"""Where the loaded operator library is."""

_exports = ctypes.CDLL(ops_path)
_exports.fastamp_launchers.restype = ctypes.c_void_p
_exports.fastamp_launchers.argtypes = [ctypes.c_int]


def launchers(cuda: bool) -> int:
    """Address of the launcher table (csrc/launchers.h) for CPU or CUDA memory, 0 if this build has none."""
    return _exports.fastamp_launchers(int(cuda)) or 0


has_cuda: bool = launchers(True) != 0
"""Whether the operator library was built with the CUDA kernels."""


def _load_host() -> tuple[ModuleType | None, str]:
    if os.environ.get("FASTAMP_HOST", "1") == "0":
        return None, "disabled by FASTAMP_HOST=0"
    try:
        module = importlib.import_module("fastamp._host")
        running = tuple(int(part) for part in torch.__version__.split(".")[:2])
        # Another torch's may well load, all its symbols being there, and then read torch's objects at wrong offsets.
        if module.built_for_torch != running:
            built = ".".join(map(str, module.built_for_torch))
            raise ImportError(f"it was built for torch {built}, and this is torch {torch.__version__}")
        module.bind(launchers(False), launchers(True))
    except (ImportError, RuntimeError) as error:
        reason = str(error)
        warnings.warn(
            f"fastamp._host did not load ({reason}). Results are the same, the time per parameter is not. "
            f"Was torch upgraded since fastamp was built? Rebuild with\n    {REBUILD}\n"
            "or set FASTAMP_HOST=0 to silence this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, reason
    return module, ""


host: ModuleType | None
host_problem: str
host, host_problem = _load_host()
"""The host module, or None and the reason."""
