"""The storage ops in plain PyTorch: the truth that tests compare bits with, and what benchmarks compare speed with.

Names and signatures are those of `fastamp.ops`. Written for clarity; csrc/storage.h says what the formulas are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "dequantize_blockwise",
    "pack_bits",
    "pack_scaled_mask",
    "philox_draws",
    "quantize_blockwise",
    "quantize_blockwise_stats_",
    "unpack_bits",
]


@dataclass(frozen=True)
class Format:
    """`top` is the largest value a code can have, `marked_top` the largest in a block with non-finite values, where
    `inf`, -`inf` and `nan` are the codes of those. In other blocks an integer format's `nan` is the code that positive
    values become that round to 0."""

    payload: torch.dtype
    top: float
    marked_top: float
    inf: int
    minus_inf: int
    nan: int
    mantissa: int = 0  # bits, fp8 only
    min_exponent: int = 0  # of normal values, fp8 only


FORMATS = {
    "int8": Format(torch.int8, 127, 126, inf=0x7F, minus_inf=0x81, nan=0x80),
    "int4": Format(torch.uint8, 7, 6, inf=0x7, minus_inf=0x9, nan=0x8),
    "fp8_e4m3": Format(torch.float8_e4m3fn, 448, 416, inf=0x7E, minus_inf=0xFE, nan=0x7F, mantissa=3, min_exponent=-6),
    "fp8_e5m2": Format(
        torch.float8_e5m2, 57344, 57344, inf=0x7C, minus_inf=0xFC, nan=0x7F, mantissa=2, min_exponent=-14
    ),
}
_BY_PAYLOAD = {f.payload: f for f in FORMATS.values()}
_MAX = torch.finfo(torch.float32).max
_SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def philox_draws(seed: int, group: Tensor) -> Tensor:
    """Philox4x32-10 as [len(group), 8] numbers of 16 bits; `group` is an int64 tensor of counters."""
    low = 0xFFFFFFFF
    c0, c1 = group & low, (group >> 32) & low
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # The products wrap around in int64, which leaves their 64 bits right.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & low) ^ c1 ^ k0, p1 & low, ((p0 >> 32) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack([c0, c1, c2, c3], dim=1)
    return torch.stack([words & 0xFFFF, words >> 16], dim=2).flatten(1)


def _known(base: Tensor) -> Tensor:
    return torch.where(base.isfinite(), base.float(), 0.0).reshape(-1)


def _difference(x: Tensor, base: Tensor) -> Tensor:
    d = x - _known(base)
    return torch.where(x.isfinite() & d.isinf(), torch.full_like(d, _MAX).copysign(d), d)


def _blocks(flat: Tensor, block_size: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % block_size)).view(-1, block_size)


def _round(y: Tensor, f: Format) -> Tensor:
    """Codes as bytes (int4: in the low half)."""
    if not f.mantissa:
        return y.round().to(torch.int8).view(torch.uint8)
    return y.to(f.payload).view(torch.uint8)


def _round_stochastic(y: Tensor, f: Format, fraction: Tensor) -> Tensor:
    if not f.mantissa:
        return (y + fraction).floor().to(torch.int8).view(torch.uint8)
    # In units of the code's last place: frexp's exponent is one above the floating-point one.
    exponent = (y.frexp().exponent - 1).clamp(min=f.min_exponent) - f.mantissa
    normal = y.abs() >= 2.0**f.min_exponent
    exact = (torch.ldexp(y.abs().double(), -exponent) + fraction.double()).floor()
    subnormal = (torch.ldexp(y.abs(), -exponent) + fraction).floor().double()
    rounded = torch.ldexp(torch.where(normal, exact, subnormal), exponent)
    return rounded.float().copysign(y).to(f.payload).view(torch.uint8)


def quantize_blockwise(
    x: Tensor,
    format: str = "int8",
    block_size: int = 128,
    stochastic: bool = False,
    seed: int | None = None,
    offset: int = 0,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    f = FORMATS[format]
    flat = x.float().reshape(-1)
    if base is not None:
        flat = _difference(flat, base)
    v = _blocks(flat, block_size)
    finite = v.isfinite()
    marked = ~finite.all(dim=1)
    amax = torch.where(finite, v.abs(), 0.0).amax(dim=1) if len(v) else v.new_zeros(0)

    tops = torch.tensor([f.top, f.marked_top], dtype=torch.float32, device=x.device)
    reciprocals = 1.0 / tops
    top = tops[marked.long()]
    scale = amax * reciprocals[marked.long()]
    reach = scale * top
    raised, lowered = torch.nextafter(scale, scale + 1.0), torch.nextafter(scale, scale * 0.0)
    too_low = (reach < amax) & (scale < torch.finfo(torch.float32).tiny)
    scale = torch.where(too_low, raised, torch.where(reach.isinf(), lowered, scale))
    widen = torch.where(scale < 2.0**-100, 2.0**64, 1.0)
    inverse = torch.where(scale > 0, 1.0 / (scale * widen), 0.0)

    y = (v * widen[:, None]) * inverse[:, None]
    y = torch.where(finite, y, 0.0)
    if stochastic:
        if seed is None:
            raise ValueError("stochastic rounding needs a seed")
        groups = torch.arange(v.numel() // 8, device=x.device) + offset
        fraction = (philox_draws(seed, groups).view(v.shape).float() + 0.5) * 2.0**-16
        bounds = top[:, None].expand_as(y)
        codes = _round_stochastic(torch.minimum(torch.maximum(y, -bounds), bounds), f, fraction)
    else:
        codes = _round(y, f)
        if not f.mantissa:
            codes = torch.where((y > 0) & (codes == 0) & ~marked[:, None], f.nan, codes)
    codes = torch.where(v == math.inf, f.inf, codes)
    codes = torch.where(v == -math.inf, f.minus_inf, codes)
    codes = torch.where(v.isnan(), f.nan, codes).to(torch.uint8)

    codes = codes.view(-1)[: x.numel()]
    if f.payload == torch.uint8:
        pairs = _blocks(codes & 15, 2)
        codes = pairs[:, 0] | pairs[:, 1] << 4
    return codes.clone().view(f.payload), torch.where(marked, -scale, scale)


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
    flat = x.float().reshape(-1)
    if base is not None:
        flat = _difference(flat, base)
    if not flat.isfinite().all():
        found_inf.fill_(1.0)
    if len(flat):
        amax.copy_(torch.maximum(amax, torch.where(flat.isfinite(), flat.abs(), 0.0).amax().view_as(amax)))
    return quantize_blockwise(x, format, block_size, stochastic, seed, offset, base)


def block_size_of(numel: int, scales: int) -> int:
    """The one power of two that cuts numel elements into that many blocks (any that is large enough for one)."""
    for block_size in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        if -(-numel // block_size) == scales:
            return block_size
    raise ValueError(f"{scales} scales do not fit {numel} elements")


def dequantize_blockwise(
    payload: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, base: Tensor | None = None
) -> Tensor:
    f = _BY_PAYLOAD[payload.dtype]
    numel = math.prod(shape)
    block_size = block_size_of(numel, len(scales))
    if f.payload == torch.uint8:
        codes = torch.stack([payload & 15, payload >> 4], dim=1).view(-1)[:numel]
        value = ((codes ^ 8).to(torch.int8) - 8).float()
    else:
        codes = payload.view(torch.uint8)
        value = payload.float()
    scale = scales.repeat_interleave(block_size)[:numel]
    marked = scale.signbit()
    out = value * scale.abs()
    if not f.mantissa:
        least = (scale.abs().clamp(max=1.0) * 2.0**-40).clamp(min=_SMALLEST[dtype])
        out = torch.where((codes == f.nan) & ~marked, least, out)
    out = torch.where(marked & (codes == f.inf), math.inf, out)
    out = torch.where(marked & (codes == f.minus_inf), -math.inf, out)
    out = torch.where(marked & (codes == f.nan), math.nan, out)
    if base is not None:
        largest = torch.finfo(dtype).max
        out = torch.where(out.isfinite(), (out + _known(base)).clamp(-largest, largest), out)
    return out.to(dtype).view(list(shape))


def pack_bits(mask: Tensor) -> Tensor:
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (_blocks(mask.reshape(-1).to(torch.uint8), 8) * weights).sum(dim=1, dtype=torch.uint8)


def pack_scaled_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    words = x.contiguous().view(-1).view(word)
    distinct = words[words != 0].unique()
    value = torch.zeros((), dtype=word, device=x.device) if len(distinct) == 0 else distinct[0]
    value = value.view(x.dtype) if len(distinct) < 2 else x.new_tensor(math.nan)
    return pack_bits(words != 0), value


def unpack_bits(payload: Tensor, shape: Sequence[int], value: Tensor | None = None) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=payload.device)
    bits = (payload[:, None] >> shifts & 1).view(-1)[: math.prod(shape)].bool().view(list(shape))
    return bits if value is None else torch.where(bits, value.reshape(()), torch.zeros_like(value).reshape(()))
