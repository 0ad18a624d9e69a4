"""Stacks of repeated blocks in a model, and treatments of a block: keep, checkpoint, offload."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastamp import _delta, storage
from fastamp.checkpointing import checkpoint
from fastamp.memory._stored import SimulatedChain, SimulatedStorage
from fastamp.store import store_activations

TREATMENTS = ("keep", "checkpoint", "offload", "store:FORMAT", "checkpoint:FORMAT")
"""How a block's activations are treated. A FORMAT is one of `fastamp.storage.FORMATS`."""


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
                f"{argument}: no repeated blocks were found in {type(model).__name__}; name the modules to treat, "
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


def stored(treatment: str, form: str) -> str:
    """`treatment` with what it keeps stored in a format. Raises ValueError for a format that is not known."""
    if form not in (*storage.FORMATS, *_delta.FORMATS):
        raise ValueError(f"store: unknown format {form!r}; {_formats('checkpoint')}")
    if form in _delta.FORMATS and treatment == "keep":
        raise ValueError(f"store: {form!r} is coded along a stack of checkpointed blocks: pass checkpoint= too")
    return f"{'store' if treatment == 'keep' else treatment}:{form}"


def check_treatment(treatment: Any) -> None:
    """Raises ValueError or TypeError for a treatment that is not known."""
    if not isinstance(treatment, str):
        raise TypeError(f"a treatment is a string, got {type(treatment).__name__}")
    kind, _, form = treatment.partition(":")
    if form and kind in ("store", "checkpoint"):
        if form not in storage.FORMATS and not (kind == "checkpoint" and form in _delta.FORMATS):
            raise ValueError(f"unknown format in the treatment {treatment!r}; {_formats(kind)}")
    elif treatment not in ("keep", "checkpoint", "offload"):
        raise ValueError(f"unknown treatment {treatment!r}; known are {', '.join(TREATMENTS)}")


def _formats(kind: str) -> str:
    known = f"formats are {', '.join(storage.FORMATS)}"
    return f"{known}, and with checkpoint {', '.join(_delta.FORMATS)}" if kind == "checkpoint" else known


def apply(model: nn.Module, treatments: Mapping[str, str]) -> Callable[[], None]:
    """Put a treatment on each named block; the function returned takes them all off again.

    A block's `forward` is replaced on the instance, so hooks, names and state dicts stay as they are. It takes the
    place of a treatment that is there already.
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
        for name, treatment, chain in _with_chains(treatments):
            module = modules[name]
            own = _untreated(module.forward)
            if treatment == "keep" and own == module.forward:
                continue
            done.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = own if treatment == "keep" else _Treated(own, treatment, name, chain)
    except BaseException:
        undo()
        raise
    return undo


_KEYFRAME_EVERY = 16  # as `checkpoint_stack`


class _Chain:
    """Adjacent blocks whose inputs are stored relative to one another; the first one begins anew in each pass."""

    def __init__(self, form: str, names: list[str]) -> None:
        self._form = form
        self._first, self._last = names[0], names[-1]
        self._running: Any = None

    def storage(self, name: str) -> Any:
        running = self._running
        if name == self._first or running is None:
            kind = SimulatedChain if _simulating() else _delta.DeltaChain
            running = kind(self._form, _KEYFRAME_EVERY)
        # A chain holds the last activation decoded until it is dropped.
        self._running = None if name == self._last else running
        return running


def _with_chains(treatments: Mapping[str, str]) -> Iterable[tuple[str, str, _Chain | None]]:
    """(name, treatment, chain) of each block: blocks with the same difference coding, side by side, share a chain."""
    for treatment, run in itertools.groupby(treatments.items(), key=lambda item: item[1]):
        names = [name for name, _ in run]
        form = treatment.partition(":")[2]
        chain = _Chain(form, names) if form in _delta.FORMATS else None
        yield from ((name, treatment, chain) for name in names)


class _Treated:
    """A block's forward under a treatment. An object, so that it is copied and pickled with the model: a copy runs the
    copy's forward."""

    def __init__(self, forward: Callable[..., Any], treatment: str, name: str, chain: _Chain | None) -> None:
        check_treatment(treatment)
        self.forward = forward
        self.treatment = treatment
        self.kind, _, self.form = treatment.partition(":")
        self.name = name
        self.chain = chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind != "checkpoint":
            with _region(self.form or "exact", offload=self.kind == "offload"):
                return self.forward(*args, **kwargs)
        if not self.form:
            return torch_checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        kept: Any = self.chain.storage(self.name) if self.chain is not None else self.form
        if not _simulating():
            return checkpoint(self.forward, *args, storage=kept, **kwargs)
        with kept.hooks() if self.chain is not None else _region(self.form):
            return torch_checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def treated(model: nn.Module) -> dict[str, str]:
    """Name of block -> treatment, of those that have one."""
    forwards = ((name, module.__dict__.get("forward")) for name, module in model.named_modules())
    return {name: forward.treatment for name, forward in forwards if isinstance(forward, _Treated)}


def untreat(model: nn.Module) -> None:
    """Takes every treatment off a model, whoever put it on."""
    modules = dict(model.named_modules())
    for module in (modules[name] for name in treated(model)):
        forward = _untreated(module.forward)
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = forward


def _untreated(forward: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(forward, _Treated):
        forward = forward.forward
    return forward


def _simulating() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _region(form: str, offload: bool = False) -> Any:
    """Saved tensors are kept in a format, in host memory if `offload`."""
    if not _simulating():
        return store_activations(form, offload="cpu" if offload else None)
    simulated = SimulatedStorage(form, offload)
    return torch.autograd.graph.saved_tensors_hooks(simulated.pack, simulated.unpack)
