"""benchmarks/on_gpu.sh where there is no GPU: its dry run, and what it makes of parts that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: the script would use it")

PARTS = [
    "build",
    "diagnostics",
    "emulated build",
    "graphs, streams",
    "emulated and real bits",
    "memcheck",
    "racecheck",
    "initcheck",
    "synccheck",
    "op tests",
    "scaler, integrations, NCCL",
    "benchmarks",
    "memory",
    "rest of the suite",
]


def on_gpu(out: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict, str]:
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), str(out), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        timeout=500,
    )
    report = out / "report.json"
    assert report.exists(), done.stdout + done.stderr
    return done, json.loads(report.read_text()), (out / "summary.md").read_text()


def outcomes(report: dict) -> dict[str, str]:
    return {part["part"]: part["outcome"] for part in report["parts"]}


@pytest.mark.slow
def test_dry_run(tmp_path):
    done, report, summary = on_gpu(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU" in done.stdout and "no GPU" in summary and report["dry_run"] is True
    assert outcomes(report) == dict.fromkeys(PARTS, "passed")
    assert [line.split(" | ")[0] for line in summary.splitlines() if " | passed | " in line] == [
        f"| {p}" for p in PARTS
    ]
    log = (tmp_path / "log.txt").read_text()
    assert all(f"==== {part}: passed" in log for part in PARTS)
    assert json.loads((tmp_path / "comparison.json").read_text())["cases"] > 50
    results = json.loads((tmp_path / "benchmarks.json").read_text())["results"]
    assert {"torch", "foreach_mul and isfinite", "fastamp"} <= set(results[1]["timing"])
    assert all(result["case"] in summary for result in results)
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["gpus"] == []


def test_a_part_that_fails_or_hangs_is_reported_and_stops_nothing(tmp_path):
    marker = tmp_path / "survivor"
    # What a part has started ends with it: this would write the file two seconds after the limit.
    hangs = f"sh -c 'echo begun; (sleep 3; touch {marker}) & sleep 60'"
    started = time.monotonic()
    done, report, summary = on_gpu(
        tmp_path / "out",
        *("--only", "--limit", "hangs=1"),
        *("--also", "breaks=sh -c 'echo before; echo why; exit 3'"),
        *("--also", f"hangs={hangs}", "--also", "absent=/no/such/program", "--also", "works=echo fine"),
    )
    assert done.returncode == 1
    assert outcomes(report) == {"breaks": "FAILED", "hangs": "TIMED OUT", "absent": "FAILED", "works": "passed"}
    assert [part["last_line"] for part in report["parts"]][::3] == ["why", "fine"]
    assert report["parts"][1]["last_line"] == "begun" and 1 <= report["parts"][1]["seconds"] < 3
    assert "1 passed, 2 FAILED, 1 TIMED OUT" in summary
    assert "before\nwhy" in (tmp_path / "out" / "log.txt").read_text()
    time.sleep(max(0.0, started + 6 - time.monotonic()))
    assert not marker.exists()


def test_the_limit_of_all_together(tmp_path):
    begun = time.monotonic()
    done, report, _ = on_gpu(tmp_path, "--only", "--total", "8", "--also", "long=sleep 60", "--also", "late=echo late")
    assert done.returncode == 1 and time.monotonic() - begun < 40
    assert set(outcomes(report).values()) == {"TIMED OUT"}
    assert report["parts"][1]["last_line"] == "no time was left for it"


def test_unknown_parts_are_refused(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), str(tmp_path), "--only", "bild"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 2 and "no part is named bild; they are: build, " in done.stderr


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import on_gpu

    return on_gpu


def test_what_runs_on_a_gpu(script, tmp_path):
    """The commands that only a GPU's machine runs name files and options that exist."""
    parts = [part for group in script.parts(tmp_path, "9.0") for part in group]
    assert [part.name for part in parts] == PARTS
    for part in parts:
        for word in part.command:
            if word.endswith(".py") and "*" not in word:
                assert (ROOT / word).exists(), word
    assert parts[0].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    commands = {part.name: part.command for part in parts}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert commands[tool][0] == "compute-sanitizer" and commands[tool][commands[tool].index("--tool") + 1] == tool
    assert script.TOTAL_SECONDS < 9 * 60
    asked = commands["scaler, integrations, NCCL"] + commands["memory"]
    for file in sorted((ROOT / "tests").glob("test_*_cuda.py")):
        assert asked.count(str(file)) == 1


@pytest.mark.parametrize("seconds, outcome", [(30, "FAILED"), (22, "TIMED OUT")])
def test_tests_that_run_out_of_time_show_what_failed(script, tmp_path, seconds, outcome):
    test = tmp_path / "test_it.py"
    test.write_text(
        "import time\ndef test_a():\n    assert 1 == 2, 'why it failed'\n"
        "def test_b():\n    for _ in range(140 if SLOW else 1): time.sleep(0.1)\n".replace("SLOW", str(seconds == 22))
    )
    pytest_command = script.parts(tmp_path, "9.0")[3][0].command[:-1]
    part = script.Part("tests", [*pytest_command, str(test)], [], seconds, grace=script.GRACE)
    script.run(part, dry=False, limit=seconds)
    assert part.outcome == outcome and part.seconds < seconds
    assert "why it failed" in part.output and "test_b" in part.output


def test_output_held_open_is_not_waited_for(script):
    """By what has left the part's process group, and so outlives it."""
    part = script.Part("leaves", ["sh", "-c", "echo begun; setsid sleep 20 & sleep 60"], [], 1)
    script.run(part, dry=False, limit=1)
    assert part.outcome == "TIMED OUT" and part.output == "begun\n" and part.seconds < 5


def test_nothing_runs_behind_a_build_that_failed(script, tmp_path):
    groups = [[script.Part("build", ["false"], [], 5)], [script.Part("tests", ["touch", str(tmp_path / "ran")], [], 5)]]
    reports = []
    script.run_all(groups, False, tmp_path / "log.txt", {}, 60, lambda: reports.append(groups[1][0].outcome))
    assert groups[0][0].outcome == "FAILED" and groups[1][0].outcome == "left out" and reports == ["", "left out"]
    assert not (tmp_path / "ran").exists()


def test_a_gpu_that_torch_does_not_find_is_no_dry_run(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), str(tmp_path / "out"), "--only"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == 1 and "nvidia-smi lists a GPU, but torch finds none" in done.stderr


def test_a_part_without_its_program_is_left_out(script):
    part = script.Part("sanitizer", ["no-such-tool"], ["true"], 5, ("no-such-tool", "no_such_module"))
    script.run(part, dry=False, limit=5)
    assert part.outcome == script.LEFT_OUT
    assert part.last_line == "no-such-tool and no_such_module not found on this machine"
