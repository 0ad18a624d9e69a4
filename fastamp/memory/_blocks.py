"""Stacks of repeated blocks in a model, and treatments of a block: keep, checkpoint, offload."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from fastamp.memory._recorder import host_copies

TREATMENTS = ("keep", "checkpoint", "offload", "store:FORMAT", "checkpoint:FORMAT")
"""How a block's activations are treated. A FORMAT is one of `fastamp.storage.FORMATS`."""

# Smaller tensors cost more to move than they free.
_OFFLOAD_BYTES = 4096


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks a model repeats, in the order of the model.

    These are the members of each outermost nn.ModuleList or nn.Sequential that has at least two, most of them
    with parameters and of the same make (the layers of a transformer, the stages of a ResNet).
    """
    found: list[str] = []

    def walk(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and _repeats(child):
                found.extend(f"{full}.{member}" for member, _ in child.named_children())
            else:
                walk(child, full)

    if isinstance(model, nn.Sequential) and _repeats(model):
        return [name for name, _ in model.named_children()]
    walk(model, "")
    return found


def _repeats(stack: nn.Module) -> bool:
    members = list(stack.children())
    kinds = [type(member) for member in members]
    # A block has parts of its own: a Sequential of plain layers is one block, not a stack of them.
    compound = [member for member in members if next(member.children(), None) is not None]
    return len(members) >= 2 and len(compound) == len(members) and len(set(kinds)) <= max(1, len(members) // 2)


def chosen_blocks(model: nn.Module, what: Any, argument: str) -> list[str]:
    """The blocks that an argument names: True (all), a number n (every n-th), names or patterns ("layers.*").

    Raises ValueError if the model has no repeated blocks, or a name or pattern fits no module; TypeError for
    others.
    """
    blocks = find_blocks(model)
    if what is True or (isinstance(what, int) and not isinstance(what, bool)):
        if not blocks:
            raise ValueError(
                f"{argument}: no repeated blocks were found in {type(model).__name__}; name the modules to "
                "treat, "
                f'such as {argument}=["encoder.layer.*"]'
            )
        every = 1 if what is True else what
        if every < 1:
            raise ValueError(f"{argument} must be True, a positive number or module names, got {what}")
        return blocks[::every]
    patterns = [what] if isinstance(what, str) else what
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} must be True, a number or module names, got {type(what).__name__}")
    names = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument}: module names are strings, got {type(pattern).__name__}")
        depth = pattern.count(".")
        matching = [n for n in names if n.count(".") == depth and fnmatch.fnmatchcase(n, pattern)]
        if not matching:
            raise ValueError(f"{argument}: no module of {type(model).__name__} is called {pattern!r}")
        chosen += [n for n in matching if n not in chosen]
    return chosen


def apply(model: nn.Module, treatments: Mapping[str, str]) -> Callable[[], None]:
    """Put a treatment on each named block; the function returned takes them all off again.

    A block's `forward` is replaced on the instance, so hooks, names and state dicts stay as they are.
    """
    modules = dict(model.named_modules())
    done: list[tuple[nn.Module, Any]] = []

    def undo() -> None:
        while done:
            module, before = done.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

    try:
        for name, treatment in treatments.items():
            if treatment == "keep":
                continue
            module = modules[name]
            done.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = _treated(module.forward, treatment)
    except BaseException:
        undo()
        raise
    return undo


def stored(treatment: str, form: str) -> str:
    """`treatment` with what it keeps stored in a format. Raises ValueError for a format that is not known."""
    from fastamp import storage

    storage.check_storage(form)
    return f"{'store' if treatment == 'keep' else treatment}:{form}"


def _treated(forward: Callable[..., Any], treatment: str) -> Callable[..., Any]:
    kind, _, form = treatment.partition(":")
    if kind == "checkpoint" and not form:
        return lambda *args, **kwargs: torch_checkpoint(forward, *args, use_reentrant=False, **kwargs)
    if kind == "checkpoint":
        from fastamp.checkpointing import checkpoint

        return lambda *args, **kwargs: checkpoint(forward, *args, storage=form, **kwargs)
    if treatment == "offload":
        return _Offloaded(forward)
    raise ValueError(f"unknown treatment {treatment!r}; known are {', '.join(TREATMENTS)}")


class _Offloaded:
    """Runs `forward` with the activations that it saves for backward in host memory (pinned where there is a
    GPU).

    Unlike `torch.autograd.graph.save_on_cpu` it leaves parameters and small tensors where they are, and moves
    a tensor that is saved several times once.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # storage -> {view of it -> its copy, for as long as something needs the copy}
        moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

        def pack(tensor: Tensor) -> Any:
            if tensor.is_leaf or tensor.nbytes < _OFFLOAD_BYTES or tensor.layout is not torch.strided:
                return tensor
            views = moved.setdefault(tensor.untyped_storage(), weakref.WeakValueDictionary())
            key = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
            copy = views.get(key)
            if copy is None:
                copy = views[key] = _HostCopy(tensor)
            return copy

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed.back()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.forward(*args, **kwargs)


class _HostCopy:
    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        pinned = torch.cuda.is_available() and tensor.is_cuda and not isinstance(tensor, FakeTensor)
        with torch.no_grad(), host_copies():
            self.host = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=pinned
            )
            # Not non_blocking: the host could free or read the copy before it is complete.
            self.host.copy_(tensor)

    def back(self) -> Tensor:
        with torch.no_grad():
            return torch.empty_strided(
                self.host.shape, self.host.stride(), dtype=self.host.dtype, device=self.device
            ).copy_(self.host)
