"""Every op on a GPU beside torch's operators and beside baselines in plain torch: python benchmarks/bench_gpu.py

For each case two times a call, medians over rounds in which all ways take turns: `host` until the call returned, and
in another call `device` between CUDA events around it, for which the device is first kept busy until the host has
launched everything (but where a way waits for the device itself). Large tensors show bandwidth (`GB/s` counts the bytes
that the way has to move at least, as written in each case), many small ones the host's work and the launches. Then
training steps of a GPT, and what they hold and take at most.

--device cpu exercises the script where there is no GPU; its times mean nothing for one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from _baselines import Baseline, available
from _gpt import GPT, batch, call, in_turn, text
from _harness import arguments, machine, summary, write
from _loop import ScalerLoop
from torch import Tensor

import fastamp
from fastamp import ops, reference
from fastamp.checkpointing import checkpoint

Ways = dict[str, Callable[[], Any]]
# Next to 1, so that values stay what they are over many rounds, and not 1, so that they are written.
NEAR_ONE = 1 + 2.0**-23


def host_time(way: Callable[[], Any], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    return (time.perf_counter() - start) * 1e6


def device_time(way: Callable[[], Any], host_us: float) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # In clock cycles, of which no GPU has more than 2,500 a microsecond. An idle device would wait for each launch.
    torch.cuda._sleep(int(2500 * (2 * host_us + 100)))
    before.record()
    way()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3


def take_turns(ways: Ways, device: str, rounds: int, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """{way: {"device": summary, "host": summary}}, in microseconds; no "device" on the CPU."""
    names = list(ways)
    times: dict[str, dict[str, list[float]]] = {name: {"device": [], "host": []} for name in names}
    on_gpu = device == "cuda"
    hosts = dict.fromkeys(names, 0.0)
    for _ in range(3):
        for name in names:
            hosts[name] = host_time(ways[name], on_gpu)
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        names.append(names.pop(0))
        for name in names:
            times[name]["host"].append(host_time(ways[name], on_gpu))
            if on_gpu:
                times[name]["device"].append(device_time(ways[name], hosts[name]))
        done += 1
    gc.enable()
    return {name: {what: summary(t) for what, t in both.items() if t} for name, both in times.items()}


def gradients(dtype: torch.dtype, count: int, numel: int, device: str) -> list[Tensor]:
    return [torch.randn(numel, device=device).to(dtype) for _ in range(count)]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- baselines: what one would write without fastamp, and what apex does, in plain torch


def mul_and_isfinite(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """One multi-tensor product, then one reduction a tensor."""
    torch._foreach_mul_(grads, inv_scale)
    for grad in grads:
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(grad)).any().float()))


def multi_tensor_clip(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, max_norm: float) -> None:
    """apex's three multi-tensor passes: scale, L2 norm, scale."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))


# ---- cases: (name, bytes moved at least, ways)


