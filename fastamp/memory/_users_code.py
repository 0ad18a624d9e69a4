"""Which files are the user's own."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch

import fastamp


@functools.cache
def is_users(file: str) -> bool:
    """Whether a traceback's file is neither fastamp's, torch's nor Python's. Other packages count as the user's."""
    ours = tuple(str(Path(str(package.__file__)).parent) for package in (fastamp, torch))
    library = file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file
    return not library and not file.startswith((*ours, "<frozen"))
