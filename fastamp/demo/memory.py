"""What one forward and backward pass of a recipe keeps in memory, and what storage costs in accuracy."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fastamp.demo.text import Batch
from fastamp.demo.training import Job, recipes


def measure(options: argparse.Namespace, index: int) -> dict[str, int]:
    """The bytes that recipe ``index`` takes for one micro-batch, measured in a process of its own.

    ``saved_bytes`` is what a forward pass leaves allocated for the backward pass, parameters aside, as the
    allocator counts it: autograd's saved tensors, what codecs made of them, copies of weights by autocast.
    (A counter in saved-tensor hooks would not see what hooks inside of it store.) ``peak_bytes`` is the most
    that the allocator has handed out at one time, above what it had before the pass, gradients included.
    """
    # Without the variable, which is read as torch is imported, Kineto writes a line at each start of a profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_here, options, index).result()


def measure_here(options: argparse.Namespace, index: int) -> dict[str, int]:
    torch.set_num_threads(options.threads)
    job = Job(recipes(options)[index], options)
    generator = torch.Generator().manual_seed(options.seed)
    shape = (2, options.batch, options.seq)
    inputs, targets = torch.randint(256, shape, generator=generator).to(job.device)
    job.loss(inputs[:1, :8], targets[:1, :8]).backward()  # loads kernels and fills pools
    job.optimizer.zero_grad()
    on_device = _measure_cuda if job.device.type == "cuda" else _measure_cpu
    return on_device(job, inputs, targets)


def _measure_cuda(job: Job, inputs: Tensor, targets: Tensor) -> dict[str, int]:
    idle = torch.cuda.memory_allocated(job.device)
    torch.cuda.reset_peak_memory_stats(job.device)
    loss = job.loss(inputs, targets)
    saved = torch.cuda.memory_allocated(job.device) - idle
    loss.backward()
    return {"saved_bytes": saved, "peak_bytes": torch.cuda.max_memory_allocated(job.device) - idle}


def _measure_cpu(job: Job, inputs: Tensor, targets: Tensor) -> dict[str, int]:
    # The process's resident memory would tell less: what it keeps of memory freed before hides part of the peak.
    with _profiler() as forward:
        loss = job.loss(inputs, targets)
    with _profiler() as backward:
        loss.backward()
    saved, peak = _total_and_peak(forward)
    _, backward_peak = _total_and_peak(backward)
    return {"saved_bytes": saved, "peak_bytes": max(peak, saved + backward_peak)}


def _profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _total_and_peak(profiler: profile) -> tuple[int, int]:
    """Bytes that are allocated and not freed while profiled, and the most at one time."""
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    bytes_after = list(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
    return bytes_after[-1], max(bytes_after)


def gradient_error(job: Job, exact: Job, batch: Batch) -> float:
    """Relative L2 error of the job's gradient against the exact job's, at the exact job's weights.

    The job's own weights are overwritten.
    """
    weights = exact.model.state_dict()
    mine, true = _gradient(job, weights, batch), _gradient(exact, weights, batch)
    return float((mine - true).norm() / true.norm())


def _gradient(job: Job, weights: dict[str, Any], batch: Batch) -> Tensor:
    job.model.load_state_dict(weights)
    torch.manual_seed(0)  # dropout: the same masks for both
    (job.loss(*batch) * 256.0).backward()  # scaled as in training, so that fp16 gradients do not underflow
    flat = torch.cat([p.grad.double().flatten() for p in job.model.parameters() if p.grad is not None])
    job.optimizer.zero_grad()
    return flat
