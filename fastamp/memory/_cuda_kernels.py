"""Lets fake CPU tensors take the kernels that CUDA tensors would, for estimates on a machine without a GPU.

Fake CUDA tensors can not run backward where there is no GPU, and CPU kernels keep other things than CUDA's
do: a float mask for dropout where CUDA keeps a bool one, the whole attention matrix under dropout where CUDA
keeps a row of statistics, half-precision results where CUDA's autocast goes to float32. The operators below
are those that differ enough to matter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# What CUDA's autocast runs in float32 and the CPU's does not (ATen/autocast_mode.h, AT_FORALL_FP32 and
# AT_FORALL_FP32_SET_OPT_DTYPE), without operators that are seldom met in a model.
_FLOAT32 = (
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "exp",
    "log",
    "log1p",
    "reciprocal",
    "rsqrt",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "softplus",
    "cosine_similarity",
    "nll_loss",
    "nll_loss2d",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "logsumexp",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "softmax.int",
    "log_softmax.int",
    "prod",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
)

_lock = threading.RLock()


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """While this is entered, CPU tensors take CUDA's way through the operators named here.

    For fake tensors: it is in effect for the whole process, and other threads wait to enter it.
    """
    with _lock:
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
            for name in _FLOAT32:
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                    library.impl(name, _in_float32(name), "AutocastCPU")
            yield
        finally:
            library._destroy()


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The memory-efficient kernel. The flash kernel keeps the same: q, k, v, the output, log-sum-exps."""
    shape = query.shape
    if query.ndim != 4:
        query, key, value = (t.reshape(-1, 1, *t.shape[-2:]) for t in (query, key, value))
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    needs = any(t.requires_grad for t in (query, key, value))
    output = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs and torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return output.reshape(*shape[:-1], value.shape[-1])


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def widened(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            args, kwargs = pytree.tree_map_only(Tensor, widened, (args, kwargs))
            return op(*args, **kwargs)

    return run
