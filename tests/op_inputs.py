"""Inputs for the op tests: tensors at chosen alignments that end where their allocation ends, with a canary in front,
and bit-for-bit comparison."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
HALF_DTYPES = [torch.float16, torch.bfloat16]

# Around one 16-byte vector of each dtype, one AVX2 pass (32), one pass of a CUDA block (4,096 floats, 8,192 halves)
# and one CPU chunk (32,768).
SIZES = [0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 1023, 4095, 4096, 4097, 8193, 12289, 32769]


def dtype_id(dtype: torch.dtype) -> str:
    return f"dtype={str(dtype).removeprefix('torch.')}"


class Guarded:
    """A 1-D tensor `offset` elements past a 16-byte boundary. An overrun at its end leaves the allocation, where the
    sanitizers see it; one at its front hits the canary."""

    CANARY = 1.5

    def __init__(self, values: Tensor, offset: int, device: torch.device) -> None:
        offset += 16 // values.element_size()
        self._all = torch.full((offset + values.numel(),), self.CANARY, dtype=values.dtype, device=device)
        self._offset = offset
        self.tensor = self._all[offset:]
        self.tensor.copy_(values)

    def check(self) -> None:
        assert bool((self._all[: self._offset] == self.CANARY).all()), "wrote before the tensor"


def random_values(numel: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Normal values over many magnitudes, with zeros of both signs and subnormals among them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(numel, generator=rng, dtype=wide)
    exponents = torch.randint(-8, 4, (numel,), generator=rng)
    values = torch.ldexp(values, exponents).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, tiny, -tiny / 2, tiny / 16], dtype=wide).to(dtype)
    if numel >= 16:
        at = torch.randint(0, numel, (5,), generator=rng)
        values[at] = special
    return values


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, except that every NaN counts as every other: their payloads are the hardware's."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        return same_bits(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.view(bits) == b.view(bits) if a.dim() else (a.reshape(1).view(bits) == b.reshape(1).view(bits))
    return bool((equal.reshape(-1) | (a.isnan() & b.isnan()).reshape(-1)).all())


def all_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def scalar(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def guarded_list(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], rng: torch.Generator, device: torch.device
) -> list[Guarded]:
    """Tensors of these sizes, dtypes in turn, at random alignments."""
    found = []
    for i, size in enumerate(sizes):
        dtype = dtypes[i % len(dtypes)]
        offset = int(torch.randint(0, 16 // dtype.itemsize, (1,), generator=rng))
        found.append(Guarded(random_values(size, dtype, rng), offset, device))
    return found
