"""``torch.cuda.amp`` with fastamp's GradScaler, in the argument order of that module."""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda.amp import amp_definitely_not_available, autocast, custom_bwd, custom_fwd

import fastamp.grad_scaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


class GradScaler(fastamp.grad_scaler.GradScaler, torch.cuda.amp.GradScaler):
    """:class:`fastamp.GradScaler` for CUDA with ``torch.cuda.amp.GradScaler``'s argument order:
    ``init_scale`` first.

    An instance of both. The keyword-only arguments are those of :class:`fastamp.GradScaler`.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **policies: Any,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled, **policies)


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda.amp, name)
