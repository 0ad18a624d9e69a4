"""The operators, as functions. Each is `torch.ops.fastamp.<name>`, with kernels for CPU and CUDA and a fake kernel.

Every function checks all of its arguments before it writes anything: a refused call (RuntimeError) leaves every tensor
as it was. Nothing here synchronizes with the device. In-place functions are not differentiable and count as in-place
writes for autograd's version check. Lists may mix dtypes, shapes, strides and alignments, and may be empty; their
tensors share one device. Complex tensors are treated as pairs of reals. What each function computes, in plain PyTorch,
is in `fastamp.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastamp import _library

_ops = torch.ops.fastamp

__all__ = [
    "accumulate_",
    "check_",
    "clip_",
    "clip_coefficient",
    "scale_losses",
    "unscale_",
    "unscale_norm_",
    "update_scale_",
]


def unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiplies gradients by `inv_scale` in place and looks for non-finite results, in one pass.

    The products are those of torch's `_amp_foreach_non_finite_check_and_unscale_`, bit for bit: taken in float32
    (float64 for float64 and complex128) and rounded to the gradient's dtype; at `inv_scale == 1` nothing is written.

    Args:
        grads: float16, bfloat16, float32, float64, complex64 or complex128 tensors of any shape and strides that do
            not overlap themselves.
        found_inf: float32, one element. Set to 1.0 if any stored value is infinite or NaN, else left as it is. Unlike
            torch's, it also notices a finite gradient that overflows while it is unscaled (a scale below 1).
        inv_scale: float32, one element: 1 / scale.

    Raises:
        RuntimeError: a tensor of another dtype, layout or device, a gradient that overlaps itself.
    """
    _ops.unscale_(grads, found_inf, inv_scale)
    increment_version([*grads, found_inf])


