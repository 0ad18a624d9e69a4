"""Activation memory and step time of one training step: python benchmarks/bench_activation_storage.py --threads 1

A 12-layer GPT (width 256, 4 sequences of 256, float32, dropout 0.1), forward and backward, with what backward needs
kept in several ways. For each: the bytes that are kept between forward and backward besides the parameters, each
memory counted once; the peak of the process's memory over what it had before the step (Linux only); the time of the
step over plain autograd's, the two taking turns, as the median of the rounds' ratios; of the step, the share that is
spent in saved-tensor hooks, which varies less; and the distance of all gradients from plain autograd's, relative to
their norm. The checkpoints cover every block, and the head with the loss.

Then the error of coding only what checkpoints of blocks keep, on a smaller model that was trained 120 steps; the same
step under float16 autocast; and batches where storage helps little.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from _gpt import GPT, batch, call, in_turn, text
from _harness import arguments, machine, ratio, time_interleaved, write
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fastamp.checkpointing import checkpoint, checkpoint_stack
from fastamp.store import store_activations

MIB = 2**20
MIN_BYTES = 4096

torchs_checkpoint = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)


# --- ways to keep what backward needs: each a region that yields a function that says how many bytes it holds


class Counted:
    """The memories of tensors, each counted once."""

    def __init__(self) -> None:
        self._memories: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._memories.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def __call__(self) -> int:
        return sum(nbytes for reference, nbytes in self._memories.values() if not reference.expired())


def is_parameter(tensor: Tensor) -> bool:
    root = tensor if tensor._base is None else tensor._base
    return isinstance(root, torch.nn.Parameter)


@contextlib.contextmanager
def hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[Counted]:
    """Hooks that leave parameters alone and count the tensors they make of the others."""
    counted = Counted()

    def count(tensor: Tensor) -> Any:
        if is_parameter(tensor):
            return tensor
        packed = pack(tensor)
        for part in packed if isinstance(packed, tuple) else (packed,):
            if isinstance(part, Tensor):
                counted.add(part)
        return packed

    with saved_tensors_hooks(count, unpack):
        yield counted


@contextlib.contextmanager
def plain() -> Iterator[None]:
    yield None


def counting() -> contextlib.AbstractContextManager[Counted]:
    """Plain autograd, and checkpoints, with what they keep counted."""
    return hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def is_activation(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_leaf and tensor.nbytes >= MIN_BYTES


def torch_bf16() -> contextlib.AbstractContextManager[Counted]:
    """The hooks that one would write: a cast."""

    def pack(tensor: Tensor) -> Any:
        return (tensor.bfloat16(), tensor.dtype) if is_activation(tensor) else tensor.detach()

    return hooks(pack, lambda packed: packed[0].to(packed[1]) if isinstance(packed, tuple) else packed)


def torch_int8() -> contextlib.AbstractContextManager[Counted]:
    """The hooks that one would write: blocks of 128 by torch's operators."""

    def pack(tensor: Tensor) -> Any:
        if not is_activation(tensor) or tensor.numel() % 128:
            return tensor.detach()
        blocks = tensor.detach().reshape(-1, 128)
        scale = blocks.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(127)
        return (blocks / scale).round_().to(torch.int8), scale, tensor.shape

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, tuple):
            return packed
        codes, scale, shape = packed
        return (codes * scale).view(shape)

    return hooks(pack, unpack)


@contextlib.contextmanager
def on_cpu() -> Iterator[Callable[[], int]]:
    held = 0
    context = save_on_cpu()
    pack = context.pack_hook

    def count(tensor: Tensor) -> Any:
        nonlocal held
        held += tensor.nbytes
        return pack(tensor)

    context.pack_hook = count
    with context:
        yield lambda: held


@contextlib.contextmanager
def store(format: str) -> Iterator[Callable[[], int]]:
    with store_activations(format) as stats:
        yield lambda: stats.held


# --- one step


Region = Callable[[], contextlib.AbstractContextManager[Any]]


class Way:
    """region: around the forward.  run, run_loss: as for GPT.  counted: region, with a count of what is kept."""

    def __init__(self, region: Region, counted: Region | None = None, run: Any = in_turn, run_loss: Any = call) -> None:
        self.region, self.counted = region, counted or region
        self.run, self.run_loss = run, run_loss


