"""`python -m fastamp run`: unmodified programs, their arguments and exits, launchers, and the report."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from doc_pages import run_page

import fastamp
from fastamp import patching, profiling, run
from fastamp._report import Report

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "unmodified"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

has_transformers = importlib.util.find_spec("transformers") is not None
has_accelerate = importlib.util.find_spec("accelerate") is not None


def execute(*command: str, launcher: tuple[str, ...] = ("-m",), cwd: Path = ROOT, **kwargs):
    """`python -m fastamp run command...`, its output as text."""
    return subprocess.run(
        [sys.executable, *launcher, "fastamp", "run", *command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )


def plain_output(script: Path, *arguments: str) -> str:
    """What the script prints by itself."""
    threads, argv = torch.get_num_threads(), sys.argv
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        sys.argv = argv
    return output.getvalue()


def losses(output: str) -> list[str]:
    return re.findall(r"^step .*", output, re.MULTILINE)


def test_page():
    run_page("integrations/run")


# ---- unmodified programs -----------------------------------------------------------------------------------


# Runs a script, then tells what it used: the type of its scaler and how often it came to fastamp.checkpoint.
WITNESS = """
import runpy, sys
from fastamp import checkpointing

calls, checkpoint = [], checkpointing.checkpoint
checkpointing.checkpoint = lambda *args, **kwargs: calls.append(1) or checkpoint(*args, **kwargs)
sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0], run_name="__main__")
scaler = names["trainer"].accelerator.scaler if "trainer" in names else names["scaler"]
print("used:", type(scaler).__module__, type(scaler).__name__, len(calls))
"""
AMP, CUDA = "fastamp.patching AmpGradScaler", "fastamp.patching CudaGradScaler"
# Trainer makes a scaler with fp16 only, which is for GPUs.
TRAINER = AMP if torch.cuda.is_available() else "builtins NoneType"


@pytest.mark.parametrize(
    ("name", "steps", "scaler", "checkpoints"),
    [
        ("amp_loop", 10, CUDA, 0),
        ("gradient_accumulation", 6, AMP, 0),
        ("checkpoint_forward", 3, AMP, 4 * 3),
        pytest.param(
            *("bert_classifier", 3, AMP, 3 * 3),
            marks=pytest.mark.skipif(not has_transformers, reason="transformers is not installed"),
        ),
        pytest.param(
            # Three layers in each of four micro-batches.
            *("hf_trainer", 2, TRAINER, 2 * 4 * 3),
            marks=pytest.mark.skipif(
                not (has_transformers and has_accelerate), reason="transformers or accelerate is not installed"
            ),
        ),
    ],
)
def test_articles_scripts_run_unchanged_with_the_same_results(name, steps, scaler, checkpoints, tmp_path):
    script = EXAMPLES / f"{name}.py"
    witness = tmp_path / "witness.py"
    witness.write_text(WITNESS)
    result = execute("--report", str(witness), str(script), "--steps", str(steps))
    assert result.returncode == 0, result.stderr
    assert f"used: {scaler} {checkpoints}\n" in result.stdout
    expected = plain_output(script, "--steps", str(steps))
    assert losses(expected) and losses(result.stdout) == losses(expected)
    report = result.stdout[result.stdout.index("fastamp report") :]
    if name in ("amp_loop", "hf_trainer"):
        # torch.cuda.amp's scaler disables itself without a GPU.
        without_gpu = f"no gradient scaler was in use: {steps} optimizer steps"
        assert (f"scaler: {steps} steps" if torch.cuda.is_available() else without_gpu) in report
    else:
        assert f"scaler: {steps} steps" in report and "scaler time" in report
    if name == "gradient_accumulation":
        scales = [float(scale) for scale in re.findall(r"scale (\S+)$", expected, re.MULTILINE)]
        halvings = len(set([2.0**24, *scales])) - 1
        assert halvings >= 3 and f"{steps} steps, {halvings} skipped" in report
        assert "scale 16777216 -> 8388608 (step 1) -> 4194304 (step 2)" in report
    if name in ("checkpoint_forward", "bert_classifier", "hf_trainer"):
        assert f"checkpoint: {checkpoints} calls\n" in report


def test_storage_applies_and_is_counted():
    script = EXAMPLES / "checkpoint_forward.py"
    result = execute("--storage", "bf16", "--min-scale", "1", "--report", str(script), "--steps", "2")
    assert result.returncode == 0, result.stderr
    exact = losses(plain_output(script, "--steps", "2"))
    # Stored inputs change gradients, not the forward pass, so that the first loss is the same.
    assert losses(result.stdout)[0] == exact[0] and losses(result.stdout)[1] != exact[1]
    # The first layer's input is the user's data and stays; the next three, 64x64 floats, are halved.
    assert "storage: 48.0 KiB saved, 24.0 KiB a step: 96.0 KiB as 48.0 KiB (6 in bf16)" in result.stdout


def test_store_applies_and_is_counted():
    script = EXAMPLES / "checkpoint_forward.py"
    result = execute("--store", "bf16", "--report", str(script), "--steps", "2")
    assert result.returncode == 0, result.stderr
    exact = losses(plain_output(script, "--steps", "2"))
    assert losses(result.stdout)[0] == exact[0] and losses(result.stdout)[1] != exact[1]
    saved = re.search(r"storage: .* saved, .* a step: .* \((\d+) in bf16", result.stdout)
    assert saved and int(saved[1]) >= 4, result.stdout


# ---- what the program sees ---------------------------------------------------------------------------------

PROBE = """
import json, sys, torch
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "main": sys.modules["__main__"].__dict__ is globals(), "scaler": torch.amp.GradScaler.__module__,
    }))
    sys.exit(int(sys.argv[-1]))
