"""What the scaler costs with the parameters of well-known models: python benchmarks/bench_models.py

The gradients have the shapes of the models' parameters; there is no forward or backward pass. Where a model's do not
fit beside everything else, the case says how much of it was taken. The clip is inactive, as in most steps of a run.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from _harness import arguments, copy_speed, progress, ratio, report, time_interleaved, with_bandwidth
from _loop import ScalerLoop
from _models import SHAPES

import fastamp


def case(options: Any, model: str, dtype: torch.dtype, clip: bool, copied: float) -> dict[str, Any]:
    shapes = SHAPES[model]()
    if options.quick:
        shapes = [shape for shape in shapes if math.prod(shape) < 2**20][:20]
    parameters = []
    for shape in shapes:
        parameters.append(torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=options.device)))
        parameters[-1].grad = torch.randn(shape, device=options.device).to(dtype)
    nbytes = sum(p.grad.nbytes for p in parameters)
    theirs, ours = (ScalerLoop(kind, parameters, options.device) for kind in (torch.amp.GradScaler, fastamp.GradScaler))
    timing = time_interleaved(
        {
            "torch": theirs.torch_clip if clip else theirs.unscale_update,
            "fastamp": ours.method_clip if clip else ours.unscale_update,
        },
        device=options.device,
        rounds=3 if options.quick else 15,
        min_seconds=0.0 if options.quick else 1.0,
    )
    name = f"{model}, {len(shapes)} tensors, {str(dtype).removeprefix('torch.')}, {nbytes / 2**20:.0f} MiB"
    result = {
        "case": f"{name}: unscale_ {'+ clip ' if clip else ''}+ update",
        "timing": timing,
        "ratios": {"against torch": ratio(timing, "torch", "fastamp")},
    }
    return with_bandwidth(result, {"torch": (5 if clip else 2) * nbytes, "fastamp": 2 * nbytes}, copied)


def main() -> int:
    options = arguments("models", __doc__, devices=("cpu", "cuda"))
    copied = copy_speed(options.device, 16 if options.quick else 256)
    cases = [
        functools.partial(case, options, model, dtype, clip, copied)
        for model in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for clip in (False, True)
    ]
    return report("models", list(progress(cases)), options, {"copy_ bytes per second": round(copied)})


if __name__ == "__main__":
    sys.exit(main())
