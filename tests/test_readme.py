"""README's numbers are those of the committed results, and its commands are where .ci/run looks for them."""

from __future__ import annotations

import os
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


def test_the_function_for_the_memory_report_is_one_that_works(tmp_path):
    page = (ROOT / "README.md").read_text()
    code, command = re.search(r"```python\n([^`]*def make[^`]*)```\n\n```\npython ([^`]*)\n```", page).groups()
    (tmp_path / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "Plan for 286 MiB: peak 2" in done.stdout and "checkpoint" in done.stdout
