"""One training step of a model as a loop would run it, on fake tensors or on real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MODES = ("train", "finetune", "inference")


@dataclass(frozen=True)
class Precision:
    """`parameters`: the dtype that floating parameters are cast to (None: none). `autocast`: its dtype, or None."""

    name: str
    parameters: torch.dtype | None = None
    autocast: torch.dtype | None = None


_PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "fp16": Precision("fp16", torch.float16),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16-amp": Precision("fp16-amp", None, torch.float16),
    "bf16-amp": Precision("bf16-amp", None, torch.bfloat16),
}
_SPELLINGS = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "16-mixed": "fp16-amp",
    "bf16-mixed": "bf16-amp",
    "amp": "fp16-amp",
    "32-true": "fp32",
    "16-true": "fp16",
    "bf16-true": "bf16",
}


def precision_of(value: str | torch.dtype | Precision | None) -> Precision:
    """Raises ValueError for a precision that is not known."""
    if value is None:
        return Precision("as the model is")
    if isinstance(value, Precision):
        return value
    name = str(value).removeprefix("torch.").lower()
    name = _SPELLINGS.get(name, name)
    if name not in _PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(_PRECISIONS)} or None, got {value!r}")
    return _PRECISIONS[name]


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: tuples and lists are spread, a mapping gives keywords."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def default_loss(output: Any) -> Tensor:
    """The model's own loss if it returns one, else the sum of its floating outputs (which keeps nothing
    extra).

    Raises ValueError for an output without a floating tensor.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own.sum() if own.ndim else own
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    floats = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    if not floats:
        raise ValueError(
            "the model's output holds no floating tensor that requires gradients: pass loss=, a function "
            "of the output, or mode='inference'"
        )
    total = floats[0].sum()
    for tensor in floats[1:]:
        total = total + tensor.sum()
    return total


@contextlib.contextmanager
def with_gradients() -> Iterator[None]:
    """A step in here has gradients, whether or not the caller has turned them off for its own code."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@dataclass
class Step:
    """What happens in one step. `loss(output)`, or `loss(output, targets)` if there are any, gives the loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    precision: Precision
    loss: Callable[..., Tensor]
    device_type: str

    def _autocast(self) -> Any:
        if self.precision.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.precision.autocast)

    def infer(self) -> Any:
        with torch.no_grad(), self._autocast():
            return self.model(*self.args, **self.kwargs)

    def train(self) -> None:
        """Forward and backward of one micro-batch. The output lives as long as backward, as in most loops."""
        with self._autocast():
            output = self.model(*self.args, **self.kwargs)
            loss = self.loss(output) if self.targets is None else self.loss(output, self.targets)
        loss.backward()
        del output, loss
