"""Who holds the GPU's memory, by torch's own memory history: `torch.cuda.memory._record_memory_history()`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastamp.memory._users_code import is_users


class Line(NamedTuple):
    """Live blocks that one line of a program allocated. `where`: "file:line in function"."""

    bytes: int
    blocks: int
    where: str


def largest_lines(snapshot: Mapping[str, Any], device: int, count: int = 5) -> list[Line]:
    """The lines whose blocks hold most of a device's memory, largest first; none if no history was recorded.

    snapshot: as `torch.cuda.memory._snapshot` documents it.
    """
    held: dict[str, list[int]] = defaultdict(list)
    for segment in snapshot["segments"]:
        if segment.get("device", device) != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                held[_where(block.get("frames") or [])].append(block["size"])
    lines = sorted((Line(sum(sizes), len(sizes), where) for where, sizes in held.items()), reverse=True)
    return lines[:count] if any(where != _UNKNOWN for where in held) else []


_UNKNOWN = "no line of Python (backward, or before the history began)"


def _where(frames: list[Mapping[str, Any]]) -> str:
    """The innermost line of the user's own code, else of Python code; frames come innermost first."""
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = [frame for frame in python if is_users(frame["filename"])]
    for frame in own or python:
        return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return _UNKNOWN
