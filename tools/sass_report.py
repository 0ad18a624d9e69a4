"""What the kernels became, per architecture: registers, spills, stack, access widths, instructions per byte.

    python tools/sass_report.py [--arch 70 75 ...] [--check] [--json benchmarks/results/sass.json]

Every csrc/cuda/*.cu is compiled as setup.py does; the counts are static, of the machine code (SASS). Needs nvcc, and
`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm` unless the toolkit has both. Compute capability 7.0 is beyond
CUDA 13: nvcc's PTX for 7.5 is assembled for 7.0 by a ptxas of CUDA 12, which refuses what 7.0 does not have.
`pip install triton==3.6.0` brings one, with disassemblers.

--check turns the rules into failures (exit status 1):
  - nothing spilled, no stack, no access to local memory;
  - at most 64 registers where a block has 256 threads;
  - the streaming kernels load and store 128 bits at a time, for every dtype;
  - and do not divide for each value.
"""

import argparse
import collections
import concurrent.futures
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHS = [70, 75, 80, 86, 89, 90, 100, 120]
OLDEST_OF_CUDA_13 = 75
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "--expt-relaxed-constexpr"]
MAX_REGISTERS = 64
# What to install for the disassemblers, and for all of CUDA 12's tools: triton's wheel carries its own copies.
CUDA_13 = "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
CUDA_12 = "triton==3.6.0"

# Kernels that stream through memory, and the 128-bit accesses that each must have.
STREAMING = {
    r"\bunscale_kernel<": ("LDG.128", "STG.128"),
    r"\bunscale_norm_kernel<": ("LDG.128", "STG.128"),
    r"\bclip_kernel<": ("LDG.128", "STG.128"),
    r"\bcheck_kernel<": ("LDG.128",),
    r"\baccumulate_kernel<": ("LDG.128", "STG.128"),
    r"\bquantize_kernel<": ("LDG.128", "STG.128"),
    r"\bdequantize_kernel<": ("LDG.128", "STG.128"),
    r"\bpack_bits_kernel": ("LDG.128", "STG.128"),
    r"\bpack_scaled_mask_kernel<": ("LDG.128", "STG.128"),
    r"\bunpack_bits_kernel<": ("LDG.128", "STG.128"),
}
# Reciprocals and roots, of which divisions are made. What divides once a block of threads or once for 16 values stays
# below; a division for each value of a vector does not. Norms divide and take roots once a tensor besides.
MAX_DIVISIONS, MAX_DIVISIONS_OF_NORMS = 8, 20
WIDTHS = {
    "U8": 8,
    "S8": 8,
    "U16": 16,
    "S16": 16,
    "64": 64,
    "128": 128,
    "256": 256,
}  # bits; 32 if none is named
MEMORY = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST")
COUNTED = ("BAR", "SHFL", "REDUX", "VOTE", "ATOMG", "ATOMS", "RED", "MEMBAR", "MUFU", "CALL")


class Missing(RuntimeError):
    """A tool that this machine lacks; the text says which and how to get it."""


@dataclass
class Kernel:
    """One kernel for one architecture."""

    kernel: str
    arch: int
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    global_bytes: int  # moved by all global loads and stores, each counted once
    accesses: dict[str, int] = field(default_factory=dict)  # "LDG.128" -> how many; and barriers, shuffles, ...

    @property
    def instructions_per_byte(self) -> float:
        return self.instructions / max(self.global_bytes, 1)

    def broken_rules(self) -> list[str]:
        broken = []
        local = [name for name in self.accesses if name.startswith(("LDL", "STL"))]
        if self.spilled_bytes or self.stack_bytes or local:
            broken.append(f"local memory: {self.spilled_bytes} bytes spilled, {self.stack_bytes} of stack")
        if self.registers > MAX_REGISTERS:
            broken.append(f"{self.registers} registers, more than {MAX_REGISTERS}")
        for pattern, needed in STREAMING.items():
            if re.search(pattern, self.kernel):
                broken += [f"no {access}" for access in needed if access not in self.accesses]
                divisions = self.accesses.get("MUFU", 0)
                most = MAX_DIVISIONS_OF_NORMS if "norm" in pattern else MAX_DIVISIONS
                if divisions > most:
                    broken.append(f"{divisions} reciprocals or roots, more than {most}")
        return broken


