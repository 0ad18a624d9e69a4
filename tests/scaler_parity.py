"""Runs the same training code with torch's scaler and with fastamp's, and compares the two bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from fastamp import _library

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and _library.has_cuda else [])

# No momentum for the fused SGD: torch makes its buffer with empty_like at the first step, and reads it
# uninitialized at the second if the first was skipped.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def _unscales_itself(name: str) -> bool:
    """Which fused optimizers do is a matter of torch's version."""
    return getattr(OPTIMIZERS[name]([torch.zeros(1)]), "_step_supports_amp_scaling", False)


def skip_if_torch_refuses(fused: Callable[[Any], torch.optim.Optimizer], device: str) -> None:
    """Some versions have a fused optimizer for the CPU alone, and say so at its first step."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        fused([parameter]).step()
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}: {error}")


FUSED = [name for name in OPTIMIZERS if name.endswith("fused") and _unscales_itself(name)]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit, except that one NaN is as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout == torch.sparse_coo:
        return (
            a.is_coalesced() == b.is_coalesced()
            and torch.equal(a._indices(), b._indices())
            and same_bits(a._values(), b._values())
        )
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    nan = a.isnan()
    bits = _BITS[a.element_size()]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(bits)[~nan], b.view(bits)[~nan])


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Compares nested dicts, lists and tuples of tensors and plain values."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert same_bits(a, b), f"{where}: {a} and {b}"
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{where}: keys {list(a)} and {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} and {len(b)} items"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} and {b}"


def parameters(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[Tensor]:
    """Sizes on both sides of vector widths and chunks, an empty one, and strides of several kinds."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (7,), (8,), (9,), (33, 5), (0,), (3, 4, 5), (1031,), (), (2, 8, 4, 4)]
    params = []
    for i, size in enumerate(sizes):
        value = torch.randn(size, generator=generator).to(dtypes[i % len(dtypes)]).to(device)
        if value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        if value.dim() == 2:
            value = value.t().contiguous().t()
        params.append(torch.nn.Parameter(value))
    return params


def fill_grads(params: list[Tensor], step: int, scale: float, poison: float | None = None) -> None:
    """Gradients as a backward pass of a loss scaled by ``scale`` would leave them, one of them poisoned."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).mul_(scale)
        if poison is not None and p is params[4]:
            grad.view(-1)[grad.numel() // 2] = poison
        p.grad = torch.empty_like(p).copy_(grad)


def snapshot(scaler: Any, params: list[Tensor], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    return {
        "params": [p.detach().clone() for p in params],
        "grads": grads,
        "optimizers": [_copy(o.state_dict()["state"]) for o in optimizers],
        "scale": scaler.get_scale(),
        "tracker": scaler._get_growth_tracker(),
        "state": scaler.state_dict(),
        "stages": [scaler._per_optimizer_states[id(o)]["stage"] for o in optimizers],
        "found": [{device: f.clone() for device, f in scaler._found_inf_per_device(o).items()} for o in optimizers],
    }


def _copy(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return state


def both(script: Callable[[Any], Iterator[Any]], *args: Any, **kwargs: Any) -> None:
    """Runs a generator function with either scaler class; what the two yield must be the same."""
    traces = [list(script(cls, *args, **kwargs)) for cls in (torch.amp.GradScaler, fastamp.GradScaler)]
    assert len(traces[0]) > 0
    assert_same(traces[0], traces[1])


class CountOps(TorchDispatchMode):
    """Counts calls by operator name, without overload: ``aten::fill_``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def syncs(self) -> int:
        return self.calls.get("aten::_local_scalar_dense", 0)
