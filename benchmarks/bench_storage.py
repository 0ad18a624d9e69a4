"""The storage codecs on a large tensor, against copy_ and pure PyTorch: python benchmarks/bench_storage.py

64 Mi float32 elements, block size 128. `bytes per second of copy_` compares what each reads and writes with copy_
between two float32 tensors. All write into memory that is there already, torch's expressions with `out=` wherever
they take it; `new memory` is what a call without `out=` takes, for both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _harness import arguments, ratio, report, time_interleaved
from torch import Tensor

from fastamp import ops

ELEMENTS = 64 * 2**20
BLOCK = 128
CHUNK = 2**16  # elements: its temporaries stay in the second-level cache


class Torch:
    """int8 codes of blocks in PyTorch, each way in several spellings; the fastest is what fastamp is compared with."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.view(-1, BLOCK)
        self.wide = torch.empty_like(self.x)
        self.codes = torch.empty(self.x.shape, dtype=torch.int8)
        self.scales = torch.empty(len(self.x), 1)
        self.chunked_quantize()

    def quantize(self) -> tuple[Tensor, Tensor]:
        scale = self.x.abs().amax(dim=1, keepdim=True) / 127
        return (self.x / scale).round().to(torch.int8), scale

    def quantize_norm(self) -> tuple[Tensor, Tensor]:
        scale = torch.linalg.vector_norm(self.x, ord=float("inf"), dim=1, keepdim=True) / 127
        return (self.x * (1 / scale)).round_().to(torch.int8), scale

    def quantize_out(self) -> None:
        torch.linalg.vector_norm(self.x, ord=float("inf"), dim=1, keepdim=True, out=self.scales)
        self.scales /= 127
        torch.mul(self.x, 1 / self.scales, out=self.wide)
        self.codes.copy_(self.wide.round_())

    def chunked_quantize(self) -> None:
        for x, codes, scales in self._chunks():
            torch.linalg.vector_norm(x, ord=float("inf"), dim=1, keepdim=True, out=scales)
            scales /= 127
            codes.copy_(torch.mul(x, 1 / scales).round_())

    def dequantize(self) -> Tensor:
        return self.codes.float() * self.scales

    def dequantize_in_place(self) -> Tensor:
        return self.codes.float().mul_(self.scales)

    def dequantize_out(self) -> None:
        torch.mul(self.codes, self.scales, out=self.wide)

    def dequantize_copy(self) -> None:
        self.wide.copy_(self.codes).mul_(self.scales)

    def chunked_dequantize(self) -> None:
        for wide, codes, scales in zip(*(self._split(t) for t in (self.wide, self.codes, self.scales)), strict=True):
            torch.mul(codes, scales, out=wide)

    def _split(self, t: Tensor) -> tuple[Tensor, ...]:
        return t.split(CHUNK // BLOCK)

    def _chunks(self) -> zip[tuple[Tensor, Tensor, Tensor]]:
        return zip(*(self._split(t) for t in (self.x, self.codes, self.scales)), strict=True)


def int8_cases(elements: int, rounds: int) -> list[dict[str, Any]]:
    x = torch.randn(elements)
    other = torch.zeros(elements)
    theirs = Torch(x)
    payload, scales = ops.quantize_blockwise(x)
    moved = payload.numel() + scales.numel() * 4 + elements * 4

    def case(name: str, expressions: dict[str, Callable[[], Any]], ours: Callable, new: Callable) -> dict[str, Any]:
        timing = time_interleaved(
            {"copy_": lambda: other.copy_(x), **expressions, "fastamp": ours, "fastamp, new memory": new},
            rounds=rounds,
        )
        best = min(expressions, key=lambda e: timing[e]["median"])
        timing = {"torch": timing[best], **timing}
        of_copy = moved / timing["fastamp"]["median"] / (8 * elements / timing["copy_"]["median"])
        new_of_copy = moved / timing["fastamp, new memory"]["median"] / (8 * elements / timing["copy_"]["median"])
        return {
            "case": f"int8 {name}, {elements >> 20} Mi float32",
            "timing": timing,
            "best of torch": best,
            "ratios": {
                "against torch": ratio(timing, "torch", "fastamp"),
                "bytes per second of copy_": round(of_copy, 2),
                "the same, new memory": round(new_of_copy, 2),
            },
            "target": {"against torch": 5.0, "bytes per second of copy_": 0.6},
        }

    return [
        case(
            "quantise",
            {
                "abs().amax()": theirs.quantize,
                "vector_norm": theirs.quantize_norm,
                "vector_norm, out=": theirs.quantize_out,
                "vector_norm, out=, chunks": theirs.chunked_quantize,
            },
            lambda: ops.quantize_blockwise(x, out=(payload, scales)),
            lambda: ops.quantize_blockwise(x),
        ),
        case(
            "dequantise",
            {
                "float() * scale": theirs.dequantize,
                "float().mul_": theirs.dequantize_in_place,
                "mul, out=": theirs.dequantize_out,
                "copy_().mul_": theirs.dequantize_copy,
                "mul, out=, chunks": theirs.chunked_dequantize,
            },
            lambda: ops.dequantize_blockwise(payload, scales, x.shape, x.dtype, out=other),
            lambda: ops.dequantize_blockwise(payload, scales, x.shape, x.dtype),
        ),
    ]


def format_case(format: str, dtype: torch.dtype, stochastic: bool, elements: int, rounds: int) -> dict[str, Any]:
    x = torch.randn(elements).to(dtype)
    other = torch.zeros_like(x)
    out = ops.quantize_blockwise(x, format, BLOCK)
    timing = time_interleaved(
        {
            "copy_": lambda: other.copy_(x),
            "quantise": lambda: ops.quantize_blockwise(x, format, BLOCK, stochastic, 1, out=out),
            "dequantise": lambda: ops.dequantize_blockwise(*out, x.shape, dtype, out=other),
        },
        rounds=rounds,
    )
    moved = (out[0].numel() * out[0].element_size() + out[1].numel() * 4) / elements + dtype.itemsize
    copied = 2 * dtype.itemsize / timing["copy_"]["median"]
    rounding = ", stochastic" if stochastic else ""
    return {
        "case": f"{format}{rounding}, {elements >> 20} Mi {str(dtype).removeprefix('torch.')}",
        "timing": timing,
        "ratios": {
            f"{what}: bytes per second of copy_": round(moved / timing[what]["median"] / copied, 2)
            for what in ("quantise", "dequantise")
        },
    }


def mask_case(elements: int, rounds: int) -> dict[str, Any]:
    x = torch.rand(elements) < 0.9
    dropped = x.float() / 0.9
    other, wide = torch.empty_like(x), torch.empty_like(dropped)
    payload = ops.pack_bits(x)
    _, value = ops.pack_scaled_mask(dropped)
    return {
        "case": f"masks, {elements >> 20} Mi",
        "timing": time_interleaved(
            {
                "copy_ of bool": lambda: other.copy_(x),
                "pack_bits": lambda: ops.pack_bits(x),
                "unpack_bits": lambda: ops.unpack_bits(payload, x.shape),
                "copy_ of float32": lambda: wide.copy_(dropped),
                "pack_scaled_mask": lambda: ops.pack_scaled_mask(dropped),
                "unpack_bits, float32": lambda: ops.unpack_bits(payload, x.shape, value),
            },
            rounds=rounds,
        ),
    }


def main() -> None:
    options = arguments("storage", __doc__)
    elements = ELEMENTS // 64 if options.quick else ELEMENTS
    rounds = 3 if options.quick else 15
    results = int8_cases(elements, rounds)
    few = rounds if options.quick else 7
    for format in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
        results += [format_case(format, dtype, False, elements // 4, few) for dtype in (torch.float32, torch.bfloat16)]
    results.append(format_case("int8", torch.float32, True, elements // 4, few))
    results.append(mask_case(elements // 4, few))
    report("storage", results, options.json)


if __name__ == "__main__":
    main()