"""


def test_script_sees_what_python_would_show_it(tmp_path):
    script = tmp_path / "folder" / "probe.py"
    script.parent.mkdir()
    script.write_text(PROBE)
    result = execute("--report", "folder/probe.py", "--report", "-m", "x", "--", "3", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    first, *report = result.stdout.splitlines()
    assert json.loads(first) == {
        "argv": ["folder/probe.py", "--report", "-m", "x", "--", "3"],
        "path": str(script.parent),
        "name": "__main__",
        "file": "folder/probe.py",
        "main": True,
        "scaler": "fastamp.patching",
    }
    assert "no gradient scaler was in use: 0 optimizer steps" in "\n".join(report)


def test_module_sees_what_python_would_show_it(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "probe.py").write_text(PROBE)
    result = execute("-m", "package.probe", "--storage", "0", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["argv"] == [str(tmp_path / "package" / "probe.py"), "--storage", "0"]
    assert seen["path"] == str(tmp_path) and seen["name"] == "__main__" and seen["main"]
    assert seen["scaler"] == "fastamp.patching"


def test_an_exception_comes_through_and_the_report_with_it(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import torch\nraise KeyError('mine')\n")
    result = execute("--report", str(script))
    assert result.returncode == 1
    assert "KeyError: 'mine'" in result.stderr and f'File "{script}", line 2' in result.stderr
    assert "fastamp report" in result.stdout


def test_spawned_processes_run_patched(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        """
import sys
import torch
from torch.amp import GradScaler

def work(rank, results):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    # In one piece: the processes write to one pipe.
    print(f"rank {rank} {GradScaler.__module__} {scaler.state_dict()['min_scale']} {sys.argv[1:]}", flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(None,), nprocs=2)
