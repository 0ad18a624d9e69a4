"""`python -m fastamp memory`, and what is said when memory runs out."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from memory_models import Stack
from torch import Tensor, nn

from fastamp import _delta, storage
from fastamp.__main__ import main as fastamp_command
from fastamp._last_call import is_out_of_memory, watching
from fastamp.memory import estimate, explain_oom
from fastamp.memory._blocks import TREATMENTS
from fastamp.memory._snapshot import largest_lines
from fastamp.memory._step import _PRECISIONS, MODES
from fastamp.memory._variants import Variants
from fastamp.memory.cli import main
from fastamp.memory.estimate import Setting
from fastamp.memory.oom import _history_lines, remedies

ROOT = Path(__file__).parents[1]

_PROGRAM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def make():
    return Net(), torch.randn(64, 16)

def make_all():
    return {"model": Net(), "inputs": torch.randn(64, 16), "optimizer": "sgd", "mode": "train",
            "loss": lambda output, targets: (output - targets).pow(2).sum(), "targets": torch.randn(64, 16)}

def make_huge():
    return nn.Linear(1 << 20, 1 << 20), torch.empty(1, 1 << 20)

def make_reading():
    net = Net()
    scale = net.blocks[0].up.weight.abs().max().item()  # a value: fake tensors have none
    return net, torch.randn(8, 16) * scale

def make_moved():
    return Net().to("cpu").to(torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)

class Branching(Net):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

def make_branching():
    return Branching(), torch.randn(8, 16)

def make_nothing():
    return 3

def make_with_a_mistake():
    print("called")
    return Net(width=3), torch.randn(8, 16)

class Mistaken(Net):
    def forward(self, x):
        print("run")
        return self.last_layer(super().forward(x))

def make_mistaken():
    print("called")
    return Mistaken(), torch.randn(8, 16)

def make_mismatched():
    return nn.Sequential(nn.Linear(16, 4), nn.Linear(5, 4)), torch.randn(8, 16)

def make_with_a_loss_that_raises():
    def loss(output):
        raise KeyError("targets")
    return Net(), torch.randn(8, 16), loss
"""


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "program_of_the_test.py"
    path.write_text(_PROGRAM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop(path.stem, None)


def test_report_plan_json_and_picture(program, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "m.json"), "--plot", str(tmp_path / "m.png")]
    assert main([f"{program}:make", "--budget", "1MB", "--precision", "fp16-amp", *files]) == 0
    out = capsys.readouterr().out
    assert "estimated: Net, fp16-amp, AdamW, for cuda" in out and "Activations by module" in out
    assert "Plan for 977 KiB" in out
    assert json.loads((tmp_path / "m.json").read_text())["source"] == "estimated"
    assert (tmp_path / "m.png").stat().st_size > 10_000


def test_the_function_may_say_more(program, capsys):
    assert main([f"{program}:make_all", "--device", "cpu", "--checkpoint", "blocks.1,blocks.2"]) == 0
    out = capsys.readouterr().out
    assert "SGD" in out and "2 blocks checkpoint" in out and "for cpu" in out
    assert main([f"{program}:make_all", "--optimizer", "none", "--checkpoint", "2"]) == 0
    assert "no optimizer" in capsys.readouterr().out


def test_a_model_is_not_even_built(program, capsys):
    assert main([f"{program}:make_huge"]) == 0  # 4 TiB of weights
    assert "4.00 TiB" in capsys.readouterr().out


def test_a_function_that_needs_values_builds_for_real(program, capsys):
    assert main([f"{program}:make_reading"]) == 0
    assert "the model was built for real" in capsys.readouterr().out


def test_a_function_that_moves_the_model_builds_it_for_real(program, capsys):
    assert main([f"{program}:make_moved"]) == 0
    assert "parameters" in capsys.readouterr().out


def test_a_model_that_fake_tensors_cannot_run_is_measured_and_planned_from_that(program, capsys):
    assert main([f"{program}:make_branching"]) == 0
    out = capsys.readouterr().out
    assert "measured: Branching" in out and "the model (Branching) cannot run on fake tensors" in out
    assert main([f"{program}:make_branching", "--budget", "1GB"]) == 0
    out = capsys.readouterr().out
    assert "Plan for 954 MiB" in out and "times are those of real steps on this device" in out


