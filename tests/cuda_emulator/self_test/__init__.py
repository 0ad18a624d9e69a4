"""Runs the kernels of the emulator's own tests. Free of torch, whose import takes seconds under TSan."""

import ctypes
from pathlib import Path

import numpy as np

from ..emulator import Emulator

KERNELS = Path(__file__).with_name("kernels.cu")


def floats(n: int) -> np.ndarray:
    """1, 2, ... n as float32: sums are exact."""
    return np.arange(1, n + 1, dtype=np.float32)


def aligned_zeros(n: int) -> np.ndarray:
    """float32 zeros at a multiple of 16 bytes."""
    raw = np.zeros(n + 4, dtype=np.float32)
    start = -raw.ctypes.data % 16 // 4
    return raw[start : start + n]


class SelfTest:
    """A library built from kernels.cu, ready to run its cases."""

    def __init__(self, path: Path | str) -> None:
        library = ctypes.CDLL(str(path))
        self._run = library.self_test_run
        pointer = ctypes.c_void_p
        self._run.argtypes = [ctypes.c_char_p, pointer, pointer, ctypes.c_int64, pointer]
        self._run.restype = ctypes.c_char_p
        self.emulator = Emulator(path)

    def error(self, case: str, source: np.ndarray, target: np.ndarray, n: int = 0, stream: int = 0) -> str:
        """Runs a case and returns what the launch threw, or ""."""
        return self._run(case.encode(), source.ctypes.data, target.ctypes.data, n, stream).decode()

    def run(self, case: str, source: np.ndarray, target: np.ndarray, n: int = 0, stream: int = 0) -> np.ndarray:
        """Runs a case that must succeed and returns the target."""
        error = self.error(case, source, target, n, stream)
        assert error == ""
        return target
