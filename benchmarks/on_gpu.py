"""What on_gpu.sh runs: parts, each with its own time limit, and a summary of what became of them."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 530
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PASSED, FAILED, TIMED_OUT, LEFT_OUT = "passed", "FAILED", "TIMED OUT", "left out"
GRACE = 10.0  # seconds: pytest's, to print the failures that it has seen


@dataclass
class Part:
    """One thing to run. `dry` is what runs in its place where there is no GPU."""

    name: str
    command: list[str]
    dry: list[str]
    limit: float  # seconds
    needs: tuple[str, ...] = ()  # Python modules and programs without which it is left out
    environment: dict[str, str] = field(default_factory=dict)
    grace: float = 0.0  # seconds of the limit that it has, once interrupted, to say what it has found so far
    outcome: str = ""
    seconds: float = 0.0
    last_line: str = ""
    output: str = ""

    def row(self) -> dict[str, Any]:
        return {
            "part": self.name,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 1),
            "limit": round(self.limit, 1),
            "last_line": self.last_line,
        }


# ---- the parts


def parts(out: Path, capability: str) -> list[list[Part]]:
    """In order of worth. Those in one list run at the same time; measuring shares the machine with nothing."""
    python = sys.executable
    # Names each test as it begins, and where one hangs.
    pytest = [python, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    build = {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability, "MAX_JOBS": str(os.cpu_count() or 2)}
    op_tests = [str(path) for path in sorted((ROOT / "tests").glob("test_op_*.py"))]
    # Tests that skip without a GPU. Those that count the device's memory share it with nothing.
    gpu_tests = [str(path) for path in sorted((ROOT / "tests").glob("test_*_cuda.py"))]
    memory = [path for path in gpu_tests if "memory" in path]
    training = ["tests/test_grad_scaler.py", "tests/test_clip.py", "tests/test_state.py", "tests/test_optimizers.py"]
    training += [path for path in gpu_tests if path not in memory]
    # Of these the parts before have run what needs a GPU; the rest checks the emulator, which needs none.
    elsewhere = ["test_op_*.py", "test_*_cuda.py", "test_cuda_*.py", "test_ptx_to_cpp.py", "test_fuzz_ops.py"]
    others = [argument for pattern in elsewhere for argument in ("--ignore-glob", f"tests/{pattern}")]
    compare = [python, "tests/compare_backends.py"]
    bench = [python, "benchmarks/bench_gpu.py", "--json", str(out / "benchmarks.json")]
    # By files: what a module's tests share (a group of NCCL processes, say) is made once.
    several = ["-n", "8", "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
    many = ["-n", str(max(2, (os.cpu_count() or 2) - 2))] if several else []
    watched = [*compare, "--backends", "cuda", "--seed", "0", "--quick"]
    # Our own calls of the API are checked where they are made; libraries probe it for what may be missing.
    sanitizer = ["compute-sanitizer", "--error-exitcode", "97", "--print-limit", "20", "--report-api-errors", "no"]
    # Checking torch's kernels too would take long. initcheck must watch them: what they write is initialised.
    ours = ["--kernel-regex", "kns=fastamp"]
    # Each tensor is an allocation of its own, so that a step beside it is seen.
    no_pool = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        [
            Part(
                "build",
                [python, "setup.py", "build_ext", "--inplace"],
                [python, "setup.py", "--version"],
                200,
                ("nvcc",),
                build,
            )
        ],
        [Part("diagnostics", [python, "-m", "fastamp"], [python, "-m", "fastamp"], 30)],
        [
            Part(
                "emulated build",
                [python, "tests/cuda_emulator/build.py", "--kind", "plain"],
                [python, "tests/cuda_emulator/build.py", "--help"],
                120,
                environment={"MAX_JOBS": build["MAX_JOBS"]},
            )
        ],
        [
            Part(
                "graphs, streams",
                [*pytest, "tests/test_cuda_device.py"],
                [*pytest, "--collect-only", "tests/test_cuda_device.py"],
                80,
                ("pytest",),
                grace=GRACE,
            )
        ],
        [
            Part(
                "emulated and real bits",
                [*compare, "--seed", "0", "--json", str(out / "comparison.json")],
                [*compare, "--backends", "cpu", "--seed", "0", "--quick", "--json", str(out / "comparison.json")],
                120,
            )
        ],
        [
            Part(
                tool,
                [*sanitizer, "--tool", tool, *(() if tool == "initcheck" else ours), *watched],
                [python, "--version"],
                100,
                ("compute-sanitizer",),
                no_pool,
            )
            for tool in SANITIZERS
        ],
        [
            Part(
                "op tests",
                [*pytest, *several, "-k", "cuda and not emulated", *op_tests],
                [*pytest, "--collect-only", "-k", "cuda and not emulated", *op_tests],
                90,
                ("pytest", "hypothesis"),
                grace=GRACE,
            )
        ],
        [
            Part(
                "scaler, integrations, NCCL",
                [*pytest, *several, "-rs", "-k", "cuda", *training],
                [*pytest, "--collect-only", "-k", "cuda", *training],
                100,
                ("pytest",),
                grace=GRACE,
            )
        ],
        [Part("benchmarks", bench, [*bench, "--device", "cpu", "--quick"], 150)],
        [
            Part(
                "memory",
                [*pytest, *memory],
                [*pytest, "--collect-only", *memory],
                100,
                ("pytest",),
                grace=GRACE,
            )
        ],
        [
            Part(
                "rest of the suite",
                [*pytest, *many, *others, "tests"],
                [*pytest, "--collect-only", "tests/test_build.py"],
                200,
                ("pytest", "hypothesis"),
                grace=GRACE,
            )
        ],
    ]


# ---- running them


def find_toolkit() -> None:
    """Puts the tools of a CUDA toolkit that is there on PATH, behind what is on it."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    for home in filter(None, homes):
        for folder in ("bin", "compute-sanitizer", "extras/compute-sanitizer"):
            if (Path(home) / folder).is_dir():
                os.environ["PATH"] += os.pathsep + str(Path(home) / folder)


