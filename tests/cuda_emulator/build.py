"""Builds the CUDA kernels and the op layer above them for the CPU, on top of the emulator.

    python tests/cuda_emulator/build.py --kind plain|asan|tsan [-o FILE]

The result is a shared library for torch.ops.load_library: every op of csrc/, registered for CPU tensors as
torch.ops.fastamp_emulated.*, whose kernels are csrc/cuda/*.cu run by the emulator. Results are kept under
build/emulated, named by a hash over everything that went in, and built again only when that changes.
"""

import argparse
import concurrent.futures
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "emulated"

KINDS = ("plain", "asan", "tsan")
# Flags of the program under test, and of the scheduler, which is never instrumented.
_PROGRAM_FLAGS = {
    "plain": ["-O2"],
    "asan": [
        "-O1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined,float-cast-overflow",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=all",
    ],
    "tsan": ["-O1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
}
_SCHEDULER_FLAGS = {
    "plain": ["-O2"],
    "asan": ["-O2", "-DCUDA_EMULATOR_ASAN"],
    "tsan": ["-O2", "-DCUDA_EMULATOR_TSAN"],
}
_COMMON_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",  # #pragma unroll
    "-Wno-unused-parameter",
    "-ffp-contract=off",  # a*b+c must not become an fma: what nvcc contracts, the PTX layer shows
    "-Wno-attributes",  # visibility of templates from torch's headers
    "-fno-gnu-unique",  # several builds are loaded into one process
]


class Unavailable(RuntimeError):
    """This machine lacks what the emulated build needs; the text says what."""


def compiler() -> str:
    """The C++ compiler: $CXX, or g++."""
    command = os.environ.get("CXX", "g++")
    if shutil.which(command.split()[0]) is None:
        raise Unavailable(f"no C++ compiler: '{command}' was not found (set CXX)")
    return command


@functools.cache
def cuda_include_dirs() -> list[Path]:
    """Where cuda_fp16.h and vector_types.h are: a CUDA toolkit, or the PyPI wheels of its headers.

    Raises Unavailable if there is neither. `pip install nvidia-cuda-runtime nvidia-cuda-crt` is enough.
    """
    candidates: list[list[Path]] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append([Path(os.environ[variable]) / "include"])
    for entry in (*sys.path, sysconfig.get_paths()["purelib"]):
        nvidia = Path(entry or ".") / "nvidia"
        candidates.append([nvidia / "cu13" / "include"])
        candidates.append([nvidia / "cuda_runtime" / "include", nvidia / "cuda_nvcc" / "include"])
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        candidates.append([Path(nvcc).resolve().parents[1] / "include"])
    candidates.append([Path("/usr/local/cuda/include")])
    for directories in candidates:
        wanted = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "vector_types.h", "crt/host_defines.h")
        if all(any((directory / name).exists() for directory in directories) for name in wanted):
            return [directory for directory in directories if directory.exists()]
    raise Unavailable(
        "no CUDA headers (needed even without a GPU): set CUDA_HOME, or "
        "`pip install nvidia-cuda-runtime nvidia-cuda-crt`"
    )


def op_sources(root: Path = ROOT) -> list[Path]:
    """The op layer and the kernels of a source tree. host.cpp is a module of its own."""
    layer = [path for path in sorted((root / "csrc").glob("*.cpp")) if path.name != "host.cpp"]
    return [*layer, *sorted((root / "csrc" / "cuda").glob("*.cu"))]


def _headers(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder in (root / "csrc", EMULATOR):
        for pattern in ("*.h", "*.cuh", "*.inc"):
            found += folder.rglob(pattern)
    return sorted(found)


def _digest(*parts: object) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:20]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"failed: {shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(
        [*compiler().split(), "--version"], capture_output=True, text=True, check=True
    ).stdout


@functools.cache
def _torch_flags() -> tuple[list[str], list[str], str]:
    """Compile flags, link flags and version of the torch at hand."""
    import torch
    from torch.utils import cpp_extension

    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    return includes, libraries, f"{torch.__version__} {torch.__file__}"


