"""Which gradients hold NaN or infinity."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OverflowedParameter(NamedTuple):
    """A parameter whose gradient holds NaN or infinity."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    """Elements of the gradient; of a sparse gradient, its stored values."""
    nan: int
    """How many of them are NaN."""
    inf: int
    """How many of them are +inf or -inf."""


def nonfinite(named_grads: list[tuple[str, Tensor]]) -> list[OverflowedParameter]:
    counts: list[Tensor] = []
    values = []
    with torch.no_grad():
        for name, grad in named_grads:
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            if local.is_sparse:
                local = local.coalesce().values()
            values.append((name, grad, local))
            counts.append(torch.stack([local.isnan().sum(), local.isinf().sum()]))
        # One sync a device rather than one a parameter.
        by_device: dict[torch.device, list[int]] = {}
        for i, count in enumerate(counts):
            by_device.setdefault(count.device, []).append(i)
        host = [[0, 0]] * len(counts)
        for indices in by_device.values():
            for i, row in zip(indices, torch.stack([counts[i] for i in indices]).tolist(), strict=True):
                host[i] = row
    return [
        OverflowedParameter(name, tuple(grad.shape), grad.dtype, local.numel(), nan, inf)
        for (name, grad, local), (nan, inf) in zip(values, host, strict=True)
        if nan or inf
    ]
