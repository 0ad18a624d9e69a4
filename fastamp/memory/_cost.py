"""How long an operator takes: a roofline of arithmetic and memory traffic, plus what calling it costs.

seconds = max(floating-point operations / rate, bytes read and written / bandwidth) + overhead of one call

Operations are counted by `torch.utils.flop_counter`. The rates are of this machine's CPU, measured once a
process, or for CUDA what the GPU at hand can do by torch's own tables, or without one assumed round numbers.
Times are for weighing plans against each other: on CPUs a step was seen to take up to three times as long, and the
ratio of two plans to be right within a fifth. `plan(times="measured")` takes them from real steps instead.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

_VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute expand detach alias slice select unsqueeze squeeze "
    "as_strided split split_with_sizes unbind lift_fresh empty empty_like empty_strided new_empty new_empty_strided "
    "_reshape_alias unfold diagonal chunk numpy_T real".split()
)

_transfer: ContextVar[bool] = ContextVar("transfer", default=False)


@contextlib.contextmanager
def transfer() -> Iterator[None]:
    """Operators in here move bytes between host and device, and cost what that takes."""
    token = _transfer.set(True)
    try:
        yield
    finally:
        _transfer.reset(token)


@dataclass(frozen=True)
class Rates:
    """What a device can do.

    flops, half_flops: operations a second of a matrix product, in float32 and in float16 or bfloat16.
    bandwidth: bytes a second of its memory.    host_bandwidth: bytes a second between host and device.
    call: seconds that an operator costs whatever it does.
    """

    flops: float
    half_flops: float
    bandwidth: float
    call: float
    host_bandwidth: float
    source: str

    def cost(self, func: Any, arguments: Any, result: Any) -> float:
        name = func._schema.name.partition("::")[2]
        if name in _VIEWS:
            return 0.0
        tensors = [t for t in pytree.tree_leaves((arguments, result)) if isinstance(t, Tensor)]
        traffic = sum(t.numel() * t.element_size() for t in tensors)
        if _transfer.get():
            return traffic / 2 / self.host_bandwidth + self.call
        arithmetic = 0.0
        counter = flop_registry.get(func._overloadpacket)
        if counter is not None:
            args, kwargs = arguments
            half = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)
            rate = self.half_flops if half else self.flops
            arithmetic = counter(*args, **(kwargs or {}), out_val=result) / rate
        return max(arithmetic, traffic / self.bandwidth) + self.call


def rates_of(device_type: str) -> Rates:
    return _cpu_rates() if device_type == "cpu" else _cuda_rates()


@functools.cache
def _cpu_rates() -> Rates:
    try:
        return _measured_cpu_rates()
    except (MemoryError, RuntimeError):  # asked because memory ran out
        return Rates(5e10, 2e10, 1e10, 2e-6, 1e10, "assumed: 50 and 20 GFLOP/s, 10 GB/s")


def _measured_cpu_rates() -> Rates:
    with _disable_current_modes(), torch.no_grad():
        a, b = torch.randn(512, 512), torch.randn(512, 512)
        matrix = _seconds(lambda: a @ b, 5)
        big = torch.randn(1 << 22)
        copy = _seconds(lambda: big.clone(), 5)
        small = torch.ones(1)
        call = _seconds(lambda: small.add(small), 200)
        half = _seconds(lambda: a.bfloat16() @ b.bfloat16(), 3)
    bandwidth = 2 * big.nbytes / copy
    flops = 2 * 512**3
    return Rates(flops / matrix, flops / half, bandwidth, call, bandwidth, "measured on this CPU")


def clock(device_type: str) -> Callable[[], float]:
    """What to time steps with: processor time for a CPU with one thread, which other programs disturb less."""
    return time.process_time if device_type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _seconds(function: Any, repeats: int) -> float:
    function()
    now, times = clock("cpu"), []
    for _ in range(repeats):
        began = now()
        function()
        times.append(now() - began)
    return sorted(times)[len(times) // 2]


@functools.cache
def _cuda_rates() -> Rates:
    if torch.cuda.is_available():
        try:
            from torch._inductor.utils import get_device_tflops, get_gpu_dram_gbps

            full, half = (get_device_tflops(t) * 0.75e12 for t in (torch.float32, torch.float16))
            return Rates(full, half, get_gpu_dram_gbps() * 1e9, 5e-6, 2e10, "torch's tables for this GPU")
        except Exception:  # private to torch, and it needs Triton
            pass
    return Rates(5e13, 1e14, 1e12, 5e-6, 2e10, "assumed: 50 and 100 TFLOP/s, 1 TB/s, 20 GB/s to the host")
