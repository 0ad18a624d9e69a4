"""The operators, as functions. Each is `torch.ops.fastamp.<name>`, with kernels for CPU and CUDA and a fake kernel.

Every function checks all of its arguments before it writes anything: a refused call (RuntimeError) leaves every tensor
as it was. Nothing here synchronizes with the device. In-place functions are not differentiable and count as in-place
writes for autograd's version check. Lists may mix dtypes, shapes, strides and alignments, and may be empty; their
tensors share one device. Complex tensors are treated as pairs of reals. What each function computes, in plain PyTorch,
is in `fastamp.reference`.
"""

from __future__ import annotations

import itertools
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


# Of update_scale_'s kernel: kMaxFoundInfs of csrc/scale.h.
MAX_FOUND_INFS = 256


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
        found_infs: one or more float32 tensors of one element, on the scale's device. More than 256 are first
            combined by operators of torch's.
        growth_factor, backoff_factor: the scale's factors.
        growth_interval: steps without overflow before the scale grows.
        min_scale, max_scale: bounds of what backing off and growing may set.
        hysteresis: an overflow backs the scale off only if it is at least the `hysteresis`-th in a row.
        hysteresis_tracker: int32, one element, `hysteresis` at the start. Needed where `hysteresis` is above 1.

    Raises:
        RuntimeError: a tensor of another dtype, size or device, no or too many `found_infs`, `min_scale` above
            `max_scale`, an interval or a hysteresis below 1.
    """
    if len(found_infs) > MAX_FOUND_INFS:
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


# ---- activation storage -----------------------------------------------------------------------------------


_seeds = itertools.count()


def quantize_blockwise(
    x: Tensor,
    format: str = "int8",
    block_size: int = 128,
    stochastic: bool = False,
    seed: int | None = None,
    offset: int = 0,
    base: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes a tensor at 8 or 4 bits an element, with one scale for each block of consecutive elements.

    Symmetric: a block's scale is its largest finite magnitude over the format's largest code, `top`, rounded to
    float32. The decoded value of a finite x differs from it by no more than the bound below, plus half a unit in the
    last place of the dtype it is decoded to. Stochastic rounding doubles the bound, and is right on average to 2**-16
    of a step.

    | format     | payload       | top   | bound                                         |
    |------------|---------------|-------|-----------------------------------------------|
    | `int8`     | int8          | 127   | 0.5001 * scale                                |
    | `int4`     | uint8, 2 each | 7     | 0.5001 * scale                                |
    | `fp8_e4m3` | float8_e4m3fn | 448   | 1.0001 * max(2**-4 * abs(x), 2**-10 * scale)  |
    | `fp8_e5m2` | float8_e5m2   | 57344 | 1.0001 * max(2**-3 * abs(x), 2**-17 * scale)  |

    What is positive comes back positive from int8 and int4, unless the block holds inf or NaN or rounding is
    stochastic: a value that would round to 0 from above gets a code of its own, -128 or -8, which decodes to next to
    nothing: 2**-40 * min(scale, 1), or the output dtype's smallest number where that is larger. The backward pass of
    ReLU asks a stored activation for nothing else.

    inf, -inf and NaN come back as themselves (a NaN as the canonical one) and leave the rest of their block alone: such
    a block has a negative scale, and a `top` of 126, 6, 416 or 57344. A finite value never comes back infinite, where
    it is decoded to its own dtype. -0.0 comes back as 0.0 from int8 and int4, as -0.0 from fp8. Blocks of subnormals
    are coded like any other, to within 2**-149. CPU and CUDA give the same bits.

    Args:
        x: float32, float16 or bfloat16, of any shape. Elements are taken in row-major order, so that a tensor that is
            not contiguous is copied first. One that is dense in another order (channels_last) is spared the copy by
            passing a view that is contiguous, such as `x.permute(0, 2, 3, 1)`, and reversing that after decoding.
        format: one of the table's.
        block_size: a power of two from 32 to 4096. int8 with float32 scales takes 8 + 32 / block_size bits an element.
        stochastic: round up or down at random, in proportion to the distance. The random numbers are Philox4x32-10 of
            seed and offset, never of torch's generators; the same seed and offset give the same bits anywhere.
        seed: 64 bits. Left out, each call takes the next of a count that starts at 0 with the process; give a seed
            where a result must be repeatable, or under torch.compile.
        offset: where in the seed's stream to start, in groups of 8 elements: coding a tensor by pieces gives the whole
            tensor's codes if a piece that starts at element i (a multiple of the block size) has `offset + i // 8`.
        base: a tensor like x. The difference x - base is coded instead (bounds are then relative to it), and
            `dequantize_blockwise` takes the same base. Non-finite elements of base count as 0.
        out: a payload and scales to write into and return, contiguous, of the dtypes and shapes below; not memory of x
            or base. New memory of many megabytes costs more than filling it: reuse is what a pool of buffers is for.

    Returns:
        (payload, scales): 1-D, of numel elements (int4: (numel + 1) // 2 bytes, element 2i in the low half of byte i)
        and of ceil(numel / block_size) float32. Neither is differentiable.

    Raises:
        RuntimeError: an x that is complex, integer, float64 or sparse, an unknown format, a block size that is not
            supported, a negative offset, a base of another shape, dtype or device, an out that does not fit.
    """
    if stochastic and seed is None:
        seed = next(_seeds)
    if out is None:
        return _ops.quantize_blockwise.default(x, format, block_size, stochastic, seed, offset, base)
    payload, scales = out
    _ops.quantize_blockwise.out(x, format, block_size, stochastic, seed, offset, base, payload=payload, scales=scales)
    increment_version([payload, scales])
    return out


