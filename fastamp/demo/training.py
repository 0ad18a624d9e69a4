"""The recipes that are compared, and the jobs that train by them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastamp.demo.model import (
    GPT,
    BlockRunner,
    checkpoint_with_fastamp,
    checkpoint_with_torch,
    run_plainly,
)
from fastamp.demo.text import Batch, Text, batches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PHASES = ("unscale_", "clip", "step", "update")


def training_step(job: Job, micro_batches: Sequence[Batch]) -> Tensor:
    """One optimizer step with gradient accumulation and clipping; returns the mean loss in nats per sequence.

    examples/train_gpt.py has the same step with nothing hidden behind a method.
    """
    losses = []
    for inputs, targets in micro_batches:
        loss = job.loss(inputs, targets)
        job.scaler.scale(loss).backward()
        losses.append(loss.detach())
    job.clip()
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad()
    return torch.stack(losses).sum()


Step = Callable[["Job", Sequence[Batch]], Tensor]


@dataclass(frozen=True)
class Recipe:
    """One way to train: which scaler, how the blocks are called, how activations are stored."""

    name: str
    scaler: Callable[..., torch.amp.GradScaler]
    run_blocks: BlockRunner = run_plainly
    store: Callable[[], AbstractContextManager] = contextlib.nullcontext
    fused_clip: bool = False
    exact: bool = True  # must give the bits that the first recipe gives


def recipes(options: argparse.Namespace) -> list[Recipe]:
    """Stock torch first, then fastamp in the same lines, then what the options ask for."""
    import fastamp

    stock = Recipe("torch", torch.amp.GradScaler)
    drop_in = Recipe("fastamp", fastamp.GradScaler)
    # Sums the squares in another order than torch, so that the norm's last bits differ.
    own_clip = Recipe("fastamp, own clip", fastamp.GradScaler, fused_clip=True, exact=False)
    if not (options.checkpoint or options.store):
        return [stock, drop_in, own_clip]
    found = [stock, drop_in]
    if options.checkpoint:
        found = [
            stock,
            Recipe("torch checkpoint", torch.amp.GradScaler, checkpoint_with_torch),
            Recipe("fastamp checkpoint", fastamp.GradScaler, checkpoint_with_fastamp("exact")),
        ]
    if options.storage or options.store:
        storage, store = options.storage or "exact", options.store
        parts = [f"{storage} checkpoint"] * options.checkpoint + [f"store {store}"] * bool(store)
        found.append(
            Recipe(
                ", ".join(parts),
                fastamp.GradScaler,
                checkpoint_with_fastamp(storage) if options.checkpoint else run_plainly,
                (lambda: fastamp.store_activations(store)) if store else contextlib.nullcontext,
                exact={storage, store or "exact"} == {"exact"},
            )
        )
    return found


class Job:
    """One recipe's model, optimizer and scaler, and the record of its run."""

    def __init__(self, recipe: Recipe, options: argparse.Namespace):
        torch.manual_seed(options.seed)
        self.recipe, self.store, self.fused_clip = recipe, recipe.store, recipe.fused_clip
        self.accumulation, self.max_norm, self.seq = options.accumulation, options.max_norm, options.seq
        self.device, self.dtype = torch.device(options.device), DTYPES[options.dtype]
        model = GPT(options.layers, options.width, options.seq, options.dropout, recipe.run_blocks)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        scaler = recipe.scaler(self.device.type, init_scale=options.init_scale, growth_interval=options.growth_interval)
        self.scaler = TimedScaler(scaler, self.optimizer, self.device)
        self.losses: list[Tensor] = []  # nats per byte
        self.scales: list[float] = []  # before each step
        self.seconds: list[float] = []

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This micro-batch's share of the step's mean loss, in nats per sequence."""
        with self.autocast(), self.store():
            return self.model(inputs, targets) / self.accumulation

    def clip(self) -> None:
        """Unscale and clip: torch's two calls, or fastamp's one that reads the gradients once for both."""
        if self.fused_clip:
            self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def run(self, step: Step, micro_batches: Sequence[Batch], seed: int) -> None:
        """One optimizer step, recorded."""
        torch.manual_seed(seed)  # dropout: the same masks for every recipe
        self.scales.append(self.scaler.get_scale())
        begin = self.scaler.now()
        loss = step(self, micro_batches)
        self.seconds.append(self.scaler.now() - begin)
        self.scaler.finish_step()
        self.losses.append(loss / self.seq)

    @torch.no_grad()
    def evaluate(self, held_out: Sequence[Batch]) -> float:
        """Mean loss in nats per byte."""
        self.model.eval()
        with self.autocast():
            losses = [self.model(inputs, targets) / self.seq for inputs, targets in held_out]
        self.model.train()
        return float(torch.stack(losses).double().mean())

    @property
    def skipped(self) -> list[int]:
        """The steps that overflowed: those after which the scale is smaller."""
        after = [*self.scales[1:], self.scaler.get_scale()]
        return [step for step, (old, new) in enumerate(zip(self.scales, after, strict=True)) if new < old]

    def differences(self, other: Job) -> list[str]:
        """What is not bit-identical to the other job's; empty if everything is."""
        mine, theirs = self._bits(), other._bits()
        return [
            name
            for name in mine
            if len(mine[name]) != len(theirs[name])
            or not all(torch.equal(a, b) for a, b in zip(mine[name], theirs[name], strict=True))
        ]

    def _bits(self) -> dict[str, list[Tensor]]:
        moments = self.optimizer.state_dict()["state"]
        return {
            "losses": [torch.stack(self.losses)],
            "scales": [torch.tensor([*self.scales, self.scaler.get_scale()], dtype=torch.float64)],
            "growth tracker": [torch.tensor(self.scaler.state_dict()["_growth_tracker"])],
            "weights": list(self.model.parameters()),
            "optimizer state": [moments[i][key] for i in sorted(moments) for key in sorted(moments[i])],
        }


