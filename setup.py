"""Builds fastamp: the ops library on the LibTorch stable ABI, and the optional pybind11 module `_host`.

Environment:
  FORCE_CUDA=1            build the CUDA kernels although no GPU is visible
  FORCE_CUDA=0            build for CPU only, whatever is visible
  TORCH_CUDA_ARCH_LIST    architectures to build for ("8.0 9.0+PTX"); setting it asks for CUDA too
  CUDA_HOME               where the CUDA toolkit is
  MAX_JOBS                compiler processes at a time
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
# torch 2.10 is the first release whose stable ABI has all that the ops use.
STABLE_ABI_TARGET = "0x020a000000000000"


def sources(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def stop(problem: str, cure: str) -> None:
    sys.exit(
        f"\nfastamp: CUDA was asked for, but {problem}.\n  To build with CUDA: {cure}\n"
        "  To build for CPU only: unset FORCE_CUDA and TORCH_CUDA_ARCH_LIST, or set FORCE_CUDA=0.\n"
    )


def nvcc_release(cuda_home: str) -> tuple[int, int] | None:
    try:
        out = subprocess.run([str(Path(cuda_home) / "bin" / "nvcc"), "--version"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.search(r"release (\d+)\.(\d+)", out.stdout)
    return (int(found[1]), int(found[2])) if found else None


def find_toolkit() -> str | None:
    """CUDA_HOME, or where nvcc on PATH belongs. torch takes the folder above nvcc's for that; where nvcc on PATH is a
    wrapper, the compiler itself is asked where it lives."""
    home = cpp_extension.CUDA_HOME
    own = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home or own or (Path(home) / "include" / "cuda_runtime.h").exists():
        return home
    try:
        command = [str(Path(home) / "bin" / "nvcc"), "--dryrun", "-x", "cu", os.devnull]
        printed = subprocess.run(command, capture_output=True, text=True).stderr
    except OSError:
        return home
    top = re.search(r"^#\$ TOP=(.+)$", printed, re.MULTILINE)
    return os.path.realpath(top[1]) if top else home


def has_headers(home: str) -> bool:
    return any((Path(folder) / "cuda_runtime.h").exists() for folder in (f"{home}/include", *toolkit_headers()))


def wants_cuda() -> bool:
    """CUDA is built when nvcc is found and a GPU, FORCE_CUDA=1 or TORCH_CUDA_ARCH_LIST says so. Asked for and
    impossible, the build stops and says what is missing."""
    force = os.environ.get("FORCE_CUDA", "")
    if force == "0":
        return False
    asked = force not in ("", "0") or bool(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    home = cpp_extension.CUDA_HOME = find_toolkit()
    if not asked:
        return bool(home) and torch.version.cuda is not None and torch.cuda.is_available()
    if torch.version.cuda is None:
        stop(
            f"the installed torch {torch.__version__} is a CPU build",
            "install a CUDA build of torch into this environment, then build again with --no-build-isolation",
        )
    if not home:
        stop(
            "no CUDA toolkit was found (no nvcc on PATH, CUDA_HOME is not set)",
            f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to its folder",
        )
    release = nvcc_release(home)
    if release is None:
        stop(
            f"there is no working nvcc in {home}/bin (CUDA_HOME)",
            "set CUDA_HOME to the folder of a CUDA toolkit",
        )
    if release[0] != int(torch.version.cuda.split(".")[0]):
        stop(
            f"nvcc in {home} is release {release[0]}.{release[1]} and torch {torch.__version__} was built with CUDA "
            f"{torch.version.cuda}",
            f"set CUDA_HOME to a CUDA {torch.version.cuda.split('.')[0]} toolkit, or install a torch built with CUDA "
            f"{release[0]}",
        )
    if not has_headers(home):
        stop(
            f"cuda_runtime.h is neither in {home}/include nor among the nvidia packages beside torch",
            "set CUDA_HOME to the folder of a whole CUDA toolkit, or pip install nvidia-cuda-runtime",
        )
    return True


def arch_flags() -> list[str]:
    """-gencode flags: TORCH_CUDA_ARCH_LIST where it is set, else all that both nvcc and torch know, with PTX of the
    newest, from 7.0 (CUDA 12) or 7.5 (CUDA 13) up."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        out = subprocess.run(
            [str(Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc"), "--list-gpu-arch"],
            capture_output=True,
            text=True,
            check=True,
        )
        known = sorted({int(n) for n in re.findall(r"compute_(\d+)\b", out.stdout)})
        wanted = [n for n in (70, 75, 80, 86, 89, 90, 100, 120) if n in known]
        os.environ["TORCH_CUDA_ARCH_LIST"] = " ".join(f"{n // 10}.{n % 10}" for n in wanted) + "+PTX" if wanted else ""
    return cpp_extension._get_cuda_arch_flags()


def arch_names(gencode: list[str]) -> list[str]:
    """What the flags build for: sm_90 is machine code, compute_90 PTX."""
    return re.findall(r",code=(\w+)", " ".join(gencode))


def runtime_library() -> tuple[str, str]:
    """Folder and name of CUDA's runtime library: the toolkit's, or the one that torch itself loads."""
    home = Path(cpp_extension.CUDA_HOME)
    for folder in (home / "lib64", home / "lib"):
        if (folder / "libcudart.so").exists():
            return str(folder), "cudart"
    for library in sorted(Path(torch.__file__).parent.parent.glob("nvidia/*/lib/libcudart.so.*")):
        return str(library.parent), f":{library.name}"
    return str(home / "lib64"), "cudart"


def toolkit_headers() -> list[str]:
    """Headers that a slim toolkit lacks are taken from the nvidia wheels that a CUDA build of torch brings."""
    nvidia = Path(torch.__file__).parent.parent / "nvidia"
    return sorted(str(p) for p in nvidia.glob("*/include")) if nvidia.is_dir() else []


def build_info(cuda: bool, archs: list[str]) -> str:
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "archs": archs,
        "host_abi": f"torch {torch.__version__}, Python {platform.python_version()}",
    }
    return f'"""What this build was made with. Written by setup.py."""\n\nBUILD: dict[str, object] = {facts!r}\n'