def find_tool(name: str, package: str, release: str = "") -> str:
    """A CUDA tool of this release ("12"): of CUDA_HOME, of PATH, of the PyPI wheels of CUDA, or of triton's."""
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / name, shutil.which(name)]
    for entry in (*sys.path, sysconfig.get_paths()["purelib"]):
        candidates += sorted(Path(entry or ".").glob(f"nvidia/*/bin/{name}"))
        candidates.append(Path(entry or ".") / "triton" / "backends" / "nvidia" / "bin" / name)
    for candidate in candidates:
        if candidate is not None and Path(candidate).is_file() and f"release {release}" in version_of(str(candidate)):
            return str(candidate)
    raise Missing(f"no {name}{' of CUDA ' * bool(release)}{release} was found: pip install {package}")


@functools.cache
def version_of(tool: str) -> str:
    return run([tool, "--version"]).stdout


def run(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


def compile_cubin(source: Path, arch: int, folder: Path) -> tuple[Path, str]:
    """Compiles one .cu; returns the cubin and what ptxas said about its kernels."""
    nvcc = find_tool("nvcc", "nvidia-cuda-nvcc")
    cubin = folder / f"{source.stem}-{arch}.cubin"
    command = [nvcc, *NVCC_FLAGS, f"-I{ROOT / 'csrc'}"]
    if arch >= OLDEST_OF_CUDA_13:
        command += [f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", str(source), "-o", str(cubin)]
        return cubin, run(command).stderr
    ptx = folder / f"{source.stem}-{arch}.ptx"
    run([*command, f"-arch=compute_{OLDEST_OF_CUDA_13}", "-ptx", str(source), "-o", str(ptx)])
    # PTX 8.1 is the first that lets a kernel's parameters take 32,764 bytes.
    text = re.sub(r"^\.version .*$", ".version 8.1", ptx.read_text(), count=1, flags=re.MULTILINE)
    text = re.sub(r"^\.target .*$", f".target sm_{arch}", text, count=1, flags=re.MULTILINE)
    ptx.write_text(text)
    ptxas = find_tool("ptxas", CUDA_12, "12")
    return cubin, run([ptxas, "-v", f"-arch=sm_{arch}", str(ptx), "-o", str(cubin)]).stderr


def disassemble(cubin: Path, arch: int) -> str:
    """SASS. CUDA 13's tools refuse 7.0, and CUDA 12's know nothing of what CUDA 13 added to newer ones."""
    package, release = (CUDA_13, "13") if arch >= OLDEST_OF_CUDA_13 else (CUDA_12, "12")
    folder = Path(find_tool("nvdisasm", package, release)).parent  # which cuobjdump looks for on PATH
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return run([find_tool("cuobjdump", package, release), "-sass", str(cubin)], env=environment).stdout


def parse_resources(ptxas_output: str) -> dict[str, tuple[int, int, int, int]]:
    """Mangled name -> registers, spilled bytes, stack bytes, shared bytes."""
    found = {}
    for entry in re.split(r"Compiling entry function '", ptxas_output)[1:]:
        name = entry.split("'")[0]
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        shared = re.search(r"(\d+) bytes smem", entry)
        stack, stores, loads = (int(number) for number in frame.groups())
        found[name] = (int(registers[1]), stores + loads, stack, int(shared[1]) if shared else 0)
    return found


def access_bits(opcode: str) -> int:
    return next((WIDTHS[part] for part in opcode.split(".")[1:] if part in WIDTHS), 32)


def parse_sass(sass: str) -> dict[str, tuple[int, int, dict[str, int]]]:
    """Mangled name -> instructions, global bytes, accesses."""
    found = {}
    for function in re.split(r"\n\s*Function : ", sass)[1:]:
        name, _, body = function.partition("\n")
        opcodes = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", body)
        accesses: collections.Counter[str] = collections.Counter()
        global_bytes = 0
        for opcode in opcodes:
            base = opcode.split(".")[0]
            if base in MEMORY:
                accesses[f"{base}.{access_bits(opcode)}"] += 1
            if base in ("LDG", "STG"):
                global_bytes += access_bits(opcode) // 8
            if base in COUNTED:
                accesses[base] += 1
        instructions = sum(opcode.split(".")[0] != "NOP" for opcode in opcodes)
        found[name] = (instructions, global_bytes, dict(sorted(accesses.items())))
    return found


FORMATS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")  # StorageFormat's values in order


def demangle(names: list[str]) -> list[str]:
    plain = run(["c++filt", "-p"], input="\n".join(names)).stdout.splitlines()
    plain = [re.sub(r"\(fastamp::StorageFormat\)(\d)", lambda m: FORMATS[int(m[1])], name) for name in plain]
    return [name.removeprefix("void ").replace("fastamp::cuda::", "") for name in plain]


def merge_tables(kernels: list[Kernel]) -> list[Kernel]:
    """One row for the small and the large table of tensors where nothing but the table's size differs."""
    groups: dict[tuple[str, int], list[Kernel]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[re.sub(r", TensorTable<\d+, \d+> ", "", kernel.kernel), kernel.arch].append(kernel)
    merged = []
    for (name, _), alike in groups.items():
        same = all(replace(k, kernel=name) == replace(alike[0], kernel=name) for k in alike)
        merged += [replace(alike[0], kernel=name)] if same else alike
    return sorted(merged, key=lambda k: (k.kernel, k.arch))


def kernels_of(source: Path, arch: int) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptxas_output = compile_cubin(source, arch, Path(folder))
        sass = parse_sass(disassemble(cubin, arch))
    resources = parse_resources(ptxas_output)
    if set(sass) != set(resources):
        raise RuntimeError(f"{source.name} for {arch}: ptxas and cuobjdump disagree about which kernels there are")
    rows = []
    for mangled, kernel in zip(sass, demangle(list(sass)), strict=True):
        registers, spilled, stack, shared = resources[mangled]
        rows.append(Kernel(kernel, arch, registers, spilled, stack, shared, *sass[mangled]))
    return rows


def table(kernels: list[Kernel]) -> str:
    lines = ["  sm regs spill stack shared  instr instr/B  kernel: accesses"]
    for k in kernels:
        accesses = " ".join(f"{name}:{count}" for name, count in k.accesses.items())
        lines.append(
            f"{k.arch:4} {k.registers:4} {k.spilled_bytes:5} {k.stack_bytes:5} {k.shared_bytes:6} "
            f"{k.instructions:6} {k.instructions_per_byte:7.2f}  {k.kernel}: {accesses}"
        )
    return "\n".join(lines)


def as_json(kernels: list[Kernel]) -> str:
    """One kernel a line, so that a change shows as one changed line in review."""
    rows = [asdict(k) | {"instructions_per_byte": round(k.instructions_per_byte, 2)} for k in kernels]
    release = re.search(r"release [^\n]*", version_of(find_tool("nvcc", "nvidia-cuda-nvcc")))
    header = json.dumps({"nvcc": release[0] if release else "unknown", "flags": NVCC_FLAGS})
    return f'{{"compiler": {header},\n"kernels": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, help="such as 70 80 90")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a rule is broken")
    parser.add_argument("--json", type=Path, help="write the numbers here, rather than print a table")
    parser.add_argument("sources", type=Path, nargs="*", help="default: csrc/cuda/*.cu")
    arguments = parser.parse_args()
    sources = arguments.sources or sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    jobs = [(source, arch) for arch in arguments.arch for source in sources]
    try:
        with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
            found = list(pool.map(lambda job: kernels_of(*job), jobs))
    except Missing as problem:
        sys.exit(f"cannot run on this machine: {problem}")
    kernels = merge_tables([k for rows in found for k in rows])
    if arguments.json is None:
        print(table(kernels))
    else:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(as_json(kernels))
    committed = ROOT / "benchmarks" / "results" / "sass.json"
    if committed.exists():
        ours, theirs = (text.replace("},\n", "}\n").splitlines() for text in (as_json(kernels), committed.read_text()))
        changed = set(ours) - set(theirs)
        print(f"{len(changed)} lines that {committed.relative_to(ROOT)} does not have")
    broken = [f"sm_{k.arch} {k.kernel}: {rule}" for k in kernels for rule in k.broken_rules()]
    print(f"{len(kernels)} kernels on {len(arguments.arch)} architectures, {len(broken)} broken rules")
    for line in broken:
        print(f"  {line}")
    sys.exit(bool(broken) and arguments.check)


if __name__ == "__main__":
    main()
