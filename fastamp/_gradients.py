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


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


def _overlaps_itself(grad: Tensor) -> bool:
    """Whether two indices may share memory: each dimension has to step over everything inside it."""
    reach = 0
    for stride, size in sorted(zip(grad.stride(), grad.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return grad.numel() > 0
            reach += stride * (size - 1)
    return False


def _name(group_index: int, param_index: int) -> str:
    return f"the gradient of params[{param_index}] in group {group_index}"


class GradientBuckets:
    """Every ``p.grad`` that is not None, of every parameter in every group, sorted by device.

    Args:
        param_groups: dicts with a list of parameters under ``"params"``, as ``optimizer.param_groups``.

    Attributes:
        devices: devices with kernels that hold gradients, in order of first appearance.
        other: gradients that need torch's own path.
        other_at: (group index, parameter index within the group) of each of them.
        first_fp16: (group index, parameter index within the group) of the first float16 gradient, or None.
        count: gradients found, ``other`` included.

    Raises:
        AssertionError: a parameter is not a tensor.
        TypeError: a gradient is not a tensor.
        RuntimeError: a plain gradient is neither floating-point nor complex, or overlaps itself. Raised here,
            before anything is written on any device.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        self._by_device: dict[torch.device, list[Tensor]] = {}
        self.other: list[Tensor] = []
        self.other_at: list[tuple[int, int]] = []
        self.first_fp16: tuple[int, int] | None = None
        self.count = 0
        for group_index, group in enumerate(param_groups):
            for param_index, param in enumerate(group["params"]):
                if not isinstance(param, Tensor):
                    raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}")
                grad = param.grad  # once: a class of its own may make another each time
                if grad is not None:
                    self._take(grad, group_index, param_index)

    def _take(self, grad: Tensor, group_index: int, param_index: int) -> None:
        if not isinstance(grad, Tensor):
            raise TypeError(f"{_name(group_index, param_index)} must be a tensor, got {type(grad).__name__}")
        self.count += 1
        if self.first_fp16 is None and grad.dtype == torch.float16:
            self.first_fp16 = (group_index, param_index)
        if not _is_plain(grad):
            self.other.append(grad)
            self.other_at.append((group_index, param_index))
            return
        if grad.dtype not in _DTYPES:
            raise RuntimeError(
                f"{_name(group_index, param_index)} must be a floating-point or complex tensor, got {grad.dtype}"
            )
        if not grad.is_contiguous() and _overlaps_itself(grad):
            raise RuntimeError(
                f"{_name(group_index, param_index)} overlaps itself in memory (an expanded tensor?): assign "
                ".contiguous() to .grad instead"
            )
        self._by_device.setdefault(grad.device, []).append(grad)

    @property
    def devices(self) -> list[torch.device]:
        return list(self._by_device)

    def grads(self, device: torch.device) -> list[Tensor]:
        return list(self._by_device[device])

    def unscale(self, device: torch.device, inv_scale: Tensor, found_inf: Tensor) -> None:
        ops.unscale_(self._by_device[device], found_inf, inv_scale)

    def check(self, device: torch.device, found_inf: Tensor) -> None:
        ops.check_(self._by_device[device], found_inf)

    def unscale_norm(self, device: torch.device, inv_scale: Tensor, found_inf: Tensor) -> tuple[Tensor, Tensor]:
        return ops.unscale_norm_(self._by_device[device], found_inf, inv_scale)

    def clip(self, device: torch.device, coef: Tensor) -> None:
        ops.clip_(self._by_device[device], coef)


def gradient_buckets(param_groups: Iterable[dict[str, Any]]) -> GradientBuckets:
    """``fastamp._host.GradientBuckets`` where the host module is loaded, else the class above."""
    return (_library.host.GradientBuckets if _library.host else GradientBuckets)(param_groups)


def unscale_on_one_device(
    param_groups: Iterable[dict[str, Any]], inv_scale: Tensor | None, found_inf: Tensor, allow_fp16: bool
) -> GradientBuckets | None:
    """Unscales all gradients, or checks them without ``inv_scale``, if they are all plain and on the device of
    ``found_inf``. Otherwise returns them, with nothing written. float16 gradients are not unscaled unless allowed.
    """
    if _library.host:
        return _library.host.unscale_on_one_device(param_groups, inv_scale, found_inf, allow_fp16)
    return GradientBuckets(param_groups)


# The host module's twins of two ops, which cost a tenth of a call through torch's dispatcher. They read memory, so
# tensors of a mode (FakeTensor, say) go through the dispatcher.


def update_scale_(scale: Tensor, *args: Any) -> None:
    """:func:`fastamp.ops.update_scale_` with all arguments by position and checked."""
    found_infs = args[1]
    few = len(found_infs) <= ops.MAX_FOUND_INFS
    (_library.host if _library.host and type(scale) is Tensor and few else ops).update_scale_(scale, *args)


def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """:func:`fastamp.ops.clip_coefficient`."""
    return (_library.host if _library.host and type(total) is Tensor else ops).clip_coefficient(total, max_norm)
