"""The backends that one test body runs on: the CPU kernels, the CUDA kernels run by the emulator on the CPU, and the
CUDA kernels on a GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import torch

import fastamp.ops
from fastamp import _library

NAMES = ("cpu", "cuda-emulated", "cuda")


class Backend:
    """`ops` has the functions of fastamp.ops; `device` is where their tensors live."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")
        self.emulator = None
        if name == "cuda-emulated":
            from cuda_emulator.build import build
            from cuda_emulator.emulator import Emulator

            # The sanitizer runs (cuda_emulator/run.py) name the library that they built.
            library = os.environ.get("FASTAMP_EMULATED_LIBRARY") or str(build())
            torch.ops.load_library(library)
            self.emulator = Emulator(library)
            self.ops = SimpleNamespace(**{name: getattr(torch.ops.fastamp_emulated, name) for name in _op_names()})
        else:
            self.ops = fastamp.ops

    def __repr__(self) -> str:
        return self.name

    def schedules(self, **settings: int) -> Iterator[None]:
        """One pass of a loop for each order in which the emulator can run threads, with other settings of its own
        besides; a single pass elsewhere."""
        if self.emulator is None:
            yield
            return
        from cuda_emulator.emulator import SCHEDULES

        for schedule in SCHEDULES:
            with self.emulator.settings(**schedule, **settings):
                yield


def _op_names() -> list[str]:
    return [name for name in fastamp.ops.__all__ if hasattr(torch.ops.fastamp, name)]


def why_missing(name: str) -> str:
    if name == "cuda":
        if not torch.cuda.is_available():
            return "this machine has no GPU"
        if not _library.has_cuda:
            return "fastamp was built without its CUDA kernels"
    if name == "cuda-emulated":
        from cuda_emulator.build import Unavailable, compiler, cuda_include_dirs

        try:
            compiler()
            cuda_include_dirs()
        except Unavailable as problem:
            return str(problem)
    return ""
