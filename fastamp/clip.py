"""Gradient clipping by norm: ``torch.nn.utils.clip_grad_norm_`` on fastamp's passes."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastamp import _gradients, _scalars
from fastamp._gradients import GradientBuckets, gradient_buckets

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips the norm of all gradients taken together, in place: ``torch.nn.utils.clip_grad_norm_``, with
    fewer passes.

    Gradients are multiplied by ``min(max_norm / (total_norm + 1e-6), 1)``, torch's formula. The L2 norm takes
    one read; where the coefficient is 1 the gradients are not touched, where torch multiplies by 1. Nothing
    synchronises with the device unless ``error_if_nonfinite`` is set.

    The norm is summed in another order than torch's, and in float32 (float64 if all gradients are float64)
    where torch rounds the norm of each float16 or bfloat16 gradient to that dtype: expect agreement with
    torch to a few units in the last place, not bit for bit. With ``norm_type`` other than 2 the norm is torch's own.

    Sparse gradients, tensor subclasses such as DTensor and devices without fastamp kernels take torch's
    function.

    Args:
        parameters: tensors of any shape and floating or complex dtype whose ``.grad`` is clipped, or one
            tensor.
        max_norm: largest norm to leave. 0 zeroes the gradients, ``inf`` only computes the norm.
        norm_type: order of the norm, ``inf`` included.
        error_if_nonfinite: raise if the total norm is NaN or infinite, before any gradient is written.
            Synchronises.
        foreach: handed to torch where its function is taken; otherwise without effect.

    Returns:
        The total norm, 0-dim, float32 (float64 if all gradients are float64), on the device of the first
        gradient. 0 if there are no gradients.

    Raises:
        ValueError: ``max_norm`` is NaN or negative, or ``norm_type`` is NaN.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or a gradient overlaps itself.
    """
    max_norm, norm_type = checked_arguments(max_norm, norm_type)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2)
    with torch.no_grad():
        buckets = gradient_buckets([{"params": parameters}])
        if buckets.other:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        total = total_norm(buckets, norm_type)
        if error_if_nonfinite:
            raise_if_nonfinite(total, norm_type)
        clip_buckets_(buckets, clip_coefficient(total, max_norm))
    return total


def checked_arguments(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    max_norm, norm_type = float(max_norm), float(norm_type)
    if math.isnan(max_norm) or max_norm < 0:
        # torch takes both: NaN turns every gradient to NaN, a negative norm turns gradients around.
        raise ValueError(
            f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm}; "
            "use float('inf') to compute the norm without clipping"
        )
    if math.isnan(norm_type):
        raise ValueError("clip_grad_norm_: norm_type must be a number or inf, got nan")
    return max_norm, norm_type


def combine_norms(norms: list[Tensor]) -> Tensor:
    """The L2 norm of the whole from the 0-dim norms of its parts, on the device of the first."""
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))


def total_norm(buckets: GradientBuckets, norm_type: float) -> Tensor:
    """The norm of the gradients as they are."""
    if not buckets.devices:
        return torch.tensor(0.0)
    if norm_type != 2.0:
        grads = [grad for device in buckets.devices for grad in buckets.grads(device)]
        return torch.nn.utils.get_total_norm(grads, norm_type)
    # A norm pass at inv_scale 1 leaves the gradients untouched; what it finds non-finite is the norm's to
    # say.
    return combine_norms(
        [buckets.unscale_norm(device, _scalars.one(device), _scalars.zero(device))[0] for device in buckets.devices]
    )


def raise_if_nonfinite(total: Tensor, norm_type: float) -> None:
    if not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
            "anyway, set `error_if_nonfinite=False`"
        )


def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    if total.dtype in (torch.float16, torch.bfloat16):
        total = total.float()
    return _gradients.clip_coefficient(total, max_norm)


def clip_buckets_(buckets: GradientBuckets, coefficient: Tensor) -> None:
    for device in buckets.devices:
        buckets.clip(device, coefficient.to(device))
