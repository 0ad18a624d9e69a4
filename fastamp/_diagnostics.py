"""What ``python -m fastamp`` prints: versions, devices, what was built, what loaded, what to do if not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastamp._version import __version__

Capability = tuple[int, int]
PACKAGE = Path(__file__).resolve().parent


def main(argv: Sequence[str] = ()) -> int:
    """Prints the report. Returns the exit code: 1 if the operators do not load or compute wrong values."""
    library, failure = load()
    checked = {} if library is None else self_check(library)
    for name, value in facts(library, checked):
        print(f"{name:<12}{value}")
    found = problems(library, failure, checked)
    for number, problem in enumerate(found, 1):
        print(f"\n{number}. {problem}")
    if not found:
        print("\nNothing is missing.")
    return 0 if library is not None and all(checked.values()) else 1


def load() -> tuple[Any, str]:
    """fastamp._library and '', or None and why it does not import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a host module that does not load is among the problems below
        try:
            return importlib.import_module("fastamp._library"), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"


def facts(library: Any, checked: dict[str, bool]) -> list[tuple[str, str]]:
    """Name and value of each line of the report."""
    build = build_info()
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    lines = [
        ("fastamp", f"{__version__}, {PACKAGE}"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("torch", f"{torch.__version__}, {cuda}"),
        ("compiler", _version_line(os.environ.get("CXX") or "c++")),
        ("nvcc", _nvcc()),
        ("devices", "; ".join(devices())),
        ("built", "no" if build is None else built(build)),
    ]
    if library is None:
        return [*lines, ("operators", "NOT LOADED")]
    host = f"loaded, {library.host.__file__}" if library.host else f"not loaded: {library.host_problem}"
    verdicts = [f"unscale_ on {device} {'right' if right else 'WRONG'}" for device, right in checked.items()]
    return [
        *lines,
        ("operators", f"loaded, {library.ops_path}"),
        ("host module", host),
        ("self-check", ", ".join(verdicts)),
    ]


def problems(library: Any, failure: str, checked: dict[str, bool]) -> list[str]:
    """Each with what to do about it, as commands that can be pasted."""
    if library is None:
        return [f"The operators do not load. {failure}\n\nFor this Python that is:\n    {rebuild()}"]
    found = []
    slower = "results are the same, steps with many parameters take longer."
    if library.host is None and os.environ.get("FASTAMP_HOST") == "0":
        found.append(f"The host module is switched off; {slower} To switch it on:\n    unset FASTAMP_HOST")
    elif library.host is None:
        found.append(
            f"The host module does not load; {slower}\n"
            f"It is built for one torch and one Python. Rebuild it for these:\n    {rebuild()}"
        )
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    found += cuda_problems(library.has_cuda, (build_info() or {}).get("archs", []), capabilities)
    wrong = [device for device, right in checked.items() if not right]
    if wrong:
        found.append(f"unscale_ computes wrong values on {', '.join(wrong)}. Rebuild:\n    {rebuild()}")
    return found


def cuda_problems(has_kernels: bool, archs: Sequence[str], capabilities: Sequence[Capability]) -> list[str]:
    """What is wrong for GPUs of these compute capabilities; archs as nvcc names them: sm_80, compute_90."""
    left_out = [capability for capability in capabilities if not (has_kernels and runs_on(archs, capability))]
    if not left_out:
        return []
    gpus = " ".join(sorted({f"{major}.{minor}" for major, minor in capabilities}))
    cure = (
        f"Rebuild with a CUDA {torch.version.cuda} toolkit:\n"
        f'    CUDA_HOME=/path/to/cuda TORCH_CUDA_ARCH_LIST="{gpus}" {rebuild()}'
    )
    if not has_kernels:
        return [f"torch sees a GPU, but this build of fastamp is for CPUs and leaves GPUs to torch.\n{cure}"]
    missing = ", ".join(f"{major}.{minor}" for major, minor in left_out)
    return [f"The kernels ({', '.join(archs)}) do not run on compute capability {missing}.\n{cure}"]


def rebuild() -> str:
    """The command that builds fastamp again, for this Python."""
    command, checkout = f"{sys.executable} -m pip install --no-build-isolation", PACKAGE.parent
    if (checkout / "setup.py").exists() and (checkout / "csrc").exists():
        return f"{command} -e {checkout}"
    return f"{command} .      (in a checkout of fastamp)"


def runs_on(archs: Sequence[str], capability: Capability) -> bool:
    """Whether kernels for these architectures run on a GPU of this compute capability.

    Machine code (sm_90) runs on its major version from its minor version up, PTX (compute_90) on any later.
    With the suffix a, both run on that one capability; with f, on its major version.
    """
    for arch in archs:
        kind, _, number = arch.partition("_")
        built_for = divmod(int(number.rstrip("af")), 10)
        any_later = kind == "compute" and number.isdigit()
        later_minor = not number.endswith("a") and built_for[0] == capability[0]
        if built_for == capability or (built_for < capability and (any_later or later_minor)):
            return True
    return False


def devices() -> list[str]:
    cpu = f"cpu, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    gpus = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        gpus.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}")
    return [cpu, *gpus]


def build_info() -> dict[str, Any] | None:
    """What setup.py noted of the build, None if there was none."""
    try:
        return importlib.import_module("fastamp._build_info").BUILD
    except ImportError:
        return None


def built(build: dict[str, Any]) -> str:
    kernels = f"for CPU and CUDA {build['cuda']} ({', '.join(build['archs'])})" if build["cuda"] else "for CPU"
    return f"{kernels}, with torch {build['torch']} and Python {build['python']}"


def self_check(library: Any) -> dict[str, bool]:
    """Unscales two gradients on each device that has kernels: device and whether the result is right."""
    from fastamp import ops

    found = {}
    for device in ["cpu", *(["cuda"] if library.has_cuda and torch.cuda.is_available() else [])]:
        grads = [torch.tensor([3.0, -5.0], device=device), torch.tensor([float("inf")], device=device)]
        found_inf, inv_scale = torch.zeros(1, device=device), torch.tensor([0.25], device=device)
        try:
            ops.unscale_(grads, found_inf, inv_scale)
            found[device] = grads[0].tolist() == [0.75, -1.25] and found_inf.item() == 1.0
        except RuntimeError:  # no kernel image for this GPU
            found[device] = False
    return found


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else "nvcc"
    where = f"CUDA_HOME={home}" if home else "CUDA_HOME is not set"
    return f"{_version_line(nvcc, 'release')}; {where}"


def _version_line(program: str, containing: str = "") -> str:
    """The first line of ``--version`` with this text in it, and where the program is."""
    path = shutil.which(program.split()[0])
    if path is None:
        return f"no {program} found"
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    line = next((line for line in printed.splitlines() if containing in line), "prints no version")
    return f"{line}, {path}"