"""
    )
    result = execute("--min-scale", "2", "--report", str(script), "--option")
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank} fastamp.patching 2.0 ['--option']" in result.stdout
    assert result.stdout.count("scaler: 1 steps, 0 skipped") == 2


def test_fsdps_sharded_scaler_is_ours(tmp_path):
    script = tmp_path / "fsdp.py"
    script.write_text(
        """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FullyShardedDataParallel(torch.nn.Linear(4, 1), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = ShardedGradScaler("cpu", init_scale=1024.0)
for step in range(4):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if step > 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
"""
    )
    result = execute("--report", "--min-scale", "512", str(script))
    assert result.returncode == 0, result.stderr
    assert "scaler: 4 steps, 2 skipped" in result.stdout
    assert "scaler: scale 1024 -> 512 (step 3)\n" in result.stdout


# ---- launchers ---------------------------------------------------------------------------------------------

LAUNCHED = """
import os, torch
import torch.distributed as dist
from torch.amp import GradScaler

model = torch.nn.Linear(4, 1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum() * (float("inf") if step == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
# In one piece, or ranks that write to one pipe without a buffer come between each other's words.
print(f"scale {scaler.get_scale()} of {GradScaler.__module__}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""


# Named by address, torchrun's workers find each other however this machine resolves its own name.
TORCHRUN = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m".split()
# On CPU accelerate launches more than one process only by mpirun.
ACCELERATE = (
    "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no -m"
).split()
needs_accelerate = pytest.mark.skipif(not has_accelerate, reason="accelerate is not installed")


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        pytest.param(TORCHRUN, 2, id="torchrun"),
        pytest.param(ACCELERATE, 1, marks=needs_accelerate, id="accelerate launch"),
    ],
)
def test_works_under(launcher, processes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    result = execute("--report", str(script), launcher=tuple(launcher))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("scale 32768.0 of fastamp.patching") == processes
    assert result.stdout.count("scaler: 3 steps, 1 skipped") == 1


@needs_accelerate
def test_an_article_that_knows_nothing_of_accelerate_runs_under_its_launcher(tmp_path):
    script = EXAMPLES / "gradient_accumulation.py"
    witness = tmp_path / "witness.py"
    witness.write_text(WITNESS)
    result = execute("--report", str(witness), str(script), "--steps", "6", launcher=tuple(ACCELERATE))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"used: {AMP} 0\n" in result.stdout and "scaler: 6 steps" in result.stdout
    assert losses(result.stdout) == losses(plain_output(script, "--steps", "6"))


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "own", "program"),
    [
        (["train.py"], [], ["train.py"]),
        (["--report", "train.py", "--report"], ["--report"], ["train.py", "--report"]),
        (
            ["--storage", "int8", "--store=bf16", "a.py", "1"],
            ["--storage", "int8", "--store=bf16"],
            ["a.py", "1"],
        ),
        (["--min-scale", "-1", "-m", "pkg", "-m"], ["--min-scale", "-1"], ["-m", "pkg", "-m"]),
        (["--report", "--", "a.py", "--", "1"], ["--report"], ["a.py", "--", "1"]),
        (["--", "-m", "pkg"], [], ["-m", "pkg"]),
        (["--"], [], []),
        ([], [], []),
    ],
)
def test_splits_its_options_from_the_programs(command, own, program):
    assert run._split(command) == (own, program)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "name of a script or -m and the name of a module is missing"),
        (["-m"], "name of a script or -m and the name of a module is missing"),
        (["--report", "--"], "name of a script or -m and the name of a module is missing"),
        (["no_such_file.py"], "there is no file 'no_such_file.py'"),
        (["-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["-m", "json.no_such_module"], "there is no module 'json.no_such_module'"),
        (["-m", "no_such_package.module"], "there is no module 'no_such_package.module'"),
        (["-m", "json"], "'json' is a package without a __main__ module"),
        (["--storage", "int7", __file__], "int7"),
        (["--min-scale", "-1", __file__], "min_scale must be a positive number, got -1.0"),
        (["--min-scale", "much", __file__], "invalid float value: 'much'"),
        (["--hysteresis", "0", __file__], "hysteresis must be a number of overflows"),
        (["--stroage", "int8", __file__], "unrecognized arguments: --stroage"),
    ],
)
def test_bad_options_run_nothing(command, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        run.main(command)
    assert exit_.value.code == 2 and message in capsys.readouterr().err
    assert not patching.is_patched() and run._ENVIRONMENT not in os.environ


# ---- the report --------------------------------------------------------------------------------------------


def train(report, overflows=(), steps=6, **kwargs):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, **kwargs)
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    report.start()
    for step in range(1, steps + 1):
        weight.grad = None
        scaler.scale((weight * (float("inf") if step in overflows else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    report.stop()
    return scaler


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_report_counts_steps_skips_and_scales(fused):
    report = Report()
    train(report, overflows=(2,), fused=fused)
    text = "\n".join(report.lines())
    assert "scaler: 6 steps, 1 skipped" in text
    assert "scale 1024 -> 512 (step 2) -> 1024 (step 6)" in text
    assert "every activation was kept as it is" in text
    # A fused optimizer is called for a step that its kernel skips.
    assert report.optimizer_steps == (6 if fused else 5)
    train(Report(), steps=2)
    assert "\n".join(report.lines()) == text


def test_report_begins_with_the_first_scale_and_counts_what_overflowed():
    """Also where the first step overflows, the program takes its steps itself, and sets the scale itself."""
    report = Report()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**24)
    report.start()
    for overflows in (True, False, True, False):
        weight.grad = None
        scaler.scale((weight * (float("inf") if overflows else 1.0)).sum()).backward()
        scaler.unscale_(optimizer)
        if not overflows:
            optimizer.step()
        scaler.update()
    scaler.update(64.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    report.stop()
    text = "\n".join(report.lines())
    assert "scaler: 5 steps, 2 skipped\n" in text
    assert "scale 16777216 -> 8388608 (step 1) -> 4194304 (step 3) -> 64 (step 4) -> 32 (step 4)\n" in text


def test_report_counts_one_optimizers_overflow_once():
    """Of two optimizers in one iteration, and not again in an iteration that the other has to itself."""
    report = Report()
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0)
    report.start()
    for factors in ((1.0, float("inf")), (1.0, None)):
        for weight, optimizer, factor in zip(weights, optimizers, factors, strict=True):
            if factor is not None:
                weight.grad = None
                scaler.scale((weight * factor).sum()).backward()
                scaler.step(optimizer)
        scaler.update()
    report.stop()
    assert "scaler: 2 steps, 1 skipped\n" in "\n".join(report.lines())


def test_report_says_where_options_came_to_nothing():
    small = torch.ones(8, requires_grad=True)

    def lines(checkpoint, **options):
        report = Report(**options)
        report.start()
        if checkpoint:
            fastamp.checkpoint(torch.sin, small * 1, storage=options["storage"]).sum().backward()
        report.stop()
        return "\n".join(report.lines())

    assert "checkpoint: never called, so that --storage int8 had nothing to store" in lines(False, storage="int8")
    text = lines(True, storage="int8")
    assert "checkpoint: 1 call\n" in text and "kept as it is; --storage int8 found nothing large enough" in text
    assert "kept as it is; --store bf16 found nothing large enough" in lines(False, store="bf16")
    assert "found nothing" not in lines(True, storage="exact")


def test_report_reads_a_long_history_in_pieces_and_shortens_it():
    report = Report()
    train(report, steps=200, overflows=range(3, 200, 3))
    text = "\n".join(report.lines())
    assert "scaler: 200 steps, 66 skipped" in text and "... 51 more ..." in text


def test_report_leaves_the_optimizers_time_out(monkeypatch):
    import time

    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            for _ in range(1000):
                next(clock)

    report = Report()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = Slow([weight], lr=0.1)
    scaler = fastamp.GradScaler("cpu")
    report.start()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    report.stop()
    assert 0 < report.scaler_seconds < 100 and report.seconds > 1000


def test_report_of_several_scalers_and_of_storage():
    report = Report()
    first = train(report)
    assert len(report._scalers) == 1 and first in report._alive
    report.start()
    profiling.stored("int8", torch.empty(1024), [torch.empty(1024, dtype=torch.int8), torch.empty(19)])
    profiling.stored("bits", torch.empty(800, dtype=torch.bool), [torch.empty(100, dtype=torch.uint8)])
    report.stop()
    train(report, steps=2)
    text = "\n".join(report.lines())
    assert "scaler 1: 6 steps, 0 skipped" in text and "scaler 2: 2 steps, 0 skipped" in text
    assert "3.6 KiB saved, 462 bytes a step: 4.8 KiB as 1.2 KiB (1 in bits, 1 in int8)" in text
