"""The gradient ops on large tensors, against torch's own operators: python benchmarks/bench_unscale.py

256 MiB of float32 gradients (128 MiB in half precision) in 16 tensors, contiguous and each starting one element after
where a vector load could begin (`misaligned`). `three calls` are what a loop with clipping does: unscale and check,
norm, clip; torch reads the gradients three times for it and writes them twice. `compiled` is torch.compile's code for
the same expression over the list. `of copy_` compares the bytes per second with those of a large `copy_`. apex,
TransformerEngine and DeepSpeed take part where they can be imported (see _baselines.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from _baselines import available
from _harness import arguments, copy_speed, progress, ratio, report, time_interleaved, with_bandwidth

from fastamp import ops

ELEMENTS = 64 * 2**20
TENSORS = 16


def gradients(dtype: torch.dtype, elements: int, device: str, offset: int = 0) -> list[torch.Tensor]:
    each = elements // TENSORS
    return [torch.randn(each + offset, device=device).to(dtype)[offset:] for _ in range(TENSORS)]


def size(dtype: torch.dtype, elements: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}, {elements * dtype.itemsize >> 20} MiB"


def compiled_unscale(grads: list[torch.Tensor], inv_scale: torch.Tensor) -> torch.Tensor:
    """What one writes for torch.compile: in place, and whether any result is not finite."""
    bad = torch.zeros((), dtype=torch.bool, device=grads[0].device)
    for grad in grads:
        grad.mul_(inv_scale)
        bad = bad | ~torch.isfinite(grad).all()
    return bad


def unscale_case(options: Any, dtype: torch.dtype, elements: int, copied: float, offset: int = 0) -> dict[str, Any]:
    device = options.device
    grads, found_inf = gradients(dtype, elements, device, offset), torch.zeros((), device=device)
    # Next to 1, so that the values stay what they are over many rounds, and not 1, so that they are written.
    factor = 1 + 2.0**-23
    inv_scale = torch.tensor(factor, device=device)

    def in_place_mul() -> None:
        for grad in grads:
            grad.mul_(factor)

    functions: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale),
        "mul_": in_place_mul,
        "_foreach_mul_": lambda: torch._foreach_mul_(grads, factor),
        "fastamp": lambda: ops.unscale_(grads, found_inf, inv_scale),
    }
    if options.compile and not offset:
        compiled = torch.compile(compiled_unscale)
        functions["compiled"] = lambda: compiled(grads, inv_scale)
    holders = [SimpleNamespace(grad=grad) for grad in grads]
    for name, baseline in options.baselines.items():
        functions[name] = functools.partial(baseline.unscale, holders, 1 / factor)
    timing = time_interleaved(functions, device=device, rounds=options.rounds)
    half = dtype.itemsize == 2
    target = {"against torch": 2.0} if half else {"against torch": 0.95, "against mul_": 0.95}
    result = {
        "case": f"unscale_, {size(dtype, elements)}{', misaligned' if offset else ''}",
        "timing": timing,
        "ratios": {f"against {name}": ratio(timing, name, "fastamp") for name in functions if name != "fastamp"},
        "target": target if device == "cpu" and not offset else {},
    }
    return with_bandwidth(result, dict.fromkeys(functions, 2 * elements * dtype.itemsize), copied)


def three_calls_case(options: Any, dtype: torch.dtype, elements: int, copied: float, active: bool) -> dict[str, Any]:
    device = options.device
    grads, found_inf = gradients(dtype, elements, device), torch.zeros((), device=device)
    parameters = [torch.nn.Parameter(grad) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    inv_scale = torch.tensor(1 + 2.0**-23, device=device)
    # After the first round the norm is max_norm, and max_norm / (norm + 1e-6) stays just below 1.
    max_norm = 1e-3 if active else 1e9

    def torchs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def ours() -> None:
        total, _ = ops.unscale_norm_(grads, found_inf, inv_scale)
        ops.clip_(grads, ops.clip_coefficient(total, max_norm))

    functions: dict[str, Callable[[], Any]] = {"torch": torchs, "fastamp": ours}
    for name, baseline in options.baselines.items():
        functions[name] = functools.partial(baseline.unscale_and_clip, parameters, 1 / float(inv_scale), max_norm)
    timing = time_interleaved(functions, device=device, rounds=options.rounds)
    result = {
        "case": f"three calls, {'active' if active else 'inactive'} clip, {size(dtype, elements)}",
        "timing": timing,
        "ratios": {f"against {name}": ratio(timing, name, "fastamp") for name in functions if name != "fastamp"},
        "target": {"against torch": 1.2 if active else 2.2} if dtype == torch.float32 and device == "cpu" else {},
    }
    nbytes = elements * dtype.itemsize
    return with_bandwidth(result, {"torch": 5 * nbytes, "fastamp": (4 if active else 2) * nbytes}, copied)


def check_case(options: Any, dtype: torch.dtype, elements: int, copied: float) -> dict[str, Any]:
    """Reads alone."""
    device = options.device
    grads, found_inf = gradients(dtype, elements, device), torch.zeros((), device=device)
    one = torch.ones((), device=device)
    timing = time_interleaved(
        {
            "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one),
            "isfinite().all()": lambda: [torch.isfinite(grad).all() for grad in grads],
            "fastamp": lambda: ops.check_(grads, found_inf),
        },
        device=device,
        rounds=options.rounds,
    )
    ratios = {f"against {name}": ratio(timing, name, "fastamp") for name in timing if name != "fastamp"}
    result = {"case": f"check_, {size(dtype, elements)}", "timing": timing, "ratios": ratios}
    return with_bandwidth(result, {"fastamp": elements * dtype.itemsize}, copied)


def accumulate_case(options: Any, dtype: torch.dtype, elements: int, copied: float) -> dict[str, Any]:
    """Into float32 main gradients, once for every micro-batch."""
    device = options.device
    grads, found_inf = gradients(dtype, elements, device), torch.zeros((), device=device)
    main = [torch.zeros(grad.shape, device=device) for grad in grads]
    inv_scale = torch.tensor(0.5, device=device)

    def torchs() -> None:
        wide = [grad.float() for grad in grads]
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inv_scale)
        torch._foreach_add_(main, wide)

    def add_alone() -> None:
        for total, grad in zip(main, grads, strict=True):
            total.add_(grad, alpha=0.5)

    timing = time_interleaved(
        {
            "torch": torchs,
            "add_, no check": add_alone,
            "fastamp": lambda: ops.accumulate_(main, grads, found_inf, inv_scale),
        },
        setup=lambda name: torch._foreach_zero_(main),
        device=device,
        rounds=options.rounds,
    )
    ratios = {f"against {name}": ratio(timing, name, "fastamp") for name in timing if name != "fastamp"}
    result = {"case": f"accumulate_, {size(dtype, elements)}", "timing": timing, "ratios": ratios}
    return with_bandwidth(result, {"fastamp": elements * (8 + dtype.itemsize)}, copied)


def main() -> int:
    options = arguments("unscale", __doc__, devices=("cpu", "cuda"))
    elements = ELEMENTS // 64 if options.quick else ELEMENTS
    options.rounds, options.compile = (3, False) if options.quick else (31, True)
    options.baselines, outcome = available(options.device)
    copied = copy_speed(options.device, 16 if options.quick else 256)
    single, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    shared = (elements, copied)
    cases = [functools.partial(unscale_case, options, dtype, *shared) for dtype in (single, bf16, fp16)]
    cases += [functools.partial(unscale_case, options, torch.float64, elements // 2, copied)]
    cases += [functools.partial(unscale_case, options, dtype, *shared, offset=1) for dtype in (single, bf16)]
    for dtype in (single, bf16):
        cases += [functools.partial(three_calls_case, options, dtype, *shared, active) for active in (False, True)]
    cases += [functools.partial(check_case, options, dtype, *shared) for dtype in (single, bf16)]
    cases += [functools.partial(accumulate_case, options, dtype, *shared) for dtype in (bf16, fp16)]
    facts = {"copy_ bytes per second": round(copied), "baselines": outcome}
    return report("unscale", list(progress(cases)), options, facts)


if __name__ == "__main__":
    sys.exit(main())
