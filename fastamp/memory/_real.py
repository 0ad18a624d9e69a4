"""A step for real, on a copy of the model: recorded as the simulated one is, or timed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from fastamp.memory import _blocks, _optimizers
from fastamp.memory._cost import clock
from fastamp.memory._cpu_kernels import scratch_bytes
from fastamp.memory._not_traceable import NotTraceable
from fastamp.memory._recorder import Mark, RecordedStep, Recorder
from fastamp.memory._step import Step, with_gradients
from fastamp.memory.report import MemoryReport
from fastamp.memory.track import Tracking

if TYPE_CHECKING:
    from fastamp.memory.estimate import Setting


class RealStep:
    """The step of a setting with these treatments of blocks, ready to run on a copy of the model.

    Raises NotTraceable, which names `purpose`, if the model has no real parameters to run with.
    """

    def __init__(self, setting: Setting, treatments: Mapping[str, str], purpose: str) -> None:
        if any(t.is_meta or isinstance(t, FakeTensor) for t in (*setting.model.parameters(), *setting.model.buffers())):
            raise NotTraceable(
                f"{purpose} runs the step for real, and {type(setting.model).__name__} has no real parameters (they "
                "are meta or fake): build the model on a device first"
            )
        self.model = copy.deepcopy(setting.model)
        _blocks.untreat(self.model)  # of a plan that is applied to the user's
        if setting.precision.parameters is not None:
            self.model.to(setting.precision.parameters)
        pairs = zip(setting.model.parameters(), self.model.parameters(), strict=True)
        self.optimizer = _optimizers.build(setting.optimizer, {id(old): new for old, new in pairs}, foreach=False)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        _blocks.apply(self.model, treatments)

        def moved(tensor: Tensor) -> Tensor:
            own = tensor.clone() if tensor.is_inference() else tensor  # autograd refuses what inference_mode has made
            return own.to(device, setting.precision.parameters if tensor.is_floating_point() else None)

        args, kwargs, targets = pytree.tree_map_only(Tensor, moved, (setting.args, setting.kwargs, setting.targets))
        self.inputs = args, kwargs, targets
        self.step = Step(self.model, args, kwargs, targets, setting.precision, setting.loss, device.type)

    def train(self, micro_batches: int = 1) -> None:
        """Forward and backward of some micro-batches."""
        for _ in range(micro_batches):
            self.step.train()

    def optimize(self) -> None:
        """The optimizer's step; gradients are gone after it."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    def report(self, micro_batches: int) -> MemoryReport:
        """The memory of a whole step; one should have run before, which makes the optimizer's states."""
        with Tracking(self.model, self.optimizer, inputs=self.inputs) as report:
            self.train(micro_batches)
            self.optimize()
        return report


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A step on a copy in here draws nothing from the program's random numbers, calls none of its hooks of optimizers,
    and has gradients though the caller may have turned them off."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), with_gradients(), _optimizers.hooks_of_all_optimizers_off():
        yield


@apart()
def measured_report(setting: Setting, treatments: Mapping[str, str], why: str) -> MemoryReport:
    """What `Setting.simulate` gives, from one real step, and a note that says why."""
    real = RealStep(setting, treatments, 'fallback="measure"')
    if setting.mode == "inference":
        with Tracking(real.model, inputs=real.inputs) as report:
            output = real.step.infer()
        del output
    else:
        if real.optimizer is not None:
            real.train()
            real.optimize()
        report = real.report(min(setting.accumulation, 2))
    report.notes.append(f"measured on a copy of the model, for fake tensors could not run it: {why}")
    return setting.titled(report, treatments)


@apart()
def record(
    setting: Setting,
    treatments: Mapping[str, str],
    *,
    optimizer: bool = True,
    gradients: Collection[str] | None = None,
    watch: Collection[str] = (),
) -> RecordedStep:
    """What `Setting.run` gives for a step that trains, from a real one."""
    real = RealStep(setting, treatments, 'fallback="measure"')
    if optimizer and real.optimizer is not None:
        real.train()
        real.optimize()
    for name, parameter in real.model.named_parameters():
        if name in (gradients or ()):
            parameter.grad = torch.zeros_like(parameter)
    recorder = Recorder(real.model, real.optimizer if optimizer else None, watch=watch, scratch=scratch_bytes)
    recorder.note_inputs(real.inputs)
    with recorder:
        real.train()
        got = frozenset(name for name, p in real.model.named_parameters() if p.grad is not None)
        seconds = recorder.seconds()
        if optimizer:
            real.optimize()
    optimizer_seconds = recorder.seconds() - seconds
    return RecordedStep(recorder.finish(), recorder.marks, got, None, [], seconds, optimizer_seconds)


class Stopwatch:
    """Moments of a step, and the seconds between two of them.

    On CUDA these are events of the current stream, which cost no waiting until they are read.
    """

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._now = clock(device_type)

    def now(self) -> Any:
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        if not self._cuda:
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


class Timed(NamedTuple):
    """Seconds of a real step, medians: of forward and backward, of the optimizer's step, and at which of them each
    watched block is entered, left and run backward."""

    marks: list[Mark]
    seconds: float
    optimizer_seconds: float


@apart()
def timed(setting: Setting, options: Sequence[Mapping[str, str]], names: Sequence[str], repeats: int) -> list[Timed]:
    """Runs the step `repeats` times under each of several treatments of blocks, in turns, after one that warms up.

    In turns, so that what slows the machine down for a while slows them all. `names` are the blocks to watch.
    """
    real, watch = RealStep(setting, {}, 'times="measured"'), Stopwatch(setting.device_type)
    runs: list[list[list[float]]] = [[] for _ in options]
    found: list[list[tuple[str, str]]] = [[] for _ in options]
    for _ in range(repeats + 1):
        for number, treatments in enumerate(options):
            undo = _blocks.apply(real.model, treatments)
            with _marking(real.model, names, watch.now) as marks:
                start = watch.now()
                real.train()
                trained = watch.now()
                real.optimize()
                moments = [moment for _, _, moment in marks] + [trained, watch.now()]
            undo()
            runs[number].append([watch.between(start, moment) for moment in moments])
            found[number] = [(kind, name) for kind, name, _ in marks]
    return [_medians(run[1:], kinds) for run, kinds in zip(runs, found, strict=True)]


def _medians(runs: list[list[float]], kinds: list[tuple[str, str]]) -> Timed:
    *blocks, seconds, whole = (median(moments) for moments in zip(*runs, strict=True))
    marks = [Mark(kind, name, 0, moment) for (kind, name), moment in zip(kinds, blocks, strict=True)]
    return Timed(marks, seconds, whole - seconds)


@contextlib.contextmanager
def _marking(model: nn.Module, names: Sequence[str], now: Callable[[], Any]) -> Iterator[list[tuple[str, str, Any]]]:
    """While this is entered, the moments at which named modules run are added to a list, as `Recorder` marks them."""
    marks: list[tuple[str, str, Any]] = []

    def watch(name: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: Any) -> None:
            marks.append(("enter", name, now()))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            marks.append(("exit", name, now()))
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            if tensors:
                register_multi_grad_hook(tensors, lambda _: marks.append(("backward", name, now())), mode="any")

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    modules = dict(model.named_modules())
    handles = [handle for name in names for handle in watch(name, modules[name])]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()
