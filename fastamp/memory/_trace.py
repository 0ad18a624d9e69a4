"""What happened to memory, as a list of events: the common form of a simulated and of a live step.

A `Block` is one storage; an event is its birth, its death, a change of its category or of its size.
Everything that a report says (breakdown, peak, timeline, what an allocator makes of it) is computed from
these afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

CATEGORIES = (
    "parameters",
    "buffers",
    "optimizer states",
    "gradients",
    "inputs",
    "activations",
    "outputs",
    "recomputed",
    "temporaries",
)
"""Longest-lived first, the order in which a plot stacks them.

inputs        what the model was given, and other tensors made outside the step.
activations   made by the forward pass and alive when backward begins.
outputs       what the model returned, for as long as the step holds on to it.
recomputed    made again by a checkpointed forward inside backward.
temporaries   everything else: freed before backward begins, gradients of activations, an optimizer's scratch.
"""

FORWARD = "made in forward"
"""Provisional: becomes activations, outputs or temporaries once the step is over."""


@dataclass(slots=True, eq=False)
class Block:
    """One storage. `bytes`: as asked for, before an allocator rounds. `born`, `died`: numbers of events."""

    bytes: int
    device: str
    category: str
    phase: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    born: int
    died: int | None = None
    returned: bool = False


class Event(NamedTuple):
    """`action` is "alloc", "free", "category" (to `category`) or "resize"; `bytes` is what it adds, below 0 for a
    free. `category` is the block's from this event on. phase, module and op say where in the step it fell."""

    action: str
    block: Block
    bytes: int
    category: str
    phase: str
    module: str
    op: str
    seconds: float


@dataclass
class Trace:
    events: list[Event] = field(default_factory=list)
    backward_starts: list[int] = field(default_factory=list)
    """Numbers of the events before which a backward pass began."""

    def blocks(self) -> list[Block]:
        return [event.block for event in self.events if event.action == "alloc"]

    def resolve(self) -> None:
        """Decides what each block made in a forward pass was, which only the end of the step tells."""
        for block in self.blocks():
            if block.category != FORWARD:
                continue
            died = len(self.events) if block.died is None else block.died
            if any(block.born < start <= died for start in self.backward_starts):
                block.category = "outputs" if block.returned else "activations"
            elif block.died is None and not self.backward_starts:
                block.category = "outputs"
            else:
                block.category = "temporaries"

    def category(self, event: Event) -> str:
        return event.block.category if event.category == FORWARD else event.category

    def main_device(self) -> str:
        """The device that most bytes were asked of."""
        held: dict[str, int] = {}
        for block in self.blocks():
            held[block.device] = held.get(block.device, 0) + block.bytes
        return max(held, key=lambda device: held[device], default="cpu")

    def totals(self, device: str) -> Iterator[dict[str, int]]:
        """The bytes of each category after each event (one dict, reused). Yields once for each event."""
        now = dict.fromkeys(CATEGORIES, 0)
        held: dict[int, tuple[str, int]] = {}
        for event in self.events:
            if event.block.device == device:
                key = id(event.block)
                was, size = held.pop(key, ("", 0))
                if was:
                    now[was] -= size
                if event.action != "free":
                    category = self.category(event)
                    held[key] = category, size + event.bytes
                    now[category] += size + event.bytes
            yield now

    def alive(self, number: int, device: str) -> list[tuple[Block, str, int]]:
        """Blocks alive after event `number`, each with its category and its bytes at that time."""
        held: dict[int, tuple[Block, str, int]] = {}
        for event in self.events[: number + 1]:
            if event.block.device != device:
                continue
            key = id(event.block)
            size = held.pop(key, (None, "", 0))[2]
            if event.action != "free":
                held[key] = event.block, self.category(event), size + event.bytes
        return list(held.values())

    def steady(self, start: int, stop: int) -> Trace:
        """The trace as of a later step, whose optimizer states exist from the beginning.

        Events `start` to `stop` are the optimizer step that made the states, and it is followed by another
        one. What only the first one made is left out, and what it made to stay is put in front.
        """
        made = [e.block for e in self.events[start:stop] if e.action == "alloc"]
        states = [block for block in made if block.category == "optimizer states" and block.died is None]
        gone = {id(block) for block in made if block.died is not None and block.died < stop}
        moved = {id(block) for block in states}
        front = [
            Event("alloc", b, b.bytes, "optimizer states", "before", b.module, "optimizer state", 0.0) for b in states
        ]
        rest = [e for e in self.events if id(e.block) not in gone | moved]
        kept_before = [sum(id(e.block) not in gone | moved for e in self.events[:n]) for n in self.backward_starts]
        later = Trace(front + rest, [len(front) + count for count in kept_before])
        for number, event in enumerate(later.events):
            if event.action == "alloc":
                event.block.born = number
            elif event.action == "free":
                event.block.died = number
        return later
