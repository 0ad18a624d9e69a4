"""Where the memory of a training step goes, before it runs out, and a plan that fits.

estimate(model, inputs)              the memory of a step, computed without allocating it
with track(model, optimizer) as r:   the same of a live step
"""

from fastamp.memory._simulate import NotTraceable
from fastamp.memory._sizes import format_bytes, parse_bytes
from fastamp.memory.estimate import estimate
from fastamp.memory.report import MemoryReport
from fastamp.memory.track import track

__all__ = ["MemoryReport", "NotTraceable", "estimate", "format_bytes", "parse_bytes", "track"]
