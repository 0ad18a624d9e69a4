"""Memory that CPU kernels take and give back within one operator, where it is a large part of a step's.

A convolution that oneDNN does not take (bfloat16 and float16 on a CPU without instructions for them) unfolds its input
into columns, one copy of the input for each place of the kernel (`slow_conv2d`, torch's ConvolutionMM2d.cpp).

An LSTM that oneDNN takes keeps a workspace for backward several times as large as its output, which torch's kernel for
fake tensors leaves out. Its parts, and those of the scratchpad, are those of oneDNN's src/cpu/rnn/rnn_utils.hpp
(`init_rnn_conf`, `set_workspace_sizes`) and rnn_utils.cpp (`set_offsets`); for float32 they are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten


def _lstm_layer(input: Tensor, *others: Any) -> tuple[Tensor, ...]:
    results = _aten.mkldnn_rnn_layer.default(input, *others)
    if not torch.is_grad_enabled():  # which the kernel itself asks, whatever its argument `train` says
        return tuple(results)
    size = _lstm_workspace(input, hidden=others[1].shape[1])
    return (*results[:3], torch.empty(size, dtype=torch.uint8, device=input.device))


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {_aten.mkldnn_rnn_layer.default: _lstm_layer}
"""What to run on fake tensors in the place of an operator whose own results are of another size there."""


def scratch_bytes(func: Any, args: Any) -> int:
    """Bytes that `func(*args)` takes beside its results, as far as they are known here."""
    if func is _aten.convolution.default:
        input, weight = args[:2]
        settings = args[3:9]
    elif func is _aten.convolution_backward.default:
        input, weight = args[1:3]
        settings = args[4:10]
    elif func in (_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default):
        return _lstm_scratch(args[0], args[1], args[2], backward=func is not _aten.mkldnn_rnn_layer.default)
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


# --- oneDNN's LSTM ---

_PAGE = 4096


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _row(length: int, itemsize: int) -> int:
    """Elements from one row of a matrix to the next, `get_good_ld`: whole cache lines, and no multiple of 256."""
    found = _whole(length, 64 // itemsize)
    return found + 64 // itemsize if found % 256 == 0 else found


def _lstm_workspace(input: Tensor, hidden: int) -> int:
    steps, batch, width = input.shape
    size, both = input.element_size(), max(width, hidden)
    states = 2 * (steps + 1) * batch  # of the layer and of its input, the initial one included
    parts = (
        steps * batch * _row(4 * hidden, size) * size,  # gates
        steps * batch * _row(hidden, size) * size,  # ht
        states * _row(both, size) * size,  # states_layer
        states * hidden * size,  # states_iter_c
        states * _row(both, 4) * 4,  # diff_states_layer
        states * _row(both, 4) * 4,  # diff_states_iter
    )
    return sum(_whole(part, _PAGE) for part in parts) + states * hidden * 4  # diff_states_iter_c


def _lstm_scratch(input: Tensor, weight: Tensor, recurrent: Tensor, backward: bool) -> int:
    """The scratchpad, and copies of bias and weights (in backward of their gradients too) in a layout of its own."""
    steps, batch, width = input.shape
    gates, hidden = recurrent.shape
    size = input.element_size()
    if not backward and not torch.is_grad_enabled():  # other kernels (brgemm), which pad less: nearly so much
        return steps * batch * gates * 4 + 2 * batch * gates * 4 + ((width + hidden) * gates + gates) * size
    at_once = steps if backward or batch < 128 else 1  # merge_gemm_iter, merge_gemm_layer
    scratchpad = _whole(at_once * batch * _row(gates, 4) * 4, _PAGE) + 2 * _whole(batch * _row(hidden, 4) * 4, _PAGE)
    copies = (width + hidden) * _row(gates, size) * size + gates * size
    if backward:
        copies += sum(gates * _row(n, size) * size for n in (width, hidden) if _row(n, size) != n)
    return scratchpad + copies