def check_(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    """Sets `found_inf` to 1.0 if any gradient holds an infinity or a NaN. Reads the gradients once, writes none.

    Args and Raises as `unscale_`.
    """
    _ops.check_(grads, found_inf)
    increment_version(found_inf)


def unscale_norm_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
    """`unscale_`, and the L2 norms of the unscaled gradients, in the same pass.

    The sums are taken in an order that depends on the sizes alone: the same bits on every run and for any number of
    threads. Squares are added in float32 over runs of at most 128 values a partial sum on the CPU, and the runs in
    float64, so the relative error of a norm stays below 1e-5 for any size (float64 gradients: 1e-13).

    Returns:
        (total_norm, norms): 0-dim, and 1-D of `len(grads)`, float32; float64 if all gradients are float64.
        Without gradients the total is 0.

    Args and Raises as `unscale_`.
    """
    total, norms = _ops.unscale_norm_(grads, found_inf, inv_scale)
    increment_version([*grads, found_inf])
    return total, norms


def clip_(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiplies gradients by a coefficient that lives on the device. At 1 no gradient is read or written.

    Args:
        grads: as for `unscale_`.
        coefficient: float32 or float64, one element, as `clip_coefficient` gives it.

    Raises:
        RuntimeError: as `unscale_`.
    """
    _ops.clip_(grads, coefficient)
    increment_version(list(grads))


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """`min(max_norm / (total_norm + 1e-6), 1)`, the bits of `torch.nn.utils.clip_grad_norm_`, in one kernel.

    Args:
        total_norm: float32 or float64, one element. NaN gives NaN.
        max_norm: any number but NaN.

    Returns:
        A tensor like `total_norm`.

    Raises:
        RuntimeError: `total_norm` of another dtype or size, `max_norm` NaN.
    """
    return _ops.clip_coefficient(total_norm, max_norm)


def accumulate_(main_grads: Sequence[Tensor], grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """`main_grads[i] += grads[i].float() * inv_scale`, and the check of the sums, in one pass.

    For gradient accumulation in float32 beside a model in half precision. Product and sum are rounded one after the
    other, as PyTorch would.

    Args:
        main_grads: float32.
        grads: float16, bfloat16 or float32, each of its main gradient's shape.
        found_inf: float32, one element. Set to 1.0 if any stored sum is infinite or NaN, else left as it is.
        inv_scale: float32, one element.

    Raises:
        RuntimeError: lists of different lengths, shapes that differ, and as `unscale_`.
    """
    _ops.accumulate_(main_grads, grads, found_inf, inv_scale)
    increment_version([*main_grads, found_inf])


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
    """One step of dynamic loss scaling, in place and in one kernel.

    An overflow is any of `found_infs` other than 0. Without the optional arguments the result is that of torch's
    `_amp_update_scale_`, bit for bit.

    Args:
        scale: float32, one element.
        growth_tracker: int32, one element: steps without overflow since the last growth.
        found_infs: one to 256 float32 tensors of one element, on the scale's device.
        growth_factor, backoff_factor: the scale's factors.
        growth_interval: steps without overflow before the scale grows.
        min_scale, max_scale: bounds of what backing off and growing may set.
        hysteresis: an overflow backs the scale off only if it is at least the `hysteresis`-th in a row.
        hysteresis_tracker: int32, one element, `hysteresis` at the start. Needed where `hysteresis` is above 1.

    Raises:
        RuntimeError: a tensor of another dtype, size or device, no or too many `found_infs`, `min_scale` above
            `max_scale`, an interval or a hysteresis below 1.
    """
    if len(found_infs) > 256:
        found_infs = [torch.stack([f.reshape(()) for f in found_infs]).amax()]
    _ops.update_scale_(
        scale,
        growth_tracker,
        found_infs,
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale,
        max_scale,
        hysteresis,
        hysteresis_tracker,
    )
    written = [scale, growth_tracker] + ([] if hysteresis_tracker is None else [hysteresis_tracker])
    increment_version(written)


def scale_losses(losses: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """`[loss * scale for loss in losses]` in one launch a dtype; differentiable.

    Dtypes are torch's: a 0-dim float16 or bfloat16 loss gives float32 (so that 65536 times a loss does not overflow),
    any other keeps its own.

    Args:
        losses: float16, bfloat16, float32 or float64 tensors of any shape.
        scale: float32, one element, on the losses' device. Gets no gradient.

    Raises:
        RuntimeError: a tensor of another dtype, layout or device.
    """
    return _ops.scale_losses(losses, scale)


# ---- fake kernels and autograd ----------------------------------------------------------------------------

_fake = torch.library.register_fake


def _one_device(*args: object) -> None:
    """A list that mixes devices must fail while it is traced too, and not only when it runs."""
    tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, Tensor)]
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1:
        raise RuntimeError(f"all tensors must be on one device, got {sorted(devices)}: call the op once for each")


@_fake("fastamp::unscale_")
@_fake("fastamp::check_")
@_fake("fastamp::clip_")
@_fake("fastamp::accumulate_")
@_fake("fastamp::update_scale_")
def _(*args: object, **kwargs: object) -> None:
    _one_device(*args, *kwargs.values())


@_fake("fastamp::unscale_norm_")
def _(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
    _one_device(grads, found_inf, inv_scale)
    double = len(grads) > 0 and all(g.dtype in (torch.float64, torch.complex128) for g in grads)
    dtype = torch.float64 if double else torch.float32
    return found_inf.new_empty((), dtype=dtype), found_inf.new_empty((len(grads),), dtype=dtype)


@_fake("fastamp::clip_coefficient")
def _(total_norm: Tensor, max_norm: float) -> Tensor:
    return torch.empty_like(total_norm)


def _scaled_dtype(loss: Tensor) -> torch.dtype:
    widens = loss.dim() == 0 and loss.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if widens else loss.dtype


@_fake("fastamp::scale_losses")
def _(losses: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    _one_device(losses, scale)
    return [loss.new_empty(loss.shape, dtype=_scaled_dtype(loss)) for loss in losses]


def _scale_losses_setup(ctx, inputs, output) -> None:
    losses, scale = inputs
    ctx.save_for_backward(scale)
    ctx.dtypes = [loss.dtype for loss in losses]


def _scale_losses_backward(ctx, grads):
    (scale,) = ctx.saved_tensors
    scaled = [None if g is None else (g * scale.reshape(())).to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]
    return scaled, None


torch.library.register_autograd("fastamp::scale_losses", _scale_losses_backward, setup_context=_scale_losses_setup)

# ---- conjugate and negative views -----------------------------------------------------------------------------

# A real factor commutes with both, so the kernels work on the memory as it lies; torch's fallback refuses lists.
_views = torch.library.Library("fastamp", "IMPL")
for _name in ("unscale_", "check_", "unscale_norm_", "clip_"):
    for _key in ("Conjugate", "Negative"):
        _views.impl(_name, torch.library.fallthrough_kernel, _key)

assert _library.ops_path  # the import above loaded the operators that this module names
