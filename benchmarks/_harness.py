"""What every benchmark here shares: interleaved timing, what the machine is, progress, a table, a JSON file, and the
comparison with an older one."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fastamp
from fastamp import _library

RESULTS = Path(__file__).parent / "results"


class Timing(dict[str, dict[str, float]]):
    """For each contestant ``median``, ``p20`` and ``p80`` in microseconds, and ``rounds``.

    Attributes:
        samples: for each contestant its time in every round, in microseconds.
    """

    def __init__(self, samples: dict[str, list[float]]) -> None:
        super().__init__({name: summary(times) for name, times in samples.items()})
        self.samples = samples


def time_interleaved(
    functions: dict[str, Callable[[], Any]],
    *,
    setup: Callable[[str], Any] | None = None,
    device: str = "cpu",
    calls: int = 1,
    rounds: int = 50,
    min_seconds: float = 0.5,
    max_seconds: float = 30.0,
    warmup: int = 3,
) -> Timing:
    """Times the functions in turn, the order rotating from round to round, so that whatever else the machine
    does meets all of them alike.

    Args:
        functions: name to function; called without arguments.
        setup: called with the name before each measurement, outside the timing.
        device: "cuda" waits for the device before the clock is read.
        calls: calls in a row that make one measurement, which is their mean. With one call, what a function
            touches has left the caches by its next turn; with many it is in them.
        rounds: at least this many rounds; more until ``min_seconds`` have been measured, and fewer, but at least 5,
            once ``max_seconds`` have: one slow contestant must not make a case endless.
    """
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in functions}

    names = list(functions)

    def one_round(record: bool) -> float:
        spent = 0.0
        names.append(names.pop(0))
        for name in names:
            if setup is not None:
                setup(name)
            wait()
            function = functions[name]
            start = time.perf_counter()
            for _ in range(calls):
                function()
            wait()
            took = (time.perf_counter() - start) / calls
            spent += took * calls
            if record:
                samples[name].append(took * 1e6)
        return spent

    for _ in range(warmup):
        one_round(record=False)
    gc.collect()
    gc.disable()
    try:
        done, spent = 0, 0.0
        while (done < rounds or spent < min_seconds) and (done < 5 or spent < max_seconds):
            spent += one_round(record=True)
            done += 1
    finally:
        gc.enable()
    return Timing(samples)


def summary(times: list[float]) -> dict[str, float]:
    p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
    return {
        "median": round(statistics.median(times), 3),
        "p20": round(p20, 3),
        "p80": round(p80, 3),
        "rounds": len(times),
    }


def ratio(timing: Timing, slow: str, fast: str, digits: int = 2) -> float:
    """How many times faster ``fast`` is than ``slow``: the median of the rounds' ratios. A machine that is slow for a
    while slows both in a round."""
    pairs = zip(timing.samples[slow], timing.samples[fast], strict=True)
    return round(statistics.median(a / b for a, b in pairs), digits)


def machine(device: str = "cpu") -> dict[str, Any]:
    """The conditions of a measurement."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastamp": fastamp.__version__,
        "commit": _commit(),
        "host_module": _library.host is not None,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def _commit() -> str:
    """What was measured: the commit, with a plus sign if files that git tracks differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/csrc", ":/fastamp", ":/benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def arguments(name: str, description: str | None, devices: Sequence[str] = ("cpu",)) -> argparse.Namespace:
    """The options that every benchmark takes. devices: where this one can run, the usual one first."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="torch's threads")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to measure")
    parser.add_argument(
        "--device", choices=devices, default=devices[0], help=f"where the tensors are (default: {devices[0]})"
    )
    parser.add_argument("--json", type=Path, help="where to write the results (default: benchmarks/results)")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD", help="older results: the exit code is 1 if a case is slower"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if options.json is None:
        options.json = RESULTS / f"{name}{'' if options.device == devices[0] else f'_{options.device}'}.json"
    if options.compare:
        try:
            options.compare = json.loads(options.compare.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--compare: {error}")
    torch.set_num_threads(options.threads)
    return options


def progress(cases: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """Calls each and yields its result; says on stderr how far it is."""
    cases = list(cases)
    begin = time.perf_counter()
    for number, case in enumerate(cases, 1):
        result = case()
        name = result["case"] if isinstance(result, dict) else ""
        print(f"[{number}/{len(cases)}, {time.perf_counter() - begin:.0f} s] {name}", file=sys.stderr, flush=True)
        yield result


def copy_speed(device: str = "cpu", mebibytes: int = 256) -> float:
    """Bytes per second that `copy_` reads and writes between two float32 tensors of this size: what memory gives."""
    a = torch.ones(mebibytes << 18, device=device)
    b = torch.zeros_like(a)
    timing = time_interleaved({"copy_": lambda: b.copy_(a)}, device=device, rounds=7, min_seconds=0.0)
    return 2 * a.nbytes / (timing["copy_"]["median"] * 1e-6)


def with_bandwidth(result: dict[str, Any], moved: dict[str, float], copied: float) -> dict[str, Any]:
    """Adds what share of the memory's speed each contestant uses.

    Args:
        moved: bytes that the contestant has to read and write at least.
        copied: bytes per second, of `copy_speed`.
    """
    result["of copy_"] = {
        what: round(bytes_ / (result["timing"][what]["median"] * 1e-6) / copied, 3) for what, bytes_ in moved.items()
    }
    return result


def report(
    name: str, results: list[dict[str, Any]], options: argparse.Namespace, facts: dict[str, Any] | None = None
) -> int:
    """Prints a table of the results, writes them with the machine's facts as JSON, and compares with older ones.

    Args:
        results: dicts with ``case``, ``timing`` (of :func:`time_interleaved`), and optionally ``ratios``, a dict of
            floats, ``target``, a dict of the same names, and ``of copy_`` (of :func:`with_bandwidth`).
        options: of :func:`arguments`.
        facts: more to write, beside the results; ``baselines``, a dict from a library to its version or to why it did
            not run, is printed too.

    Returns:
        The exit code: 1 if a case is slower than ``--compare`` has it, by more than both measurements' noise.
    """
    width = max(len(result["case"]) for result in results)
    print(f"{'case':{width}} {'what':28} {'median us':>11} {'p20':>11} {'p80':>11} {'of copy_':>9}")
    for result in results:
        for what, times in result["timing"].items():
            share = result.get("of copy_", {}).get(what)
            print(
                f"{result['case']:{width}} {what:28} {times['median']:11.1f} {times['p20']:11.1f} {times['p80']:11.1f}"
                + (f" {share:9.2f}" if share else "")
            )
        for what, value in result.get("ratios", {}).items():
            target = result.get("target", {}).get(what)
            verdict = f"   (target {target}x{'' if value >= target else ', missed'})" if target else ""
            print(f"{'':{width}} {what:28} {value:10.2f}x{verdict}")
    for library, outcome in (facts or {}).get("baselines", {}).items():
        print(f"{library}: {outcome}")
    content = {"benchmark": name, "machine": machine(options.device), "unit": "us", **(facts or {}), "results": results}
    write(content, options.json)
    if not options.compare:
        return 0
    worse = slower(options.compare, content)
    print("\n".join(["slower than before:", *worse] if worse else ["no case is slower than before"]))
    return int(bool(worse))


def write(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path}")


def slower(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each ratio that fell by more than the noise: the ranges from p20 to p80 of old and new do not meet.
    Ratios are between contestants of one process, so that old and new may come from machines of different speed.
    """

    def ranges(content: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float, float]]:
        found = {}
        for result in content["results"]:
            timing = result["timing"]
            peer, *_ = timing
            for what, times in timing.items():
                if what.startswith("fastamp") or what.startswith("scaler."):
                    low, high = timing[peer]["p20"] / times["p80"], timing[peer]["p80"] / times["p20"]
                    found[result["case"], what] = (low, timing[peer]["median"] / times["median"], high)
        return found

    before = ranges(old)
    lines = []
    for key, (_, now, high) in ranges(new).items():
        if key in before and high < before[key][0]:
            lines.append(f"  {key[0]}, {key[1]}: {now:.2f}x of its peer, was {before[key][1]:.2f}x")
    return lines
