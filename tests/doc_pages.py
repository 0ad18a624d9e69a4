"""Runs the code on a page of documentation, as a reader would who pastes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent.parent / "docs"


def run_page(name: str) -> dict[str, Any]:
    """Executes the Python blocks of docs/<name>.md one after another. Returns the names they have defined."""
    path = PAGES / f"{name}.md"
    text = path.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert blocks, f"{path} has no Python block"
    namespace: dict[str, Any] = {"__name__": path.stem}
    for block in blocks:
        # Blank lines in front, so that a traceback points at the line of the page.
        code = "\n" * text[: block.start(1)].count("\n") + block[1]
        exec(compile(code, str(path), "exec"), namespace)
    return namespace
