"""The gradient ops on large tensors, against torch's own operators: python benchmarks/bench_unscale.py

256 MiB of float32 gradients (128 MiB in half precision) in 16 tensors. `three calls` are what a loop with clipping
does: unscale and check, norm, clip; torch reads the gradients three times for it and writes them twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _harness import arguments, ratio, report, time_interleaved

from fastamp import ops

ELEMENTS = 64 * 2**20
TENSORS = 16


def gradients(dtype: torch.dtype, elements: int) -> list[torch.Tensor]:
    return [torch.randn(elements // TENSORS).to(dtype) for _ in range(TENSORS)]


def unscale_case(dtype: torch.dtype, elements: int, rounds: int) -> dict[str, Any]:
    grads, found_inf = gradients(dtype, elements), torch.zeros(())
    # Next to 1, so that the values stay what they are over many rounds, and not 1, so that they are written.
    factor = math.nextafter(1.0, 2.0) if dtype == torch.float64 else 1 + 2.0**-23
    inv_scale = torch.tensor(factor)

    def in_place_mul() -> None:
        for grad in grads:
            grad.mul_(factor)

    timing = time_interleaved(
        {
            "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale),
            "mul_": in_place_mul,
            "fastamp": lambda: ops.unscale_(grads, found_inf, inv_scale),
        },
        rounds=rounds,
    )
    half = dtype != torch.float32
    return {
        "case": f"unscale_, {str(dtype).removeprefix('torch.')}, {elements * dtype.itemsize >> 20} MiB",
        "timing": timing,
        "ratios": {
            "against torch": ratio(timing, "torch", "fastamp"),
            "against mul_": ratio(timing, "mul_", "fastamp"),
        },
        "target": {"against torch": 2.0 if half else 0.95, **({} if half else {"against mul_": 0.95})},
    }


def three_calls_case(dtype: torch.dtype, elements: int, rounds: int, active: bool) -> dict[str, Any]:
    grads, found_inf = gradients(dtype, elements), torch.zeros(())
    parameters = [torch.nn.Parameter(grad) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    inv_scale = torch.tensor(1 + 2.0**-23)
    # After the first round the norm is max_norm, and max_norm / (norm + 1e-6) stays just below 1.
    max_norm = 1e-3 if active else 1e9

    def torchs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def ours() -> None:
        total, _ = ops.unscale_norm_(grads, found_inf, inv_scale)
        ops.clip_(grads, ops.clip_coefficient(total, max_norm))

    timing = time_interleaved({"torch": torchs, "fastamp": ours}, rounds=rounds)
    name = f"three calls, {'active' if active else 'inactive'} clip, {str(dtype).removeprefix('torch.')}"
    return {
        "case": f"{name}, {elements * dtype.itemsize >> 20} MiB",
        "timing": timing,
        "ratios": {"against torch": ratio(timing, "torch", "fastamp")},
        "target": {"against torch": 1.2 if active else 2.2} if dtype == torch.float32 else {},
    }


def main() -> None:
    options = arguments("unscale", __doc__)
    elements = ELEMENTS // 64 if options.quick else ELEMENTS
    rounds = 3 if options.quick else 15
    results = [unscale_case(dtype, elements, rounds) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for dtype in (torch.float32, torch.bfloat16):
        results += [three_calls_case(dtype, elements, rounds, active) for active in (False, True)]
    report("unscale", results, options.json)


if __name__ == "__main__":
    main()
