"""`torch.utils.checkpoint` with fastamp's `checkpoint` and `checkpoint_sequential` in place of torch's.

Everything else torch's module has, public or not, is torch's own object.
"""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint as _torch_checkpoint
from torch.utils.checkpoint import *  # noqa: F403

from fastamp.checkpointing import checkpoint as checkpoint
from fastamp.checkpointing import checkpoint_sequential as checkpoint_sequential

__all__ = list(_torch_checkpoint.__all__)


def __getattr__(name: str) -> Any:
    # Also names torch does not list, and globals its context managers change.
    try:
        return getattr(_torch_checkpoint, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_checkpoint)})
