"""python -m fastamp demo: the same bits as torch, and an exit code that says when they are not."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import fastamp
from fastamp import demo
from fastamp.demo import memory, report
from fastamp.demo.command import parse
from fastamp.demo.text import batches, standard_library
from fastamp.demo.training import Job, recipes

SMALL = [
    "--device",
    "cpu",
    "--steps",
    "14",
    "--layers",
    "1",
    "--batch",
    "2",
    "--seq",
    "16",
    "--growth-interval",
    "4",
]
EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"


def run(tmp_path, *arguments, **keywords):
    """Exit code and the numbers of a small run; its plot is at tmp_path/plot.png."""
    files = ["--out", str(tmp_path / "plot.png"), "--json", str(tmp_path / "numbers.json")]
    code = demo.main([*SMALL, *files, *arguments], **keywords)
    return code, json.loads((tmp_path / "numbers.json").read_text())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bit_identical_with_skipped_steps(tmp_path, capsys, dtype):
    code, numbers = run(tmp_path, "--dtype", dtype)
    stock, drop_in, own_clip = numbers["runs"]
    assert code == 0
    assert drop_in["losses"] == stock["losses"] and drop_in["scales"] == stock["scales"]
    assert drop_in["differs_from_torch"] == []
    for result in numbers["runs"]:
        assert 0 < len(result["skipped"]) < 14
        assert result["losses"][-1] < result["losses"][0] - 0.5
        assert all(result["scales"][step + 1] == result["scales"][step] / 2 for step in result["skipped"][:-1])
    assert own_clip["losses"] == pytest.approx(stock["losses"], rel=1e-2)
    output = capsys.readouterr()
    assert f"{len(stock['skipped'])} of 14" in output.out and "step 14/14" in output.err
    assert "yes" in next(line for line in output.out.splitlines() if line.startswith("losses, weights bit-identical"))


def test_wrong_scaler_is_found_out(tmp_path, capsys, monkeypatch):
    class Inexact(fastamp.GradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            optimizer.param_groups[0]["params"][0].grad[0] += 1e-6

    monkeypatch.setattr(fastamp, "GradScaler", Inexact)
    code, numbers = run(tmp_path, "--dtype", "fp32")
    assert code == 1
    assert "weights" in numbers["runs"][1]["differs_from_torch"]
    output = capsys.readouterr()
    assert "NO: " in output.out and "NOT bit-identical to torch: fastamp" in output.err


def test_example_gives_what_the_command_gives(tmp_path):
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    code, theirs = run(tmp_path, "--dtype", "fp32", step=example.training_step)
    assert code == 0
    _, ours = run(tmp_path, "--dtype", "fp32")
    assert [r["losses"] for r in theirs["runs"]] == [r["losses"] for r in ours["runs"]]


def test_scaler_time_is_split_by_phase(tmp_path):
    _, numbers = run(tmp_path, "--dtype", "fp32")
    stock, drop_in, own_clip = (result["scaler_us"] for result in numbers["runs"])
    for times in (stock, drop_in):
        assert all(times[phase] > 0 for phase in ("unscale_", "clip", "step", "update"))
    assert own_clip["unscale_"] == 0 < own_clip["clip"]  # one call does both
    assert stock["total"] == pytest.approx(sum(stock.values()) - stock["total"])


def test_plot_is_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    run(tmp_path, "--dtype", "fp32", "--steps", "3")
    header = (tmp_path / "plot.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") == 1950


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _ = run(tmp_path, "--dtype", "fp32", "--steps", "3")
    assert code == 0
    assert "python -m pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "plot.png").exists()


@pytest.fixture
def measured_here(monkeypatch):
    """Memory is measured in this process: saved bytes are right, and new processes take seconds."""
    monkeypatch.setattr(memory, "measure", memory.measure_here)


def test_checkpoint_with_stored_boundaries(tmp_path, capsys, measured_here):
    code, numbers = run(
        tmp_path, "--dtype", "fp32", "--layers", "3", "--seq", "32", "--checkpoint", "--storage", "int8"
    )
    plain, torchs, exact, int8 = numbers["runs"]
    assert code == 0
    assert exact["losses"] == torchs["losses"] == plain["losses"]
    assert exact["gradient_error"] == torchs["gradient_error"] == 0
    assert 0 < int8["gradient_error"] < 0.05
    assert exact["saved_bytes"] <= 1.02 * torchs["saved_bytes"] < 0.5 * plain["saved_bytes"]
    boundaries = 3 * 2 * 32 * 32 * 4
    assert int8["saved_bytes"] < exact["saved_bytes"] - 0.7 * boundaries
    assert "saved for backward (MB)" in capsys.readouterr().out


def test_stored_activations(tmp_path, measured_here):
    code, numbers = run(tmp_path, "--dtype", "fp32", "--seq", "32", "--store", "int8")
    plain, drop_in, stored = numbers["runs"]
    assert code == 0
    assert drop_in["saved_bytes"] == plain["saved_bytes"]
    assert stored["saved_bytes"] < 0.6 * plain["saved_bytes"]
    assert 0 < stored["gradient_error"] < 0.05


def test_stored_exactly_is_compared_exactly(tmp_path, measured_here):
    code, numbers = run(tmp_path, "--dtype", "fp32", "--dropout", "0.1", "--steps", "4", "--store", "exact")
    plain, _, stored = numbers["runs"]
    assert code == 0
    assert stored["exact"] and stored["gradient_error"] == 0 and stored["losses"] == plain["losses"]
    assert stored["saved_bytes"] < plain["saved_bytes"]  # dropout's masks


def test_memory_is_measured_in_a_process_of_its_own():
    options = parse(["--dtype", "fp32", "--device", "cpu", "--width", "64", "--seq", "256", "--batch", "16"])
    found = memory.measure(options, 0)
    assert found == memory.measure_here(options, 0)
    assert found["saved_bytes"] < found["peak_bytes"] < 2 * found["saved_bytes"]


def test_peak_memory_holds_what_is_saved_and_all_gradients():
    """The smallest model too, whose step a process may do with memory that it has already."""
    options = parse(["--dtype", "fp32", "--device", "cpu", "--layers", "1", "--width", "16", "--seq", "8"])
    found = memory.measure_here(options, 0)
    gradients = sum(p.nbytes for p in Job(recipes(options)[0], options).model.parameters())
    assert found["peak_bytes"] >= max(found["saved_bytes"], gradients) > 0


def test_text_is_split_by_file_and_batches_are_repeatable():
    text = standard_library()
    assert text.files > 100
    assert len(text.train) > 5 * len(text.validation) > 100_000
    options = parse(["--batch", "3", "--seq", "8", "--seed", "5", "--device", "cpu"])
    first, again = (list(batches(text.train, 4, options)) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    inputs, targets = first[0]
    assert inputs.shape == targets.shape == (3, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_table_is_aligned():
    assert report.table([["", "a", "bb"], ["long title", "1", "2"], ["x", "333", ""]]) == "\n".join(
        ["              a  bb", "----------  ---  --", "long title    1   2", "x           333"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "40"], "argument --width: expected a multiple of 16"),
        (["--steps", "0"], "argument --steps: expected a positive integer, got 0"),
        (["--dropout", "1"], "argument --dropout: expected a rate in [0, 1)"),
        (["--storage", "int8"], "argument --storage: needs --checkpoint"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--checkpoint", "--storage", "int7"], "argument --storage: expected one of exact, bf16, "),
        (["--checkpoint", "--storage", "delta-int7"], "delta-int8, delta-int4, got 'delta-int7'"),
        (["--store", "delta-int8"], "argument --store: expected one of exact, bf16, "),
        (["--device", "no_such"], "argument --device: torch "),
        (["--device", "cuda:99"], "cannot use 'cuda:99' here: "),
    ],
)
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
