"""The three backends that one test body runs on: the CPU kernels, the CUDA kernels run by the emulator on the CPU, and
the CUDA kernels on a GPU where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import fastamp.ops
from fastamp import _library

_BACKENDS = ("cpu", "cuda-emulated", "cuda")


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

    def schedules(self) -> Iterator[None]:
        """One pass of a loop for each order in which the emulator can run threads; a single pass elsewhere."""
        if self.emulator is None:
            yield
            return
        from cuda_emulator.emulator import SCHEDULES

        for schedule in SCHEDULES:
            with self.emulator.settings(**schedule):
                yield


def _op_names() -> list[str]:
    return [name for name in fastamp.ops.__all__ if hasattr(torch.ops.fastamp, name)]


def _why_missing(name: str) -> str:
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


_made: dict[str, Backend] = {}


def _backend(name: str) -> Backend:
    if name not in _made:
        reason = _why_missing(name)
        if reason:
            pytest.skip(reason)
        _made[name] = Backend(name)
    return _made[name]


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return _backend(request.param)


@pytest.fixture
def emulated() -> Backend:
    """For what only the emulator can tell, such as what was launched."""
    return _backend("cuda-emulated")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator seeded anew on each run; the seed is shown when the test fails, and FASTAMP_TEST_SEED repeats it."""
    seed = int(os.environ.get("FASTAMP_TEST_SEED") or torch.seed() % 2**31)
    request.node.user_properties.append(("seed", seed))
    print(f"FASTAMP_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)