def quantize_blockwise_stats_(
    x: Tensor,
    found_inf: Tensor,
    amax: Tensor,
    format: str = "int8",
    block_size: int = 128,
    stochastic: bool = False,
    seed: int | None = None,
    offset: int = 0,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_blockwise`, and what its pass over x sees anyway.

    Args:
        found_inf: float32, one element. Set to 1.0 if x holds an infinity or a NaN, else left as it is.
        amax: float32, one element, not negative. Raised to the largest finite magnitude that was coded.

    The rest is as for `quantize_blockwise`.
    """
    if stochastic and seed is None:
        seed = next(_seeds)
    result = _ops.quantize_blockwise_stats_(x, found_inf, amax, format, block_size, stochastic, seed, offset, base)
    increment_version([found_inf, amax])
    return result


def dequantize_blockwise(
    payload: Tensor,
    scales: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    base: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The tensor that `quantize_blockwise` coded, contiguous.

    Neither format nor block size need be told: the payload's dtype is the format, and a number of blocks above one
    fits one power of two only. (ceil(n / b) == k > 1 puts b into [n / k, n / (k - 1)), which spans at most a factor of
    two. With one block the size makes no difference.)

    Args:
        payload, scales: as returned by `quantize_blockwise`.
        shape: of the result. Its number of elements must be that of x.
        dtype: float32, float16 or bfloat16, whatever x was. The product of code and scale is taken in float32 and
            rounded once to it.
        base: what was given to `quantize_blockwise`; added in float32, non-finite elements as 0, and the sum of a
            finite code is held within the dtype's finite range.
        out: a contiguous tensor of that shape and dtype to write into and return; not memory of the payload or scales.
            It may be base itself.

    Returns:
        A tensor that is not differentiable: gradients belong to what was coded.

    Raises:
        RuntimeError: a payload of a dtype that is no format's, payload or scales that do not fit the shape, a dtype
            that is not supported, a base of another shape, dtype or device, an out that does not fit.
    """
    if out is None:
        return _ops.dequantize_blockwise.default(payload, scales, shape, dtype, base)
    _ops.dequantize_blockwise.out(payload, scales, shape, dtype, base, out=out)
    increment_version(out)
    return out


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor at one bit an element, exactly.

    Args:
        mask: bool, of any shape, in row-major order (copied first if not contiguous).

    Returns:
        uint8, 1-D, (numel + 7) // 8 bytes: bit i % 8 of byte i // 8 is element i, and the last byte's rest is 0.

    Raises:
        RuntimeError: a mask of another dtype.
    """
    return _ops.pack_bits.default(mask)


def pack_scaled_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor whose elements are all either 0 or one constant, at one bit an element, exactly.

    Dropout on the CPU keeps its mask so, the constant being 1 / (1 - p). What to do with another tensor is the
    caller's choice: the result says that it is none. Where an element differs early, the CPU stops early.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape, in row-major order (copied first if not contiguous).

    Returns:
        (payload, value): the bits as from `pack_bits`, and the constant, a 0-dim tensor of x's dtype (0 if there are
        only zeros). If x holds anything else, value is NaN and the payload means nothing. Elements are compared bit
        for bit, so that -0.0 differs from 0.0. Nothing here synchronizes, but asking whether value is NaN does.

    Raises:
        RuntimeError: an x of another dtype.
    """
    return _ops.pack_scaled_mask.default(x)


def unpack_bits(payload: Tensor, shape: Sequence[int], value: Tensor | None = None) -> Tensor:
    """Undoes `pack_bits`, or with its value `pack_scaled_mask`.

    Args:
        payload: uint8, (numel + 7) // 8 bytes.
        shape: of the result.
        value: one floating-point element.

    Returns:
        bool without value; else a tensor of value's dtype that holds it where the bit is set and 0 elsewhere.

    Raises:
        RuntimeError: a payload of another dtype or that does not fit the shape, a value of another dtype or size.
    """
    return _ops.unpack_bits.default(payload, shape, value)


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

# Nothing in storage is differentiable: autograd is passed by, and results require no gradient.
_STORAGE_OPS = (
    "quantize_blockwise",
    "quantize_blockwise.out",
    "quantize_blockwise_stats_",
    "dequantize_blockwise",
    "dequantize_blockwise.out",
    "pack_bits",
    "pack_scaled_mask",
    "unpack_bits",
)
_storage_library = torch.library.Library("fastamp", "IMPL")
for _name in _STORAGE_OPS:
    _storage_library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

_PAYLOADS = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def _fake_quantize(x: Tensor, format: str, block_size: int) -> tuple[Tensor, Tensor]:
    if format not in _PAYLOADS:
        raise RuntimeError(f"quantize_blockwise: format must be one of {', '.join(_PAYLOADS)}, got {format}")
    numel = x.numel()
    bytes_ = (numel + 1) // 2 if format == "int4" else numel
    blocks = (numel + block_size - 1) // block_size
    return x.new_empty((bytes_,), dtype=_PAYLOADS[format]), x.new_empty((blocks,), dtype=torch.float32)


@_fake("fastamp::quantize_blockwise")
def _(x: Tensor, format: str = "int8", block_size: int = 128, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    _one_device(x, *args, *kwargs.values())
    return _fake_quantize(x, format, block_size)


@_fake("fastamp::quantize_blockwise_stats_")
def _(
    x: Tensor,
    found_inf: Tensor,
    amax: Tensor,
    format: str = "int8",
    block_size: int = 128,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    _one_device(x, found_inf, amax, *args, *kwargs.values())
    return _fake_quantize(x, format, block_size)


@_fake("fastamp::quantize_blockwise.out")
@_fake("fastamp::dequantize_blockwise.out")
def _(*args: object, **kwargs: object) -> None:
    _one_device(*args, *kwargs.values())


@_fake("fastamp::dequantize_blockwise")
def _(payload: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
    _one_device(payload, scales, base)
    return payload.new_empty(shape, dtype=dtype)


def _fake_bits(x: Tensor) -> Tensor:
    return x.new_empty(((x.numel() + 7) // 8,), dtype=torch.uint8)


@_fake("fastamp::pack_bits")
def _(mask: Tensor) -> Tensor:
    return _fake_bits(mask)


@_fake("fastamp::pack_scaled_mask")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_bits(x), x.new_empty(())


@_fake("fastamp::unpack_bits")
def _(payload: Tensor, shape: Sequence[int], value: Tensor | None = None) -> Tensor:
    _one_device(payload, value)
    return payload.new_empty(shape, dtype=torch.bool if value is None else value.dtype)


# ---- conjugate and negative views -----------------------------------------------------------------------------

# A real factor commutes with both, so the kernels work on the memory as it lies; torch's fallback refuses lists.
_views = torch.library.Library("fastamp", "IMPL")
for _name in ("unscale_", "check_", "unscale_norm_", "clip_"):
    for _key in ("Conjugate", "Negative"):
        _views.impl(_name, torch.library.fallthrough_kernel, _key)

assert _library.ops_path  # the import above loaded the operators that this module names