def _compile_all(commands: list[list[str]]) -> None:
    jobs = min(int(os.environ.get("MAX_JOBS", "2")), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(_run, command) for command in commands]:
            done.result()


def build_library(
    kind: str,
    sources: Sequence[Path],
    *,
    name: str,
    torch: bool,
    root: Path = ROOT,
    flags: Sequence[str] = (),
) -> Path:
    """Builds `sources` (.cpp, and .cu as C++) with the emulator into one shared library; returns its path.

    kind is one of KINDS; torch adds torch's headers and libraries for the .cpp files; root is the source tree
    whose csrc/ is included; flags are added to every compilation. Raises Unavailable if this machine lacks
    compiler or headers, RuntimeError with the compiler's output if a source does not compile.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    includes = [f"-I{root / 'csrc'}", f"-I{root / 'csrc' / 'cuda'}", f"-I{EMULATOR}"]
    # -isystem: the toolkit's headers are not ours to clean of warnings.
    for directory in cuda_include_dirs():
        includes += ["-isystem", str(directory)]
    torch_includes, torch_libraries, torch_version = _torch_flags() if torch else ([], [], "")
    sanitizer = [flag for flag in _PROGRAM_FLAGS[kind] if flag.startswith("-fsanitize=")]

    common_key = _digest(
        _compiler_version(),
        torch_version,
        *[
            (str(path.relative_to(root) if path.is_relative_to(root) else path), path.read_text())
            for path in _headers(root)
        ],
        *[
            directory / header
            for directory in cuda_include_dirs()
            for header in ("cuda_fp16.h", "vector_types.h")
            if (directory / header).exists()
        ],
    )
    objects: list[Path] = []
    commands: list[list[str]] = []
    for source in (*sources, EMULATOR / "cuda_emulator.cpp"):
        command = [*compiler().split(), *_COMMON_FLAGS, *flags]
        command += _SCHEDULER_FLAGS[kind] if source.parent == EMULATOR else _PROGRAM_FLAGS[kind]
        command += includes
        if torch and source.suffix == ".cpp" and source.parent != EMULATOR:
            command += torch_includes
        key = _digest(common_key, command, str(source.name), source)
        target = CACHE / "objects" / f"{source.stem}-{key}.o"
        objects.append(target)
        if not target.exists():
            temporary = target.with_suffix(f".{os.getpid()}.o")
            commands.append([*command, "-x", "c++", "-c", str(source), "-o", str(temporary)])
    library = (
        CACHE / f"{name}-{kind}-{_digest([path.name for path in objects], sanitizer, torch_libraries)}.so"
    )
    if library.exists():
        return library

    (CACHE / "objects").mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parallel test processes: the first builds, the others find it done
        if library.exists():
            return library
        commands = [command for command in commands if not Path(_final_name(command[-1])).exists()]
        _compile_all(commands)
        for command in commands:
            os.replace(command[-1], _final_name(command[-1]))
        temporary = library.with_suffix(f".{os.getpid()}.so")
        link = [*compiler().split(), "-shared", *sanitizer, *map(str, objects), *torch_libraries, "-ldl"]
        _run([*link, "-Wl,-Bsymbolic", "-o", str(temporary)])
        os.replace(temporary, library)
    return library


def _final_name(temporary: str) -> str:
    stem, _, _ = temporary.rpartition(f".{os.getpid()}.o")
    return f"{stem}.o"


def build(kind: str = "plain", *, root: Path = ROOT) -> Path:
    """Builds the emulated op library of a source tree, returns its path, raises as build_library() does."""
    defines = ["-DFASTAMP_EMULATED", "-DFASTAMP_NAMESPACE=fastamp_emulated"]
    defines += ["-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    return build_library(kind, op_sources(root), name="ops", torch=True, root=root, flags=defines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("-o", "--output", type=Path, help="copy the library here")
    arguments = parser.parse_args()
    library = build(arguments.kind)
    if arguments.output is not None:
        shutil.copyfile(library, arguments.output)
        library = arguments.output
    print(library)


if __name__ == "__main__":
    main()
