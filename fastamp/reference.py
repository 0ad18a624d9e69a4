"""Plain-PyTorch truth of every op in :mod:`fastamp.ops`: same names, same arguments, same results.

Tests compare the compiled ops against these functions, and benchmarks time them against each other. They are
written to be read, not to be fast: each reads its flags with ``.item()``, which synchronises with the device.
They check no arguments; :mod:`fastamp.ops` does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastamp.reference_storage import (
    dequantize_blockwise,
    pack_bits,
    pack_scaled_mask,
    quantize_blockwise,
    quantize_blockwise_stats_,
    unpack_bits,
)

__all__ = [
    "accumulate_",
    "check_",
    "clip_",
    "clip_coefficient",
    "dequantize_blockwise",
    "pack_bits",
    "pack_scaled_mask",
    "quantize_blockwise",
    "quantize_blockwise_stats_",
    "scale_losses",
    "unpack_bits",
    "unscale_",
    "unscale_norm_",
    "update_scale_",
]


def _elements(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _multiply_(tensor: Tensor, factor: Tensor) -> None:
    """Computes in float32, or in float64 for float64 tensors, and rounds once to the tensor's dtype."""
    if factor.item() == 1.0:
        return
    values = _elements(tensor)
    opmath = torch.float64 if values.dtype == torch.float64 else torch.float32
    values.copy_(values.to(opmath) * factor.reshape(()).to(opmath))


def _note_nonfinite_(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    if not all(torch.isfinite(_elements(t)).all().item() for t in tensors):
        found_inf.fill_(1.0)


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for grad in grads:
        _multiply_(grad, inv_scale)
    _note_nonfinite_(grads, found_inf)


@torch.no_grad()
def check_(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    _note_nonfinite_(grads, found_inf)


@torch.no_grad()
def unscale_norm_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The norms are sums of squares in float64, rounded once at the end."""
    unscale_(grads, found_inf, inv_scale)
    all_double = len(grads) > 0 and all(_elements(g).dtype == torch.float64 for g in grads)
    dtype = torch.float64 if all_double else torch.float32
    norms = [_elements(g).double().square().sum().sqrt() for g in grads]
    per_tensor = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=found_inf.device)
    return per_tensor.square().sum().sqrt().to(dtype), per_tensor.to(dtype)


@torch.no_grad()
def clip_(grads: Sequence[Tensor], coef: Tensor) -> None:
    for grad in grads:
        _multiply_(grad, coef)


@torch.no_grad()
def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """``min(max_norm / (total + 1e-6), 1)``, the formula of ``torch.nn.utils.clip_grad_norm_``; NaN stays
    NaN."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


@torch.no_grad()
def accumulate_(main_grads: Sequence[Tensor], grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for main, grad in zip(main_grads, grads, strict=True):
        _elements(main).add_(_elements(grad).float() * inv_scale.reshape(()))
    _note_nonfinite_(main_grads, found_inf)


@torch.no_grad()
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
) -> None:
    # Python floats are doubles: the products are taken in double and rounded once, by fill_, to float32.
    now = scale.item()
    if any(found_inf.item() != 0.0 for found_inf in found_infs):
        growth_tracker.fill_(0)
        if hysteresis_tracker is not None:
            hysteresis_tracker.sub_(1)
            if hysteresis_tracker.item() > 0:
                return
        scale.fill_(now * backoff_factor)
        if min_scale is not None:
            scale.clamp_(min=min_scale)
        return
    if hysteresis_tracker is not None:
        hysteresis_tracker.fill_(hysteresis)
    growth_tracker.add_(1)
    if growth_tracker.item() != growth_interval:
        return
    growth_tracker.fill_(0)
    grown = torch.tensor(now * growth_factor, dtype=torch.float64).float().item()
    if math.isfinite(grown):
        scale.fill_(grown)
        if max_scale is not None:
            scale.clamp_(max=max_scale)


def scale_losses(losses: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Differentiable; dtypes promote as in ``loss * scale`` with a 0-dim scale."""
    return [loss * scale.reshape(()) for loss in losses]