def lacks(part: Part) -> list[str]:
    return [need for need in part.needs if not (shutil.which(need) or importlib.util.find_spec(need.replace("-", "_")))]


def run(part: Part, dry: bool, limit: float) -> None:
    """Runs a part; it and all that it started are ended after `limit` seconds."""
    part.limit = limit
    missing = [] if dry else lacks(part)
    if missing:
        part.outcome, part.last_line = LEFT_OUT, f"{' and '.join(missing)} not found on this machine"
        return
    if limit < 1:
        part.outcome, part.last_line = TIMED_OUT, "no time was left for it"
        return
    environment = {**os.environ, **({} if dry else part.environment)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    environment["PYTHONUNBUFFERED"] = "1"
    started = time.monotonic()
    # A file: a pipe would be waited for as long as anything that the part has started holds it.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                part.dry if dry else part.command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as problem:
            part.outcome, part.last_line = FAILED, str(problem)
            return
        grace = part.grace if limit > 2 * part.grace else 0.0
        part.outcome = TIMED_OUT
        if ended(process, limit - grace):
            part.outcome = PASSED if process.returncode == 0 else FAILED
        elif grace:
            process.send_signal(signal.SIGINT)
            ended(process, grace)
        with contextlib.suppress(ProcessLookupError):  # nothing that it has started outlives it
            os.killpg(process.pid, signal.SIGKILL)
        ended(process, 10)  # it may be stuck in a driver for good
        part.seconds = time.monotonic() - started
        output.seek(0)
        part.output = output.read().decode(errors="replace")
    part.last_line = next((line.strip() for line in reversed(part.output.splitlines()) if line.strip()), "")


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_all(
    groups: list[list[Part]],
    dry: bool,
    log: Path,
    limits: dict[str, float],
    total: float,
    report: Callable[[], None],
) -> None:
    """Runs group after group, within `total` seconds; logs each part's output and reports as soon as its group has
    ended. Nothing runs behind a build that failed: the time is better spent on another try."""
    end = time.monotonic() + total
    built = True
    with log.open("w") as file:
        for group in groups:
            if not built:
                for part in group:
                    part.outcome, part.last_line = LEFT_OUT, "the build did not pass"
                continue
            left = end - time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(len(group)) as pool:
                jobs = [pool.submit(run, p, dry, min(limits.get(p.name, p.limit), left)) for p in group]
                for job in jobs:
                    job.result()
            for part in group:
                command = shlex.join(part.dry if dry else part.command)
                file.write(f"==== {part.name}: {part.outcome}, {part.seconds:.1f} s ====\n$ {command}\n{part.output}\n")
                file.flush()
                print(f"{part.outcome:9} {part.seconds:6.1f} s  {part.name}: {part.last_line[:120]}", flush=True)
                built = built and (part.name != "build" or part.outcome == PASSED)
            report()
    report()


# ---- what machine, what code


def first_line(command: list[str], pattern: str = "") -> str:
    lines = [line.strip() for line in lines_of(command) or [] if re.search(pattern, line)]
    return lines[0] if lines else "unknown"


def lines_of(command: list[str]) -> list[str] | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def source_digest() -> str:
    """Over what is compiled and run: tells which code was checked where there is no git."""
    state = hashlib.sha256()
    for pattern in ("csrc/**/*", "fastamp/**/*.py", "tests/**/*.py", "setup.py"):
        for path in sorted(p for p in ROOT.glob(pattern) if p.is_file() and p.name != "_build_info.py"):
            state.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return state.hexdigest()[:16]


def facts() -> dict[str, Any]:
    changed = lines_of(["git", "status", "--short", "--untracked-files=no"])
    found: dict[str, Any] = {
        "commit": first_line(["git", "rev-parse", "HEAD"]),
        "changed since": "unknown" if changed is None else f"{len(changed)} files",
        "source digest": source_digest(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "nvcc": first_line(["nvcc", "--version"], "release"),
        "compiler": first_line([os.environ.get("CXX", "c++"), "--version"]),
        "compute-sanitizer": first_line(["compute-sanitizer", "--version"], "Version"),
        "driver": first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "gpus": [],
        "packages": {},
    }
    for name in ("torch", "ninja", "pytest", "hypothesis", "xdist", "numpy"):
        found["packages"][name] = "there" if importlib.util.find_spec(name) else "missing"
    # In a process of its own, so that this one holds no device memory.
    # The first import of torch on a fresh machine reads gigabytes.
    try:
        done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=180)
        problem = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = "import torch took more than 180 s"
    if problem:
        found["packages"]["torch"] = f"does not import: {problem.splitlines()[-1]}"
    else:
        found.update(json.loads(done.stdout))
        problem = done.stderr.strip()
    if not found["gpus"] and lines_of(["nvidia-smi", "-L"]):
        # No dry run that looks as if all were well.
        raise SystemExit(f"nvidia-smi lists a GPU, but torch finds none.\n{problem or 'torch says nothing about it.'}")
    return found


ASK_TORCH = """
import json, torch
gpus = []
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    gpus.append({"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "GiB": round(gpu.total_memory / 2**30)})
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


# ---- the summary


def benchmark_table(path: Path) -> list[str]:
    """The median device times of benchmarks.json, and its training steps."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    lines = [
        "",
        "## Benchmarks",
        "",
        "| case | way | us | host us | GB/s | against the first |",
        "|---|---|--:|--:|--:|--:|",
    ]

    def time_of(times: dict[str, Any]) -> float:
        return times.get("device", times["host"])["median"]

    for result in content["results"]:
        first = next(iter(result["timing"].values()))
        for way, times in result["timing"].items():
            us, host = time_of(times), times["host"]["median"]
            speed = f"{result['bytes'] / us / 1e3:.0f}" if result["bytes"] else ""
            lines.append(f"| {result['case']} | {way} | {us:.1f} | {host:.1f} | {speed} | {time_of(first) / us:.2f}x |")
    lines += ["", "| training step | us | held MiB | peak MiB |", "|---|--:|--:|--:|"]
    for way, numbers in content["training"].items():
        held, peak = (f"{numbers[what] / 2**20:.0f}" if what in numbers else "" for what in ("held", "peak"))
        lines.append(f"| {way} | {time_of(numbers['us']):.0f} | {held} | {peak} |")
    return lines