def stack(storage: str, model_blocks: Any, x: Tensor) -> Tensor:
    return checkpoint_stack(model_blocks, x, storage=storage)


def each(checkpoint: Any, blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x)
    return x


def checkpointed(how: Any, loss: Any | None = None) -> Way:
    """how: a checkpoint function for each block, or the name of a difference format."""
    run = functools.partial(stack, how) if isinstance(how, str) else functools.partial(each, how)
    return Way(plain, counting, run, loss or how)


int8_checkpoint = functools.partial(checkpoint, storage="int8")

WAYS = {
    "plain autograd": Way(plain, counting),
    'store_activations("exact")': Way(functools.partial(store, "exact")),
    'store_activations("bf16")': Way(functools.partial(store, "bf16")),
    'store_activations("int8")': Way(functools.partial(store, "int8")),
    'store_activations("fp8_e4m3")': Way(functools.partial(store, "fp8_e4m3")),
    'store_activations("int4")': Way(functools.partial(store, "int4")),
    "hooks in torch, bf16": Way(torch_bf16),
    "hooks in torch, int8": Way(torch_int8),
    "save_on_cpu": Way(on_cpu),
    "torch checkpoint": checkpointed(torchs_checkpoint),
    'checkpoint(storage="int8")': checkpointed(int8_checkpoint),
    'torch checkpoint in store_activations("int8")': Way(
        functools.partial(store, "int8"), None, functools.partial(each, torchs_checkpoint), torchs_checkpoint
    ),
    'checkpoint_stack(storage="delta-int8")': checkpointed("delta-int8", int8_checkpoint),
}


