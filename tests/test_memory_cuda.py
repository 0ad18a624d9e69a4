"""`fastamp.memory` on a GPU: estimates and plans against the CUDA allocator, its counters, and running out for real.

The bodies of most checks are those of the CPU: see memory_checks.py.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from backends import why_missing
from memory_checks import Measured, check_estimate, check_plan, close
from memory_models import make

from fastamp.memory import Planner, track
from fastamp.memory._real import Stopwatch

pytestmark = pytest.mark.skipif(bool(why_missing("cuda")), reason=why_missing("cuda") or "there is a GPU")

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _empty_allocator() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("cnn", {}),
        ("bert", {}),
        ("gpt", {}),
        ("gpt", {"precision": "fp16-amp"}),
        ("bert", {"precision": "bf16-amp"}),
        ("gpt", {"accumulation": 2}),
    ],
    ids=str,
)
def test_saved_bytes_and_peak_are_those_of_a_real_step(kind, settings):
    report = check_estimate(kind, "cuda", **settings)
    assert report.device == "cuda" and report.cuda.requested == report.peak.bytes <= report.cuda.allocated


def test_a_live_step_has_the_allocators_peak_and_tells_reserved_from_allocated():
    model, inputs, loss = make("gpt", "cuda")
    real = Measured(model, inputs, loss, torch.optim.AdamW(model.parameters()))
    peak = real.peak()
    with track(model, real.optimizer, inputs=inputs) as report:
        real.step()
        torch.cuda.synchronize()
    assert report.device.startswith("cuda")
    close(report.peak.bytes, peak)
    assert report.measured["peak allocated"] == torch.cuda.max_memory_allocated()
    assert report.measured["peak reserved"] == torch.cuda.max_memory_reserved()
    assert report.fragmentation == report.measured["peak reserved"] - report.measured["peak allocated"] >= 0
    assert "CUDA caching allocator (measured): at most" in str(report) and "beyond what tensors needed" in str(report)


@pytest.mark.parametrize(
    "kind, options, precision",
    [
        ("gpt", ("keep", "checkpoint"), None),
        ("gpt", ("keep", "offload"), None),
        ("gpt", ("keep", "store:int8"), "fp16-amp"),
        ("bert", ("keep", "store:bf16", "checkpoint"), None),
        ("cnn", ("keep", "checkpoint"), None),
    ],
    ids=str,
)
def test_a_plan_that_is_applied_has_the_predicted_peak_and_undone_the_old_one(kind, options, precision):
    found = check_plan(kind, options, "cuda", precision)
    if "offload" in options:
        assert found.estimate().other_devices["host (offloaded)"] > 0


def test_measured_times_predict_the_time_of_a_plan():
    model, inputs, loss = make("gpt", "cuda")
    planner = Planner(model, inputs, loss=loss, optimizer="sgd", micro_batches=False, margin=0, times="measured")
    keep, checkpointed = (planner._peak(1, dict.fromkeys(planner.blocks, each)) for each in ("keep", "checkpoint"))
    found = planner.plan((keep + checkpointed) // 2)
    run = found.verify(repeats=5)
    assert set(found.treatments.values()) == {"keep", "checkpoint"}
    assert run.predicted_seconds == pytest.approx(run.seconds, rel=0.3)
    close(run.predicted_peak, run.peak)


def test_a_stopwatch_reads_the_gpus_clock_and_waits_only_when_read():
    watch, a = Stopwatch("cuda"), torch.randn(4096, 4096, device="cuda")
    start = watch.now()
    for _ in range(20):
        a @ a
    stop = watch.now()
    queued = stop.query()
    seconds = watch.between(start, stop)
    assert seconds > 1e-4 and stop.query() and isinstance(queued, bool)


_LIMITED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from memory_models import make
torch.cuda.memory._record_memory_history(stacks="python")
model, tokens, loss = make("gpt", "cuda")
loss(model(tokens[:1])).backward()
model.zero_grad()
allowed = torch.cuda.memory_reserved() + 200_000_000
torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
print("limited", flush=True)
loss(model(tokens)).backward()
"""


def test_run_explains_a_programs_real_lack_of_memory_and_raises_it_again(tmp_path):
    script = tmp_path / "limited.py"
    script.write_text(_LIMITED.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "fastamp", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 1 and done.stdout == "limited\n", done.stderr
    assert "fastamp: out of memory. By an estimate, the step takes:" in done.stderr
    assert "the GPU has" in done.stderr and "activations" in done.stderr
    assert "live now, by the line that allocated it" in done.stderr and "memory_models.py:" in done.stderr
    assert "checkpoint the 4 blocks blocks.0 to blocks.3" in done.stderr
    lines = done.stderr.splitlines()
    assert sum(line.strip()[:2] in ("1.", "2.", "3.") and "frees" in line for line in lines) == 3
    explained = next(n for n, line in enumerate(lines) if "fastamp: out of memory" in line)
    raised = [n for n, line in enumerate(lines) if line.startswith("torch.OutOfMemoryError: CUDA out of memory")]
    assert raised and raised[-1] > explained
