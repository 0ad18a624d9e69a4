"""fastamp.GradScaler against torch.amp.GradScaler in one process, interleaved: what an iteration costs.

python benchmarks/bench_grad_scaler.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _harness import arguments, ratio, report, time_interleaved

import fastamp

SCALE = 65536.0


class Loop:
    """Parameters with gradients, an optimizer, a scaler."""

    def __init__(
        self,
        scaler: type[torch.amp.GradScaler],
        count: int,
        numel: int,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        max_norm: float,
    ) -> None:
        self.max_norm = max_norm
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(numel, generator=generator)) for _ in range(count)]
        for p in self.params:
            p.grad = torch.randn(numel, generator=generator)
        self.grads = [p.grad for p in self.params]
        self.scaled = [g * SCALE for g in self.grads]
        self.optimizer = optimizer(self.params)
        self.scaler = scaler("cpu", init_scale=SCALE, growth_interval=2**30)
        self.scaler.scale(torch.ones(()))

    def refill(self) -> None:
        """Unscaling in place round after round would leave subnormal numbers, which are slow, and then
        zeros."""
        torch._foreach_copy_(self.grads, self.scaled)

    def unscale_update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()

    def torch_clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.update()

    def function_clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        fastamp.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.update()

    def method_clip(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        self.scaler.update()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def torch_clip_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.step()

    def method_clip_step(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        self.step()

    def fold_clip_step(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, self.max_norm, fold=True)
        self.step()

    def optimizer_alone(self) -> None:
        self.optimizer.step()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4)


def main() -> None:
    options = arguments("grad_scaler", __doc__)
    rounds: dict[str, Any] = dict(rounds=5, min_seconds=0.0) if options.quick else dict(rounds=200, min_seconds=2.0)
    results: list[dict[str, Any]] = []

    def case(
        name: str,
        torch_function: str,
        ours: dict[str, str],
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        count: int = 1000,
        numel: int = 16,
        max_norm: float = 1e9,
        target: float | None = None,
        alone: bool = False,
    ) -> None:
        methods = {"torch": torch_function, **ours}
        if alone:
            methods["the optimizer alone"] = "optimizer_alone"
        loops = {}
        for label in methods:
            scaler = fastamp.GradScaler if label in ours else torch.amp.GradScaler
            loops[label] = Loop(scaler, count, numel, optimizer, max_norm)
        functions = {label: getattr(loops[label], method) for label, method in methods.items()}

        timing = time_interleaved(functions, setup=lambda name: loops[name].refill(), **rounds)
        result: dict[str, Any] = {"case": name, "timing": timing}
        result["ratios"] = {f"torch / {label}": ratio(timing, "torch", label) for label in ours}
        if target is not None:
            result["target"] = {f"torch / {next(iter(ours))}": target}
        results.append(result)

    small = "1,000 x 16"
    case(f"{small}: unscale_ + update", "unscale_update", {"fastamp": "unscale_update"}, target=20)
    for active, max_norm in (("inactive", 1e9), ("active", 1e-3)):
        case(
            f"{small}: unscale_ + clip ({active}) + update",
            "torch_clip",
            {"scaler.clip_grad_norm_": "method_clip", "fastamp.clip_grad_norm_": "function_clip"},
            max_norm=max_norm,
            target=15,
        )
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": sgd,
        "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-4, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    }
    for name, optimizer in optimizers.items():
        case(f"{small}: step + update, {name}", "step", {"fastamp": "step"}, optimizer, alone=True)
    case(
        f"{small}: clip + step + update, AdamW fused",
        "torch_clip_step",
        {"fastamp": "method_clip_step", "fastamp, folded": "fold_clip_step"},
        optimizers["AdamW fused"],
        max_norm=1e-3,
    )
    case("100 x 16: unscale_ + update", "unscale_update", {"fastamp": "unscale_update"}, count=100)
    case("1 x 16: unscale_ + update", "unscale_update", {"fastamp": "unscale_update"}, count=1)
    case(
        "100 x 65,536: unscale_ + update",
        "unscale_update",
        {"fastamp": "unscale_update"},
        count=100,
        numel=65536,
    )
    report("grad_scaler", results, options.json)


if __name__ == "__main__":
    main()
