"""The storage codecs on a large tensor, against copy_ and pure PyTorch: python benchmarks/bench_storage.py

64 Mi float32 elements, block size 128. `bytes per second of copy_` compares what each reads and writes with copy_
between two float32 tensors. All write into memory that is there already, torch's expressions with `out=` wherever
they take it; `new memory` is what a call without `out=` takes, for both sides. `compiled` is torch.compile's code.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from _harness import arguments, progress, ratio, report, time_interleaved
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
        self.codes = torch.empty(self.x.shape, dtype=torch.int8, device=x.device)
        self.scales = torch.empty(len(self.x), 1, device=x.device)
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


def compiled_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale


def compiled_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales


def int8_case(options: Any, quantise: bool) -> dict[str, Any]:
    elements = options.elements
    x = torch.randn(elements, device=options.device)
    other = torch.zeros_like(x)
    theirs = Torch(x)
    payload, scales = ops.quantize_blockwise(x)
    moved = payload.numel() + scales.numel() * 4 + elements * 4
    if quantise:
        expressions: dict[str, Callable[[], Any]] = {
            "abs().amax()": theirs.quantize,
            "vector_norm": theirs.quantize_norm,
            "vector_norm, out=": theirs.quantize_out,
            "vector_norm, out=, chunks": theirs.chunked_quantize,
        }
        ours = {
            "fastamp": lambda: ops.quantize_blockwise(x, out=(payload, scales)),
            "fastamp, new memory": lambda: ops.quantize_blockwise(x),
        }
    else:
        expressions = {
            "float() * scale": theirs.dequantize,
            "float().mul_": theirs.dequantize_in_place,
            "mul, out=": theirs.dequantize_out,
            "copy_().mul_": theirs.dequantize_copy,
            "mul, out=, chunks": theirs.chunked_dequantize,
        }
        ours = {
            "fastamp": lambda: ops.dequantize_blockwise(payload, scales, x.shape, x.dtype, out=other),
            "fastamp, new memory": lambda: ops.dequantize_blockwise(payload, scales, x.shape, x.dtype),
        }
    compiled: dict[str, Callable[[], Any]] = {}
    if options.compile:
        function = torch.compile(compiled_quantize if quantise else compiled_dequantize)
        inputs = (theirs.x,) if quantise else (theirs.codes, theirs.scales)
        compiled = {"compiled": lambda: function(*inputs)}
    timing = time_interleaved(
        {"copy_": lambda: other.copy_(x), **expressions, **compiled, **ours},
        device=options.device,
        rounds=options.rounds,
    )
    best = min(expressions, key=lambda e: timing[e]["median"])
    share = moved / (8 * elements)  # of the bytes that copy_ moves
    ratios = {
        "against torch": ratio(timing, best, "fastamp"),
        **({"against compiled": ratio(timing, "compiled", "fastamp")} if compiled else {}),
        "bytes per second of copy_": round(share * ratio(timing, "copy_", "fastamp", 4), 2),
        "the same, new memory": round(share * ratio(timing, "copy_", "fastamp, new memory", 4), 2),
    }
    return {
        "case": f"int8 {'quantise' if quantise else 'dequantise'}, {elements >> 20} Mi float32",
        "timing": {"torch": timing[best], **timing},
        "best of torch": best,
        "ratios": ratios,
        "target": {"against torch": 5.0, "bytes per second of copy_": 0.6} if options.device == "cpu" else {},
    }


def format_case(options: Any, format: str, dtype: torch.dtype, stochastic: bool = False) -> dict[str, Any]:
    elements = options.elements // 4
    x = torch.randn(elements, device=options.device).to(dtype)
    other = torch.zeros_like(x)
    out = ops.quantize_blockwise(x, format, BLOCK)
    timing = time_interleaved(
        {
            "copy_": lambda: other.copy_(x),
            "fastamp quantise": lambda: ops.quantize_blockwise(x, format, BLOCK, stochastic, 1, out=out),
            "fastamp dequantise": lambda: ops.dequantize_blockwise(*out, x.shape, dtype, out=other),
        },
        device=options.device,
        rounds=options.few,
    )
    moved = (out[0].numel() * out[0].element_size() + out[1].numel() * 4) / elements + dtype.itemsize
    share = moved / (2 * dtype.itemsize)  # of the bytes that copy_ moves
    rounding = ", stochastic" if stochastic else ""
    return {
        "case": f"{format}{rounding}, {elements >> 20} Mi {str(dtype).removeprefix('torch.')}",
        "timing": timing,
        "ratios": {
            f"{what}: bytes per second of copy_": round(share * ratio(timing, "copy_", f"fastamp {what}", 4), 2)
            for what in ("quantise", "dequantise")
        },
    }


def mask_case(options: Any) -> dict[str, Any]:
    elements = options.elements // 4
    x = torch.rand(elements, device=options.device) < 0.9
    dropped = x.float() / 0.9
    other, wide = torch.empty_like(x), torch.empty_like(dropped)
    payload = ops.pack_bits(x)
    _, value = ops.pack_scaled_mask(dropped)
    return {
        "case": f"masks, {elements >> 20} Mi",
        "timing": time_interleaved(
            {
                "copy_ of bool": lambda: other.copy_(x),
                "copy_ of float32": lambda: wide.copy_(dropped),
                "fastamp pack_bits": lambda: ops.pack_bits(x),
                "fastamp unpack_bits": lambda: ops.unpack_bits(payload, x.shape),
                "fastamp pack_scaled_mask": lambda: ops.pack_scaled_mask(dropped),
                "fastamp unpack_bits, float32": lambda: ops.unpack_bits(payload, x.shape, value),
            },
            device=options.device,
            rounds=options.few,
        ),
    }


COLUMNS = ["case", "PyTorch's best", "fastamp", "ratio", "bytes per second of copy_"]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    def missed(result: dict[str, Any], what: str) -> str:
        value, target = result["ratios"][what], result.get("target", {}).get(what)
        return "" if target is None else f" ({target} missed)" if value < target else f" ({target})"

    def milliseconds(times: dict[str, float]) -> str:
        return f"{times['median'] / 1000:.1f} ms"

    found = []
    for result in results:
        timing, ratios = result["timing"], result.get("ratios", {})
        if "torch" in timing:
            best = f"{milliseconds(timing['torch'])}, `{result['best of torch']}`"
            share, speed = "bytes per second of copy_", "against torch"
            speeds = f"{ratios[speed]:.1f}x{missed(result, speed)}", f"{ratios[share]:.2f}{missed(result, share)}"
            found.append([result["case"], best, milliseconds(timing["fastamp"]), *speeds])
            if "compiled" in timing:
                times = milliseconds(timing["compiled"]), milliseconds(timing["fastamp"])
                found.append([f"{result['case']}, torch.compile", *times, f"{ratios['against compiled']:.1f}x", ""])
        else:
            for what, share in ratios.items():
                way = what.partition(":")[0]
                time = milliseconds(timing[f"fastamp {way}"])
                found.append([f"{result['case']}, {way}", "", time, "", f"{share:.2f}"])
    return found


def main() -> int:
    options = arguments("storage", __doc__, devices=("cpu", "cuda"))
    options.elements = ELEMENTS // 64 if options.quick else ELEMENTS
    options.rounds, options.few = (3, 3) if options.quick else (15, 7)
    options.compile = not options.quick
    cases: list[Callable[[], Any]] = [functools.partial(int8_case, options, quantise) for quantise in (True, False)]
    for format, dtype in itertools.product(("int8", "int4", "fp8_e4m3", "fp8_e5m2"), (torch.float32, torch.bfloat16)):
        cases.append(functools.partial(format_case, options, format, dtype))
    cases.append(functools.partial(format_case, options, "int8", torch.float32, stochastic=True))
    cases.append(functools.partial(mask_case, options))
    results = list(progress(cases))
    return report("storage", results, options, {"columns": COLUMNS, "rows": rows(results)})


if __name__ == "__main__":
    sys.exit(main())