def copy_headers() -> None:
    """The torch-free headers go into the package, for C++ programs (fastamp.include_paths())."""
    folder = ROOT / "fastamp" / "include" / "fastamp"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("launchers.h", "scale.h", "storage.h", "tensor_ref.h", "unscale.h"):
        shutil.copy2(ROOT / "csrc" / name, folder / name)


class Build(cpp_extension.BuildExtension):
    """Notes what it builds. Other commands (metadata, the version) leave the note of an earlier build as it is."""

    info = ""

    def run(self) -> None:
        super().run()
        (ROOT / "fastamp" / "_build_info.py").write_text(self.info)


def extensions() -> list[Extension]:
    cuda = wants_cuda()
    include = [str(ROOT / "csrc")]
    # As system headers, so that torch's own warnings do not hide ours.
    system = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    # -ffp-contract=off: a*b+c is two roundings unless the source says fma, so that CPU and CUDA agree to the bit.
    cxx = ["-O3", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
    stable = [f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}"]
    flags = {"cxx": ["-std=c++17", *cxx, *stable, *system]}
    ops_sources = [s for s in sources("csrc/*.cpp", "csrc/cpu/*.cpp") if s != "csrc/host.cpp"]
    library_dirs, libraries, archs = [str(Path(torch.__file__).parent / "lib")], ["torch_cpu", "c10"], []
    if cuda:
        ops_sources += sources("csrc/cuda/*.cu")
        include += toolkit_headers()
        flags["cxx"] = flags["cxx"] + ["-DUSE_CUDA"]
        gencode = arch_flags()
        archs = arch_names(gencode)
        # No fast-math: subnormals and NaN must survive. -fmad=false for the same reason as -ffp-contract=off.
        flags["nvcc"] = [
            "-std=c++17",
            "-O3",
            "-fmad=false",
            "-lineinfo",
            "-DUSE_CUDA",
            "-Xcompiler=-Wall,-Wno-unknown-pragmas,-fvisibility=hidden",
            "--expt-relaxed-constexpr",
            *stable,
        ]
        folder, cudart = runtime_library()
        libraries += ["torch_cuda", cudart]
        library_dirs.append(folder)
    Build.info = build_info(cuda, archs)
    ops = Extension(
        "fastamp._ops",
        ops_sources,
        include_dirs=include,
        extra_compile_args=flags,
        library_dirs=library_dirs,
        libraries=libraries,
        py_limited_api=True,
        language="c++",
    )
    # No -std here: torch's headers need the standard that torch's own build helper picks.
    host = cpp_extension.CppExtension(
        "fastamp._host", ["csrc/host.cpp"], include_dirs=include, extra_compile_args={"cxx": [*cxx, *system]}
    )
    return [ops, host]


if __name__ == "__main__":
    copy_headers()
    setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