class Step:
    """A forward and a backward, with the same dropout each time."""

    def __init__(self, layers: int, batch_size: int = 4, seq: int = 256, dropout: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers, 256, 256, dropout)
        self.data = batch(text(), batch_size, seq, torch.Generator().manual_seed(0))

    def __call__(self, way: Way, counted: bool = False) -> int | None:
        """Bytes kept between forward and backward, if counted."""
        torch.manual_seed(1)
        self.model.zero_grad()
        with (way.counted if counted else way.region)() as held:
            loss = self.model(*self.data, run=way.run, run_loss=way.run_loss)
        kept = held() if counted else None
        loss.backward()
        return kept

    def gradients(self) -> Tensor:
        return torch.cat([parameter.grad.flatten().double() for parameter in self.model.parameters()])


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def measure(layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    step = Step(layers)
    cases: dict[str, dict[str, Any]] = {}
    expected = None
    for name, way in WAYS.items():
        kept = step(way, counted=True)
        gradients = step.gradients()
        expected = gradients if expected is None else expected
        cases[name] = {"saved": kept, "error": relative(gradients, expected)}
    for name, way in WAYS.items():
        cases[name] |= compared(step, name, "plain autograd", rounds)
        if way.run is in_turn and name != "plain autograd":
            cases[name]["hooks"] = hooks_share(step, way, rounds)
    ours = cases['checkpoint(storage="int8")']
    ours["time of torch checkpoint's"] = compared(step, 'checkpoint(storage="int8")', "torch checkpoint", rounds)[
        "time"
    ]
    for name, peak in peaks(layers).items():
        cases[name]["peak"] = peak
    return cases


def compared(step: Step, name: str, other: str, rounds: int) -> dict[str, Any]:
    """The step's times, and how many times the other way's they are."""
    pair = {way: functools.partial(step, WAYS[way]) for way in (other, name)}
    timing = time_interleaved(pair, rounds=rounds, min_seconds=0, max_seconds=120, warmup=1)
    return {"us": timing[name], "time": ratio(timing, name, other, 3)}


def hooks_share(step: Step, way: Way, rounds: int) -> float:
    """The share of the step's time that is spent in saved-tensor hooks."""
    spent = 0.0
    make = saved_tensors_hooks.__init__

    def timed(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            nonlocal spent
            begin = time.perf_counter()
            result = hook(argument)
            spent += time.perf_counter() - begin
            return result

        return run

    def make_timed(self: Any, pack: Any, unpack: Any) -> None:
        make(self, timed(pack), timed(unpack))

    shares = []
    with unittest.mock.patch.object(saved_tensors_hooks, "__init__", make_timed):
        for _ in range(rounds):
            spent, begin = 0.0, time.perf_counter()
            step(way)
            shares.append(spent / (time.perf_counter() - begin))
    return statistics.median(shares)


# --- peak memory, in a process of its own


def peaks(layers: int) -> dict[str, int]:
    if sys.platform != "linux":
        return {}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_peaks, (layers, torch.get_num_threads()))


def measure_peaks(layers: int, threads: int) -> dict[str, int]:
    """By way, how far the process's resident memory rose during a step, and above what it was before."""
    torch.set_num_threads(threads)
    # Every large block is mapped by itself and unmapped when it is freed: what is resident is what is in use.
    libc = ctypes.CDLL("libc.so.6")
    mmap_threshold = -3
    libc.mallopt(mmap_threshold, 64 * 1024)
    step = Step(layers)
    step(WAYS["plain autograd"])  # what is made once
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not part of what is compared
    found = {}
    for name, way in WAYS.items():
        step_in_place(step, way)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        step_in_place(step, way)
        found[name] = status("VmHWM") - before
    return found


def step_in_place(step: Step, way: Way) -> None:
    zero_grad = step.model.zero_grad
    step.model.zero_grad = functools.partial(zero_grad, set_to_none=False)  # type: ignore[method-assign]
    step(way)
    step.model.zero_grad = zero_grad  # type: ignore[method-assign]


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


# --- the error of coded block boundaries on a trained model


def trained_errors(steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = GPT(layers=6, width=128, seq=128, dropout=0.0)
    data, generator = text(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(*batch(data, 8, 128, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    inputs = batch(data, 8, 128, generator)

    def gradients(run: Any) -> Tensor:
        model.zero_grad()
        model(*inputs, run=run).backward()
        return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])

    expected = gradients(in_turn)
    errors = {}
    for format in ("exact", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4"):
        errors[format] = relative(
            gradients(functools.partial(each, functools.partial(checkpoint, storage=format))), expected
        )
    for format in ("delta-int8", "delta-int4"):
        errors[format] = relative(gradients(functools.partial(stack, format)), expected)
    return errors


# --- under autocast


def under_autocast(layers: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Bytes kept and gradient errors where many activations have 16 bits already. CPUs are slow at it: no times."""
    step = Step(layers)
    found: dict[str, dict[str, Any]] = {}
    expected = None
    for name in ("plain autograd", 'store_activations("exact")', 'store_activations("int8")'):
        with torch.autocast("cpu", dtype=dtype):
            kept = step(WAYS[name], counted=True)
        gradients = step.gradients()
        expected = gradients if expected is None else expected
        found[name] = {"saved": kept, "error": relative(gradients, expected)}
    return found


# --- where it helps little


def small_gains(layers: int) -> dict[str, dict[str, int]]:
    found = {}
    for name, step in {
        "no dropout": Step(layers, dropout=0.0),
        "one sequence of 16 tokens": Step(layers, batch_size=1, seq=16),
    }.items():
        names = ("plain autograd", 'store_activations("exact")', 'store_activations("int8")')
        found[name] = {way: step(WAYS[way], counted=True) for way in names}
        found[name]["parameters"] = sum(parameter.nbytes for parameter in step.model.parameters())
    return found


# --- the report


def judged(cases: dict[str, dict[str, Any]], errors: dict[str, float]) -> list[dict[str, Any]]:
    """Each target, what was measured, and whether it is met. All are upper bounds."""

    def bytes_of(name: str, other: str) -> float:
        return cases[name]["saved"] / cases[other]["saved"]

    def stored(format: str) -> str:
        return f'store_activations("{format}")'

    plain_name, torch_name, ours = "plain autograd", "torch checkpoint", 'checkpoint(storage="int8")'
    targets = [
        ("exact store: bytes of plain's", bytes_of(stored("exact"), plain_name), 0.90),
        ("exact store: gradient error", cases[stored("exact")]["error"], 0.0),
        ("int8 store: bytes of plain's", bytes_of(stored("int8"), plain_name), 0.29),
        ("int8 store: gradient error", cases[stored("int8")]["error"], 1e-2),
        ("int8 store: time of plain's", cases[stored("int8")]["time"], 1.10),
        ("bf16 store: time of plain's", cases[stored("bf16")]["time"], 1.03),
        ("int8 checkpoint: bytes of torch checkpoint's", bytes_of(ours, torch_name), 0.27),
        ("int8 checkpoint: time of torch checkpoint's", cases[ours]["time of torch checkpoint's"], 1.03),
        ("trained, int8 boundaries: gradient error", errors["int8"], 3e-3),
        ("trained, delta-int8 boundaries: gradient error", errors["delta-int8"], 1e-3),
        ("trained, delta-int4 boundaries: gradient error", errors["delta-int4"], 1.5e-2),
    ]
    return [{"what": what, "value": value, "target": target, "met": value <= target} for what, value, target in targets]


COLUMNS = ["kept by", "saved MiB", "of plain's", "peak MiB", "step time", "of it in hooks", "gradient error"]


def table(
    cases: dict[str, dict[str, Any]], autocast: dict[str, dict[str, Any]], small: dict[str, dict[str, int]]
) -> list[list[str]]:
    base = cases["plain autograd"]
    rows = []
    for name, case in cases.items():
        peak = f"{case['peak'] / MIB:.0f}" if "peak" in case else ""
        hooks = f"{case['hooks']:.1%}" if "hooks" in case else ""
        row = [name, *bytes_columns(case, base), peak, f"{case['time']:.2f}x", hooks, error_column(case)]
        rows.append(row)
    for name, case in autocast.items():
        sizes = bytes_columns(case, autocast["plain autograd"])
        rows.append([f"float16 autocast: {name}", *sizes, "", "", "", error_column(case)])
    for batch_name, sizes in small.items():
        parameters = sizes["parameters"] / MIB
        for name in ("exact", "int8"):
            bytes_ = sizes[f'store_activations("{name}")']
            label = f'{batch_name}: store_activations("{name}")'
            if sizes["plain autograd"] < sizes["parameters"]:
                label += f" (beside {parameters:.0f} MiB of parameters)"
            rows.append([label, f"{bytes_ / MIB:.1f}", f"{bytes_ / sizes['plain autograd']:.3f}", "", "", "", ""])
    return rows


def bytes_columns(case: dict[str, Any], base: dict[str, Any]) -> list[str]:
    return [f"{case['saved'] / MIB:.1f}", f"{case['saved'] / base['saved']:.3f}"]


def error_column(case: dict[str, Any]) -> str:
    return f"{case['error']:.1e}" if case["error"] else "0"


def main() -> None:
    options = arguments("activation_storage", __doc__)
    layers, rounds, steps = (1, 2, 3) if options.quick else (12, 11, 120)
    cases = measure(layers, rounds)
    errors = trained_errors(steps)
    autocast = under_autocast(layers, torch.float16)
    small = small_gains(layers)
    targets, rows = judged(cases, errors), table(cases, autocast, small)
    print("  ".join(COLUMNS))
    for row in rows:
        print(f"{row[0]:72} {'  '.join(f'{value:>8}' for value in row[1:])}")
    print(f"\ngradient error of block boundaries alone, {steps} steps trained:")
    print("  ".join(f"{format} {error:.1e}" for format, error in errors.items()))
    print()
    for target in targets:
        verdict = "met" if target["met"] else "missed"
        print(f"{target['what']:52} {target['value']:10.3g}  (at most {target['target']:g}: {verdict})")
    content = {
        "benchmark": "activation_storage",
        "machine": machine(),
        "model": {"layers": layers, "width": 256, "batch": 4, "seq": 256, "dropout": 0.1, "dtype": "float32"},
        "columns": COLUMNS,
        "rows": rows,
        "cases": cases,
        "trained_errors": errors,
        "autocast": autocast,
        "small_gains": small,
        "targets": targets,
    }
    write(content, options.json)


if __name__ == "__main__":
    main()
