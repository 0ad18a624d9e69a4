"""Fixtures. `backend` runs one test body on each backend of backends.py that this machine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from backends import NAMES, Backend, why_missing

_made: dict[str, Backend] = {}


def _backend(name: str) -> Backend:
    if name not in _made:
        reason = why_missing(name)
        if reason:
            pytest.skip(reason)
        _made[name] = Backend(name)
    return _made[name]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return _backend(request.param)


@pytest.fixture
def emulated() -> Backend:
    """For what only the emulator can tell, such as what was launched."""
    return _backend("cuda-emulated")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch works on one thread: what it allocates and how long it takes does not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator seeded anew on each run; the seed is shown when the test fails, and FASTAMP_TEST_SEED repeats it."""
    seed = int(os.environ.get("FASTAMP_TEST_SEED") or torch.seed() % 2**31)
    request.node.user_properties.append(("seed", seed))
    print(f"FASTAMP_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)
