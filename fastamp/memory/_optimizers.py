"""Optimizers on fake parameters: what state each keeps and what scratch its step needs."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import optimizer as _torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# One real step of an optimizer that fake tensors cannot run is tried on parameters up to this size.
_LARGEST_REAL_STEP = 256 << 20

NAMES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


def name_of(spec: Any) -> str:
    if spec is None:
        return "no optimizer"
    if isinstance(spec, str):
        found = NAMES.get(spec.lower())
        return found.__name__ if inspect.isclass(found) else spec
    if isinstance(spec, torch.optim.Optimizer):
        return type(spec).__name__
    return getattr(getattr(spec, "func", spec), "__name__", type(spec).__name__)


def check(spec: Any) -> None:
    """Raises TypeError or ValueError for what is no optimizer."""
    if isinstance(spec, str):
        if spec.lower() not in NAMES:
            raise ValueError(f"optimizer must be one of torch.optim ({', '.join(sorted(NAMES))}), got {spec!r}")
    elif spec is not None and not callable(spec) and not isinstance(unwrapped(spec), torch.optim.Optimizer):
        raise TypeError(
            "optimizer must be an optimizer, its class, a callable that takes the parameters, or a name such "
            f'as "adamw", got {type(spec).__name__}'
        )


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that holds it as `.optimizer` (as Accelerate's does)."""
    while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def build(spec: Any, parameters: dict[int, nn.Parameter], foreach: bool) -> torch.optim.Optimizer | None:
    """An optimizer over the fake parameters that train.

    parameters: id of each real parameter -> its fake one. An optimizer instance keeps its groups and
    settings; its own parameters and state are not touched. foreach: choose the multi-tensor implementation
    where the optimizer left that open, as torch does on CUDA.

    Raises ValueError if an optimizer instance holds parameters that are not the model's.
    """
    spec = unwrapped(spec)
    if spec is None or not any(p.requires_grad for p in parameters.values()):
        return None
    if isinstance(spec, torch.optim.Optimizer):
        optimizer = _twin(spec, parameters)
    else:
        trained = [p for p in parameters.values() if p.requires_grad]
        kind = NAMES[spec.lower()] if isinstance(spec, str) else spec
        if kind is NAMES.get("muon"):  # takes matrices only; the rest usually goes to AdamW
            trained = [p for p in trained if p.ndim == 2]
        optimizer = kind(trained)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: calling {name_of(spec)} gave {type(optimizer).__name__}, not an optimizer")
    # The user's hooks count steps, say: these are none of theirs.
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    for group in optimizer.param_groups:
        if foreach and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
        _run_anywhere(group)
    return optimizer


@contextlib.contextmanager
def hooks_of_all_optimizers_off() -> Iterator[None]:
    """Steps in here call none of the hooks that a program registered for every optimizer."""
    registered: tuple[dict[int, Any], ...] = _torch._global_optimizer_pre_hooks, _torch._global_optimizer_post_hooks
    kept = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registered, kept, strict=True):
            hooks.update(before)


def _run_anywhere(group: dict[str, Any]) -> None:
    """`capturable` steps are for accelerators only; the states are those of other steps."""
    if group.get("capturable"):
        group["capturable"] = False


def _twin(optimizer: torch.optim.Optimizer, parameters: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
    twin = object.__new__(type(optimizer))
    # "step" is there where a learning-rate scheduler has bound it to the original.
    twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    twin.state = type(optimizer.state)(optimizer.state.default_factory)  # type: ignore[attr-defined]
    twin.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        foreign = [p for p in group["params"] if id(p) not in parameters]
        if foreign:
            raise ValueError(
                f"optimizer: group {number} holds {len(foreign)} parameters that are not the model's; make "
                "it from model.parameters()"
            )
        twin.param_groups.append({**group, "params": [parameters[id(p)] for p in group["params"]]})
    return twin


class AnyScalar(TorchDispatchMode):
    """Gives 1 for a number that fake tensors do not know: an optimizer's scalars scale and do not shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default or args[0].dtype == torch.bool:
                raise
            return 1.0 if args[0].dtype.is_floating_point else 1


def known_state(optimizer: torch.optim.Optimizer) -> tuple[int, str] | None:
    """Bytes of state of optimizers that decide by values what to do next, with the reason for the number.

    L-BFGS (torch/optim/lbfgs.py) keeps two vectors of all parameters for each step of its history, its
    direction and its last gradient; the history is taken as full.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        group = optimizer.param_groups[0]
        vector = sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
        size = (2 * group["history_size"] + 2) * vector
        return size, f"L-BFGS with a full history of {group['history_size']} steps"
    if isinstance(optimizer, torch.optim.SparseAdam):
        size = sum(2 * p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"])
        return size, "SparseAdam keeps two dense tensors for each parameter"
    return None


def state_after_one_step(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of state after one real step, parameter by parameter on the CPU; None if that fails."""
    total = 0
    cost: dict[tuple[Any, ...], int] = {}
    for group in optimizer.param_groups:
        for fake in group["params"]:
            if not fake.requires_grad:
                continue
            key = tuple(fake.shape), fake.dtype
            if key not in cost:
                if fake.numel() * fake.element_size() > _LARGEST_REAL_STEP:
                    return None
                try:
                    with _disable_current_modes():  # real tensors, whatever simulates around this
                        cost[key] = _one_step(optimizer, group, nn.Parameter(torch.zeros(key[0], dtype=key[1])))
                except Exception:  # whatever a stranger's optimizer raises on a CPU parameter
                    return None
            total += cost[key]
    return total


def _one_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> int:
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.state = type(optimizer.state)(optimizer.state.default_factory)  # type: ignore[attr-defined]
    stand_in.param_groups = [{**group, "params": [parameter]}]
    _run_anywhere(stand_in.param_groups[0])
    parameter.grad = torch.ones_like(parameter)
    stand_in.step()
    return state_bytes(stand_in)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state, each storage once."""
    storages = {}
    for leaf in pytree.tree_leaves([dict(state) for state in optimizer.state.values()]):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
