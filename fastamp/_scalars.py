"""0-dim float32 tensors on a device, without a fill kernel for each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# One fill serves this many steps.
_POOL_SIZE = 64

_zeros: dict[Any, list[Tensor]] = {}
_ones: dict[Any, Tensor] = {}


def _full(shape: tuple[int, ...], value: float, device: torch.device) -> Tensor:
    # Not as an inference tensor: those refuse in-place writes once inference mode has ended.
    with torch.inference_mode(False), torch.no_grad():
        return torch.full(shape, value, dtype=torch.float32, device=device)


def _pool_key(device: torch.device) -> Any:
    """What may share one fill; None where each caller needs a fill of its own."""
    if device.type != "cuda":
        return device
    # A fill recorded in a CUDA graph has to run at every replay, and its memory belongs to the graph.
    if torch.cuda.is_current_stream_capturing():
        return None
    # Another stream would not wait for the fill.
    return device, torch.cuda.current_stream(device).cuda_stream


def zero(device: torch.device) -> Tensor:
    """A 0-dim float32 zero that nothing else refers to: no value handed out before, no sync, seldom a
    kernel."""
    key = _pool_key(device)
    if key is None:
        return _full((), 0.0, device)
    try:
        return _zeros[key].pop()
    except (KeyError, IndexError):
        fresh = _full((_POOL_SIZE,), 0.0, device)
        # Where a mode that makes tensors of its own is active (FakeTensorMode, say), nothing may be kept.
        if type(fresh) is not Tensor:
            return _full((), 0.0, device)
        last, *rest = fresh.unbind()
        _zeros[key] = rest
        return last


def one(device: torch.device) -> Tensor:
    """A 0-dim float32 one, shared by all callers: never write to it."""
    key = _pool_key(device)
    value = None if key is None else _ones.get(key)
    if value is None:
        value = _full((), 1.0, device)
        if key is not None and type(value) is Tensor:
            _ones[key] = value
    return value
