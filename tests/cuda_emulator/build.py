"""Builds the CUDA kernels and the op layer above them for the CPU, on top of the emulator.

    python tests/cuda_emulator/build.py --kind plain|asan|tsan [--ptx ARCH] [-o FILE]

The result is a shared library for torch.ops.load_library: every op of csrc/, registered for CPU tensors as
torch.ops.fastamp_emulated.*, whose kernels are csrc/cuda/*.cu run by the emulator; with --ptx, what runs is
the PTX that nvcc makes of them for that architecture. Results are kept under build/emulated, named by a hash
over everything that went in, and built again only when that changes.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "emulated"
PTX_CACHE = CACHE / "ptx"

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
if platform.machine() == "x86_64":
    # Every CUDA thread gets a copy of its kernel's parameters, tables of 32 KB among them. Copied by a call of memcpy,
    # they would go through TSan byte by byte, which takes minutes.
    _PROGRAM_FLAGS["tsan"].append("-mmemcpy-strategy=rep_8byte:-1:noalign")
# What setup.py passes to nvcc, as far as it decides about the code. -O0 for the translation: to compile a
# hundred thousand statements with optimisation takes longer than it saves.
_NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-lineinfo", "--expt-relaxed-constexpr"]
_TRANSLATED_FLAGS = ["-O0", "-w"]
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


def _dependencies(source: Path, root: Path) -> list[Path]:
    """The source and every file of ours that it includes, however indirectly."""
    folders = [root / "csrc", root / "csrc" / "cuda", EMULATOR]
    found = {source.resolve(): None}
    unread = [source.resolve()]
    while unread:
        file = unread.pop()
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE):
            for folder in (file.parent, *folders):
                included = (folder / name).resolve()
                if included.exists() and included not in found:
                    found[included] = None
                    unread.append(included)
                if included.exists():
                    break
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
    return subprocess.run([*compiler().split(), "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _torch_flags() -> tuple[list[str], list[str], str]:
    """Compile flags, link flags and version of the torch at hand."""
    import torch
    from torch.utils import cpp_extension

    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    return includes, libraries, f"{torch.__version__} {torch.__file__}"


def _run_in_parallel(tasks: Sequence[Callable[[], None]]) -> None:
    jobs = min(int(os.environ.get("MAX_JOBS", "2")), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


def _run_to_file(command: Sequence[str], target: Path) -> None:
    """Runs a command, whose last argument is the file it writes; the file appears once it is complete."""
    temporary = target.with_name(f"{os.getpid()}-{threading.get_ident()}-{target.name}")
    _run([*command, str(temporary)])
    os.replace(temporary, target)


@contextlib.contextmanager
def _cache_lock(name: str) -> Iterator[None]:
    """Parallel test processes: the first builds what is named, the others wait and find it done."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _source_key(source: Path, root: Path) -> str:
    """Changes with a source and all it includes: ours by content, the toolkit's by its own headers' content."""
    toolkit = [
        directory / header
        for directory in cuda_include_dirs()
        for header in ("cuda_fp16.hpp", "cuda_bf16.hpp", "cuda_fp8.hpp", "vector_types.h")
        if (directory / header).exists()
    ]
    return _digest(*_dependencies(source, root), *toolkit)


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

    common_key = _digest(_compiler_version(), torch_version)
    objects: list[Path] = []
    tasks: list[Callable[[], None]] = []
    for source in (*sources, EMULATOR / "cuda_emulator.cpp"):
        command = [*compiler().split(), *_COMMON_FLAGS, *flags]
        if source.parent == EMULATOR:
            command += _SCHEDULER_FLAGS[kind]
        elif source.parent == PTX_CACHE:
            command += _TRANSLATED_FLAGS
        else:
            command += _PROGRAM_FLAGS[kind]
        command += includes
        if torch and source.suffix == ".cpp" and source.parent.name == "csrc":
            command += torch_includes
        key = _digest(common_key, [part.replace(str(root), ".") for part in command], _source_key(source, root))
        target = CACHE / "objects" / f"{source.stem}-{key}.o"
        objects.append(target)
        if not target.exists():
            command += ["-x", "c++", "-c", str(source), "-o"]
            tasks.append(functools.partial(_run_to_file, command, target))
    library = CACHE / f"{name}-{kind}-{_digest([path.name for path in objects], sanitizer, torch_libraries)}.so"
    if library.exists():
        return library
    with _cache_lock(f"{name}-{kind}"):
        (CACHE / "objects").mkdir(exist_ok=True)
        if not library.exists():
            _run_in_parallel(tasks)
            link = [*compiler().split(), "-shared", *sanitizer, *map(str, objects), *torch_libraries, "-ldl"]
            _run_to_file([*link, "-Wl,-Bsymbolic", "-o"], library)
    return library


