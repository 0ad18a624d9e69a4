"""Memory that CPU kernels take and give back within one operator, where it is a large part of a step's.

A convolution that oneDNN does not take (bfloat16 and float16 on a CPU without instructions for them) unfolds its input
into columns, one copy of the input for each place of the kernel (`slow_conv2d`, torch's ConvolutionMM2d.cpp).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten


def scratch_bytes(func: Any, args: Any) -> int:
    """Bytes that `func(*args)` takes beside its results, as far as they are known here."""
    if func is _aten.convolution.default:
        input, weight = args[:2]
        settings = args[3:9]
    elif func is _aten.convolution_backward.default:
        input, weight = args[1:3]
        settings = args[4:10]
    else:
        return 0
    if input.device.type != "cpu":
        return 0
    return _columns(input.dtype, tuple(input.shape), tuple(weight.shape), *(_hashable(value) for value in settings))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


@functools.lru_cache(maxsize=1024)
def _columns(
    dtype: torch.dtype,
    input: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
) -> int:
    if len(input) != 4 or transposed:
        return 0
    with _disable_current_modes():  # fake tensors would be asked about as if they were on the meta device
        x, w = (torch.empty(1, dtype=dtype).expand(shape) for shape in (input, weight))
        backend: Any = torch._C._select_conv_backend(
            x, w, None, list(stride), list(padding), list(dilation), transposed, list(output_padding), groups
        )
    kernel = weight[2:]
    unfolds = math.prod(kernel) > 1 or max(stride) > 1 or max(padding) > 0
    if backend.name != "Slow2d" or not unfolds:
        return 0
    places = math.prod(
        (size + 2 * pad - each) // step + 1
        for size, pad, each, step in zip(input[2:], padding, kernel, stride, strict=True)
    )
    return input[0] * weight[1] * math.prod(kernel) * places * dtype.itemsize  # weight[1]: channels of one group