@pytest.mark.parametrize(
    "function, error, frames, said",
    [
        ("make_with_a_mistake", "TypeError: Net.__init__() got an unexpected", ["make_with_a_mistake"], "--real calls"),
        ("make_mistaken", "AttributeError: 'Mistaken' object has no attribute", ["forward"], "(Mistaken) raised Attr"),
        ("make_with_a_loss_that_raises", "KeyError: 'targets'", ["loss"], "outside any module raised KeyError"),
        ("make_mismatched", "", [], "module '1' (Linear) raised RuntimeError"),
    ],
)
def test_a_users_mistake_is_shown_with_its_own_traceback_and_not_tried_for_real(
    program, capsys, function, error, frames, said
):
    assert main([f"{program}:{function}"]) == 1
    out, err = capsys.readouterr()
    assert out in ("", "called\n", "called\nrun\n")  # once, on fake tensors
    assert error in err and said in err
    assert re.findall(r'File "(.*)", line \d+, in (\w+)', err) == [(str(program), name) for name in frames]


def test_mistakes_of_a_file_are_shown_and_a_file_that_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_program", raising=False)
    path = tmp_path / "broken_program.py"
    for text, expected in (
        ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
        ("def make(:\n", "SyntaxError"),
        ("open('weights.bin')\n", "FileNotFoundError"),
    ):
        path.write_text(text)
        for target in (str(path), path.stem):
            monkeypatch.delitem(sys.modules, "broken_program", raising=False)
            assert main([f"{target}:make"]) == 1
            err = capsys.readouterr().err
            assert expected in err and f'File "{path}", line 1' in err and "fastamp" not in err.replace(str(path), "")
    (tmp_path / "folder.py").mkdir()
    assert main([f"{tmp_path / 'folder.py'}:make"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"python -m fastamp memory: cannot read '{tmp_path / 'folder.py'}': Is a directory"
    ]


def test_a_module_by_its_name_as_a_command(program, capsys, monkeypatch):
    monkeypatch.chdir(program.parent)
    assert fastamp_command(["memory", "program_of_the_test:make", "--budget", "1kB"]) == 1
    printed = capsys.readouterr()
    assert "Memory of one step" in printed.out and "less than the least that this step needs" in printed.err


@pytest.mark.parametrize(
    "target, message",
    [
        ("nocolon", "the target must be script.py:function"),
        ("missing.py:make", "cannot read 'missing.py': No such file"),
        ("no_such_module_anywhere:make", "cannot import 'no_such_module_anywhere'"),
        ("{program}:nothing", "has no function 'nothing'; it has .*make_all"),
        ("{program}:make_nothing", "must return .model, inputs. or a dict, it returned int"),
        ("{program}:make --optimizer adamx", "optimizer must be one of torch.optim"),
        ("{program}:make --budget ten", "budget must be a size"),
        ("{program}:make --checkpoint layers.*", "no module of Net is called"),
        ("{program}:make --store int3", "store: unknown format 'int3'; formats are exact, bf16"),
        ("{program}:make --precision fp8", "precision must be one of fp32"),
        ("{program}:make --accumulation 0", "accumulation must be at least 1, got 0"),
        ("{program}:make --options keep", "--options keep is about what a plan may do: give it a --budget"),
        ("{program}:make --budget 1MB --options keep,shrink", "unknown treatment 'shrink'; known are keep"),
        ("{program}:make --budget 1MB --checkpoint all", "--checkpoint all settles what the plan .* is to choose"),
        ("{program}:make --budget 1MB --store int8", "--store int8 settles .*--options keep,store:FORMAT"),
        ("{program}:make --budget 1MB --accumulation 2", "--accumulation 2 settles .*the plan cuts the batch"),
    ],
)
def test_bad_command_lines(program, capsys, target, message):
    assert main(target.format(program=program).split()) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--budget ten", "budget must be a size"),
        ("--budget 1MB --options keep,shrink", "unknown treatment 'shrink'; known are keep"),
        ("--budget 1MB --options offload --device cpu", "'offload' moves activations to host memory"),
        ("--json {program}/memory.json", "--json .*memory.json: cannot be written, .*: Not a directory"),
        ("--json {folder}/missing/memory.json", "--json .*: cannot be written, .*missing': No such directory"),
        ("--json {folder}", "--json .*: cannot be written, .*: Is a directory"),
        ("--plot {folder}/missing/memory.png", "--plot .*: cannot be written, .*missing': No such directory"),
        ("--plot {folder}/memory.gift", "plot: path must end with one of .*png, .*got '.*memory.gift'"),
    ],
)
def test_what_is_wrong_with_the_options_is_said_before_the_estimate(program, capsys, options, message):
    pytest.importorskip("matplotlib")
    given = options.format(program=program, folder=program.parent).split()
    assert main([f"{program}:make_mistaken", *given]) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err) and printed.out == ""  # the function was not called


def test_the_margin_is_named_with_the_least_budget(program, capsys):
    assert main([f"{program}:make", "--budget", "1kB"]) == 1
    assert re.search(r"needs, .* bytes: .*; 5% of it left free as the margin\)", capsys.readouterr().err)


