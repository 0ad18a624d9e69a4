"""Where the memory of a training step goes, before it runs out, and a plan that fits.

estimate(model, inputs)              the memory of a step, computed without allocating it
with track(model, optimizer) as r:   the same of a live step
plan(model, inputs, budget="10GB")   the fastest way to fit a step into a budget
"""

from fastamp.memory._simulate import NotTraceable
from fastamp.memory._sizes import format_bytes, parse_bytes
from fastamp.memory.estimate import estimate
from fastamp.memory.plan import DoesNotFit, Plan, Planner, plan
from fastamp.memory.report import MemoryReport
from fastamp.memory.track import track

__all__ = [
    "DoesNotFit",
    "MemoryReport",
    "NotTraceable",
    "Plan",
    "Planner",
    "estimate",
    "format_bytes",
    "parse_bytes",
    "plan",
    "track",
]
