"""Runs the op tests on the emulated CUDA kernels, layer by layer.

    python tests/cuda_emulator/run.py [--layer plain|asan|tsan|ptx ...] [--arch 75 ...] [-- PYTEST_ARGUMENTS]

plain   the kernels as g++ compiles them
asan    the same with AddressSanitizer and UndefinedBehaviorSanitizer: out of bounds, misaligned, bad shifts
tsan    the same with ThreadSanitizer, to which every CUDA thread is a thread: races, missing barriers, fences
ptx     what nvcc emitted, for each --arch (oldest, 8.0, 9.0 and newest if none is given)
cpu-asan, cpu-tsan    no emulator: the CPU kernels and the op layer, instrumented, with several threads

--layer may be repeated; without it all run. Exit status 1 if a layer finds something or cannot run here.
"""

import argparse
import concurrent.futures
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuda_emulator import build, sanitizers

LAYERS = ("plain", "asan", "tsan", "ptx", "cpu-asan", "cpu-tsan")
# Tests that a layer leaves out. Thousands of blocks take TSan minutes and show it nothing that hundreds do not.
LEFT_OUT = {
    "tsan": "launch_holds and (1357 or 1358 or 3000)",
    # Not about the CPU's kernels, or about a signal that the sanitizer takes itself.
    "cpu-asan": "emulated or large or opcheck or compile or fake or touches_no_memory",
    "cpu-tsan": "emulated or large or opcheck or compile or fake or touches_no_memory",
}
# What a failure is recognised by, the most telling first.
REASONS = (
    r"CUDA emulator: .*",
    r"SUMMARY: (?:Address|Thread)Sanitizer: .*",
    r"ERROR: AddressSanitizer: .*",
    r"\S*: runtime error: .*",
    r"WARNING: ThreadSanitizer: .*",
    r"Fatal Python error: .*",
    r"^E  .*",
    r"^FAILED .*",
)


@dataclass
class Layer:
    """One way to run the kernels: a kind of build, or nvcc's PTX for an architecture; or the CPU's kernels."""

    name: str
    kind: str
    ptx_arch: int | None = None
    cpu: bool = False


@dataclass
class Outcome:
    passed: bool
    summary: str  # pytest's last line, or the reason of the failure
    output: str
    seconds: float


def layers(names: Sequence[str], archs: Sequence[int] | None = None) -> list[Layer]:
    """The layers of these names; raises build.Unavailable if "ptx" is among them and there is no nvcc."""
    result = [Layer(name, name) for name in names if name in build.KINDS]
    if "ptx" in names:
        result += [Layer(f"ptx {arch}", "plain", arch) for arch in archs or build.ptx_archs()]
    result += [Layer(name, name.removeprefix("cpu-"), cpu=True) for name in names if name.startswith("cpu-")]
    return result


def op_tests(root: Path = build.ROOT) -> list[str]:
    return [str(path) for path in sorted((root / "tests").glob("test_op_*.py"))]


def reason_of(output: str) -> str:
    for pattern in REASONS:
        found = re.search(pattern, output, re.MULTILINE)
        if found is not None:
            return found[0].strip()
    return output.strip().splitlines()[-1] if output.strip() else "no output"


def run_layer(
    layer: Layer,
    *,
    library_root: Path = build.ROOT,
    pytest_arguments: Sequence[str] = (),
    timeout: float = 1800,
) -> Outcome:
    """Builds the library of `library_root` for a layer and runs the op tests of this checkout on it.

    Raises build.Unavailable if this machine lacks what the layer needs, RuntimeError if the build fails.
    """
    started = time.monotonic()
    environment = sanitizers.environment(layer.kind)
    command = [*sanitizers.command_prefix(layer.kind), sys.executable, "-m", "pytest", "-q"]
    # A sanitizer ends the process: its report must not be in pytest's hands.
    command += ["--capture=sys", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    if layer.cpu:
        root = build.build_cpu(layer.kind)
        environment["OMP_NUM_THREADS"] = "3"
        if layer.kind == "tsan":
            environment["LD_PRELOAD"] += f" {build.build_openmp_edges()}"
            # Nothing suppressed: torch calls all threads of the kernels, and its name would hide their races.
            environment["TSAN_OPTIONS"] = f"halt_on_error=1:exitcode={sanitizers.EXIT_STATUS['tsan']}"
    else:
        root = build.ROOT
        library = build.build(layer.kind, ptx_arch=layer.ptx_arch, root=library_root)
        environment["FASTAMP_EMULATED_LIBRARY"] = str(library)
        command += ["-p", "cuda_emulator.only_emulated"]
    if layer.name in LEFT_OUT:
        command += ["-k", f"not ({LEFT_OUT[layer.name]})"]
    command += [*op_tests(root), *pytest_arguments]  # a -k among the latter counts instead
    paths = [str(root), str(root / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=timeout)
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        seen = expired.stdout or b""
        seen = seen.decode(errors="replace") if isinstance(seen, bytes) else seen
        output, status = f"{seen}\nE  no end after {timeout:.0f} s", 1
    passed = status == 0
    # Exit status 5 (no tests collected) fails too: a layer that ran nothing has shown nothing.
    if status < 0:
        output += f"\nE  ended by signal {-status}"
    summary = done.stdout.strip().splitlines()[-1] if passed else reason_of(output)
    return Outcome(passed, summary, output, time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layer", action="append", choices=LAYERS, help="may be given several times")
    parser.add_argument("--arch", type=int, nargs="+", help="architectures of the ptx layer, such as 75 90")
    parser.add_argument("pytest_arguments", nargs="*", help="after --: passed on to pytest, such as -x")
    arguments = parser.parse_args()
    failed = False
    try:
        chosen = layers(arguments.layer or LAYERS, arguments.arch)
        run_one = functools.partial(run_layer, pytest_arguments=arguments.pytest_arguments)
        pool = concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1))  # a layer is one process
        for layer, outcome in zip(chosen, pool.map(run_one, chosen), strict=True):
            failed |= not outcome.passed
            if not outcome.passed:
                print(outcome.output)
            verdict = "ok" if outcome.passed else "FAILED"
            print(f"{layer.name:8} {verdict:7} {outcome.seconds:6.0f} s  {outcome.summary}", flush=True)
    except build.Unavailable as reason:
        sys.exit(f"cannot run on this machine: {reason}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
