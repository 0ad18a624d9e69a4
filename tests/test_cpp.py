"""The C++ example: it is built with CMake as a user would, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doc_pages import run_page
from torch import nn

import fastamp

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("launchers.h", "scale.h", "storage.h", "tensor_ref.h", "unscale.h")

# Next to Python, where pip puts it, whether or not that is on the PATH.
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

needs_cmake = pytest.mark.skipif(
    CMAKE is None or shutil.which("c++") is None, reason="cmake or a C++ compiler is not installed"
)


def run(*command: str | Path, timeout: int = 600) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure(build: Path, *options: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(CMAKE, "-S", ROOT / "examples" / "cpp", "-B", build, *generator,
        f"-DPython3_EXECUTABLE={sys.executable}", *options)  # fmt: skip


def test_headers_are_those_of_the_sources_and_torch_free():
    (folder,) = fastamp.include_paths()
    installed = Path(folder) / "fastamp"
    assert sorted(path.name for path in installed.iterdir()) == sorted(HEADERS)
    for name in HEADERS:
        text = (installed / name).read_text()
        assert text == (ROOT / "csrc" / name).read_text(), f"{name} is out of date: build again"
        for include in re.findall(r'#include ["<]([^">]+)[">]', text):
            assert include in HEADERS or "/" not in include, f"{name} includes {include}"


def test_library_is_the_one_that_python_loads():
    from fastamp import _library

    assert os.path.samefile(fastamp.library_path(), _library.ops_path)


def test_missing_files_say_how_to_build(monkeypatch, tmp_path):
    from fastamp import cpp

    monkeypatch.setattr(cpp, "__file__", str(tmp_path / "cpp.py"))
    with pytest.raises(FileNotFoundError, match=r"include_paths: .* holds no headers; build fastamp"):
        cpp.include_paths()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"library_path: .* is missing; build fastamp"):
        cpp.library_path()


@needs_cmake
def test_program_on_raw_pointers(tmp_path):
    configure(tmp_path, "-DTORCH_PROGRAM=OFF")
    run(CMAKE, "--build", tmp_path)
    output = run(tmp_path / "raw_pointers")
    assert output.count("ok    ") == 7 and "FAILED" not in output


@needs_cmake
@pytest.mark.slow
def test_libtorch_program_trains_as_python_does(tmp_path):
    configure(tmp_path)
    run(CMAKE, "--build", tmp_path, "--target", "train")
    output = run(tmp_path / "train")
    lines = re.findall(r"step \d: loss (\S+), scale ([^,\n]+)(, skipped)?", output)
    assert len(lines) == 8

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    x = torch.randn(64, 16)
    y = x.sum(1, keepdim=True).sin()
    for step, (loss_text, scale_text, skipped) in enumerate(lines):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss * float("inf") if step == 3 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # The program takes a GPU where there is one, whose sums have another order.
        assert float(loss_text) == pytest.approx(loss.item(), abs=1e-4 if torch.cuda.is_available() else 2e-6)
        assert float(scale_text) == scaler.get_scale() and bool(skipped) == (step == 3)


def test_page(capsys):
    run_page("integrations/cpp")
    assert "_ops" in capsys.readouterr().out