def nvcc() -> str:
    """The CUDA compiler; raises Unavailable without one."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        candidate = Path(os.environ.get(variable, "/nonexistent")) / "bin" / "nvcc"
        if candidate.exists():
            return str(candidate)
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise Unavailable("no nvcc: set CUDA_HOME to a CUDA toolkit")
    return found


def ptx_archs() -> list[int]:
    """The architectures the PTX layer covers: the oldest and the newest that nvcc knows, 8.0 and 9.0."""
    listed = subprocess.run([nvcc(), "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = sorted({int(number) for number in re.findall(r"compute_(\d+)\b", listed)})
    return sorted({known[0], 80, 90, known[-1]})


def _nvcc_version() -> str:
    return subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout


def translate_ptx(sources: Sequence[Path], arch: int, *, root: Path = ROOT) -> list[Path]:
    """Compiles .cu files to PTX for an architecture and that to C++; returns the C++ files.

    Raises Unavailable without nvcc, RuntimeError if nvcc fails or emits what the translator does not know.
    """
    from cuda_emulator import ptx_to_cpp

    translator_key = _digest(Path(ptx_to_cpp.__file__), _nvcc_version())
    results: list[Path] = []
    tasks: list[Callable[[], None]] = []

    def make(source: Path, target: Path) -> None:
        ptx = target.with_suffix(".ptx")
        command = [
            nvcc(),
            *_NVCC_FLAGS,
            f"-arch=compute_{arch}",
            f"-I{root / 'csrc'}",
            f"-I{root / 'csrc' / 'cuda'}",
        ]
        _run_to_file([*command, "-ptx", str(source), "-o"], ptx)
        try:
            text = ptx_to_cpp.translate(ptx.read_text())
        except ptx_to_cpp.TranslationError as problem:
            raise RuntimeError(f"{ptx}: {problem}") from problem
        temporary = target.with_name(f"{os.getpid()}-{target.name}")
        temporary.write_text(text)
        os.replace(temporary, target)

    for source in sources:
        key = _digest(translator_key, _NVCC_FLAGS, arch, _source_key(source, root))
        target = PTX_CACHE / f"{source.stem}-{arch}-{key}.cpp"
        results.append(target)
        if not target.exists():
            tasks.append(functools.partial(make, source, target))
    if tasks:
        with _cache_lock(f"ptx-{arch}"):
            PTX_CACHE.mkdir(exist_ok=True)
            _run_in_parallel(tasks)
    return results


def build(kind: str = "plain", *, ptx_arch: int | None = None, root: Path = ROOT) -> Path:
    """Builds the emulated op library of a source tree and returns its path.

    With ptx_arch (75, 80, ...) the kernels that run are nvcc's PTX for that architecture. Raises as
    build_library() and translate_ptx() do.
    """
    defines = ["-DFASTAMP_EMULATED", "-DFASTAMP_NAMESPACE=fastamp_emulated"]
    defines += ["-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    sources, name = op_sources(root), "ops"
    if ptx_arch is not None:
        kernels = [path for path in sources if path.suffix == ".cu"]
        sources += [*translate_ptx(kernels, ptx_arch, root=root), EMULATOR / "ptx_registry.cpp"]
        name = f"ops-ptx{ptx_arch}"
    return build_library(kind, sources, name=name, torch=True, root=root, flags=defines)


def build_cpu(kind: str) -> Path:
    """A copy of the package whose CPU kernels and op layer are instrumented; returns the folder that holds it.

    Raises RuntimeError if the build fails.
    """
    sanitizer = [flag for flag in _PROGRAM_FLAGS[kind] if flag.startswith(("-fsanitize", "-fno-sanitize"))]
    copied = ["csrc", "fastamp", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
    inputs = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
    tree = (
        CACHE / f"cpu-{kind}-{_digest(_compiler_version(), _torch_flags()[2], sanitizer, ROOT / 'setup.py', *inputs)}"
    )
    with _cache_lock(f"cpu-{kind}"):
        for name in copied:  # the Python part anew each time
            source, target = ROOT / name, tree / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copyfile(source, target)
        if not (tree / "built").exists():
            flags = " ".join([*sanitizer, "-g1", "-fno-omit-frame-pointer"])
            environment = {**os.environ, "CFLAGS": flags, "LDFLAGS": " ".join(sanitizer)}
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment)
            if done.returncode != 0:
                raise RuntimeError(f"failed: {shlex.join(command)} in {tree}\n{done.stdout}{done.stderr}")
            (tree / "built").touch()
    return tree


def build_openmp_edges() -> Path:
    """The library that shows TSan how torch's threads wait for each other (openmp_edges.cpp)."""
    source = EMULATOR / "openmp_edges.cpp"
    library = CACHE / f"openmp_edges-{_digest(_compiler_version(), source)}.so"
    if not library.exists():
        with _cache_lock("openmp_edges"):
            _run_to_file([*compiler().split(), "-O1", "-fPIC", "-shared", str(source), "-ldl", "-o"], library)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--ptx", type=int, metavar="ARCH", help="run nvcc's PTX for this architecture: 75, 90, ...")
    parser.add_argument("-o", "--output", type=Path, help="copy the library here")
    arguments = parser.parse_args()
    library = build(arguments.kind, ptx_arch=arguments.ptx)
    if arguments.output is not None:
        shutil.copyfile(library, arguments.output)
        library = arguments.output
    print(library)


if __name__ == "__main__":
    sys.path.insert(0, str(EMULATOR.parent))
    main()
