"""Byte counts: read in any usual spelling, and written for people."""

from __future__ import annotations

import math
import re

# A comma only as in "1,000,000": "1,5GB" is one and a half to some and fifteen to none.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+"
_SPELLING = re.compile(rf"^\s*({_NUMBER})\s*([a-z]*)\s*$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMES = {
    "byte": "b",
    "bytes": "b",
    "kilobyte": "kb",
    "megabyte": "mb",
    "gigabyte": "gb",
    "terabyte": "tb",
    "kibibyte": "kib",
    "mebibyte": "mib",
    "gibibyte": "gib",
    "tebibyte": "tib",
}


def parse_bytes(value: int | float | str, name: str = "budget") -> int:
    """The bytes that `value` means: "10GB", "10 GiB", "512 MiB", "80g", "1_000_000", "1.5e9" or a plain number.

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB, TiB and the bare letters k, m, g, t powers of 1024
    (as nvidia-smi, PyTorch and container runtimes mean them). Upper and lower case are the same.

    Raises TypeError for another type, ValueError for what is not a positive finite size; the message names
    `name`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f'{name} must be a number of bytes or a size such as "10GB", got {type(value).__name__}')
    if isinstance(value, str):
        match = _SPELLING.match(value)
        unit = match[2].lower() if match else ""
        unit = _NAMES.get(unit.removesuffix("s") if len(unit) > 4 else unit, unit)
        letter, rest = unit[:1], unit[1:]
        if letter == "b" and not rest:
            letter = ""
        if match is None or letter not in _POWERS or rest not in ("", "b", "ib"):
            raise ValueError(f'{name} must be a size such as "10GB", "512 MiB" or a number of bytes, got {value!r}')
        number = float(match[1].replace("_", "").replace(",", "")) * (1000 if rest == "b" else 1024) ** _POWERS[letter]
    else:
        number = float(value)
    if not math.isfinite(number) or number < 1:
        raise ValueError(f"{name} must be a positive, finite number of bytes, got {value!r}")
    return int(number)


def format_bytes(count: float) -> str:
    """`count` bytes with a binary unit: "512 B", "1.50 MiB"."""
    sign, size = ("-" if count < 0 else ""), abs(float(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" else 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{digits}f} {unit}"
