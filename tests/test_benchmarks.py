"""The benchmarks run, their comparison notices what got slower, and the committed results are whole."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
RESULTS = sorted((FOLDER / "results").glob("*.json"))


@pytest.fixture
def module(monkeypatch):
    """Imports a file of benchmarks/, whose files find each other as programs do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def timing(median, spread=0.02):
    return {"median": median, "p20": median * (1 - spread), "p80": median * (1 + spread), "rounds": 9}


def results(ours, spread=0.02):
    times = {"torch": timing(100.0, spread), "mul_": timing(90.0, spread), "fastamp": timing(ours, spread)}
    return {"results": [{"case": "a case", "timing": times}]}


def test_slower_by_more_than_the_noise(module):
    slower = module("_harness").slower
    assert slower(results(50.0), results(60.0)) == ["  a case, fastamp: 1.67x of its peer, was 2.00x"]
    assert slower(results(50.0), results(50.5)) == []
    assert slower(results(50.0), results(40.0)) == []
    assert slower(results(50.0, 0.2), results(60.0, 0.2)) == []  # the noise is larger
    slow_machine = results(500.0)
    slow_machine["results"][0]["timing"]["torch"] = timing(1000.0)
    assert slower(results(50.0), slow_machine) == []


def test_a_ratio_is_that_of_the_rounds(module):
    """The machine is slow while two of three rounds run, and in one of them for the first contestant alone."""
    harness = module("_harness")
    found = harness.Timing({"torch": [20.0, 200.0, 300.0], "fastamp": [10.0, 100.0, 10.0]})
    assert harness.ratio(found, "torch", "fastamp") == 2.0
    assert found["torch"]["median"] == 200.0 and found["fastamp"]["median"] == 10.0


def test_a_case_that_is_new_is_not_slower(module):
    assert module("_harness").slower({"results": []}, results(50.0)) == []


def test_contestants_take_turns(module):
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = module("_harness").time_interleaved(functions, rounds=3, min_seconds=0.0, warmup=1)
    assert calls == [*"bca", *"cab", *"abc", *"bca"]
    assert all(times["rounds"] == 3 and times["p20"] <= times["median"] <= times["p80"] for times in found.values())


def test_mean_of_calls_in_a_row(module):
    calls = []
    found = module("_harness").time_interleaved(
        {"a": lambda: calls.append(1)}, calls=5, rounds=2, min_seconds=0, warmup=0
    )
    assert len(calls) == 10 and found["a"]["rounds"] == 2


@pytest.mark.parametrize("shapes, tensors, elements", [
    ("resnet50", 161, 25_557_032), ("bert_base", 199, 109_482_240), ("gpt2", 148, 124_439_808),
])  # fmt: skip
def test_shapes_are_those_of_the_models(module, shapes, tensors, elements):
    """The counts that their papers and libraries give."""
    found = list(getattr(module("_models"), shapes)())
    assert (len(found), sum(map(math.prod, found))) == (tensors, elements)


def test_llama_layer(module):
    """32 layers, both embeddings and the last norm are 6.74 billion parameters."""
    layer = sum(map(math.prod, module("_models").llama_7b(1)))
    assert 32 * layer + 2 * 32000 * 4096 + 4096 == 6_738_415_616


@pytest.mark.parametrize("name", ["scale", "unscale", "storage"])
def test_quick_run(name, tmp_path):
    """Each writes every case with its spread, and a second run compares with the first."""
    file = tmp_path / f"{name}.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path), name],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads(file.read_text())
    assert content["benchmark"] == name and content["machine"]["torch"]
    for result in content["results"]:
        assert all(times["p20"] <= times["median"] <= times["p80"] for times in result["timing"].values())
        assert f"{result['case']}" in run.stdout
    assert f"\n{name} " in run.stdout, "the table at the end has a row for it"


def test_compare_marks_a_regression(tmp_path):
    """Results that claim to have been a hundred times faster."""
    run = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path / "new"), "scale"]
    assert subprocess.run(run, cwd=ROOT, capture_output=True, timeout=300).returncode == 0
    content = json.loads((tmp_path / "new" / "scale.json").read_text())
    for result in content["results"]:
        result["timing"]["fastamp"] = {key: value / 100 for key, value in result["timing"]["fastamp"].items()}
    (tmp_path / "scale.json").write_text(json.dumps(content))
    again = subprocess.run([*run, "--compare", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 1 and "slower than before:" in again.stdout
    assert f"slower than in {tmp_path}: scale" in again.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nonsense"], "no such benchmark: nonsense; there are: activation_storage"),
        (["--compare", "nowhere"], "--compare: nowhere is not a folder"),
    ],
)
def test_bad_arguments(arguments, words):
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 2 and words in run.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path):
    machine = json.loads(path.read_text()).get("machine")
    if isinstance(machine, dict):
        assert {"processor", "threads", "torch", "python"} <= machine.keys()
    else:  # a sentence; the SASS table needs none, since it is of the compiler's output
        assert path.stem == "sass" or "torch" in machine


def test_plots_are_of_the_committed_results():
    run = subprocess.run(
        [sys.executable, "benchmarks/make_plots.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_sizes_up_to_the_memorys_end(module):
    sizes = module("bench_sizes").sizes
    assert sizes(2**20) == [2**10, 2**12, 2**14, 2**16, 2**18, 2**20]
    assert sizes(2**30 + 5)[-2:] == [2**28, 2**30]
    assert sizes(2**31 + 5)[-2:] == [2**30, 2**31]
    assert sizes(3 * 2**32)[-2:] == [2**32, 3 * 2**32]


def test_steps_with_each_of_torchs_usual_optimizers(module):
    bench = module("bench_step")
    assert {"SGD", "Adam", "AdamW fused", "Adagrad fused", "Adafactor foreach", "NAdam"} <= set(bench.OPTIMIZERS)
    made = [make([torch.nn.Parameter(torch.zeros(3))]) for make in bench.OPTIMIZERS.values()]
    assert {type(optimizer).__name__ for optimizer in made} == set(bench.USUAL)
    times = {kind: {"median": 2000.0} for kind in ("torch", "fastamp")}
    counts = {kind: {"operators": 5, "syncs": 1} for kind in times}
    results = [
        {"model": model, "optimizer": "SGD", "timing": times, "after backward": times, "counts": counts,
         "ratios": {"against torch": 1.0, "after backward, against torch": 1.0}}
        for model in ("CNN", "GPT-style")
    ]  # fmt: skip
    found = bench.table(results)
    assert found["rows"] == [["SGD", *["2.0 to 2.0 ms, 1.00x"] * 4, "5 to 5", "1 to 1"]]
    assert len(found["columns"]) == len(found["rows"][0])
