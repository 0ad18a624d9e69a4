"""What follows a backward pass, for the benchmarks of the scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# All but 1, so that thousands of rounds of unscaling in place leave the gradients what they are. Multiplying by less
# would soon come down to subnormal numbers, which are slow, and to zeros.
SCALE = 1.0 + 2.0**-23


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


class ScalerLoop:
    """Parameters with gradients, an optimizer, a scaler of torch's or fastamp's kind. No clip is active."""

    def __init__(
        self,
        scaler: type[torch.amp.GradScaler],
        params: list[torch.nn.Parameter],
        device: str,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        scale: float = SCALE,
    ) -> None:
        self.params = params
        self.optimizer = optimizer(params)
        self.scaler: Any = scaler(device, init_scale=scale, growth_interval=2**30)
        self.scaler.scale(torch.ones((), device=device))

    def next_max_norm(self) -> float:
        return 1e9

    def unscale_update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()

    def torch_clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, self.next_max_norm())
        self.scaler.update()

    def method_clip(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, self.next_max_norm())
        self.scaler.update()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def torch_clip_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, self.next_max_norm())
        self.step()

    def method_clip_step(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, self.next_max_norm())
        self.step()

    def fold_clip_step(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, self.next_max_norm(), fold=True)
        self.step()
