"""README's numbers are those of the committed results, and its commands are where .ci/run looks for them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_those_of_the_results():
    done = subprocess.run(
        [sys.executable, "benchmarks/make_readme.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_first_blocks_are_the_two_commands():
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert "fastamp demo" in blocks[0] and "pytest" in blocks[1]
    for block in blocks[:2]:
        assert "python3 -m venv" in block and "pip install" in block, "each command starts from nothing"
