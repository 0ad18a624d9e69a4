"""``torch.amp`` with fastamp's GradScaler: change ``torch`` to ``fastamp`` in an import and it works."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import autocast, custom_bwd, custom_fwd, is_autocast_available

from fastamp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]


def __getattr__(name: str) -> Any:
    return getattr(torch.amp, name)
