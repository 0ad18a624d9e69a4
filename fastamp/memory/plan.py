"""`plan`: the fastest way to fit a training step into a memory budget."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fastamp._last_call import out_of_memory_error
from fastamp.memory import _blocks
from fastamp.memory._not_traceable import NotTraceable
from fastamp.memory._profile import (
    Choice,
    NotAStack,
    StepCost,
    between,
    cheapest,
    front,
    least,
    lumped_cost,
    step_cost,
)
from fastamp.memory._real import RealStep, Stopwatch, apart, measured_report
from fastamp.memory._recorder import RecordedStep
from fastamp.memory._sizes import format_bytes, parse_bytes
from fastamp.memory._variants import Variants, batch_size, changed, sliced
from fastamp.memory.estimate import Setting
from fastamp.memory.report import MemoryReport

# Costs of blocks are taken from steps in which all blocks are treated alike, so a mixed plan's peak can be
# off by a little: plans up to this much above the budget are simulated as a whole before they are dismissed.
_SLACK = 1.03


class DoesNotFit(ValueError):
    """No allowed plan fits the budget.

    Attributes:
        least: bytes that the smallest plan needs; as a budget it fits.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Verification:
    """What a plan's step really took, beside what was predicted."""

    peak: int
    predicted_peak: int
    seconds: float
    predicted_seconds: float
    report: MemoryReport


