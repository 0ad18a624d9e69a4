"""Real text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import argparse
import functools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, each (batch, seq) int64; a target is the byte after its input."""

_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}


@dataclass(frozen=True)
class Text:
    """uint8 tensors, split by file: every tenth file is kept for validation."""

    train: Tensor
    validation: Tensor
    files: int


@functools.cache
def standard_library() -> Text:
    """The ``.py`` files of the running interpreter's standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = sorted((p for p in paths if not _LEFT_OUT.intersection(p.parts)), key=Path.as_posix)
    if len(paths) < 10:
        raise SystemExit(
            f"demo: trains on the standard library's source, but {root} holds {len(paths)} .py "
            "files; run it with a Python that has them (python.org, conda, your distribution's full python3)"
        )
    contents = [(root / path).read_bytes() for path in paths]
    validation = contents[9::10]
    del contents[9::10]
    return Text(_tensor(contents), _tensor(validation), len(paths))


def _tensor(contents: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)


def batches(text: Tensor, count: int, options: argparse.Namespace) -> Iterator[Batch]:
    """``count`` batches from random places of the text; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(options.seed)
    window = torch.arange(options.seq + 1)
    for _ in range(count):
        starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=generator)
        piece = text[starts + window].long().to(options.device)
        yield piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
