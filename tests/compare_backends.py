"""Runs every op on the same inputs on the emulated and the real GPU, and compares the results bit for bit.

    python tests/compare_backends.py [--backends cuda-emulated cuda] [--seed 0 1 ...] [--quick] [--json FILE]

Needs no pytest. Exit status 1 if any bit differs, or if fewer than two of the backends are there. With one backend it
only runs the ops, which is what compute-sanitizer watches. The CPU kernels sum in another order: with `cpu` among the
backends, norms are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends import NAMES, Backend, why_missing
from op_inputs import DTYPES, SIZES, guarded_list, random_values, same_bits, scalar

Case = Callable[[], list[Tensor]]
FORMATS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")
STORED = (torch.float32, torch.float16, torch.bfloat16)
QUICK_SIZES = [0, 1, 17, 4097, 9001]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def strided(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> list[Tensor]:
    wide = random_values(40 * 70, dtype, rng).to(device).view(40, 70)
    return [wide[:, 3:60], wide.t()[5::3], wide[::7, ::2].unsqueeze(1)]


def spoiled(values: Tensor, rng: torch.Generator) -> Tensor:
    """With an infinity or a NaN at a random place, where there is one."""
    if values.numel():
        at = int(torch.randint(0, values.numel(), (1,), generator=rng))
        values[at] = [float("inf"), float("-inf"), float("nan")][at % 3]
    return values


def cases(ops: Any, device: torch.device, seed: int, quick: bool, norms: bool) -> Iterator[tuple[str, Case]]:
    """(name, case): a case makes its inputs anew from the seed, the same on every backend."""
    sizes = QUICK_SIZES if quick else [*SIZES, 100_003]

    def lists(dtypes: list[torch.dtype], bad: bool, body: Callable[..., list[Tensor]]) -> Case:
        def run() -> list[Tensor]:
            rng = torch.Generator().manual_seed(seed)
            guards = guarded_list(sizes * len(dtypes), sorted(dtypes * len(sizes), key=str), rng, device)
            grads = [guard.tensor for guard in guards]
            if bad:
                spoiled(grads[-1], rng)
            for dtype in dtypes:
                grads += strided(dtype, rng, device)
            found = scalar(0.0, device)
            results = body(grads, found, rng)
            for guard in guards:
                guard.check()
            return [*results, *grads, found]

        return run

    def in_place(op: str, factor: float) -> Callable[..., list[Tensor]]:
        def body(grads: list[Tensor], found: Tensor, rng: torch.Generator) -> list[Tensor]:
            if op == "check_":
                ops.check_(grads, found)
            elif op == "clip_":
                ops.clip_(grads, scalar(factor, device))
            else:
                return list(getattr(ops, op)(grads, found, scalar(factor, device)) or ())
            return []

        return body

    for op in ("unscale_", "check_", "clip_", "unscale_norm_"):
        if op == "unscale_norm_" and not norms:
            continue
        for dtypes in [[dtype] for dtype in DTYPES] + [DTYPES]:
            label = f"{op} {name_of(dtypes[0]) if len(dtypes) == 1 else 'mixed list'}"
            yield label, lists(dtypes, False, in_place(op, 1 / 3))
            yield f"{label}, not finite", lists(dtypes, True, in_place(op, 0.25))
        yield f"{op} factor 1", lists(DTYPES, False, in_place(op, 1.0))

    def accumulate(grads: list[Tensor], found: Tensor, rng: torch.Generator) -> list[Tensor]:
        mains = [random_values(g.numel(), torch.float32, rng).to(device).view(g.shape) for g in grads]
        ops.accumulate_(mains, grads, found, scalar(1 / 3, device))
        return mains

    for dtype in STORED:
        yield f"accumulate_ {name_of(dtype)}", lists([dtype], False, accumulate)

    def scale_losses(grads: list[Tensor], found: Tensor, rng: torch.Generator) -> list[Tensor]:
        losses = [grad.reshape(-1)[0] for grad in grads if grad.numel()]
        return ops.scale_losses([*losses, *grads], scalar(65536.0, device))

    yield "scale_losses", lists(DTYPES, False, scale_losses)

    def update_scale() -> list[Tensor]:
        scale, tracker = scalar(65536.0, device), scalar(0, device, torch.int32)
        seen = []
        for step in range(8):
            found = [scalar(float(step in (3, 4)), device), scalar(0.0, device)]
            ops.update_scale_(scale, tracker, found, 1.7, 0.3, 2)
            seen += [scale.clone(), tracker.clone()]
        return seen

    yield "update_scale_", update_scale

    def clip_coefficient() -> list[Tensor]:
        totals = [scalar(v, device, d) for v in (0.0, 0.7, 3e9, float("nan")) for d in (torch.float32, torch.float64)]
        return [ops.clip_coefficient(total, 0.9) for total in totals]

    yield "clip_coefficient", clip_coefficient

    def quantize(format: str, dtype: torch.dtype, stochastic: bool, block_size: int, with_base: bool) -> Case:
        def body(grads: list[Tensor], found: Tensor, rng: torch.Generator) -> list[Tensor]:
            results, amax = [], scalar(0.0, device)
            for at, x in enumerate(grads):
                x = x.contiguous()
                base = random_values(x.numel(), dtype, rng).to(device).view(x.shape) if with_base else None
                arguments = (format, block_size, stochastic, 1234 + at, 7 * at, base)
                payload, scales = ops.quantize_blockwise(x, *arguments)
                noted = ops.quantize_blockwise_stats_(x, found, amax, *arguments)
                decoded = ops.dequantize_blockwise(payload, scales, x.shape, dtype, base)
                results += [payload.view(torch.uint8), scales, noted[0].view(torch.uint8), noted[1], decoded]
            return [*results, amax]

        return lists([dtype], True, body)

    for format in FORMATS:
        for dtype in STORED:
            for stochastic in (False, True):
                name = f"quantize {format} {name_of(dtype)}{' stochastic' * stochastic}"
                yield name, quantize(format, dtype, stochastic, 128, False)
        for block_size in (32, 4096) if quick else (32, 64, 256, 512, 1024, 2048, 4096):
            yield f"quantize {format} blocks of {block_size}", quantize(format, torch.float32, False, block_size, False)
        yield f"quantize {format} difference", quantize(format, torch.bfloat16, True, 128, True)

    def masks() -> list[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        results = []
        for numel in sizes:
            mask = torch.rand(numel, generator=rng) < 0.9
            packed = ops.pack_bits(mask.to(device))
            results += [packed, ops.unpack_bits(packed, mask.shape)]
            for dtype in DTYPES:
                packed, value = ops.pack_scaled_mask((mask.to(dtype) * 1.25).to(device))
                results += [packed, value, ops.unpack_bits(packed, mask.shape, value)]
        return results

    yield "masks", masks


def compare(backends: list[Backend], seeds: list[int], quick: bool) -> dict[str, Any]:
    """{"cases": how many, "tensors": how many were compared, "differences": [text]}"""
    norms = all(backend.name != "cpu" for backend in backends) or len(backends) == 1
    report: dict[str, Any] = {"backends": [b.name for b in backends], "cases": 0, "tensors": 0, "differences": []}
    for seed in seeds:
        runs = [cases(backend.ops, backend.device, seed, quick, norms) for backend in backends]
        for same in zip(*runs, strict=True):
            name = same[0][0]
            results = [[t.cpu() for t in case()] for _, case in same]
            report["cases"] += 1
            report["tensors"] += len(results[0])
            for backend, other in zip(backends[1:], results[1:], strict=True):
                wrong = [i for i, (a, b) in enumerate(zip(results[0], other, strict=True)) if not same_bits(a, b)]
                if wrong:
                    text = f"{name}, seed {seed}: {backends[0]} and {backend} differ in tensors {wrong[:8]}"
                    report["differences"].append(text)
                    print(text, flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=NAMES, default=["cuda-emulated", "cuda"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--quick", action="store_true", help="a few sizes only")
    parser.add_argument("--json", type=Path, help="write the counts and differences here")
    options = parser.parse_args()
    missing = {name: why_missing(name) for name in options.backends if why_missing(name)}
    if missing:
        sys.exit("; ".join(f"cannot run on {name}: {reason}" for name, reason in missing.items()))
    started = time.monotonic()
    report = compare([Backend(name) for name in options.backends], options.seed, options.quick)
    report["seconds"] = round(time.monotonic() - started, 1)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    verdict = f"{len(report['differences'])} differences" if len(options.backends) > 1 else "nothing to compare with"
    print(f"{' and '.join(options.backends)}: {report['cases']} cases, {report['tensors']} tensors, {verdict}")
    sys.exit(bool(report["differences"]))


if __name__ == "__main__":
    main()