def test_help_lists_the_values_of_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in (*storage.FORMATS, *_delta.FORMATS, *TREATMENTS, *_PRECISIONS, *MODES, "adamw", "cpu", "cuda", "all"):
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), name


# --- out of memory ---


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


class _Greedy(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def _train(model: nn.Module, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    output = model(tokens)
    _Greedy.apply(output).sum().backward()
    optimizer.step()


def test_an_error_in_backward_is_explained_and_raised_again():
    model, tokens, out = Stack((128,) * 6), torch.randint(300, (8, 64)), io.StringIO()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 GiB") as raised:
        with watching(file=out):
            _train(model, tokens, optimizer)
    text = out.getvalue()
    assert any(entry.name == "_train" for entry in raised.traceback)
    assert "fastamp: out of memory" in text and "optimizer states" in text and "activations" in text
    lines = [line for line in text.splitlines() if line.strip()[:2] in ("1.", "2.", "3.", "4.")]
    assert len(lines) == 3
    assert all("frees" in line and ("x the time" in line or "time not known" in line) for line in lines)
    assert "checkpoint the 6 blocks blocks.0 to blocks.5" in text
    assert not nn.modules.module._global_forward_hooks
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("where", ["backward", "the loss"])
def test_the_model_is_explained_and_not_the_loss(where):
    class Loss(nn.CrossEntropyLoss):
        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            if where == "the loss":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(output, targets)

    model, tokens, out = Stack((128,) * 6), torch.randint(300, (8, 64)), io.StringIO()
    with pytest.raises(torch.OutOfMemoryError), watching(file=out):
        output = model(tokens)
        Loss()(_Greedy.apply(output).flatten(0, 1), torch.zeros(8 * 64, dtype=torch.int64)).backward()
    assert "checkpoint the 6 blocks blocks.0 to blocks.5" in out.getvalue()


def test_an_error_in_forward_is_found_in_its_frames():
    class Failing(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            output = super().forward(tokens)
            if not isinstance(tokens, torch._subclasses.FakeTensor):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return output

    model, out = Failing((128,) * 6), io.StringIO()
    with pytest.raises(torch.OutOfMemoryError):
        try:
            model(torch.randint(300, (4, 32)))
        except torch.OutOfMemoryError as error:
            explain_oom(error, file=out)
    assert "checkpoint the 6 blocks" in out.getvalue() and "an optimizer, for none was found" in out.getvalue()


@pytest.mark.parametrize("how", ["cause", "context", "suppressed", "within the model"])
def test_an_error_that_comes_from_a_lack_of_memory_is_explained(how):
    class Wrapping(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            output = super().forward(tokens)
            if how != "within the model" or isinstance(tokens, torch._subclasses.FakeTensor):
                return output
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except torch.OutOfMemoryError as error:
                raise ValueError("layer 3 failed") from error

    def step() -> None:
        output = model(tokens)
        try:
            _Greedy.apply(output).sum().backward()
        except torch.OutOfMemoryError as error:
            if how == "cause":
                raise ValueError("step 7 failed") from error
            if how == "suppressed":
                raise ValueError("step 7 failed") from None
            raise ValueError("step 7 failed")  # noqa: B904, which is what is tried

    model, tokens = Wrapping((128,) * 6), torch.randint(300, (8, 64))
    out = io.StringIO()
    with pytest.raises(ValueError, match="failed"), watching(file=out):
        step()
    assert "checkpoint the 6 blocks blocks.0 to blocks.5" in out.getvalue()
    out = io.StringIO()
    with pytest.raises(ValueError, match="failed"):
        try:
            step()
        except ValueError as error:
            explain_oom(error, model=model, inputs=tokens, file=out)
    assert "checkpoint the 6 blocks blocks.0 to blocks.5" in out.getvalue()
    if how == "within the model":
        out = io.StringIO()
        with pytest.raises(ValueError, match="failed"):
            try:
                step()
            except ValueError as error:
                explain_oom(error, file=out)
        assert "checkpoint the 6 blocks" in out.getvalue()


def test_watching_leaves_a_compiled_model_whole_and_explains_it():
    model, out = nn.Sequential(nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 16))), io.StringIO()
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # raises where the watch would break the graph
    with pytest.raises(torch.OutOfMemoryError), warnings.catch_warnings(), watching(file=out):
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        _Greedy.apply(compiled(torch.randn(8, 16))).sum().backward()
    assert "fastamp: out of memory" in out.getvalue() and "most activations: 0 2.00 KiB" in out.getvalue()


def test_remedies_are_sorted_and_their_bytes_are_simulated():
    model, tokens = Stack(), torch.randint(300, (8, 64))
    setting = Setting(model, tokens, "sgd", None, "train", 1, None, None, None)
    variants = Variants(setting)
    report = setting.report_of(variants.plain, {})
    assert report.peak.bytes == setting.simulate({}).peak.bytes
    found = remedies(variants, report)
    assert [r.saves for r in found] == sorted((r.saves for r in found), reverse=True)
    checkpointing = next(r for r in found if r.what.startswith("checkpoint"))
    assert checkpointing.peak == estimate(model, tokens, optimizer="sgd", checkpoint=True).peak.bytes
    assert checkpointing.saves == report.peak.bytes - checkpointing.peak
    assert 1.05 < checkpointing.time < 1.7
    halves = next(r for r in found if r.what.startswith("gradient accumulation"))
    assert halves.peak == estimate(model, tokens[:4], optimizer="sgd", accumulation=2).peak.bytes
    assert any("autocast" in r.what for r in found)


def test_other_errors_and_unknown_models_pass_through():
    out = io.StringIO()
    with pytest.raises(KeyError), watching(file=out):
        raise KeyError("x")
    assert out.getvalue() == ""
    with pytest.raises(torch.OutOfMemoryError):
        explain_oom(torch.OutOfMemoryError("CUDA out of memory."), file=out)
    assert "no model was found" in out.getvalue()
    out = io.StringIO()
    with pytest.raises(torch.OutOfMemoryError):
        explain_oom(torch.OutOfMemoryError("CUDA out of memory."), model=nn.Linear(2, 2), inputs="nonsense", file=out)
    assert "could not explain" in out.getvalue()


def _frames(*places: tuple[str, int, str]) -> list[dict[str, object]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in places]


def test_lines_that_hold_most_come_from_torchs_memory_history():
    inside = (str(Path(torch.__file__).parent / "nn" / "functional.py"), 9, "linear")
    in_cpp = ("??", 0, "at::native::empty_cuda")
    model, loop = ("/home/me/model.py", 33, "forward"), ("/home/me/train.py", 7, "<module>")

    def block(size: int, *frames: tuple[str, int, str], state: str = "active_allocated") -> dict[str, object]:
        return {"size": size, "requested_size": size, "address": 0, "state": state, "frames": _frames(*frames)}

    snapshot = {
        "segments": [
            {
                "device": 0,
                "total_size": 20 << 20,
                "blocks": [
                    block(1 << 20, in_cpp, inside, model, loop),
                    block(3 << 20, inside, model, loop),
                    block(9 << 20, inside, model, loop, state="inactive"),
                ],
            },
            {"device": 0, "total_size": 4 << 20, "blocks": [block(2 << 20), block(1 << 20, loop), block(512, inside)]},
            {"device": 1, "total_size": 99 << 20, "blocks": [block(99 << 20, loop)]},
        ],
        "device_traces": [],
    }
    found = largest_lines(snapshot, device=0, count=3)
    assert found[0] == (4 << 20, 2, "/home/me/model.py:33 in forward")
    assert found[1][:2] == (2 << 20, 1) and "no line of Python" in found[1].where
    assert found[2] == (1 << 20, 1, "/home/me/train.py:7 in <module>")
    assert largest_lines(snapshot, device=0)[3].where.endswith("functional.py:9 in linear")
    assert _history_lines(snapshot, 1)[1].split("  ")[-1] == "/home/me/train.py:7 in <module>"
    text = "\n".join(_history_lines(snapshot, 0))
    assert "by the line that allocated it" in text and "4.00 MiB  /home/me/model.py:33 in forward  (2 blocks)" in text
    # Nothing is said of what was recorded without frames.
    for segment in snapshot["segments"]:
        for each in segment["blocks"]:
            del each["frames"]
    assert largest_lines(snapshot, device=0) == _history_lines(snapshot, 0) == []


_LIMITED = """
import resource, sys
sys.path.insert(0, {tests!r})
import torch
from memory_models import Stack
import fastamp.memory.oom  # what explaining itself loads is not what runs out
torch.set_num_threads(1)
model, tokens = Stack((512,) * 5), torch.randint(300, (128, 128))
model(tokens[:1, :4]).sum().backward()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, -1))
print("limited", flush=True)
model(tokens=tokens).sum().backward()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space need Linux")
def test_run_explains_a_programs_real_lack_of_memory(tmp_path):
    script = tmp_path / "limited.py"
    script.write_text(_LIMITED.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "fastamp", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == "limited\n"
    assert "fastamp: out of memory. By an estimate, the step takes" in done.stderr
    lines = done.stderr.splitlines()
    assert sum(line.strip()[:2] in ("1.", "2.", "3.") and "frees" in line for line in lines) == 3
    assert "checkpoint the 5 blocks blocks.0 to blocks.4" in done.stderr
    assert "can't allocate memory" in lines[-1]  # Python's own report of the error, with its traceback, comes last
    assert any("limited.py" in line and "in <module>" in line for line in lines)