def unscale_cases(device: str, elements: int, peers: dict[str, Baseline]) -> list[tuple[str, int, Ways]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (16, 512):
            grads = gradients(dtype, count, elements // count, device)
            found_inf, inv_scale = torch.zeros((), device=device), torch.full((), NEAR_ONE, device=device)
            nbytes = sum(grad.nbytes for grad in grads)
            size = f"{name_of(dtype)}, {count} tensors, {nbytes >> 20} MiB"
            ways: Ways = {
                "torch": functools.partial(
                    torch._amp_foreach_non_finite_check_and_unscale_, grads, found_inf, inv_scale
                ),
                "foreach_mul and isfinite": functools.partial(mul_and_isfinite, grads, found_inf, inv_scale),
                "fastamp": functools.partial(ops.unscale_, grads, found_inf, inv_scale),
            }
            holders = [SimpleNamespace(grad=grad) for grad in grads]
            for peer, baseline in peers.items():
                ways[peer] = functools.partial(baseline.unscale, holders, 1 / NEAR_ONE)
            found.append((f"unscale_, {size}", 2 * nbytes, ways))
            ways = {
                "isfinite": lambda grads=grads: [torch.isfinite(grad).all() for grad in grads],
                "fastamp": functools.partial(ops.check_, grads, found_inf),
            }
            found.append((f"check_, {size}", nbytes, ways))
    return found


def clip_cases(device: str, elements: int, peers: dict[str, Baseline]) -> list[tuple[str, int, Ways]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for active in (False, True):
            grads = gradients(dtype, 16, elements // 16, device)
            parameters = [torch.nn.Parameter(grad.clone()) for grad in grads]
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            found_inf, inv_scale = torch.zeros((), device=device), torch.full((), NEAR_ONE, device=device)
            # After the first round the norm is max_norm, and max_norm / (norm + 1e-6) stays just below 1.
            max_norm = 1e-3 if active else 1e9

            def torchs(grads=grads, parameters=parameters, found=found_inf, inv=inv_scale, to=max_norm) -> None:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv)
                torch.nn.utils.clip_grad_norm_(parameters, to, foreach=True)

            def ours(grads=grads, found=found_inf, inv=inv_scale, to=max_norm) -> None:
                total, _ = ops.unscale_norm_(grads, found, inv)
                ops.clip_(grads, ops.clip_coefficient(total, to))

            ways: Ways = {
                "torch": torchs,
                "multi-tensor passes": functools.partial(multi_tensor_clip, grads, found_inf, inv_scale, max_norm),
                "fastamp": ours,
            }
            for peer, baseline in peers.items():
                ways[peer] = functools.partial(baseline.unscale_and_clip, parameters, 1 / NEAR_ONE, max_norm)
            nbytes = sum(grad.nbytes for grad in grads)
            name = f"unscale, norm, {'active' if active else 'inactive'} clip, {name_of(dtype)}, {nbytes >> 20} MiB"
            found.append((name, (4 if active else 2) * nbytes, ways))
    return found


def storage_cases(device: str, elements: int) -> list[tuple[str, int, Ways]]:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(elements, device=device).to(dtype)
        for format in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
            payload, scales = ops.quantize_blockwise(x, format)
            coded = payload.nbytes + scales.nbytes
            ways: Ways = {
                "plain torch": functools.partial(reference.quantize_blockwise, x, format),
                "fastamp": functools.partial(ops.quantize_blockwise, x, format),
                "fastamp, stochastic": functools.partial(ops.quantize_blockwise, x, format, 128, True, 1),
            }
            found.append((f"quantize {format}, {name_of(dtype)}, {x.nbytes >> 20} MiB", x.nbytes + coded, ways))
            ways = {
                "plain torch": functools.partial(reference.dequantize_blockwise, payload, scales, x.shape, dtype),
                "fastamp": functools.partial(ops.dequantize_blockwise, payload, scales, x.shape, dtype),
            }
            found.append((f"dequantize {format}, {name_of(dtype)}, {x.nbytes >> 20} MiB", x.nbytes + coded, ways))
    mask = torch.rand(elements, device=device) < 0.9
    packed = ops.pack_bits(mask)
    found.append(("pack_bits", mask.nbytes + packed.nbytes, {"fastamp": functools.partial(ops.pack_bits, mask)}))
    ways = {"fastamp": functools.partial(ops.unpack_bits, packed, mask.shape)}
    found.append(("unpack_bits", mask.nbytes + packed.nbytes, ways))
    return found


def copy_case(device: str, elements: int) -> list[tuple[str, int, Ways]]:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return [("copy_, the bandwidth to compare with", 2 * source.nbytes, {"torch": lambda: target.copy_(source)})]


def loop(scaler: type[torch.amp.GradScaler], device: str, count: int, numel: int) -> ScalerLoop:
    params = [torch.nn.Parameter(p) for p in gradients(torch.float32, count, numel, device)]
    for p in params:
        p.grad = torch.randn_like(p)
    return ScalerLoop(scaler, params, device, lambda ps: torch.optim.AdamW(ps, lr=1e-6, fused=True), scale=1.0)


def scaler_cases(device: str) -> list[tuple[str, int, Ways]]:
    found = []
    for count, numel in ((1000, 16), (300, 65_536)) if device == "cuda" else ((10, 16),):
        theirs, ours = (loop(s, device, count, numel) for s in (torch.amp.GradScaler, fastamp.GradScaler))
        size = f"{count} x {numel}"
        for what, method in (("unscale", "unscale_update"), ("step", "step")):
            name = f"GradScaler {what} and update, {size}, AdamW fused"
            found.append((name, 0, {"torch": getattr(theirs, method), "fastamp": getattr(ours, method)}))
        ways: Ways = {
            "torch": theirs.torch_clip_step,
            "fastamp": ours.method_clip_step,
            "fastamp, folded": ours.fold_clip_step,
        }
        found.append((f"GradScaler unscale, clip, step, update, {size}, AdamW fused", 0, ways))
    return found


# ---- training steps


def training(device: str, quick: bool) -> dict[str, dict[str, Any]]:
    """By way: bytes held between forward and backward, at most during a step, and times of the step."""
    layers, width, size, seq = (1, 32, 2, 32) if quick else (12, 1024, 16, 1024)
    torch.manual_seed(0)
    model = GPT(layers, width, seq, 0.1).to(device)
    inputs, targets = (t.to(device) for t in batch(text() % 256, size, seq, torch.Generator().manual_seed(0)))
    torchs = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)

    def each(run: Any, blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = run(block, x)
        return x

    int8 = functools.partial(checkpoint, storage="int8")
    offloaded = functools.partial(checkpoint, offload="cpu")
    ways: dict[str, tuple[Any, Any, Any]] = {
        "plain autograd": (contextlib.nullcontext, in_turn, call),
        "torch checkpoint": (contextlib.nullcontext, functools.partial(each, torchs), torchs),
        "checkpoint": (contextlib.nullcontext, functools.partial(each, checkpoint), checkpoint),
        'checkpoint(storage="int8")': (contextlib.nullcontext, functools.partial(each, int8), int8),
        'checkpoint(offload="cpu")': (contextlib.nullcontext, functools.partial(each, offloaded), offloaded),
        **{
            f'store_activations("{format}")': (functools.partial(fastamp.store_activations, format), in_turn, call)
            for format in ("exact", "bf16", "int8", "fp8_e4m3", "int4")
        },
        'store_activations("int8", offload="cpu")': (
            functools.partial(fastamp.store_activations, "int8", offload="cpu"),
            in_turn,
            call,
        ),
    }
    found: dict[str, dict[str, Any]] = {}

    def step(region: Any, run: Any, run_loss: Any, read: Callable[[], int] = int) -> int:
        model.zero_grad(set_to_none=False)
        with torch.autocast(device, torch.bfloat16), region():
            loss = model(inputs, targets, run=run, run_loss=run_loss)
        held = read()
        loss.backward()
        return held

    for name, way in ways.items():
        step(*way)
        found[name] = {}
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found[name]["held"] = step(*way, torch.cuda.memory_allocated) - before
            found[name]["peak"] = torch.cuda.max_memory_allocated() - before
    for name, times in take_turns(
        {name: functools.partial(step, *way) for name, way in ways.items()}, device, 2 if quick else 8, 0
    ).items():
        found[name]["us"] = times
    return found


def main() -> None:
    options = arguments("gpu", __doc__, devices=("cuda", "cpu"))
    device, quick = options.device, options.quick
    elements = 2**13 if quick else 2**26
    rounds, seconds = (2, 0.0) if quick else (20, 0.25)
    results: list[dict[str, Any]] = []
    print(f"{'case':62} {'way':26} {'device us':>11} {'host us':>10} {'GB/s':>7}")
    peers, outcome = available(device)
    content = {"benchmark": "gpu", "machine": machine(device), "unit": "us", "baselines": outcome}
    makes = (
        functools.partial(copy_case, device, elements),
        functools.partial(unscale_cases, device, elements, peers),
        functools.partial(clip_cases, device, elements, peers),
        functools.partial(storage_cases, device, elements),
        functools.partial(scaler_cases, device),
    )
    for make in makes:
        for name, nbytes, ways in make():
            timing = take_turns(ways, device, rounds, seconds)
            results.append({"case": name, "bytes": nbytes, "timing": timing})
            for way, times in timing.items():
                on_device, on_host = times.get("device", times["host"])["median"], times["host"]["median"]
                speed = f"{nbytes / on_device / 1e3:7.0f}" if nbytes else ""
                print(f"{name:62} {way:26} {on_device:11.1f} {on_host:10.1f} {speed}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        # Each time: what was measured is there even if time runs out.
        write({**content, "results": results, "training": {}}, options.json)
    steps = training(device, quick)
    for way, numbers in steps.items():
        times = numbers["us"].get("device", numbers["us"]["host"])["median"]
        memory = "".join(f", {what} {numbers[what] >> 20} MiB" for what in ("held", "peak") if what in numbers)
        print(f"training step, {way}: {times:.0f} us{memory}", flush=True)
    for library, what in outcome.items():
        print(f"{library}: {what}")
    write({**content, "results": results, "training": steps}, options.json)
    print(f"{len(results)} cases and {len(steps)} training steps")


if __name__ == "__main__":
    main()
