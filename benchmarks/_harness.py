"""What every benchmark here shares: interleaved timing, what the machine is, a table, a JSON file."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastamp
from fastamp import _library

RESULTS = Path(__file__).parent / "results"


def time_interleaved(
    functions: dict[str, Callable[[], Any]],
    *,
    setup: Callable[[str], Any] | None = None,
    device: str = "cpu",
    calls: int = 1,
    rounds: int = 50,
    min_seconds: float = 0.5,
    warmup: int = 3,
) -> dict[str, dict[str, float]]:
    """Times the functions in turn, the order rotating from round to round, so that whatever else the machine
    does meets all of them alike.

    Args:
        functions: name to function; called without arguments.
        setup: called with the name before each measurement, outside the timing.
        device: "cuda" waits for the device before the clock is read.
        calls: calls in a row that make one measurement, which is their mean. With one call, what a function
            touches has left the caches by its next turn; with many it is in them.
        rounds: at least this many rounds; more until ``min_seconds`` have been measured.

    Returns:
        For each name ``median``, ``p20``, ``p80`` in microseconds, and ``rounds``.
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
        while done < rounds or spent < min_seconds:
            spent += one_round(record=True)
            done += 1
    finally:
        gc.enable()
    return {name: summary(times) for name, times in samples.items()}


def summary(times: list[float]) -> dict[str, float]:
    p20, *_, p80 = statistics.quantiles(times, n=5)
    return {
        "median": round(statistics.median(times), 3),
        "p20": round(p20, 3),
        "p80": round(p80, 3),
        "rounds": len(times),
    }


def ratio(timing: dict[str, dict[str, float]], slow: str, fast: str) -> float:
    """How many times faster ``fast`` is than ``slow``, by medians."""
    return round(timing[slow]["median"] / timing[fast]["median"], 2)


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
        "host_module": _library.host is not None,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def arguments(name: str, description: str | None, device: bool = False) -> argparse.Namespace:
    """The options that every benchmark takes, and --device for those that run on a GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="torch's threads")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to measure")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where to write the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def report(name: str, results: list[dict[str, Any]], path: Path, device: str = "cpu") -> None:
    """Prints a table of the results, and writes them with the machine's facts as JSON.

    Args:
        results: dicts with ``case``, ``timing`` (of :func:`time_interleaved`), and optionally ``ratios``: a
            dict of
            floats, and ``target``: a dict of the same names.
    """
    print(f"{'case':44} {'what':28} {'median us':>11} {'p20':>11} {'p80':>11}")
    for result in results:
        for what, times in result["timing"].items():
            print(f"{result['case']:44} {what:28} {times['median']:11.1f} {times['p20']:11.1f} {times['p80']:11.1f}")
        for what, value in result.get("ratios", {}).items():
            target = result.get("target", {}).get(what)
            print(f"{'':44} {what:28} {value:10.2f}x" + (f"   (target {target}x)" if target else ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "machine": machine(device), "unit": "us", "results": results}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path}")
