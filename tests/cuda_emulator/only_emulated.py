"""A pytest plugin for run.py: keeps the tests that run on the emulated backend, drops all others."""

import pytest


def runs_emulated(item: pytest.Item) -> bool:
    if "emulated" in getattr(item, "fixturenames", ()):
        return True
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("backend") == "cuda-emulated"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = [item for item in items if not runs_emulated(item)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if runs_emulated(item)]
