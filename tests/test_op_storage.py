"""quantize_blockwise, dequantize_blockwise and the bit masks: against fastamp.reference bit for bit, and against what
their docstrings promise in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from op_inputs import Guarded, dtype_id, random_values, same_bits, scalar
from torch import Tensor

import fastamp.ops
from fastamp import reference, reference_storage

FORMATS = list(reference_storage.FORMATS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
MASK_DTYPES = [*DTYPES, torch.float64]
INF, NAN = math.inf, math.nan
FLOAT_MAX = torch.finfo(torch.float32).max
# Steps beyond a code: half a one in the integer formats; relative to |x| and absolute in those of fp8.
HALF_STEP = {"int8": (0.0, 0.5), "int4": (0.0, 0.5), "fp8_e4m3": (2.0**-4, 2.0**-10), "fp8_e5m2": (2.0**-3, 2.0**-17)}


def raw(t: Tensor) -> Tensor:
    """Codes as bytes: fp8 tensors compare as little else does."""
    return t.view(torch.uint8).cpu()


def assert_same_codes(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert ours[0].dtype == theirs[0].dtype
    assert torch.equal(raw(ours[0]), raw(theirs[0]))
    assert same_bits(ours[1], theirs[1])


def wild_values(numel: int, dtype: torch.dtype, rng: torch.Generator, bad: int = 3) -> Tensor:
    """Values whose magnitudes span float's range, block by block and within blocks, with specials among them."""
    values = torch.randn(numel, generator=rng)
    blocks = torch.randint(-149, 127, (numel // 40 + 1,), generator=rng).repeat_interleave(40)[:numel]
    within = torch.randint(-12, 1, (numel,), generator=rng)
    values = torch.ldexp(torch.ldexp(values, blocks // 2), blocks - blocks // 2 + within)
    special = [0.0, -0.0, 1e-45, -1e-45, torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.17e-38]
    special += [INF, -INF, NAN][:bad]
    if numel > 64:
        at = torch.randint(0, numel, (3 * len(special),), generator=rng)
        values[at] = torch.tensor(special * 3)
    return values.to(dtype)


def bound(x: Tensor, scales: Tensor, format: str, block_size: int, dtype: torch.dtype, steps: int = 1) -> Tensor:
    """What quantize_blockwise's docstring allows |decoded - x| to be, in float64; `steps` is 2 for stochastic."""
    relative, absolute = HALF_STEP[format]
    size = x.double().abs()
    scale = scales.double().abs().repeat_interleave(block_size)[: x.numel()]
    allowed = 1.0001 * steps * torch.maximum(relative * size, absolute * scale)
    info = torch.finfo(dtype)
    unit = ((size + allowed) * info.eps).clamp(min=info.smallest_normal * info.eps)
    return allowed + unit / 2


def decoded_finite(x: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Checks that non-finite values came back as themselves and others finite; returns the finite ones."""
    finite = x.isfinite()
    assert torch.equal(decoded.isfinite(), finite)
    assert torch.equal(decoded.isnan(), x.isnan())
    infinite = x.isinf()
    assert torch.equal(decoded[infinite], x[infinite])
    return x[finite], decoded[finite]


# ---- codes and values, bit for bit ------------------------------------------------------------------------


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_the_references(backend, format, dtype, stochastic, rng):
    sizes = [0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 511, 1000, 4095, 4096, 4097, 9001]
    for i, numel in enumerate(sizes):
        block_size = BLOCK_SIZES[i % len(BLOCK_SIZES)]
        values = wild_values(numel, dtype, rng) if i % 2 else random_values(numel, dtype, rng)
        x = Guarded(values, i % 5, backend.device).tensor  # most of them misaligned
        ours = backend.ops.quantize_blockwise(x, format, block_size, stochastic, 12345 + i, 7 * i)
        theirs = reference.quantize_blockwise(values, format, block_size, stochastic, 12345 + i, 7 * i)
        assert_same_codes(ours, theirs)
        for out in {dtype, torch.float32, DTYPES[i % 3]}:
            decoded = backend.ops.dequantize_blockwise(*ours, x.shape, out)
            assert decoded.dtype == out and decoded.is_contiguous()
            assert same_bits(decoded, reference.dequantize_blockwise(*theirs, x.shape, out))


@pytest.mark.parametrize("format", FORMATS)
def test_few_blocks_do_the_work_of_many(emulated, format, rng):
    x, mask = wild_values(70_001, torch.float32, rng), torch.rand(300_001, generator=rng) < 0.5
    dropped = torch.where(mask, 1.25, 0.0)
    theirs = reference.quantize_blockwise(x, format, 4096, True, 5)
    decoded, bits = reference.dequantize_blockwise(*theirs, x.shape, x.dtype), reference.pack_bits(mask)
    for _ in emulated.schedules(grid_limit=2):
        ours = emulated.ops.quantize_blockwise(x, format, 4096, True, 5)
        assert_same_codes(ours, theirs)
        assert same_bits(emulated.ops.dequantize_blockwise(*ours, x.shape, x.dtype), decoded)
        packed, value = emulated.ops.pack_scaled_mask(dropped)
        assert torch.equal(emulated.ops.pack_bits(mask), bits) and torch.equal(packed, bits) and value == 1.25
        assert torch.equal(emulated.ops.unpack_bits(bits, mask.shape), mask)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(backend, block_size, rng):
    numel = 3 * 4096 + 77
    for format in FORMATS:
        x = wild_values(numel, torch.float32, rng)
        theirs = reference.quantize_blockwise(x, format, block_size)
        for _ in backend.schedules():
            ours = backend.ops.quantize_blockwise(x.to(backend.device), format, block_size)
            assert_same_codes(ours, theirs)
            decoded = backend.ops.dequantize_blockwise(*ours, x.shape, torch.float32)
            assert same_bits(decoded, reference.dequantize_blockwise(*theirs, x.shape, torch.float32))


def test_every_code(backend):
    """All 256 codes in an ordinary and in a marked block, whether the encoder makes them or not."""
    for format, f in reference_storage.FORMATS.items():
        payload = torch.arange(256, dtype=torch.uint8).view(f.payload).to(backend.device)
        shape = (512,) if format == "int4" else (256,)
        for scale in (0.37, 1e-45, 2.0**-120):
            for sign in (1.0, -1.0):
                if sign > 0 and format.startswith("fp8"):
                    # Codes of infinities and NaN do not occur in ordinary blocks.
                    payload = torch.where(payload.float().isfinite(), payload.view(torch.uint8), 0).view(f.payload)
                scales = torch.full((1,), sign * scale, device=backend.device)
                for dtype in DTYPES:
                    decoded = backend.ops.dequantize_blockwise(payload, scales, shape, dtype)
                    assert same_bits(decoded, reference.dequantize_blockwise(payload, scales, shape, dtype))


def test_extreme_scales(backend):
    """One block for each of thousands of magnitudes: around float's largest and smallest values and around every
    threshold of the scale's arithmetic, where an overflow or a loss to rounding would show."""
    biggest = 0x7F7FFFFF
    around = [0x00000001, 0x00800000, biggest - 90]
    around += [
        int(np.float32(top * 2.0**e).view(np.int32)) for top in (6, 7, 126, 127, 416, 448, 57344) for e in (-126, -100)
    ]
    amax = torch.cat([torch.arange(max(a - 40, 1), min(a + 91, biggest + 1), dtype=torch.int32) for a in around])
    amax = amax.view(torch.float32)
    x = torch.zeros(len(amax), 32)
    fractions = torch.linspace(-1, 1, 32)
    x[:, :] = amax[:, None] * fractions
    x[:, 5], x[:, 6] = amax, -amax
    for marked in (False, True):
        if marked:
            x[:, 9] = NAN
        for format in FORMATS:
            ours = backend.ops.quantize_blockwise(x.to(backend.device), format, 32)
            assert_same_codes(ours, reference.quantize_blockwise(x, format, 32))
            decoded = backend.ops.dequantize_blockwise(*ours, x.shape, torch.float32).cpu()
            before, after = decoded_finite(x, decoded)
            error = (after.double() - before.double()).abs()
            allowed = bound(x.flatten(), ours[1].cpu(), format, 32, torch.float32)[x.flatten().isfinite()]
            assert bool((error <= allowed).all()), format


# ---- what the docstring promises --------------------------------------------------------------------------


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("format", FORMATS)
def test_error_is_bounded(backend, format, dtype, stochastic, rng):
    block_size = 64
    x = torch.cat([wild_values(10000, dtype, rng), torch.randn(10000, generator=rng).to(dtype)])
    payload, scales = backend.ops.quantize_blockwise(x.to(backend.device), format, block_size, stochastic, 3)
    decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, dtype).cpu()
    before, after = decoded_finite(x, decoded)
    allowed = bound(x, scales.cpu(), format, block_size, dtype, 2 if stochastic else 1)[x.isfinite()]
    error = (after.double() - before.double()).abs()
    assert bool((error <= allowed).all())
    # The bound is no idle one: it is nearly reached somewhere. (Of a relative step, 1 / 1.125 is the most.)
    assert bool((error >= 0.8 * allowed).any())
    # And the scale is amax / top.
    f = reference_storage.FORMATS[format]
    blocks = torch.nn.functional.pad(x.double(), (0, -x.numel() % block_size)).view(-1, block_size)
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(dim=1)
    top = torch.where(blocks.isfinite().all(dim=1), f.top, f.marked_top).double()
    torch.testing.assert_close(scales.cpu().double().abs(), amax / top, rtol=2.0**-22, atol=1.01 * 2.0**-149)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("format, half_step", [("int8", 0.5 / 127), ("int4", 0.5 / 7)])
def test_what_is_positive_stays_positive(backend, format, half_step, dtype, rng):
    """ReLU's backward asks for nothing else. Half of the values are such that rounding alone would lose them."""
    x = torch.randn(3, 97, generator=rng)
    x[:, ::2] *= half_step / 4
    x = torch.cat([x.view(-1), x.relu().view(-1), torch.tensor([half_step, half_step * 1.01, 2.0**-149, -0.0])])
    x[::32] = torch.rand(len(x[::32]), generator=rng).add_(1.0).copysign(x[::32])  # the largest of each block
    x[:32] *= 2.0**-120  # 2**-40 of its scale is beyond float32
    x[32:64] *= 1e4
    x = x.to(backend.device, dtype)
    payload, scales = backend.ops.quantize_blockwise(x, format, 32)
    decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, dtype)
    assert torch.equal(decoded > 0, x > 0)
    assert torch.equal(decoded < 0, (x < 0) & (decoded != 0))
    scale = scales.repeat_interleave(32)[: x.numel()]
    small = (x > 0) & (x.float() < 0.499 * scale)
    smallest = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}[dtype]
    least = (2.0**-40 * scale[small].clamp(max=1.0)).clamp(min=smallest).to(dtype)
    assert small.sum() > 100 and torch.equal(decoded[small], least)
    if dtype == torch.float32:
        assert len(least.unique()) > 4 and least.min() == smallest and least.max() == 2.0**-40
    # Stochastic rounding has no such code: its values are right on average instead.
    payload, scales = backend.ops.quantize_blockwise(x, format, 32, stochastic=True, seed=1)
    decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, torch.float32)
    steps = decoded / scales.repeat_interleave(32)[: x.numel()].clamp(min=2.0**-149)
    torch.testing.assert_close(steps, steps.round(), rtol=0.0, atol=1e-4)


def test_a_tensor_of_one_magnitude_comes_back(backend):
    """To within the roundings of scale and product, which half precision does not see."""
    for format in FORMATS:
        for dtype in DTYPES:
            for value in (1.0, 3.0, 65504.0, 2.0**-14):
                x = torch.tensor([value, -value, 0.0] * 50, device=backend.device).to(dtype)
                payload, scales = backend.ops.quantize_blockwise(x, format, 32)
                decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, dtype)
                tolerance = 2.0**-22 if dtype == torch.float32 else 0.0
                torch.testing.assert_close(decoded, x, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("format", FORMATS)
def test_nonfinite_at_every_position(backend, format, rng):
    """One at a time, in a block whose other values must not notice more than the lower top."""
    numel, block_size = 70, 32
    clean = torch.randn(numel, generator=rng)
    for at in range(numel):
        bad = (INF, -INF, NAN)[at % 3]
        x = clean.clone()
        x[at] = bad
        payload, scales = backend.ops.quantize_blockwise(x.to(backend.device), format, block_size)
        decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, torch.float32).cpu()
        before, after = decoded_finite(x, decoded)
        allowed = bound(x, scales.cpu(), format, block_size, torch.float32)[x.isfinite()]
        assert bool(((after - before).double().abs() <= allowed).all())
        marked = torch.zeros(3, dtype=torch.bool)
        marked[at // block_size] = True
        assert torch.equal(scales.cpu().signbit(), marked)


def test_blocks_of_nothing_finite(backend):
    x = torch.tensor([INF, -INF, NAN, -INF] * 20, device=backend.device)
    for format in FORMATS:
        for dtype in DTYPES:
            payload, scales = backend.ops.quantize_blockwise(x.to(dtype), format, 32)
            assert bool((scales == 0).all()) and bool(scales.signbit().all())
            assert same_bits(backend.ops.dequantize_blockwise(payload, scales, x.shape, dtype), x.to(dtype))


def test_zeros(backend):
    x = torch.tensor([0.0, -0.0] * 40, device=backend.device)
    for format in FORMATS:
        for values in (x, torch.cat([x, torch.ones(16, device=backend.device)])):
            payload, scales = backend.ops.quantize_blockwise(values, format, 128)
            decoded = backend.ops.dequantize_blockwise(payload, scales, values.shape, torch.float32)
            assert torch.equal(decoded, values)
            keeps_sign = format.startswith("fp8")
            assert torch.equal(decoded.signbit(), values.signbit() & keeps_sign)
            assert bool((scales.isfinite()).all())


def test_subnormals_are_exact_where_they_fit_the_codes(backend):
    """Integers of float's smallest unit: the scale becomes that unit."""
    for format, top in (("int8", 127), ("int4", 7)):
        x = torch.arange(-top, top + 1, dtype=torch.float64).mul(2.0**-149).float().to(backend.device)
        payload, scales = backend.ops.quantize_blockwise(x, format, 32)
        assert torch.equal(backend.ops.dequantize_blockwise(payload, scales, x.shape, torch.float32), x)


# ---- shapes and layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (7, 11), (2, 3, 4, 5)], ids=str)
def test_shapes(backend, shape, rng):
    x = torch.randn(shape, generator=rng).to(backend.device)
    for format, f in reference_storage.FORMATS.items():
        payload, scales = backend.ops.quantize_blockwise(x, format)
        assert payload.shape == ((x.numel() + 1) // 2 if format == "int4" else x.numel(),)
        assert payload.dtype == f.payload and scales.shape == (-(-x.numel() // 128),)
        assert same_bits(
            backend.ops.dequantize_blockwise(payload, scales, shape, torch.bfloat16),
            reference.dequantize_blockwise(payload.cpu(), scales.cpu(), shape, torch.bfloat16),
        )
    assert torch.equal(backend.ops.unpack_bits(backend.ops.pack_bits(x > 0), shape), x > 0)


def test_strided_inputs(backend, rng):
    image = torch.randn(2, 8, 5, 6, generator=rng).to(backend.device)
    tensors = {
        "transposed": image[0, 0].t(),
        "every other": image[..., ::2],
        "expanded": image[:1, :1].expand(4, 3, 5, 6),
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "negative view": torch.randn(9, 9, generator=rng, dtype=torch.complex64).to(backend.device).conj().imag,
    }
    assert tensors["negative view"].is_neg()
    for x in tensors.values():
        ours = backend.ops.quantize_blockwise(x, "int8", 32)
        assert_same_codes(ours, reference.quantize_blockwise(x.resolve_neg().cpu().contiguous(), "int8", 32))
        mask = x > 0
        assert torch.equal(raw(backend.ops.pack_bits(mask)), raw(reference.pack_bits(mask.cpu())))


def test_the_docstrings_recipe_for_channels_last_copies_nothing(backend, rng):
    x = torch.randn(2, 8, 5, 6, generator=rng).to(backend.device).contiguous(memory_format=torch.channels_last)
    view = x.permute(0, 2, 3, 1)
    assert view.is_contiguous()
    payload, scales = backend.ops.quantize_blockwise(view)
    back = backend.ops.dequantize_blockwise(payload, scales, view.shape, x.dtype).permute(0, 3, 1, 2)
    assert back.stride() == x.stride()
    assert bool(((back - x).abs() <= 0.5001 * scales.max()).all())


def test_payload_views_at_any_alignment(backend, rng):
    """A payload may lie anywhere, as a slice of a pool does."""
    x = torch.randn(2000, generator=rng)
    for format, f in reference_storage.FORMATS.items():
        payload, scales = reference.quantize_blockwise(x, format, 64)
        for offset in (1, 4, 16):
            moved = Guarded(raw(payload), offset, backend.device).tensor.view(f.payload)
            decoded = backend.ops.dequantize_blockwise(moved, scales.to(backend.device), (2000,), torch.float16)
            assert same_bits(decoded, reference.dequantize_blockwise(payload, scales, (2000,), torch.float16))
    mask = x > 0
    for offset in (1, 4, 16):
        moved = Guarded(reference.pack_bits(mask), offset, backend.device).tensor
        assert torch.equal(backend.ops.unpack_bits(moved, (2000,)).cpu(), mask)


def test_block_size_is_found_from_the_number_of_scales(backend, rng):
    """Every block size decodes as it was coded, for sizes around the multiples of each."""
    for block_size in BLOCK_SIZES:
        for numel in {1, 31, 33, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1, 5000}:
            x = torch.randn(numel, generator=rng).to(backend.device)
            payload, scales = backend.ops.quantize_blockwise(x, "int8", block_size)
            decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, torch.float32)
            scale = scales.repeat_interleave(block_size)[:numel]
            assert torch.equal(decoded, torch.where(payload == -128, 2.0**-40, payload.float()) * scale)


def test_block_size_is_unambiguous():
    for numel in [*range(1, 9000), 2**31, 2**31 + 1, 12345678901]:
        blocks = [-(-numel // b) for b in BLOCK_SIZES]
        several = [b for b in blocks if b > 1]
        assert len(set(several)) == len(several)


# ---- stochastic rounding ----------------------------------------------------------------------------------


def test_philox_known_answers():
    """Of the Random123 library (kat_vectors), with the counter's upper half 0."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    draws = reference_storage.philox_draws(0, torch.zeros(1, dtype=torch.int64))[0].tolist()
    assert draws == [part for word in words for part in (word & 0xFFFF, word >> 16)]


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_is_fair(backend, format):
    """The share of values rounded up is the fraction that was left over; exact values stay."""
    numel = 1 << 14
    f = reference_storage.FORMATS[format]
    for low, high, part in ((0.0, 1.0, 0.25), (-5.0, -4.0, 0.9), (2.0, 3.0, 0.5)):
        if f.mantissa:  # a step of fp8 at this size
            step = 2.0 ** (math.floor(math.log2(max(abs(low), abs(high) * 0.99, 1.0))) - f.mantissa)
            low, high = (low, low + step) if low >= 0 else (high - step, high)
            if low == 0.0:
                low, high = 1.0, 1.0 + 2.0**-f.mantissa
        x = torch.full((numel,), low + part * (high - low))
        x[::128] = f.top  # makes the scale 1
        payload, scales = backend.ops.quantize_blockwise(x.to(backend.device), format, 128, True, 99)
        assert bool((scales == 1.0).all())
        decoded = backend.ops.dequantize_blockwise(payload, scales, x.shape, torch.float32).cpu()
        rounded = decoded[torch.arange(numel) % 128 != 0]
        assert set(rounded.tolist()) == {low, high}
        up = (rounded == high).double().mean().item()
        assert abs(up - part) < 5 * math.sqrt(part * (1 - part) / len(rounded))
    exact = torch.arange(-7.0, 8.0).repeat(20).to(backend.device)
    payload, scales = backend.ops.quantize_blockwise(exact, format if format != "int8" else "int4", 32, True, 1)
    if format in ("int8", "int4"):
        assert torch.equal(backend.ops.dequantize_blockwise(payload, scales, exact.shape, torch.float32), exact)


def test_stochastic_pieces_make_the_whole(backend, rng):
    x = torch.randn(4096, generator=rng).to(backend.device)
    for format in FORMATS:
        whole = backend.ops.quantize_blockwise(x, format, 64, True, 2**63 - 1, 1000)
        parts = [
            backend.ops.quantize_blockwise(x[a:b], format, 64, True, 2**63 - 1, 1000 + a // 8)
            for a, b in ((0, 64), (64, 1024), (1024, 4096))
        ]
        assert torch.equal(raw(whole[0]), torch.cat([raw(p) for p, _ in parts]))
        other = backend.ops.quantize_blockwise(x, format, 64, True, 2**63 - 2, 1000)
        assert not torch.equal(raw(whole[0]), raw(other[0]))


def test_counters_beyond_32_bits(backend, rng):
    x = torch.randn(256, generator=rng)
    for seed, offset in ((-1, 2**32 - 3), (2**40 + 5, 2**60)):
        ours = backend.ops.quantize_blockwise(x.to(backend.device), "int8", 64, True, seed, offset)
        assert_same_codes(ours, reference.quantize_blockwise(x, "int8", 64, True, seed, offset))


def test_no_global_generator_is_touched():
    x = torch.randn(1000)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = fastamp.ops.quantize_blockwise(x, stochastic=True)
    second = fastamp.ops.quantize_blockwise(x, stochastic=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first[0], second[0]), "two calls without a seed must draw different numbers"


# ---- differences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("format", FORMATS)
def test_difference_bits_are_the_references(backend, format, dtype, rng):
    for i, numel in enumerate((1, 33, 4101)):
        x, base = wild_values(numel, dtype, rng), wild_values(numel, dtype, rng)
        moved = Guarded(base, i, backend.device).tensor
        stochastic = bool(i % 2)
        ours = backend.ops.quantize_blockwise(x.to(backend.device), format, 64, stochastic, 4, 0, moved)
        theirs = reference.quantize_blockwise(x, format, 64, stochastic, 4, 0, base)
        assert_same_codes(ours, theirs)
        decoded = backend.ops.dequantize_blockwise(*ours, x.shape, dtype, moved).cpu()
        assert same_bits(decoded, reference.dequantize_blockwise(*theirs, x.shape, dtype, base))
        decoded_finite(x, decoded)  # an infinity in base does no harm


def test_difference_coding_does_not_accumulate_error(backend, rng):
    """Each step codes against what the decoder has: the error stays that of one step."""
    x = torch.randn(3000, generator=rng).to(backend.device)
    known = x
    for _ in range(20):
        x = x + 0.05 * torch.randn(3000, generator=rng).to(backend.device)
        payload, scales = backend.ops.quantize_blockwise(x, "int8", base=known)
        known = backend.ops.dequantize_blockwise(payload, scales, x.shape, x.dtype, known)
        assert bool(((known - x).abs() <= 0.5001 * scales.max() + 1e-6).all())
    assert scales.max() < 0.3 / 127


# ---- memory of the caller's ---------------------------------------------------------------------------------


def quantize_into(backend, out: tuple[Tensor, Tensor], *args) -> None:
    """The emulated ops are torch's overloads themselves, whose out arguments have names of their own."""
    if backend.name == "cuda-emulated":
        backend.ops.quantize_blockwise(*args, payload=out[0], scales=out[1])
    else:
        assert backend.ops.quantize_blockwise(*args, out=out) is out


def test_given_memory(backend, rng):
    x = torch.randn(7, 211, generator=rng).to(backend.device)
    for format in FORMATS:
        expected = backend.ops.quantize_blockwise(x, format, 64)
        out = tuple(torch.zeros_like(t) for t in expected)
        # A slice of a larger buffer, at an odd place.
        out = (Guarded(raw(out[0]), 3, backend.device).tensor.view(out[0].dtype), out[1])
        quantize_into(backend, out, x, format, 64)
        assert_same_codes(out, expected)
        for dtype in DTYPES:
            decoded = Guarded(torch.zeros(x.numel(), dtype=dtype), 1, backend.device).tensor.view(x.shape)
            backend.ops.dequantize_blockwise(*expected, x.shape, dtype, out=decoded)
            assert same_bits(decoded, backend.ops.dequantize_blockwise(*expected, x.shape, dtype))
    base = torch.randn(7, 211, generator=rng).to(backend.device)
    codes = backend.ops.quantize_blockwise(x, base=base)
    expected = backend.ops.dequantize_blockwise(*codes, x.shape, x.dtype, base)
    backend.ops.dequantize_blockwise(*codes, x.shape, x.dtype, base, out=base)
    assert same_bits(base, expected)


def test_given_memory_that_does_not_fit(backend):
    x = torch.ones(300, device=backend.device)
    payload, scales = backend.ops.quantize_blockwise(x)
    bad = [(payload[1:], scales), (payload, scales[1:]), (payload.int(), scales), (payload, scales.double())]
    bad += [(payload.expand(2, 300)[:, 0], scales), (torch.zeros(600, dtype=torch.int8, device=x.device)[::2], scales)]
    for out in bad:
        before = [t.clone() for t in out]
        with pytest.raises(RuntimeError, match=r"quantize_blockwise: out\[[01]\] must be contiguous"):
            quantize_into(backend, out, x)
        assert all(same_bits(a, b) for a, b in zip(out, before, strict=True))
    for out in (x[1:], x.half(), torch.ones(600, device=x.device)[::2], x.view(3, 100)):
        with pytest.raises(RuntimeError, match="dequantize_blockwise: out must be contiguous"):
            backend.ops.dequantize_blockwise(payload, scales, (300,), torch.float32, out=out)


def test_writes_to_given_memory_are_counted():
    x = torch.ones(300)
    payload, scales = fastamp.ops.quantize_blockwise(x)
    fastamp.ops.quantize_blockwise(x, out=(payload, scales))
    fastamp.ops.dequantize_blockwise(payload, scales, x.shape, x.dtype, out=x)
    assert (payload._version, scales._version, x._version) == (1, 1, 1)


def test_large_results_are_those_of_their_parts(rng):
    """Results that leave the caches are written another way."""
    part = wild_values(1 << 20, torch.float32, rng)
    x = part.repeat(9)
    for format in ("int8", "fp8_e4m3"):
        whole = fastamp.ops.quantize_blockwise(x, format)
        assert_same_codes(tuple(t[: len(t) // 9] for t in whole), fastamp.ops.quantize_blockwise(part, format))
        expected = fastamp.ops.dequantize_blockwise(*(t[: len(t) // 9] for t in whole), part.shape, x.dtype)
        decoded = fastamp.ops.dequantize_blockwise(*whole, x.shape, x.dtype)
        assert all(same_bits(chunk, expected) for chunk in decoded.chunk(9))
        half = fastamp.ops.dequantize_blockwise(*(t.repeat(2) for t in whole), (2 * x.numel(),), torch.bfloat16)
        expected = fastamp.ops.dequantize_blockwise(*(t[: len(t) // 9] for t in whole), part.shape, torch.bfloat16)
        assert all(same_bits(chunk, expected) for chunk in half.chunk(18))
        skewed = torch.empty(x.numel() + 1)[1:]
        fastamp.ops.dequantize_blockwise(*whole, x.shape, x.dtype, out=skewed)
        assert same_bits(skewed, decoded)


# ---- statistics -------------------------------------------------------------------------------------------


def test_statistics(backend, rng):
    for dtype in DTYPES:
        for numel in (0, 5, 3000, 40000):
            x = random_values(numel, dtype, rng)
            found, amax = scalar(0.0, backend.device), scalar(0.125, backend.device)
            ours = backend.ops.quantize_blockwise_stats_(x.to(backend.device), found, amax, "int4", 32)
            assert_same_codes(ours, reference.quantize_blockwise(x, "int4", 32))
            expected = x.abs().max().float().clamp(min=0.125).item() if numel else 0.125
            assert found.item() == 0.0 and amax.item() == expected
            if numel < 6:
                continue
            x[numel // 2], x[-1] = NAN, -INF
            x[0] = -600.0
            backend.ops.quantize_blockwise_stats_(x.to(backend.device), found, amax)
            assert found.item() == 1.0 and amax.item() == 600.0
            base = torch.full_like(x, 50.0)
            backend.ops.quantize_blockwise_stats_(x.to(backend.device), found, amax, base=base.to(backend.device))
            assert found.item() == 1.0 and amax.item() == 650.0
    versions = found._version, amax._version
    fastamp.ops.quantize_blockwise_stats_(torch.ones(3), found.cpu(), amax.cpu())
    if backend.device.type == "cpu":
        assert (found._version, amax._version) == (versions[0] + 1, versions[1] + 1)


def test_statistics_of_large_blocks(backend, rng):
    """Blocks of more than a warp share magnitudes through shared memory, those with non-finite values twice."""
    x = random_values(3 * 4096 + 99, torch.float32, rng)
    x[5], x[4096 + 2000], x[-1] = INF, 700.0, NAN
    for block_size in (1024, 4096):
        theirs = reference.quantize_blockwise(x, "int8", block_size)
        for _ in backend.schedules():
            found, amax = scalar(0.0, backend.device), scalar(0.0, backend.device)
            ours = backend.ops.quantize_blockwise_stats_(x.to(backend.device), found, amax, "int8", block_size)
            assert_same_codes(ours, theirs)
            assert found.item() == 1.0 and amax.item() == 700.0


# ---- bit masks --------------------------------------------------------------------------------------------

MASK_SIZES = [0, 1, 7, 8, 9, 31, 32, 33, 127, 511, 512, 513, 4095, 4096, 4097, 33000, 70001]


def test_bits(backend, rng):
    for i, numel in enumerate(MASK_SIZES):
        mask = torch.rand(numel, generator=rng) < (0.1, 0.5, 0.9)[i % 3]
        x = Guarded(mask.to(torch.uint8), i % 4, backend.device).tensor.view(torch.bool)
        payload = backend.ops.pack_bits(x)
        expected = np.packbits(mask.numpy(), bitorder="little")
        assert torch.equal(payload.cpu(), torch.from_numpy(expected))
        assert torch.equal(backend.ops.unpack_bits(payload, (numel,)).cpu(), mask)


def test_bits_under_every_schedule(backend, rng):
    mask = torch.rand(20000, generator=rng) < 0.5
    x = mask.float().mul(3.0).to(backend.device)
    for _ in backend.schedules():
        payload = backend.ops.pack_bits(mask.to(backend.device))
        assert torch.equal(backend.ops.unpack_bits(payload, (20000,)).cpu(), mask)
        payload, value = backend.ops.pack_scaled_mask(x)
        assert torch.equal(backend.ops.unpack_bits(payload, (20000,), value), x)


def test_any_byte_but_zero_is_true(backend):
    """A bool tensor made of other memory can hold any byte."""
    x = torch.arange(256, dtype=torch.uint8).repeat(3).to(backend.device)
    payload = backend.ops.pack_bits(x.view(torch.bool))
    assert torch.equal(backend.ops.unpack_bits(payload, x.shape), x != 0)


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=dtype_id)
def test_scaled_masks(backend, dtype, rng):
    for i, numel in enumerate(MASK_SIZES):
        constant = (1 / 0.9, -2.5, INF)[i % 3]
        mask = torch.rand(numel, generator=rng) < 0.7
        x = torch.where(mask, torch.tensor(constant, dtype=dtype), torch.zeros((), dtype=dtype))
        x = Guarded(x, i % 3, backend.device).tensor
        payload, value = backend.ops.pack_scaled_mask(x)
        assert value.dtype == dtype and value.shape == ()
        assert value.item() == (x.max() if constant > 0 else x.min()).item() if numel else value.item() == 0.0
        assert torch.equal(payload.cpu(), reference.pack_bits(mask))
        assert same_bits(backend.ops.unpack_bits(payload, (numel,), value), x)
        assert same_bits(reference.unpack_bits(payload.cpu(), (numel,), value.cpu()), x.cpu())


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=dtype_id)
def test_what_is_no_mask_says_so(backend, dtype, rng):
    numel = 9000
    clean = (torch.rand(numel, generator=rng) < 0.5).to(dtype)
    places = [0, 1, 31, 4095, 4096, numel - 2, numel - 1]
    for other in (2.0, -1.0, torch.finfo(dtype).eps, -0.0, NAN, 1.0 + torch.finfo(dtype).eps):
        for at in places:
            x = clean.clone()
            x[at] = other
            _, value = backend.ops.pack_scaled_mask(x.to(backend.device))
            assert bool(value.isnan()), (other, at)
    nothing = torch.zeros(100, dtype=dtype, device=backend.device)
    assert backend.ops.pack_scaled_mask(nothing)[1].item() == 0.0
    assert bool(backend.ops.pack_scaled_mask(nothing + NAN)[1].isnan())


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropouts_mask_is_one(p):
    """What F.dropout saves on the CPU, at 1 bit an element and exact."""
    saved = []
    x = torch.randn(33, 65, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.nn.functional.dropout(x, p)
    (mask,) = saved
    assert mask.dtype == torch.float32
    payload, value = fastamp.ops.pack_scaled_mask(mask)
    assert payload.numel() * 8 < mask.numel() + 8
    assert same_bits(fastamp.ops.unpack_bits(payload, mask.shape, value), mask)


# ---- one result, however computed -------------------------------------------------------------------------


def test_same_bits_for_any_number_of_threads(rng):
    x = wild_values(300_000, torch.float32, rng)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            found, amax = scalar(0.0, x.device), scalar(0.0, x.device)
            payload, scales = fastamp.ops.quantize_blockwise_stats_(x, found, amax, "int8", 4096, True, 8)
            decoded = fastamp.ops.dequantize_blockwise(payload, scales, x.shape, torch.float32)
            results.append((payload, scales, decoded, found, amax, fastamp.ops.pack_bits(x > 0)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_portable_forms_have_the_same_bits():
    """Those that other processors run; FASTAMP_AVX2=0 selects them anywhere."""
    program = "import sys, test_op_storage; test_op_storage.compare_with_reference(); print('compared')"
    environment = dict(os.environ, FASTAMP_AVX2="0", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "compared", done.stdout + done.stderr


def compare_with_reference() -> None:
    rng = torch.Generator().manual_seed(11)
    for format in FORMATS:
        for dtype in DTYPES:
            for stochastic in (False, True):
                x, base = wild_values(1003, dtype, rng), wild_values(1003, dtype, rng)
                for b in (None, base):
                    ours = fastamp.ops.quantize_blockwise(x, format, 128, stochastic, 5, 6, b)
                    theirs = reference.quantize_blockwise(x, format, 128, stochastic, 5, 6, b)
                    assert_same_codes(ours, theirs)
                    decoded = fastamp.ops.dequantize_blockwise(*ours, x.shape, dtype, b)
                    assert same_bits(decoded, reference.dequantize_blockwise(*theirs, x.shape, dtype, b))
    for dtype in MASK_DTYPES:
        x = (torch.rand(5003, generator=rng) < 0.5).to(dtype) * 1.25
        payload, value = fastamp.ops.pack_scaled_mask(x)
        assert torch.equal(payload, fastamp.ops.pack_bits(x != 0))
        assert torch.equal(payload, reference.pack_bits(x != 0))
        assert same_bits(fastamp.ops.unpack_bits(payload, x.shape, value), x)
        assert torch.equal(fastamp.ops.unpack_bits(payload, x.shape), x != 0)


def test_launches(emulated):
    """One launch an op, and blocks of threads bounded whatever the size."""
    backend = emulated
    x = torch.randn(10000)
    for run, expected in (
        (lambda: backend.ops.quantize_blockwise(x), 1),
        (lambda: backend.ops.quantize_blockwise_stats_(x, torch.zeros(1), torch.zeros(1)), 1),
        (lambda: backend.ops.dequantize_blockwise(*reference.quantize_blockwise(x), x.shape, x.dtype), 1),
        (lambda: backend.ops.pack_bits(x > 0), 1),
        (lambda: backend.ops.pack_scaled_mask(x), 2),
        (lambda: backend.ops.quantize_blockwise(x[:0]), 0),
    ):
        with backend.emulator.record() as launches:
            run()
        assert len(launches) == expected
    with backend.emulator.dry_run() as launches:
        backend.ops.quantize_blockwise(torch.empty(1 << 26))
    assert launches[0]["grid"][0] == 4096


# ---- bad input --------------------------------------------------------------------------------------------


def _bad_calls(device: torch.device) -> dict[str, tuple[str, tuple, str]]:
    x = torch.randn(300, device=device)
    payload, scales = (t.to(device) for t in reference.quantize_blockwise(x.cpu()))
    bits = torch.zeros(38, dtype=torch.uint8, device=device)
    one = torch.ones(1, device=device)
    sparse = torch.eye(3, device=device).to_sparse()
    quantize, dequantize, unpack = "quantize_blockwise", "dequantize_blockwise", "unpack_bits"
    f32 = torch.float32
    return {
        "integers": (quantize, (x.int(),), "x must be torch.float32, torch.float16 or torch.bfloat16, got torch.int32"),
        "complex": (quantize, (x.to(torch.complex64),), "got torch.complex64"),
        "bool": (quantize, (x > 0,), "got torch.bool"),
        "float64": (quantize, (x.double(),), "got torch.float64"),
        "sparse": (quantize, (sparse,), "sparse"),
        "unknown format": (quantize, (x, "int3"), "one of int8, int4, fp8_e4m3, fp8_e5m2, got int3"),
        "block size 0": (quantize, (x, "int8", 0), "a power of two from 32 to 4096, got 0"),
        "block size 16": (quantize, (x, "int8", 16), "a power of two from 32 to 4096, got 16"),
        "block size 96": (quantize, (x, "int8", 96), "a power of two from 32 to 4096, got 96"),
        "block size 8192": (quantize, (x, "int8", 8192), "a power of two from 32 to 4096, got 8192"),
        "negative offset": (quantize, (x, "int8", 128, True, 1, -1), "offset must not be negative, got -1"),
        "base of another shape": (quantize, (x, "int8", 128, False, None, 0, x[:3]), "base must have the shape of x"),
        "base of another dtype": (quantize, (x, "int8", 128, False, None, 0, x.half()), "base must be torch.float32"),
        "found_inf of two": (
            "quantize_blockwise_stats_",
            (x, torch.zeros(2, device=device), one),
            "found_inf must hold one",
        ),
        "amax of float64": ("quantize_blockwise_stats_", (x, one, one.double()), "amax must hold one"),
        "payload dtype": (dequantize, (payload.int(), scales, (300,), f32), "payload must be torch.int8, torch.uint8"),
        "short payload": (dequantize, (payload[:-1], scales, (300,), f32), "payload must hold 300 elements"),
        "short int4 payload": (dequantize, (bits, scales, (300,), f32), "payload must hold 150 elements"),
        "another shape": (dequantize, (payload, scales, (301,), f32), "payload must hold 301 elements"),
        "too many scales": (dequantize, (payload, torch.ones(11, device=device), (300,), f32), "scales must hold one"),
        "no scales": (dequantize, (payload, scales[:0], (300,), f32), "scales must hold one"),
        "scales' dtype": (dequantize, (payload, scales.double(), (300,), f32), "scales must be torch.float32"),
        "negative size": (dequantize, (payload, scales, (-300,), f32), "no negative size, got -300"),
        "too large a shape": (dequantize, (payload, scales, (2**40, 2**40), f32), "too many elements"),
        "dtype float64": (dequantize, (payload, scales, (300,), torch.float64), "dtype must be torch.float32"),
        "dtype int8": (dequantize, (payload, scales, (300,), torch.int8), "dtype must be torch.float32"),
        "decoding base's dtype": (
            dequantize,
            (payload, scales, (300,), torch.float16, x),
            "base must be torch.float16",
        ),
        "decoding base's shape": (dequantize, (payload, scales, (300,), f32, x[1:]), "the shape of the output"),
        "mask of floats": ("pack_bits", (x,), "mask must be torch.bool, got torch.float32; pack_scaled_mask takes"),
        "scaled mask of ints": ("pack_scaled_mask", (x.int(),), "x must be a floating-point tensor"),
        "short bits": (unpack, (bits[:-1], (300,)), "payload must hold 38 bytes"),
        "bits' dtype": (unpack, (bits.int(), (300,)), "payload must be torch.uint8"),
        "value of ints": (unpack, (bits, (300,), one.int()), "value must hold one floating-point element"),
        "two values": (unpack, (bits, (300,), x[:2]), "value must hold one floating-point element"),
    }


@pytest.mark.parametrize("case", list(_bad_calls(torch.device("cpu"))))
def test_bad_input_is_refused(backend, case):
    name, args, message = _bad_calls(backend.device)[case]
    before = [a.clone() for a in args if isinstance(a, Tensor)]
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        getattr(backend.ops, name)(*args)
    after = [a for a in args if isinstance(a, Tensor)]
    assert all(
        torch.equal(a.to_dense(), b.to_dense()) if a.is_sparse else same_bits(a, b)
        for a, b in zip(after, before, strict=True)
    )


def test_devices_must_agree():
    meta = torch.ones(300, device="meta")
    payload, scales = fastamp.ops.quantize_blockwise(torch.ones(300))
    for run in (
        lambda: fastamp.ops.quantize_blockwise(torch.ones(300), base=meta),
        lambda: fastamp.ops.dequantize_blockwise(payload, scales.to("meta"), (300,), torch.float32),
        lambda: fastamp.ops.unpack_bits(fastamp.ops.pack_bits(torch.ones(9) > 0), (9,), meta[:1]),
    ):
        with pytest.raises(RuntimeError, match="on one device"):
            run()


def test_stochastic_needs_a_seed_below_the_public_function():
    with pytest.raises(RuntimeError, match="stochastic rounding needs a seed"):
        torch.ops.fastamp.quantize_blockwise(torch.ones(3), "int8", 128, True)


# ---- registration -----------------------------------------------------------------------------------------


def _devices() -> list[str]:
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", _devices())
def test_opcheck(device):
    d = torch.device(device)
    ops = torch.ops.fastamp
    x = torch.randn(3, 50, device=d, requires_grad=True)
    base = torch.randn(3, 50, device=d)
    check = torch.library.opcheck
    check(ops.quantize_blockwise.default, (x,))
    for format in FORMATS:
        check(ops.quantize_blockwise.default, (x, format, 64, True, 3, 5, base))
        payload, scales = fastamp.ops.quantize_blockwise(x, format, 64, base=base)
        # The schema test multiplies its inputs, which torch does not do in fp8.
        without = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        tests = {"test_utils": without} if format.startswith("fp8") else {}
        check(ops.dequantize_blockwise.default, (payload, scales, (3, 50), torch.float32, base), **tests)
    payload, scales = fastamp.ops.quantize_blockwise(x)
    check(ops.dequantize_blockwise.default, (payload, scales, (3, 50), torch.float16))
    check(ops.quantize_blockwise.out, (base,), kwargs={"payload": payload.clone(), "scales": scales.clone()})
    check(ops.dequantize_blockwise.out, (payload, scales, (3, 50), torch.float32), kwargs={"out": base.clone()})
    check(ops.quantize_blockwise_stats_.default, (base, scalar(0.0, d), scalar(0.0, d)))
    mask = base > 0
    check(ops.pack_bits.default, (mask,))
    check(ops.pack_scaled_mask.default, (mask.float(),))
    check(ops.unpack_bits.default, (fastamp.ops.pack_bits(mask), (3, 50)))
    check(ops.unpack_bits.default, (fastamp.ops.pack_bits(mask), (3, 50), scalar(2.0, d)))


def test_fake_results_are_like_the_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def describe(results):
        return [(r.shape, r.dtype, r.stride()) for r in (results if isinstance(results, tuple) else (results,))]

    for shape in ((), (0,), (7, 11), (129,)):
        for dtype in DTYPES:
            x = torch.zeros(shape, dtype=dtype)
            for format in FORMATS:
                real = fastamp.ops.quantize_blockwise(x, format, 32)
                decoded = fastamp.ops.dequantize_blockwise(*real, shape, torch.bfloat16)
                masks = fastamp.ops.pack_scaled_mask(x), fastamp.ops.pack_bits(x > 0)
                with FakeTensorMode() as mode:
                    fake_x = mode.from_tensor(x)
                    fake = fastamp.ops.quantize_blockwise(fake_x, format, 32)
                    fake_decoded = fastamp.ops.dequantize_blockwise(*fake, shape, torch.bfloat16)
                    fake_masks = fastamp.ops.pack_scaled_mask(fake_x), fastamp.ops.pack_bits(fake_x > 0)
                assert describe(fake) == describe(real)
                assert describe(fake_decoded) == describe(decoded)
                assert [describe(m) for m in fake_masks] == [describe(m) for m in masks]


def test_nothing_is_differentiable():
    x = torch.randn(100, requires_grad=True)
    payload, scales = fastamp.ops.quantize_blockwise(x)
    decoded = fastamp.ops.dequantize_blockwise(payload, scales, x.shape, x.dtype, x)
    mask, value = fastamp.ops.pack_scaled_mask(x)
    for result in (payload, scales, decoded, mask, value):
        assert not result.requires_grad


def test_compiles_with_dynamic_shapes():
    def round_trip(x: Tensor) -> Tensor:
        payload, scales = fastamp.ops.quantize_blockwise(x * 2, "int8", 64)
        return fastamp.ops.dequantize_blockwise(payload, scales, x.shape, x.dtype) + 1

    compiled = torch.compile(round_trip, backend="aot_eager", dynamic=True, fullgraph=True)
    for shape in ((3, 50), (5, 77), (64,)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), round_trip(x))
