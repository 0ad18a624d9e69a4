"""What each treatment of each block costs, from one simulated step a treatment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastamp.memory._recorder import RecordedStep


@dataclass(frozen=True)
class BlockCost:
    """One block under one treatment, bytes above what was held when it began.

    kept: held from its forward until its backward.    forward: at most during its forward.
    backward: at most during its backward, above what the blocks before it keep.    seconds: of both.
    """

    kept: float
    forward: float
    backward: float
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """A whole step with every block under one treatment.

    standing: bytes when the first block begins.   after: at most between the last block's forward and its
    backward, above what is held then.   outside: seconds of the step outside blocks.
    """

    standing: float
    blocks: tuple[BlockCost, ...]
    after: float
    outside: float
    peak: float

    @property
    def seconds(self) -> float:
        return self.outside + sum(block.seconds for block in self.blocks)

    def above(self, bytes: float) -> StepCost:
        """The same with `bytes` held throughout."""
        return replace(self, standing=self.standing + bytes, peak=self.peak + bytes)

    def timed_as(self, estimated: StepCost, measured: StepCost) -> StepCost:
        """The same with each time changed as from `estimated` to `measured`, which are of one step."""

        def scaled(own: float, before: float, after: float) -> float:
            return own * after / before if before > 0 else after

        blocks = tuple(
            replace(own, seconds=scaled(own.seconds, before.seconds, after.seconds))
            for own, before, after in zip(self.blocks, estimated.blocks, measured.blocks, strict=True)
        )
        return replace(self, blocks=blocks, outside=scaled(self.outside, estimated.outside, measured.outside))


class NotAStack(ValueError):
    """The blocks are not run once each, one after another, forward and then backward."""


def step_cost(run: RecordedStep, names: Sequence[str]) -> StepCost:
    """Raises NotAStack where the blocks do not form one."""
    trace, marks = run.trace, run.marks
    device = trace.main_device()
    totals = [sum(now.values()) for now in trace.totals(device)]
    end = len(totals)
    enters = [mark for mark in marks if mark.kind == "enter"]
    exits = [mark for mark in marks if mark.kind == "exit"]
    backs = [mark for mark in marks if mark.kind == "backward"]
    if [m.name for m in enters] != list(names) or [m.name for m in exits] != list(names):
        raise NotAStack("blocks are run in another order than they have in the model, or not once each")
    if [m.name for m in backs] != list(reversed(names)):
        raise NotAStack("blocks do not run backward in the reverse of their order")

    def held(event: int) -> float:
        return totals[event - 1] if event > 0 else 0

    def most(start: int, stop: int) -> float:
        return max([held(start), *totals[start:stop]])

    backward_of = {mark.name: mark for mark in backs}
    # A block's stretch lasts until the next one begins: what lies between two blocks goes with the first.
    bounds = [*enters, exits[-1]]
    blocks = []
    before = held(bounds[0].event)
    for number, name in enumerate(names):
        start, stop = bounds[number], bounds[number + 1]
        back = backward_of[name]
        back_stop = backward_of[names[number - 1]].event if number else end
        back_seconds = (backward_of[names[number - 1]].seconds if number else run.seconds) - back.seconds
        blocks.append(
            BlockCost(
                kept=held(stop.event) - held(start.event),
                forward=most(start.event, stop.event) - held(start.event),
                backward=most(back.event, back_stop) - before,
                seconds=stop.seconds - start.seconds + back_seconds,
            )
        )
        before += blocks[-1].kept
    last = backs[0]
    after = most(exits[-1].event, last.event) - held(exits[-1].event)
    outside = run.seconds - sum(block.seconds for block in blocks)
    return StepCost(held(bounds[0].event), tuple(blocks), after, outside, max(totals))


def lumped_cost(run: RecordedStep) -> StepCost:
    """The whole step as a single block, for blocks that are no stack and so can only be treated all alike."""
    peak = max(sum(now.values()) for now in run.trace.totals(run.trace.main_device()))
    return StepCost(0, (BlockCost(0, peak, 0, run.seconds),), 0, 0, peak)


def between(low: StepCost, high: StepCost, share: float) -> StepCost:
    """The costs at `share` of the way from one batch size to a larger one.

    A tensor's size is a straight line in the batch size; a maximum of such is below its chord, so this does
    not say too little.
    """

    def mix(a: float, b: float) -> float:
        return a + (b - a) * share

    blocks = tuple(
        BlockCost(
            mix(a.kept, b.kept),
            mix(a.forward, b.forward),
            mix(a.backward, b.backward),
            mix(a.seconds, b.seconds),
        )
        for a, b in zip(low.blocks, high.blocks, strict=True)
    )
    return StepCost(
        mix(low.standing, high.standing),
        blocks,
        mix(low.after, high.after),
        mix(low.outside, high.outside),
        mix(low.peak, high.peak),
    )


@dataclass(frozen=True)
class Choice:
    """A treatment for each block, with the peak and the seconds that the costs give."""

    treatments: tuple[str, ...]
    peak: float
    seconds: float


_State = tuple[float, float, float, tuple]  # kept, seconds and peak so far, and the choices as a linked list


def cheapest(costs: dict[str, StepCost], budget: float) -> Choice | None:
    """The fastest choice of treatments whose peak fits the budget; None if none does. Exact.

    The peak of a stack is the largest of: what is held plus a block's own forward or backward, and all that
    is kept plus what comes after the last block. So, going through the blocks in order, all that matters
    about the choices made so far is how much they keep and how long they take, and of two choices the one
    that keeps more and takes longer can be forgotten. Peaks within the budget need no minding: they are
    checked as they arise.
    """
    names = list(costs)
    first = costs[names[0]]
    standing = max(cost.standing for cost in costs.values())
    after = max(cost.after for cost in costs.values())
    states: list[_State] = [(standing, first.outside, standing, ())]
    for number in range(len(first.blocks)):
        grown = []
        for kept, seconds, peak, chosen in states:
            for name in names:
                block = costs[name].blocks[number]
                here = max(peak, kept + block.forward, kept + block.backward)
                if here <= budget:
                    grown.append((kept + block.kept, seconds + block.seconds, here, (chosen, name)))
        states = _undominated(grown)
    ends = [
        (seconds, max(peak, kept + after), chosen) for kept, seconds, peak, chosen in states if kept + after <= budget
    ]
    if not ends:
        return None
    seconds, peak, chosen = min(ends, key=lambda end: end[:2])
    treatments: list[str] = []
    while chosen:
        chosen, name = chosen
        treatments.append(name)
    return Choice(tuple(reversed(treatments)), peak, seconds)


def _undominated(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:3]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def front(costs: dict[str, StepCost], budget: float) -> Iterator[Choice]:
    """The choices within the budget that nothing betters in both peak and seconds: fastest and largest first.

    A smaller budget gives the end of the same sequence, down to the treatments: of choices that are equally good it
    is always the same one.
    """
    choice = cheapest(costs, budget)
    while choice is not None:
        smaller = cheapest(costs, math.ceil(choice.peak) - 1)
        if smaller is None or smaller.seconds > choice.seconds:
            same = cheapest(costs, choice.peak)
            yield same if same is not None else choice
        choice = smaller


def least(costs: dict[str, StepCost]) -> Choice:
    """The choice with the lowest peak, the fastest of those."""
    low, high = 0, int(max(cost.peak for cost in costs.values())) + 1
    best = cheapest(costs, high)
    while best is None:
        low, high = high, 2 * high
        best = cheapest(costs, high)
    while low + 1 < high:
        middle = (low + high) // 2
        found = cheapest(costs, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, int(found.peak) + 1)
    return best
