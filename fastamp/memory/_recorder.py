"""Records a `Trace` of a training step, real or simulated, with torch's own memory tracker.

`torch.distributed._tools.mem_tracker.MemTracker` knows when each storage comes to life, changes hands and
dies. `Recorder` writes that down together with the operator, module and phase of the step that it happened
in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastamp.memory._trace import FORWARD, Block, Event, Trace

try:
    from torch.distributed._tools import mem_tracker as _torch_tracker
    from torch.distributed._tools.common_utils import get_untyped_storages
    from torch.distributed._tools.mem_tracker import MemTracker
except ImportError as error:
    raise ImportError(
        "fastamp.memory stands on torch.distributed._tools.mem_tracker, and this torch "
        f"({torch.__version__}) has none that works: {error}. Builds of torch without torch.distributed lack "
        "it; install a standard build, torch 2.10 or later."
    ) from error

# MemTracker is private to torch: say so plainly where a release has changed what this file stands on.
_EXPECTED = (
    "_update_snap",
    "_track",
    "_pre_fw_hook",
    "_post_fw_hook",
    "_pre_bw_hook",
    "_post_bw_hook",
    "_track_module_params_and_buffers",
    "_track_optimizer_states",
    "_update_peak_stats",
    "_update_and_maybe_create_winfos",
    "_deregister_param_and_optimizer_hooks",
)
_missing = [name for name in _EXPECTED if not hasattr(MemTracker, name)]
if _missing or list(inspect.signature(MemTracker._update_snap).parameters)[1:3] != ["u_type", "winfo"]:
    raise ImportError(
        f"fastamp.memory does not know the MemTracker of torch {torch.__version__}"
        f"{' (without ' + ', '.join(_missing) + ')' if _missing else ''}. It was written for torch 2.10 to "
        "2.14."
    )

_Ref = _torch_tracker._MemRefType
_CATEGORY = {
    _Ref.PARAM: "parameters",
    _Ref.BUFFER: "buffers",
    _Ref.GRAD: "gradients",
    _Ref.OTH: "inputs",
    _Ref.TEMP: "temporaries",
    _Ref.OPT: "temporaries",
}  # OPT: until the optimizer turns out to keep it

_host_copies: ContextVar[bool] = ContextVar("host_copies", default=False)
HOST = "host (offloaded)"


@contextlib.contextmanager
def host_copies() -> Iterator[None]:
    """Tensors made in here are recorded as host memory, whatever device simulates it."""
    token = _host_copies.set(True)
    try:
        yield
    finally:
        _host_copies.reset(token)


class Mark(NamedTuple):
    """A watched module is about to run ("enter"), has run ("exit"), or is about to run backward ("backward").

    `event` numbers the first event after it; `seconds` is the record's clock.
    """

    kind: str
    name: str
    event: int
    seconds: float


class RecordedStep(NamedTuple):
    """A step that ran, on fake tensors or for real.

    gradients: names of the parameters that got one. first_peak: of the step that makes the optimizer's states. seconds,
    optimizer_seconds: by the record's clock, of forward and backward and of the optimizer's step.
    """

    trace: Trace
    marks: list[Mark]
    gradients: frozenset[str]
    first_peak: int | None
    notes: list[str]
    seconds: float
    optimizer_seconds: float


class Recorder(MemTracker):
    """`with Recorder(model, optimizer) as recorder: step()`; then `recorder.finish()` is the trace.

    Costs one Python call for each operator (tens of microseconds) and holds no tensor alive.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        watch: Collection[str] = (),
        cost: Callable[[Any, Any, Any], float] | None = None,
        scratch: Callable[[Any, Any], int] | None = None,
        kernels: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        """watch: modules whose beginnings are marked. cost: seconds of an operator, from it, its arguments and its
        result; it becomes the clock of the record. scratch: bytes that it takes for itself, from it and its arguments.
        kernels: what to run in the place of an operator.
        """
        super().__init__()
        self.trace = Trace()
        self.marks: list[Mark] = []
        self._watch = frozenset(watch)
        self._cost = cost
        self._scratch = scratch
        self._kernels = kernels or {}
        self._spent = 0.0
        self.phase = "forward"
        self._op = ""
        self._shape: tuple[int, ...] = ()
        self._dtype = ""
        self.began = time.perf_counter()
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._prefix = ""
        self._setup, self._finished = True, False
        if model is not None:
            self._prefix = type(model).__name__
            self._names = {id(module): name for name, module in model.named_modules()}
            self.note_state(model)
        if optimizer is not None:
            self._track_optimizer_states(_Ref.OPT, optimizer)
        self._setup = False

    # --- what exists before the step ---

    def note_state(self, model: nn.Module) -> None:
        """Parameters, buffers and gradients that exist, each under its name."""
        for name, parameter in model.named_parameters():
            self._name_blocks(parameter, _Ref.PARAM, name)
            if parameter.grad is not None:
                self._name_blocks(parameter.grad, _Ref.GRAD, name)
        for name, buffer in model.named_buffers():
            self._name_blocks(buffer, _Ref.BUFFER, name)

    def note_inputs(self, *values: Any) -> None:
        """Tensors in `values` (any nesting) are inputs, unless they are known as something else."""
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, Tensor) and not self._knows(leaf):
                self._describe(leaf, "input")
                self._update_and_maybe_create_winfos(leaf, _Ref.OTH)

    def _name_blocks(self, tensor: Tensor, ref: Any, name: str) -> None:
        self._describe(tensor, ref.value.lower())
        self._update_and_maybe_create_winfos(tensor, ref)
        for block in self._blocks(tensor):
            block.module = name.rpartition(".")[0]

    def _knows(self, tensor: Tensor) -> bool:
        return all(storage in self._WINFO for part in _strided(tensor) for storage in get_untyped_storages(part))

    def _update_and_maybe_create_winfos(self, t: Tensor, reftype: Any, update_existing: bool = False) -> set[Any]:
        winfos: set[Any] = set()
        for part in _strided(t):
            winfos |= super()._update_and_maybe_create_winfos(part, reftype, update_existing)
        return winfos

    def _describe(self, tensor: Tensor, op: str) -> None:
        self._op, self._shape, self._dtype = op, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    # --- where in the step we are ---

    def _where(self) -> tuple[str, str]:
        """Phase and innermost module."""
        if self._setup:
            return "before", ""
        if self._in_opt:
            return "optimizer", ""
        if not self._mod_tracker.is_bw:
            return "forward", self._stack[-1] if self._stack else ""
        if self._stack:
            return "backward", self._stack[-1]  # a checkpointed forward
        name = max(self._mod_tracker.parents - {"Global"}, key=len, default="")
        return "backward", name.removeprefix(self._prefix).removeprefix(".")

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._stack and not self._mod_tracker.is_bw:
            self._track_module_params_and_buffers(module)
        name = self._names.get(id(module), type(module).__name__)
        if not self._mod_tracker.is_bw:
            self._mark("enter", name)
        self._stack.append(name)

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        name = self._stack.pop()
        if not self._mod_tracker.is_bw:
            self._mark("exit", name)
        if not self._stack and not self._mod_tracker.is_bw:
            for leaf in pytree.tree_leaves(_plain(outputs)):
                for block in self._blocks(leaf):
                    block.returned = True

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        self._mark("backward", self._names.get(id(module), ""))

    def _mark(self, kind: str, name: str) -> None:
        if name in self._watch:
            self.marks.append(Mark(kind, name, len(self.trace.events), self.seconds()))

    def seconds(self) -> float:
        """The record's clock."""
        return self._spent if self._cost is not None else time.perf_counter() - self.began

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _update_peak_stats(self, peak_state: Any) -> None:
        pass  # the peak is found in the trace

    # --- what changes hands ---

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        """Unlike torch's, takes frozen parameters, and calls a gradient only what `.grad` holds."""
        for parameter in module.parameters():
            if not self._knows(parameter):
                self._name_blocks(parameter, _Ref.PARAM, "")
            if install_grad_hooks and parameter.requires_grad and parameter not in self._param_to_grad_hook_handles:
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_hook)
                self._param_to_grad_hook_handles[parameter] = (handle, handle)
        for buffer in module.buffers():
            if not self._knows(buffer):
                self._name_blocks(buffer, _Ref.BUFFER, "")
        return 0, 0

    def _gradient_hook(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._update_and_maybe_create_winfos(parameter.grad, _Ref.GRAD)

    def _track_optimizer_states(self, reftype: Any, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for leaf in pytree.tree_leaves(state):
                if isinstance(leaf, Tensor):
                    self._describe(leaf, "optimizer state")
                    self._update_and_maybe_create_winfos(leaf, reftype)
                    for block in self._blocks(leaf):
                        if block.category == "temporaries":
                            self._was_a_state(block)

    def _was_a_state(self, block: Block) -> None:
        """The step that made a block has ended, and the optimizer keeps it: a state from its beginning."""
        if block.phase != "optimizer":
            self._log("category", block, 0, "optimizer states")
            return
        block.category = "optimizer states"
        events = self.trace.events
        events[block.born] = events[block.born]._replace(category="optimizer states")

    def add_state(self, size: int, device: Any) -> None:
        """Counts `size` bytes of optimizer state that the step itself could not be seen to make."""
        if size:
            self._in_opt = True
            block = Block(
                size,
                str(device),
                "optimizer states",
                "optimizer",
                "",
                "optimizer state",
                (size,),
                "uint8",
                len(self.trace.events),
            )
            self._log("alloc", block, size, "optimizer states")
            self._in_opt = False

    # --- the record ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("prim", "profiler"):  # asks for a tensor's device, names a region
            return func(*args, **(kwargs or {}))
        phase, _ = self._where()
        if phase == "backward" and self.phase != "backward":
            self.trace.backward_starts.append(len(self.trace.events))
        self.phase = phase
        # A checkpointed forward inside backward records a graph; backward itself does not.
        self._in_ac = phase == "backward" and torch.is_grad_enabled()
        if phase == "forward" or self._in_ac:
            # What the step was given from outside, seen for the first time. Not in a plain backward pass,
            # where the engine hands on gradients that no operator made, nor in an optimizer's step, whose
            # new counters come the same way.
            self.note_inputs(args, kwargs)
        self._op = str(func)
        kernel = self._kernels.get(func)
        # What a kernel in place takes out of a sparse tensor is there until what it puts in is.
        replaced = [_strided(each) for each in args if isinstance(each, Tensor)] if kernel is not None else []
        result = super().__torch_dispatch__(kernel or func, types, args, kwargs)
        del replaced
        if self._cost is not None:
            self._spent += self._cost(func, (args, kwargs), result)
        scratch = self._scratch(func, args) if self._scratch is not None else 0
        if scratch:
            self._log_scratch(scratch, phase, str(args[0].device))
        if "bernoulli" in self._op:  # a dropout mask, made by empty_like
            for block in self._blocks(args[0]):
                block.op = self._op
        return result

    def _blocks(self, tensor: Any) -> list[Block]:
        """The blocks that a tensor lies in; none for other values and for what is not recorded."""
        parts = _strided(tensor) if isinstance(tensor, Tensor) else ()
        storages = [storage for part in parts for storage in get_untyped_storages(part)]
        found = [getattr(self._WINFO.get(storage, (None,))[0], "block", None) for storage in storages]
        return [block for block in found if block is not None]

    def _track(self, reftype: Any, t: Tensor) -> None:
        self._shape, self._dtype = tuple(t.shape), str(t.dtype).removeprefix("torch.")
        for part in _strided(t):
            super()._track(reftype, part)

    def _update_snap(
        self, u_type: Any, winfo: Any, old_mem_consumed: int | None = None, old_reftype: Any = None
    ) -> None:
        if self._finished:
            return
        super()._update_snap(u_type, winfo, old_mem_consumed, old_reftype)
        kind = u_type.name
        if kind == "ADD":
            phase, module = self._where()
            category = _CATEGORY.get(winfo.reftype)
            if category is None:  # ACT
                category = "recomputed" if phase == "backward" else FORWARD
            if category == "inputs":
                phase = "before"
            device = HOST if _host_copies.get() else str(winfo.device)
            winfo.block = Block(
                _bytes(winfo),
                device,
                category,
                phase,
                module,
                self._op,
                self._shape,
                self._dtype,
                len(self.trace.events),
            )
            self._log("alloc", winfo.block, winfo.block.bytes, category)
            return
        block = getattr(winfo, "block", None)
        if block is None:  # it was empty when it was made, and has grown since
            return
        if kind == "DEL":
            self._log("free", block, -block.bytes, block.category)
            block.died = len(self.trace.events) - 1
        elif kind == "REF":
            self._log("category", block, 0, _CATEGORY.get(winfo.reftype, block.category))
        else:
            change = _bytes(winfo) - block.bytes
            self._log("resize", block, change, block.category)
            block.bytes += change

    def _log(self, action: str, block: Block, change: int, category: str) -> None:
        phase, module = self._where()
        if action == "free" and not self._setup:
            phase = self.phase  # that of the last operator: what a step leaves is freed after it
        block.category = category
        self.trace.events.append(Event(action, block, change, category, phase, module, self._op, self.seconds()))

    def _log_scratch(self, size: int, phase: str, device: str) -> None:
        """What an operator takes and gives back beside its results, which are there by then."""
        module, born = self._where()[1], len(self.trace.events)
        block = Block(size, device, "temporaries", phase, module, self._op, (size,), "uint8", born, born + 1)
        self._log("alloc", block, size, "temporaries")
        self._log("free", block, -size, "temporaries")

    def finish(self) -> Trace:
        """The trace as of now: what is freed later, as the simulation is taken down, is no part of it."""
        self._finished = True
        self.trace.resolve()
        return self.trace


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with memory of their own that a sparse tensor is made of; any other tensor is itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # MKL-DNN's own layout: it has no storage to be seen


def _plain(outputs: Any) -> Any:
    """Mappings and data classes (a library's ModelOutput) as dicts, which pytree knows."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return vars(outputs) if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type) else outputs


def _bytes(winfo: Any) -> int:
    return winfo.size * winfo.element_size
