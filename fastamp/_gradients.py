"""The gradients of an optimizer, gathered and sorted by device: the Python twin of ``fastamp._host``.

``GradientBuckets`` here and in ``_host`` have the same interface and give the same results;
``gradient_buckets`` makes the faster one that is there. An object is good for one pass: it holds the
gradients that were there when it was made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastamp import _library, ops

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def has_kernels(device: torch.device) -> bool:
    """Whether this build of fastamp has kernels for tensors on ``device``."""
    return device.type == "cpu" or (device.type == "cuda" and _library.has_cuda)


def _is_plain(grad: Tensor) -> bool:
    """True where kernels can read the tensor's memory. Everything else keeps torch's own path: subclasses
    (DTensor), sparse and nested layouts, quantized tensors, and devices that fastamp has no kernels for."""
    return (
        type(grad) in _PLAIN_TYPES
        and grad.layout is torch.strided
        and not grad.is_nested
        and not grad.is_quantized
        and has_kernels(grad.device)
    )


class GradientBuckets:
    """Every ``p.grad`` that is not None, of every parameter in every group, sorted by device.

    Args:
        param_groups: dicts with a list of parameters under ``"params"``, as ``optimizer.param_groups``.

    Attributes:
        devices: devices with kernels that hold gradients, in order of first appearance.
        other: gradients that need torch's own path.
        first_fp16: (group index, parameter index within the group) of the first float16 gradient, or None.
        count: gradients found, ``other`` included.

    Raises:
        AssertionError: a parameter is not a tensor.
        RuntimeError: a plain gradient is neither floating-point nor complex, or overlaps itself. Raised here,
            before anything is written.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        self._by_device: dict[torch.device, list[Tensor]] = {}
        self.other: list[Tensor] = []
        self.first_fp16: tuple[int, int] | None = None
        self.count = 0
        for group_index, group in enumerate(param_groups):
            for param_index, param in enumerate(group["params"]):
                if not isinstance(param, Tensor):
                    raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}")
                grad = param.grad
                if grad is None:
                    continue
                self.count += 1
                if self.first_fp16 is None and grad.dtype == torch.float16:
                    self.first_fp16 = (group_index, param_index)
                if _is_plain(grad):
                    self._by_device.setdefault(grad.device, []).append(grad)
                else:
                    self.other.append(grad)

    @property
    def devices(self) -> list[torch.device]:
        return list(self._by_device)

    def grads(self, device: torch.device) -> list[Tensor]:
        return list(self._by_device[device])

    def unscale(self, device: torch.device, inv_scale: Tensor, found_inf: Tensor) -> None:
        ops.unscale_(self._by_device[device], found_inf, inv_scale)

    def check(self, device: torch.device, found_inf: Tensor) -> None:
        ops.check_(self._by_device[device], found_inf)

    def unscale_norm(
        self, device: torch.device, inv_scale: Tensor, found_inf: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ops.unscale_norm_(self._by_device[device], found_inf, inv_scale)

    def clip(self, device: torch.device, coef: Tensor) -> None:
        ops.clip_(self._by_device[device], coef)


def gradient_buckets(param_groups: list[dict[str, Any]]) -> GradientBuckets:
    """``fastamp._host.GradientBuckets`` where the host module is loaded, else the class above."""
    return getattr(_library.host, "GradientBuckets", GradientBuckets)(param_groups)