@dataclass
class Plan:
    """How to run a step within a budget; made by `plan`. `print(plan)` shows it in words.

    Attributes:
        budget: what was allowed, in bytes.
        treatments: name of each block -> how it is treated, "keep" where nothing is done.
        micro_batch, accumulation: the batch is run in `accumulation` pieces of `micro_batch`, gradients adding up
            (divide each piece's mean loss by `accumulation`).
        predicted_peak: bytes, of the whole plan, simulated.
        seconds: predicted time of the step; if `times` is "estimated", good for comparing plans only, see `rates`.
        keep_peak, keep_seconds: the same for the step as it is, nothing treated, in one piece.
        rates: where the speeds that `seconds` comes from are taken from.
        notes: what the reader should know.
        times: "estimated", or "measured" in real steps.
    """

    budget: int
    treatments: dict[str, str]
    micro_batch: int
    accumulation: int
    predicted_peak: int
    seconds: float
    keep_peak: int
    keep_seconds: float
    rates: str
    notes: list[str] = field(default_factory=list)
    times: str = "estimated"
    _setting: Any = field(default=None, repr=False)
    _for_real: bool = field(default=False, repr=False)
    _undo: Callable[[], None] | None = field(default=None, repr=False)

    def apply(self, model: nn.Module) -> None:
        """Puts the treatments on the blocks of `model` (the planned one or one built alike).

        The blocks' `forward` is replaced on the instances; parameters, hooks and state dicts stay as they are.
        Cutting batches is left to the loop: see `split`.

        Raises:
            RuntimeError: the plan is applied already, or another one is to this model.
            ValueError: `model` lacks one of the blocks.
        """
        if self._undo is not None:
            raise RuntimeError("this plan is applied already: call undo() first")
        modules = dict(model.named_modules())
        missing = [name for name in self.treatments if name not in modules]
        if missing:
            raise ValueError(f"apply: {type(model).__name__} has no module called {missing[0]!r}")
        treated = _blocks.treated(model)
        if treated:
            name, treatment = next(iter(treated.items()))
            raise RuntimeError(
                f"apply: {type(model).__name__} has the treatments of a plan already ({name!r}: {treatment}): call "
                "that plan's undo() first"
            )
        self._undo = _blocks.apply(model, self.treatments)

    def undo(self) -> None:
        """Takes the treatments off again.

        Raises:
            RuntimeError: the plan is not applied.
        """
        if self._undo is None:
            raise RuntimeError("this plan is not applied")
        self._undo()
        self._undo = None

    def split(self, batch: Any) -> Iterator[Any]:
        """The micro-batches of `batch` (tensors in any nesting, of any shape and dtype).

        Tensors as long as the first one are cut along dimension 0, everything else is repeated.
        """
        size = batch_size(batch)
        for start in range(0, size, self.micro_batch):
            yield sliced(batch, size, start, min(size, start + self.micro_batch))

    def verify(self, repeats: int = 3) -> Verification:
        """Runs the planned step for real, on a copy of the model, and measures its peak and its time.

        Needs room for a second copy of the parameters. The time is the median of `repeats` unrecorded steps after one
        that warms up: processor time on a CPU with one thread, else wall-clock time; on CUDA each is waited for.

        Returns:
            `peak` and `predicted_peak` in bytes, `seconds` and `predicted_seconds`, and the measured `report`.

        Raises:
            NotTraceable: the model has no real parameters.
            ValueError: the plan is for another device than the model's.
        """
        setting: Setting = self._setting
        report, seconds = _run_for_real(setting, self, repeats)
        return Verification(report.peak.bytes, self.predicted_peak, seconds, self.seconds, report)

    def estimate(self) -> MemoryReport:
        """The full report of the planned step, on fake tensors where the plan was made so: see `estimate`."""
        return _report(self._setting, self.treatments, self._for_real)

    def as_dict(self) -> dict[str, Any]:
        """The plan's attributes as plain values, for JSON."""
        names = (
            "budget",
            "treatments",
            "micro_batch",
            "accumulation",
            "predicted_peak",
            "seconds",
            "keep_peak",
            "keep_seconds",
            "rates",
            "notes",
            "times",
        )
        return {name: getattr(self, name) for name in names}

    def describe(self, times: bool = True) -> str:
        """The plan in words; without estimated times if `times` is false."""
        slower = f", {self.seconds / self.keep_seconds:.2f} x the time of the step as it is" if times else ""
        lines = [
            f"Plan for {format_bytes(self.budget)}: peak {format_bytes(self.predicted_peak)}{slower} "
            f"(as it is: {format_bytes(self.keep_peak)})."
        ]
        if self.accumulation > 1:
            lines.append(f"  batch: {self.accumulation} micro-batches of {self.micro_batch}")
        for treatment, run in itertools.groupby(self.treatments.items(), key=lambda item: item[1]):
            names = [name for name, _ in run]
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} blocks)"
            lines.append(f"  {span}: {treatment}")
        if times:
            lines.append(f"  times are {'estimates; rates ' if self.times == 'estimated' else ''}{self.rates}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def __str__(self) -> str:
        return self.describe()


def plan(
    model: nn.Module,
    example_inputs: Any,
    budget: int | float | str,
    *,
    optimizer: Any = "adamw",
    precision: str | torch.dtype | None = None,
    mode: str = "train",
    loss: Callable[..., Tensor] | None = None,
    targets: Any = None,
    device: str | torch.device | None = None,
    options: Sequence[str] = ("keep", "checkpoint"),
    micro_batches: bool = True,
    blocks: Any = None,
    margin: float | None = None,
    times: str = "estimated",
    fallback: str = "raise",
) -> Plan:
    """The fastest combination of treatments of blocks and micro-batches whose peak fits `budget`.

    For a stack of blocks run one after another the choice is exact for the costs at hand (dynamic programming); each
    block's costs come from simulated steps on fake tensors. The plan returned was simulated as a whole, and that is its
    `predicted_peak`. More budget never gives a slower plan.

    Args:
        model, example_inputs, optimizer, precision, mode, loss, targets, device: as for `estimate`.
        budget: bytes, as a number or in any usual spelling ("10GB", "10 GiB").
        options: what a block may be treated with: "keep", "checkpoint", "offload" (to host memory; CUDA only), and with
            approximate gradients "store:FORMAT" and "checkpoint:FORMAT" for the formats of `fastamp.store_activations`
            and `fastamp.checkpoint`. The default changes no gradient. One that the model does not run with is left out
            with a note.
        micro_batches: whether the batch may be cut. Only into equal parts, along the first dimension.
        blocks: the modules to treat, as `estimate`'s `checkpoint`; by default the repeated blocks found.
        margin: part of the budget to leave free for what the allocator loses; by default 0.05 for CUDA, 0 for the CPU.
        times: where the times that are weighed come from. "estimated": from the operators' arithmetic and traffic, good
            for telling plans apart. "measured": from real steps of copies of the model on its device, a few for each
            option, all blocks treated alike; the predicted time is then that of this device as it is now. Of a batch
            that does not fit, a part is run, and its times are scaled up.
        fallback: where fake tensors cannot run the model: "raise" NotTraceable, or "measure" sizes and times in real
            steps of copies of the model, on its own device. Those have to fit.

    Returns:
        a `Plan`: `apply(model)` puts it in place, `undo()` takes it out, `verify()` runs and measures it.

    Raises:
        DoesNotFit: (a ValueError) nothing allowed fits; it says what the least is.
        NotTraceable: the step does not run on fake tensors; it names the module that stops them. See `fallback`.
        TypeError, ValueError: for arguments that are wrong.
    """
    budget = parse_bytes(budget)
    return Planner(
        model,
        example_inputs,
        optimizer=optimizer,
        precision=precision,
        mode=mode,
        loss=loss,
        targets=targets,
        device=device,
        options=options,
        micro_batches=micro_batches,
        blocks=blocks,
        margin=margin,
        times=times,
        fallback=fallback,
    ).plan(budget)


class Planner:
    """Plans for several budgets from one set of simulations: `Planner(model, inputs).plan("10GB")`. Arguments and
    exceptions are as for `plan`."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        optimizer: Any = "adamw",
        precision: str | torch.dtype | None = None,
        mode: str = "train",
        loss: Callable[..., Tensor] | None = None,
        targets: Any = None,
        device: str | torch.device | None = None,
        options: Sequence[str] = ("keep", "checkpoint"),
        micro_batches: bool = True,
        blocks: Any = None,
        margin: float | None = None,
        times: str = "estimated",
        fallback: str = "raise",
    ) -> None:
        if mode == "inference":
            raise ValueError("plan: inference keeps nothing to plan for; see estimate(mode='inference')")
        if times not in ("estimated", "measured"):
            raise ValueError(f'times must be "estimated" or "measured", got {times!r}')
        if fallback not in ("raise", "measure"):
            raise ValueError(f'fallback must be "raise" or "measure", got {fallback!r}')
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(f"margin must be a fraction from 0 to below 1, got {margin}")
        setting = Setting(model, example_inputs, optimizer, precision, mode, 1, loss, targets, device)
        own_device = next((p.device.type for p in model.parameters()), "cpu")
        if times == "measured" and own_device != setting.device_type:
            raise ValueError(
                f'times="measured" runs the step where the model is, on {own_device}, and device={device!r} asks for '
                "another: leave device out, or move the model there"
            )
        check_options(options, setting.device_type)
        if blocks is None:
            self.blocks = _blocks.find_blocks(model)
        else:
            self.blocks = _blocks.chosen_blocks(model, blocks, "blocks")
        self.times, self.notes = times, []
        try:
            self._variants = Variants(setting)
        except NotTraceable as problem:
            if fallback == "raise" or not problem.fake_tensors_are_the_limit:
                raise
            self._variants = Variants(changed(setting, device_type=own_device), for_real=True)
            self.times = "measured"
            self.notes.append(f"sizes and times are of real steps on {own_device}, for {problem}")
            check_options(options, own_device)
        self.setting = self._variants.setting
        self.margin = (0.05 if self.setting.device_type == "cuda" else 0.0) if margin is None else margin
        self.options = list(dict.fromkeys(options))
        if not self.blocks:
            self.options = ["keep"]
            self.notes.append("no repeated blocks were found, so none is treated: name them with blocks=")
        self.notes += self._variants.plain.notes
        self.micro_batches = micro_batches and self._variants.batch > 1
        self._costs: dict[int, dict[str, StepCost]] = {}
        self._peaks: dict[tuple[int, tuple[str, ...]], int] = {}
        self._lumped = not self.blocks
        self._dropped: list[str] = []
        try:
            self._costs_of(1)
        except NotAStack as problem:
            self._lumped = True
            self.notes.append(f"all blocks are treated alike: {problem}")
            self._costs_of(1)

    # --- simulations ---

    def _run(self, treatments: dict[str, str], pieces: int) -> RecordedStep:
        watch = [] if self._lumped else self.blocks
        return self._variants.run(self._variants.with_pieces(pieces), treatments, watch)

    def _costs_of(self, pieces: int) -> dict[str, StepCost]:
        """Costs of each treatment when the batch is cut into `pieces`."""
        if pieces in self._costs:
            return self._costs[pieces]
        candidates = self._pieces()
        if pieces == 1 or pieces in (candidates[1], candidates[-1]):
            self._costs[pieces] = self._costs_of_options(self.options, pieces)
        else:
            large, small = candidates[1], candidates[-1]
            share = (1 / pieces - 1 / small) / (1 / large - 1 / small)
            low, high = self._costs_of(small), self._costs_of(large)
            self._costs[pieces] = {option: between(low[option], high[option], share) for option in self.options}
        return self._costs[pieces]

    def _costs_of_options(self, options: Sequence[str], pieces: int) -> dict[str, StepCost]:
        by_option = self._runs_of_options(options, pieces)
        options, runs = list(by_option), list(by_option.values())
        treatments = [dict.fromkeys(self.blocks, option) for option in options]
        for each, run in zip(treatments, runs, strict=True):
            self._peaks[pieces, tuple(each.values())] = self._variants.peak(run.trace)
        order = [mark.name for mark in runs[0].marks if mark.kind == "enter"]
        if sorted(order) == sorted(self.blocks):
            self.blocks = order  # the order they run in, which need not be the model's
        costs = self._step_costs(runs)
        if self.times == "measured":
            costs = self._with_real_times(treatments, pieces, runs, costs)
        return dict(zip(options, costs, strict=True))

    def _runs_of_options(self, options: Sequence[str], pieces: int) -> dict[str, RecordedStep]:
        """The step with all blocks under each option. Options that it cannot run under are dropped for good."""
        runs, problems = {}, {}
        for option in options:
            try:
                runs[option] = self._run(dict.fromkeys(self.blocks, option), pieces)
            except Exception as problem:
                if (
                    pieces > 1 or out_of_memory_error(problem) is not None
                ):  # that option runs, with another budget or batch
                    raise
                problems[option] = problem
        if not runs:
            raise next(iter(problems.values()))
        for option, reason in problems.items():
            self.options.remove(option)
            self._dropped.append(option)
            self.notes.append(f"{option} is left out, for the step does not run with it: {_first_line(reason)}")
        return runs

    def _step_costs(self, runs: Sequence[RecordedStep]) -> list[StepCost]:
        costs = [lumped_cost(run) if self._lumped else step_cost(run, self.blocks) for run in runs]
        return [cost.above(self._variants.states) for cost in costs]

    def _with_real_times(
        self, treatments: list[dict[str, str]], pieces: int, runs: list[RecordedStep], costs: list[StepCost]
    ) -> list[StepCost]:
        """`costs` of `runs` with times of real steps: of the largest part of the batch that fits, if not all does."""
        batch = self._variants.batch
        for part in [n for n in range(pieces, batch + 1) if batch % n == 0]:
            smaller = runs if part == pieces else [self._run(each, part) for each in treatments]
            try:
                real = self._variants.with_real_times(self._variants.with_pieces(part), smaller, treatments)
            except Exception as problem:
                if part == batch or out_of_memory_error(problem) is None:
                    raise
                continue
            if not self._costs:  # it is the same for each part
                self._variants.optimizer_seconds = real[0].optimizer_seconds
            ratios = zip(costs, self._step_costs(smaller), self._step_costs(real), strict=True)
            return [cost.timed_as(estimated, measured) for cost, estimated, measured in ratios]
        raise AssertionError("there is at least one part")

    def _treatments(self, choice: Choice) -> dict[str, str]:
        chosen = choice.treatments * len(self.blocks) if self._lumped else choice.treatments
        return dict(zip(self.blocks, chosen, strict=True))

    def _pieces(self) -> list[int]:
        """Into how many equal parts the batch may be cut."""
        if not self.micro_batches:
            return [1]
        return [n for n in range(1, self._variants.batch + 1) if self._variants.batch % n == 0]

    def _peak(self, pieces: int, treatments: dict[str, str]) -> int:
        """The peak of a whole plan, simulated."""
        key = pieces, tuple(treatments.values())
        if key not in self._peaks:
            self._peaks[key] = self._variants.peak(self._run(treatments, pieces).trace)
        return self._peaks[key]

    def _seconds(self, pieces: int, choice: Choice) -> float:
        return pieces * choice.seconds + self._variants.optimizer_seconds

    # --- the choice ---

    def plan(self, budget: int | float | str) -> Plan:
        """The fastest plan that fits `budget`; result and exceptions as for `plan`."""
        allowed = parse_bytes(budget)
        usable = math.floor(allowed * (1 - self.margin))
        # Merged by time, so the first one that really fits is the fastest.
        for seconds, pieces, choice in heapq.merge(
            *(self._candidates(pieces, usable) for pieces in self._worth_cutting(usable)),
            key=lambda candidate: candidate[:2],
        ):
            peak = self._peak(pieces, self._treatments(choice))
            if peak <= usable:
                return self._plan(allowed, pieces, choice, peak, seconds)
        raise self._does_not_fit(allowed)

    def _worth_cutting(self, usable: int) -> list[int]:
        """By estimated times nothing is faster than the whole batch with each block at its fastest, if that fits."""
        if self.times == "measured":
            return self._pieces()
        fastest = cheapest(self._costs_of(1), math.inf)
        assert fastest is not None
        if fastest.peak <= usable * _SLACK and self._peak(1, self._treatments(fastest)) <= usable:
            return [1]
        return self._pieces()

    def _candidates(self, pieces: int, usable: int) -> Iterator[tuple[float, int, Choice]]:
        """Plans with this many pieces, fastest first, each with a lower peak than the one before.

        A larger `usable` only puts more in front: what is behind stays, so more budget cannot give a slower plan.
        """
        try:
            costs = self._costs_of(pieces)
        except NotTraceable as problem:
            note = f"the batch is not cut: the step does not run on a part of it ({problem})"
            self.notes += [] if note in self.notes else [note]
            return
        for choice in front(costs, usable * _SLACK):
            yield self._seconds(pieces, choice), pieces, choice
        smallest = least(costs)
        yield self._seconds(pieces, smallest), pieces, smallest

    def _plan(self, budget: int, pieces: int, choice: Choice, peak: int, seconds: float) -> Plan:
        keeping = self._costs_of(1).get("keep")
        if keeping is None:
            keeping = self._costs_of_options(["keep"], 1)["keep"]
        return Plan(
            budget=budget,
            treatments=self._treatments(choice),
            micro_batch=self._variants.batch // pieces,
            accumulation=pieces,
            predicted_peak=peak,
            seconds=seconds,
            keep_peak=self._peak(1, dict.fromkeys(self.blocks, "keep")),
            keep_seconds=keeping.seconds + self._variants.optimizer_seconds,
            rates=self._variants.rates.source if self.times == "estimated" else "those of real steps on this device",
            notes=[*self.notes, *self._notes_on_pieces(pieces)],
            times=self.times,
            _setting=self._variants.with_pieces(pieces),
            _for_real=self._variants.for_real,
        )

    def _notes_on_pieces(self, pieces: int) -> list[str]:
        norms = [m for m in self.setting.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if pieces == 1 or not any(norm.training for norm in norms):
            return []
        size = self._variants.batch // pieces
        return [
            f"the statistics of BatchNorm are then those of each micro-batch of {size}, not of the batch: outputs and "
            "gradients differ a little from those of the batch in one piece (micro_batches=False never cuts it)"
        ]

    def _does_not_fit(self, budget: int) -> DoesNotFit:
        found = []
        for pieces in {1, self._pieces()[-1]}:
            try:
                choice = least(self._costs_of(pieces))
            except NotTraceable:
                continue
            found.append((self._peak(pieces, self._treatments(choice)), pieces, choice))
        peak, pieces, choice = min(found, key=lambda entry: entry[:2])
        treatments = self._treatments(choice)
        needed = math.ceil(peak / (1 - self.margin))
        chosen = list(treatments.values())
        counts = {name: chosen.count(name) for name in dict.fromkeys(chosen)}
        how = ", ".join(f"{count} blocks {name}" for name, count in counts.items()) or "no blocks to treat"
        if pieces > 1:
            how += f", micro-batches of {self._variants.batch // pieces}"
        if self.margin:
            how += f"; {self.margin:.0%} of it left free as the margin"
        run = _report(self._variants.with_pieces(pieces), treatments, self._variants.for_real)
        standing = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in run.peak.breakdown.items() if size > 0.02 * run.peak.bytes
        )
        tried = self.options + self._dropped
        missing = [o for o in ("checkpoint", "store:int8", "checkpoint:int8") if o not in tried]
        more = f" Options not allowed here: {', '.join(missing)}." if missing else ""
        if self._dropped:
            more += f" Options that the step does not run with: {', '.join(self._dropped)}."
        return DoesNotFit(
            f"budget: {format_bytes(budget)} is less than the least that this step needs, {format_bytes(needed)} "
            f"({needed:,} bytes: {how}). At that peak: {standing}.{more}",
            needed,
        )


def _report(setting: Setting, treatments: dict[str, str], for_real: bool) -> MemoryReport:
    if for_real:
        return measured_report(setting, treatments, "see the plan's notes")
    return setting.simulate(treatments)


@apart()
def _run_for_real(setting: Setting, plan: Plan, repeats: int) -> tuple[MemoryReport, float]:
    """A planned step for real, on a copy of the model: its record, and the median of unrecorded times."""
    real, watch, seconds = RealStep(setting, plan.treatments, "verify"), Stopwatch(setting.device_type), []
    if real.step.device_type != setting.device_type:
        raise ValueError(
            f"verify runs the step where the model is, on {real.step.device_type}, and the plan is for "
            f"{setting.device_type}: plan with device={real.step.device_type!r}, or a model that is there"
        )
    for _ in range(repeats + 1):
        began = watch.now()
        real.train(plan.accumulation)
        real.optimize()
        seconds.append(watch.between(began, watch.now()))
    report = real.report(min(plan.accumulation, 2))
    return report, median(seconds[1:])


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


def check_options(options: Sequence[str], device_type: str) -> None:
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise TypeError(f"options must be a sequence of treatments such as ('keep', 'checkpoint'), got {options!r}")
    for option in options:
        _blocks.check_treatment(option)
    if "offload" in options and device_type == "cpu":
        raise ValueError("options: 'offload' moves activations to host memory, and with device='cpu' they are there")
