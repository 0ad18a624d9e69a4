"""What a real step takes, on any device, and checks of estimates and plans against it: for a CPU and for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from memory_models import allocated_peak, make, saved_bytes, storage_bytes
from torch import Tensor, nn

from fastamp.memory import MemoryReport, Plan, Planner, estimate

_AUTOCAST = {"bf16-amp": torch.bfloat16, "fp16-amp": torch.float16}


def close(estimated: int, real: int, share: float = 0.1) -> None:
    assert abs(estimated - real) <= share * real, f"estimated {estimated:,}, measured {real:,}"


class Measured:
    """A training loop written by hand, without fastamp.

    saved: bytes that autograd keeps of a forward pass.    peak(): of a step whose optimizer states exist, parameters
    and states included.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        loss: Callable[[Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        precision: str | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.model, self.inputs, self.loss, self.optimizer = model, inputs, loss, optimizer
        self.precision, self.micro_batches = precision, micro_batches
        self.step()

    def forward(self) -> tuple[Tensor, Tensor]:
        kind, dtype = self.inputs.device.type, _AUTOCAST.get(self.precision or "")
        with torch.autocast(kind, dtype=dtype) if dtype is not None else contextlib.nullcontext():
            output = self.model(self.inputs)
            return output, self.loss(output)

    def step(self) -> None:
        for _ in range(self.micro_batches):
            output, value = self.forward()
            value.backward()
            del output, value
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def saved(self) -> int:
        return saved_bytes(self.forward, (*self.model.parameters(), *self.model.buffers(), self.inputs))

    def peak(self) -> int:
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        own = [t for t in states if t.device == self.inputs.device]  # a step's counter may be on the host
        standing = storage_bytes(*self.model.parameters(), *self.model.buffers(), self.inputs, *own)
        return standing + allocated_peak(self.step, self.inputs.device.type)


def check_estimate(
    kind: str, device: str = "cpu", prepare: Callable[[nn.Module], object] | None = None, **settings: Any
) -> MemoryReport:
    """An estimate of a step has the saved bytes and the peak of a real one. `prepare` changes the model before."""
    model, inputs, loss = make(kind, device)
    if prepare is not None:
        prepare(model)
    report = estimate(model, inputs, loss=loss, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    real = Measured(model, inputs, loss, optimizer, settings.get("precision"), settings.get("accumulation", 1))
    close(report.activations, real.saved)
    close(report.peak.bytes, real.peak())
    return report


def check_plan(kind: str, options: Sequence[str], device: str = "cpu", precision: str | None = None) -> Plan:
    """A plan that is applied has the peak that it predicted, and its undoing has the peak of before."""
    model, inputs, loss = make(kind, device)
    planner = Planner(
        model, inputs, loss=loss, optimizer="sgd", micro_batches=False, options=options, precision=precision, margin=0
    )
    keep, other = (planner._peak(1, dict.fromkeys(planner.blocks, option)) for option in (options[0], options[-1]))
    assert other < keep
    found = planner.plan((keep + other) // 2)
    assert set(found.treatments.values()) - {"keep"}
    real = Measured(model, inputs, loss, torch.optim.SGD(model.parameters(), 1e-4), precision)
    plain = real.peak()
    close(keep, plain)
    found.apply(model)
    treated = real.peak()
    close(found.predicted_peak, treated)
    assert treated < plain
    found.undo()
    close(real.peak(), plain, 0.01)
    return found
