"""Where the memory of a training step goes, before it runs out, and a plan that fits.

In short:

    estimate(model, inputs)              the memory of a step, computed without allocating it
    with track(model, optimizer) as r:   the same of a live step
    plan(model, inputs, budget="10GB")   the fastest way to fit a step into a budget
    explain_oom(error)                   what held the memory that ran out, and what to do about it
"""

from fastamp.memory._not_traceable import NotTraceable
from fastamp.memory._sizes import format_bytes, parse_bytes
from fastamp.memory.estimate import estimate
from fastamp.memory.oom import explain_oom
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
    "explain_oom",
    "format_bytes",
    "parse_bytes",
    "plan",
    "track",
]