def summary(machine: dict[str, Any], done: list[Part], dry: bool, seconds: float, out: Path) -> str:
    counts = {o: sum(p.outcome == o for p in done) for o in (PASSED, FAILED, TIMED_OUT, LEFT_OUT)}
    lines = ["# fastamp on a GPU", ""]
    if dry:
        lines += ["**Dry run: this machine has no GPU. Nothing here says anything about one.**", ""]
    lines.append(", ".join(f"{n} {o}" for o, n in counts.items() if n) + f", in {seconds:.0f} s.")
    lines += ["", "| part | outcome | seconds | limit | last line |", "|---|---|--:|--:|---|"]
    for part in done:
        last = part.last_line[:160].replace("|", "\\|")
        lines.append(f"| {part.name} | {part.outcome} | {part.seconds:.1f} | {part.limit:.0f} | {last} |")
    lines += ["", "## Machine", ""]
    lines += [
        f"- {name}: {json.dumps(value) if not isinstance(value, str) else value}" for name, value in machine.items()
    ]
    lines += benchmark_table(out / "benchmarks.json")
    return "\n".join(lines) + "\n"


def named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(prog="on_gpu.sh", description="Tests, checks and measures fastamp on a GPU.")
    parser.add_argument("out", type=Path, help="folder for summary.md, report.json and log.txt")
    parser.add_argument("--only", nargs="*", metavar="PART", help="only these parts; none of them without a name")
    parser.add_argument("--also", type=named, action="append", default=[], metavar="NAME=COMMAND", help="one more part")
    parser.add_argument(
        "--limit", type=named, action="append", default=[], metavar="PART=SECONDS", help="its time limit"
    )
    parser.add_argument("--total", type=float, default=TOTAL_SECONDS, metavar="SECONDS", help="limit of all together")
    options = parser.parse_args()
    started = time.monotonic()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("benchmarks.json", "comparison.json"):
        (out / stale).unlink(missing_ok=True)
    find_toolkit()
    machine = facts()
    dry = not machine["gpus"]
    if dry:
        print("This machine has no GPU: a dry run, on the CPU and in the small, that shows nothing about a GPU.")
    groups = parts(out, machine["gpus"][0]["capability"] if machine["gpus"] else "")
    names = [part.name for group in groups for part in group]
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; they are: {', '.join(names)}")
    if options.only is not None:
        groups = [[part for part in group if part.name in options.only] for group in groups]
    groups += [[Part(name, shlex.split(command), shlex.split(command), 60)] for name, command in options.also]
    groups = [group for group in groups if group]
    limits = {name: float(seconds) for name, seconds in options.limit}
    parts_of_all = [part for group in groups for part in group]

    def report() -> None:
        done = [part for part in parts_of_all if part.outcome]
        (out / "summary.md").write_text(summary(machine, done, dry, time.monotonic() - started, out))
        content = {"dry_run": dry, "machine": machine, "parts": [part.row() for part in done]}
        (out / "report.json").write_text(json.dumps(content, indent=1) + "\n")

    run_all(groups, dry, out / "log.txt", limits, options.total - (time.monotonic() - started), report)
    print(f"written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return int(any(part.outcome in (FAILED, TIMED_OUT) for part in parts_of_all))


if __name__ == "__main__":
    sys.exit(main())
