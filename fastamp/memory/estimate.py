"""`estimate`: the memory of a training step without running it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastamp.memory import _blocks, _cpu_kernels, _optimizers
from fastamp.memory._cuda_kernels import cuda_kernels
from fastamp.memory._fake_kernels import FAKE_KERNELS
from fastamp.memory._not_traceable import NotTraceable, explained
from fastamp.memory._recorder import RecordedStep, Recorder
from fastamp.memory._simulate import FakeModel, fake_mode_of
from fastamp.memory._step import MODES, Precision, Step, default_loss, precision_of, split_inputs, with_gradients
from fastamp.memory._trace import Trace
from fastamp.memory.report import MemoryReport, Parameters, fill


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    optimizer: Any = "adamw",
    precision: str | torch.dtype | None = None,
    mode: str = "train",
    checkpoint: Any = None,
    store: Any = None,
    accumulation: int = 1,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = None,
    device: str | torch.device | None = None,
    fallback: str = "raise",
) -> MemoryReport:
    """The memory of one step of `model`, computed on fake tensors: none of the model's memory is allocated.

    Counted is what operators ask the allocator for. Not counted: what a kernel takes and gives back within itself
    (but for the columns of the CPU's half-precision convolutions and the scratchpad of its LSTMs), library workspaces,
    the reserve space of cuDNN's recurrent layers, the CUDA context.

    Args:
        model: a module with real, meta or fake parameters. It is as before afterwards.
        example_inputs: one argument, a tuple of arguments or a mapping of keyword arguments. Only shapes,
            dtypes and the nesting matter; tensors may be on the meta device.
        optimizer: a torch optimizer, its class, a callable taking the parameters, or a name ("adamw", "sgd",
            ...); None for none. State is what the optimizer itself makes in a simulated step.
        precision: "fp32", "fp16", "bf16" (parameters in that type), "fp16-amp", "bf16-amp" (autocast over the
            parameters as they are), or None: the model as it is.
        mode: "train"; "finetune", which insists that something is frozen (frozen parameters have no gradients
            and no states in either); or "inference", without gradients, states or saved activations.
        checkpoint: True for every repeated block, a number n for every n-th, names of modules ("layers.*"), or
            a mapping from such names to the format that their inputs are kept in ({"layers.*": "int8"}).
        store: a format for what the repeated blocks keep, see `fastamp.store_activations`, or a mapping from
            names of modules to formats. A checkpointed block keeps its inputs in that format.
        accumulation: micro-batches to one optimizer step. `example_inputs` is one micro-batch.
        loss: gives the loss from the model's output, or from it and `targets` if those are given; without it
            the output's own `.loss`, else its sum.
        targets: what `loss` gets as its second argument, counted as an input.
        device: whose kernels are assumed: "cpu" or "cuda" (default: the model's own; CUDA for a meta model).
        fallback: where fake tensors cannot run the model: "raise" NotTraceable, which names the module, or
            "measure" one real step of a copy of the model, which does allocate. A step that fails for another
            reason would fail for real too, and is not tried.

    Returns:
        a MemoryReport; `print(report)` shows the table.

    Raises:
        TypeError, ValueError: for arguments that are wrong, before anything has run.
        NotTraceable: the step did not run: see `fallback`, and the error's own attributes.
    """
    setting = Setting(model, example_inputs, optimizer, precision, mode, accumulation, loss, targets, device)
    treatments = treatments_of(model, checkpoint, store)
    if fallback not in ("raise", "measure"):
        raise ValueError(f'fallback must be "raise" or "measure", got {fallback!r}')
    try:
        return setting.simulate(treatments)
    except NotTraceable as problem:
        if fallback == "raise" or not problem.fake_tensors_are_the_limit:
            raise
        from fastamp.memory._real import measured_report

        return measured_report(setting, treatments, str(problem))


def treatments_of(model: nn.Module, checkpoint: Any, store: Any) -> dict[str, str]:
    """Name of module -> treatment, from estimate's arguments `checkpoint` and `store`."""
    chosen: dict[str, str] = {}
    if isinstance(checkpoint, Mapping):
        for pattern, form in checkpoint.items():
            for name in _blocks.chosen_blocks(model, pattern, "checkpoint"):
                chosen[name] = _blocks.stored("checkpoint", form)
    elif checkpoint is not None and checkpoint is not False:
        chosen.update(dict.fromkeys(_blocks.chosen_blocks(model, checkpoint, "checkpoint"), "checkpoint"))
    if store is not None and store is not False:
        formats = store if isinstance(store, Mapping) else {None: store}
        for pattern, form in formats.items():
            for name in _blocks.chosen_blocks(model, True if pattern is None else pattern, "store"):
                chosen[name] = _blocks.stored(chosen.get(name, "keep"), form)
    return chosen


# The model is changed in place while it is simulated, and torch tracks modules for the whole process.
_one_at_a_time = threading.RLock()


class Setting:
    """All that decides a step's memory except how its blocks are treated. Checks its arguments."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        optimizer: Any,
        precision: str | torch.dtype | Precision | None,
        mode: str,
        accumulation: int,
        loss: Callable[..., Tensor] | None,
        targets: Any,
        device: str | torch.device | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if isinstance(accumulation, bool) or not isinstance(accumulation, int):
            raise TypeError(f"accumulation must be a number of micro-batches, got {type(accumulation).__name__}")
        if accumulation < 1:
            raise ValueError(f"accumulation must be at least 1, got {accumulation}")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a function of the model's output, got {type(loss).__name__}")
        if targets is not None and loss is None:
            raise ValueError("targets go to loss(output, targets), and there is no loss: pass it too")
        _optimizers.check(optimizer)
        self.model = model
        self.args, self.kwargs = split_inputs(example_inputs)
        self.optimizer = _optimizers.unwrapped(optimizer) if mode != "inference" else None
        self.precision = precision_of(precision)
        self.mode = mode
        self.accumulation = accumulation
        self.loss = loss or default_loss
        self.targets = targets
        self.device_type = _device_type(model, device)
        parameters = list(model.parameters())
        frozen = sum(not p.requires_grad for p in parameters)
        if mode == "finetune" and not frozen:
            raise ValueError(
                f"mode='finetune' expects frozen parameters, and all {len(parameters)} require gradients: "
                "call requires_grad_(False) on those to freeze, or say mode='train'"
            )
        if mode != "inference" and frozen == len(parameters):
            raise ValueError(f"mode={mode!r}: no parameter of {type(model).__name__} requires gradients")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            _optimizers.build(self.optimizer, {id(p): p for p in parameters}, foreach=False)

    # --- the step on fake tensors ---

    def simulate(self, treatments: Mapping[str, str] | None = None) -> MemoryReport:
        """The report of one steady step with these treatments of blocks."""
        return self.report_of(self.run(treatments or {}), treatments or {})

    def report_of(self, run: RecordedStep, treatments: Mapping[str, str]) -> MemoryReport:
        report = fill(MemoryReport(first_step_peak=run.first_peak, notes=run.notes), run.trace)
        report.device = self.device_type
        return self.titled(report, treatments)

    def run(
        self,
        treatments: Mapping[str, str],
        *,
        optimizer: bool = True,
        gradients: Collection[str] | None = None,
        watch: Collection[str] = (),
        cost: Callable[[Any, Any, Any], float] | None = None,
    ) -> RecordedStep:
        """Runs the step on fake tensors.

        optimizer: take optimizer steps. gradients: parameters that hold a gradient from before, which stands
        for earlier micro-batches; None to run those. watch, cost: see `Recorder`.
        """
        mode = fake_mode_of(self.model)
        training = self.mode != "inference"
        real_cuda = self.device_type == "cuda" and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if real_cuda else torch.device("cpu")
        emulated = self.device_type == "cuda" and not real_cuda
        fakes = FakeModel(
            self.model,
            mode,
            device,
            self.precision.parameters,
            lambda _, p: training and p.requires_grad,
            others=(getattr(self.loss, "__self__", self.loss), self.optimizer),
        )
        with _one_at_a_time, with_gradients(), _optimizers.hooks_of_all_optimizers_off(), fakes as fake:
            args, kwargs, targets = fake.fake_tree((self.args, self.kwargs, self.targets))
            undo = _blocks.apply(self.model, treatments)
            try:
                with mode, cuda_kernels() if emulated else contextlib.nullcontext():
                    for name, parameter in self.model.named_parameters():
                        if name in (gradients or ()):
                            parameter.grad = torch.empty_like(parameter)
                    step = Step(self.model, args, kwargs, targets, self.precision, self.loss, device.type)
                    kernels, scratch = FAKE_KERNELS, None
                    if self.device_type == "cpu":
                        kernels, scratch = FAKE_KERNELS | _cpu_kernels.FAKE_KERNELS, _cpu_kernels.scratch_bytes
                    recorder = Recorder(self.model, watch=watch, cost=cost, scratch=scratch, kernels=kernels)
                    recorder.note_inputs(args, kwargs, targets)
                    run = self._record(step, fake, recorder, optimizer, 1 if gradients is not None else 2)
            finally:
                undo()
        if not fake.complete:
            run.notes.append(
                f"{type(self.model).__name__} holds more objects than were looked into: what the step stores in those "
                "that lie deepest is not taken out again"
            )
        return run

    def _record(
        self, step: Step, fake: FakeModel, recorder: Recorder, with_optimizer: bool, micro_batches: int
    ) -> RecordedStep:
        notes: list[str] = []
        if (
            self.device_type == "cuda"
            and self.mode != "inference"
            and any(isinstance(m, nn.RNNBase) for m in self.model.modules())
        ):
            notes.append("reserve space of cuDNN's RNN, which backward needs, is not counted: track measures it")
        if self.mode == "inference":
            with recorder, explained(self.model):
                output = step.infer()
            trace = recorder.finish()
            del output
            return RecordedStep(trace, recorder.marks, frozenset(), None, notes, recorder.seconds(), 0.0)
        optimizer = None
        if with_optimizer:
            optimizer = _optimizers.build(self.optimizer, fake.parameters, foreach=self.device_type == "cuda")
        with recorder:
            with explained(self.model):
                # The second micro-batch meets the gradients of the first; a third would be like the second.
                for _ in range(min(self.accumulation, micro_batches)):
                    step.train()
            gradients = frozenset(n for n, p in self.model.named_parameters() if p.grad is not None)
            start = stop = len(recorder.trace.events)
            seconds = recorder.seconds()
            if optimizer is not None:
                stop = self._optimizer_steps(optimizer, recorder, notes)
                optimizer.zero_grad()
        trace, first_peak = recorder.finish(), None
        if stop != start:
            first_peak = _peak(trace, stop)
            trace = trace.steady(start, stop)
        optimizer_seconds = (recorder.seconds() - seconds) / 2  # of the two steps taken
        return RecordedStep(trace, recorder.marks, gradients, first_peak, notes, seconds, optimizer_seconds)

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, recorder: Recorder, notes: list[str]) -> int:
        """Takes the optimizer step that makes the states, then another; the number of the event between."""
        name = type(optimizer).__name__
        known = _optimizers.known_state(optimizer)
        if known is None:
            try:
                with _optimizers.AnyScalar():
                    optimizer.step()
                    between = len(recorder.trace.events)
                    optimizer.step()
                return between
            except Exception as problem:  # a stranger's optimizer may raise anything on fake tensors
                size = _optimizers.state_after_one_step(optimizer)
                if size is None:
                    notes.append(
                        f"the states of {name} are unknown and counted as nothing: its step runs neither on "
                        f"fake tensors ({type(problem).__name__}: {problem}) nor on CPU stand-ins"
                    )
                    return len(recorder.trace.events)
                notes.append(f"the states of {name} were counted after one real step on CPU stand-ins")
        else:
            size, reason = known
            notes.append(f"optimizer states by formula: {reason}")
        recorder.add_state(size, device=next(p.device for g in optimizer.param_groups for p in g["params"]))
        return len(recorder.trace.events)

    # --- words ---

    def titled(self, report: MemoryReport, treatments: Mapping[str, str]) -> MemoryReport:
        report.parameters, report.regime = describe_parameters(self.model, self.mode, self.precision)
        used = sorted(set(treatments.values()) - {"keep"})
        parts = [
            type(self.model).__name__,
            self.precision.name,
            "" if self.mode == "inference" else _optimizers.name_of(self.optimizer),
            f"{self.accumulation} micro-batches" if self.accumulation > 1 else "",
            ", ".join(f"{list(treatments.values()).count(name)} blocks {name}" for name in used),
            f"for {report.device}",
        ]
        report.title = ", ".join(part for part in parts if part)
        return report


def _peak(trace: Trace, stop: int) -> int:
    device = trace.main_device()
    return max((sum(now.values()) for number, now in enumerate(trace.totals(device)) if number < stop), default=0)


def _device_type(model: nn.Module, device: str | torch.device | None) -> str:
    if device is not None:
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
        return kind
    kinds = {p.device.type for p in model.parameters()}
    return "cpu" if kinds <= {"cpu"} else "cuda"


def describe_parameters(model: nn.Module, mode: str, precision: Precision) -> tuple[Parameters, str]:
    """Bytes and numbers of parameters, and in words what is trained."""
    found = Parameters()
    trained: list[nn.Parameter] = []
    for parameter in model.parameters():
        dtype = precision.parameters if precision.parameters and parameter.is_floating_point() else parameter.dtype
        size = parameter.numel() * dtype.itemsize
        found.bytes += size
        found.count += parameter.numel()
        if mode != "inference" and parameter.requires_grad:
            trained.append(parameter)
            found.trainable_bytes += size
            found.trainable_count += parameter.numel()
    if mode == "inference":
        return found, f"Inference: {found.count:,} parameters, no gradients, no optimizer states."
    if found.trainable_count == found.count:
        return found, f"Full training: all {found.count:,} parameters."
    found.adapter_rank = adapter_rank(trained)
    share = f"{found.trainable_count:,} of {found.count:,} parameters ({found.trainable_count / found.count:.2%})"
    if found.adapter_rank is not None:
        return (
            found,
            f"LoRA-style fine-tuning (rank {found.adapter_rank}): {share} train, the rest is frozen.",
        )
    return found, f"Fine-tuning: {share} train, the rest is frozen."


def adapter_rank(trained: list[nn.Parameter]) -> int | None:
    """The rank of low-rank adapters, if most of what trains is matrices with one small side.

    Small is at most an eighth of the other side.
    """
    ranks: dict[int, int] = {}
    for parameter in trained:
        if parameter.ndim == 2 and min(parameter.shape) * 8 <= max(parameter.shape):
            ranks[min(parameter.shape)] = ranks.get(min(parameter.shape), 0) + parameter.numel()
    if not ranks:
        return None
    rank = max(ranks, key=lambda each: ranks[each])
    return rank if 2 * ranks[rank] > sum(p.numel() for p in trained) else None