class TimedScaler:
    """Stands in for a scaler and times its calls by phase; all else is the scaler's own.

    A phase lasts from call to return. ``clip`` is fastamp's own clipping call, or what runs between
    ``unscale_`` and ``step``. What the optimizer itself does within ``step`` is taken off. On CUDA every
    reading of the clock waits for the device.
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device):
        self._scaler, self._device = scaler, device
        self._step: dict[str, float] = defaultdict(float)
        self._last_return: float | None = None
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        optimizer.register_step_pre_hook(lambda *_: self._add("step", self.now()))
        optimizer.register_step_post_hook(lambda *_: self._add("step", -self.now()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._timed("unscale_", self._scaler.unscale_, optimizer)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._timed("clip", self._scaler.clip_grad_norm_, *args, **kwargs)  # type: ignore[attr-defined]

    def step(self, optimizer: torch.optim.Optimizer) -> float | None:
        if self._last_return is not None:
            self._add("clip", self.now() - self._last_return)
        return self._timed("step", self._scaler.step, optimizer)

    def update(self) -> None:
        self._timed("update", self._scaler.update)

    def now(self) -> float:
        """Seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def finish_step(self) -> None:
        for phase in PHASES:
            self.seconds[phase].append(self._step[phase])
        self._step.clear()
        self._last_return = None

    def median_us(self) -> dict[str, float]:
        """Median microseconds per step of each phase, and the sum of these as ``total``."""
        found = {phase: statistics.median(self.seconds[phase]) * 1e6 for phase in PHASES}
        return {**found, "total": sum(found.values())}

    def _add(self, phase: str, seconds: float) -> None:
        self._step[phase] += seconds

    def _timed(self, phase: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
        begin = self.now()
        result = call(*args, **kwargs)
        self._last_return = self.now()
        self._add(phase, self._last_return - begin)
        return result


def train(jobs: Sequence[Job], text: Text, options: argparse.Namespace, step: Step = training_step) -> None:
    """Trains all jobs on the same batches. They take turns, one optimizer step each, so that whatever else
    the machine does meanwhile slows them alike and their times can be compared."""
    stream = batches(text.train, options.steps * options.accumulation, options)
    for index in progress(options.steps, jobs[0]):
        micro_batches = [next(stream) for _ in range(options.accumulation)]
        first = index % len(jobs)  # rotates, so that no job always finds the batches cold
        for job in [*jobs[first:], *jobs[:first]]:
            job.run(step, micro_batches, seed=options.seed + index)


def progress(steps: int, job: Job) -> Iterator[int]:
    """Yields the steps and shows how far they are: tqdm's bar on a terminal, else ten lines in all."""

    def status() -> str:
        loss, scale = float(job.losses[-1]), math.log2(job.scales[-1])
        return f"loss {loss:.2f} nats/byte, scale 2^{scale:.0f}, {len(job.skipped)} steps skipped"

    with contextlib.suppress(ImportError):
        from tqdm import tqdm  # type: ignore[import-untyped]

        if sys.stderr.isatty():
            with tqdm(range(steps), desc="training", unit="step", dynamic_ncols=True) as bar:
                for index in bar:
                    yield index
                    bar.set_postfix_str(status(), refresh=False)
            return
    every = max(1, steps // 10)
    for index in range(steps):
        yield index
        if (index + 1) % every == 0:
            print(f"step {index + 1:{len(str(steps))}d}/{steps}: {status()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def deterministic(options: argparse.Namespace) -> Iterator[None]:
    """Sets the number of threads and, on CUDA, kernels that give the same bits on every run, so that only recipes
    can make a difference."""
    threads = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(options.threads)
    if options.device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.set_num_threads(threads)
