"""What setup.py decides and says: when CUDA is built, and what is missing where it cannot be."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def build(monkeypatch):
    for name in ("FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("fastamp_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toolkit(folder: Path, release: str) -> str:
    """A CUDA_HOME whose nvcc answers --version."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    return str(folder)


def test_cpu_torch_and_nothing_asked_builds_for_cpu(build, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert build.wants_cuda() is False


def test_nvcc_without_a_gpu_builds_for_cpu(build, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build.cpp_extension, "CUDA_HOME", toolkit(tmp_path, "13.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build.wants_cuda() is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert build.wants_cuda() is True


@pytest.mark.parametrize("asked", [{"FORCE_CUDA": "1"}, {"TORCH_CUDA_ARCH_LIST": "8.0"}], ids=str)
def test_asked_for_cuda_and_possible(build, monkeypatch, tmp_path, asked):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build.cpp_extension, "CUDA_HOME", toolkit(tmp_path, "13.0"))
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert build.wants_cuda() is True
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert build.wants_cuda() is False


@pytest.mark.parametrize(
    "cuda, release, message",
    [
        (None, "13.0", "the installed torch .* is a CPU build.*install a CUDA build of torch"),
        ("13.0", None, "no CUDA toolkit was found.*set CUDA_HOME"),
        ("13.0", "", "no working nvcc in .*set CUDA_HOME"),
        ("13.0", "12.8", "release 12.8 and torch .* was built with CUDA 13.0.*CUDA 13 toolkit"),
    ],
)
def test_asked_for_cuda_and_impossible(build, monkeypatch, tmp_path, cuda, release, message):
    monkeypatch.setenv("FORCE_CUDA", "1")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    home = None if release is None else toolkit(tmp_path, release) if release else str(tmp_path)
    monkeypatch.setattr(build.cpp_extension, "CUDA_HOME", home)
    with pytest.raises(SystemExit, match=f"(?s)CUDA was asked for, but .*{message}"):
        build.wants_cuda()


def test_architectures_are_noted_as_nvcc_names_them(build, monkeypatch):
    """As torch's helper spells the flags; python -m fastamp compares the names with the GPUs it sees."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0+PTX")
    names = build.arch_names(build.arch_flags())
    assert sorted(names) == ["compute_90", "sm_75", "sm_90"]
    from fastamp import _diagnostics

    assert [_diagnostics.runs_on(names, c) for c in ((7, 0), (7, 5), (9, 0), (12, 0))] == [False, True, True, True]


@pytest.mark.parametrize("has_development_link", [True, False])
def test_cuda_runtime_library(build, monkeypatch, tmp_path, has_development_link):
    """The toolkit's where it can be linked, else the one among torch's own packages."""
    home, wheel = tmp_path / "cuda", tmp_path / "site" / "nvidia" / "cu13" / "lib"
    (home / "lib64").mkdir(parents=True)
    wheel.mkdir(parents=True)
    (wheel / "libcudart.so.13").touch()
    if has_development_link:
        (home / "lib64" / "libcudart.so").touch()
    monkeypatch.setattr(build.cpp_extension, "CUDA_HOME", str(home))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "site" / "torch" / "__init__.py"))
    expected = (str(home / "lib64"), "cudart") if has_development_link else (str(wheel), ":libcudart.so.13")
    assert build.runtime_library() == expected


def test_nvcc_on_the_path_may_be_a_wrapper(build, monkeypatch, tmp_path):
    """torch takes the folder above the wrapper's for the toolkit; nvcc knows better."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_CUDA", "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "toolkit_headers", lambda: [])
    real = toolkit(tmp_path / "real", "13.0")
    wrapper = tmp_path / "local" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f"#!/bin/sh\necho '#$ TOP={real}/bin/..' >&2\nexec {real}/bin/nvcc \"$@\"\n")
    wrapper.chmod(0o755)
    monkeypatch.setattr(build.cpp_extension, "CUDA_HOME", str(tmp_path / "local"))
    assert build.wants_cuda() is True
    assert build.cpp_extension.CUDA_HOME == real


def test_a_toolkit_without_headers_is_refused(build, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_CUDA", "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "toolkit_headers", lambda: [])
    home = toolkit(tmp_path, "13.0")
    (tmp_path / "include" / "cuda_runtime.h").unlink()
    monkeypatch.setattr(build.cpp_extension, "CUDA_HOME", home)
    with pytest.raises(SystemExit, match=r"(?s)cuda_runtime\.h is neither in .*pip install nvidia-cuda-runtime"):
        build.wants_cuda()


def test_asking_for_the_version_leaves_the_note_of_the_build_alone():
    note = ROOT / "fastamp" / "_build_info.py"
    before = note.read_bytes(), note.stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1]
    assert (note.read_bytes(), note.stat().st_mtime_ns) == before


def test_the_build_stops_with_one_message():
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")
    done = subprocess.run(
        [sys.executable, "setup.py", "--name"],
        cwd=ROOT,
        env=os.environ | {"FORCE_CUDA": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "is a CPU build" in done.stderr and "FORCE_CUDA=0" in done.stderr and "Traceback" not in done.stderr


def test_the_version_is_written_once():
    import fastamp

    assert (ROOT / "fastamp" / "_version.py").read_text().count(fastamp.__version__) == 1
    assert fastamp.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_import_is_fast():
    """`import fastamp` after torch: under 100 ms, best of five."""
    program = "import time, torch; t = time.perf_counter(); import fastamp; print(time.perf_counter() - t)"
    times = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(5)]
    assert min(times) < 0.1, times
