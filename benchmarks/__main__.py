"""Runs the benchmarks: python -m benchmarks [--quick] [NAME ...]

Each bench_NAME.py runs in a process of its own and writes NAME.json. At the end one table shows, for every benchmark,
the ratios against torch, and how many targets were missed. `--compare FOLDER` compares each with older results and
makes the exit code 1 where a case got slower by more than the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
# Two measure the process's memory and time that a GPU has no part in; one is about GPUs.
ONLY = {"activation_storage": "cpu", "checkpoint": "cpu", "gpu": "cuda"}


def names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def summary_of(content: dict[str, Any]) -> list[str]:
    """Cases, the smallest, middle and largest ratio against torch, and how many targets were missed of how many."""
    ratios, targets, missed = [], 0, 0
    for result in content.get("results", []):
        for what, value in result.get("ratios", {}).items():
            target = result.get("target", {}).get(what)
            if target is not None:
                targets += 1
                missed += value < target
            if what == "against torch" or what.startswith("torch / "):
                ratios.append(value)
    for target in content.get("targets", []):  # upper bounds, judged by the benchmark
        targets += 1
        missed += not target["met"]
    cases = len(content.get("results", [])) or len(content.get("cases", []))
    spread = (
        [f"{value:.2f}x" for value in (min(ratios), statistics.median(ratios), max(ratios))] if ratios else [""] * 3
    )
    return [str(cases), *spread, f"{missed} of {targets}" if targets else ""]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run (default: all): {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="small and few: to see that they run, not to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="torch's threads (default: at most 2)")
    parser.add_argument("--out", type=Path, help="folder for the JSON files (default: benchmarks/results; "
                        "with --quick: build/benchmarks)")  # fmt: skip
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="folder of older results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    if options.compare and not options.compare.is_dir():
        parser.error(f"--compare: {options.compare} is not a folder")
    out = options.out or (FOLDER.parent / "build" / "benchmarks" if options.quick else RESULTS)

    table = [["benchmark", "seconds", "cases", "lowest", "median", "highest", "targets missed"]]
    failed, slower = [], []
    for name in options.names or names():
        if ONLY.get(name, options.device) != options.device:
            print(f"\n==== {name}: for --device {ONLY[name]} ====", flush=True)
            continue
        print(f"\n==== {name} ====", flush=True)
        suffix = "" if options.device == "cpu" or name in ONLY else f"_{options.device}"
        file = out / f"{name}{suffix}.json"
        command = [sys.executable, str(FOLDER / f"bench_{name}.py"), "--json", str(file), "--device", options.device]
        if options.quick:
            command.append("--quick")
        threads = 1 if name == "activation_storage" and options.threads is None else options.threads
        if threads is not None:
            command += ["--threads", str(threads)]
        old = options.compare / file.name if options.compare else None
        if old is not None and old.is_file():
            command += ["--compare", str(old)]
        begin = time.perf_counter()
        code = subprocess.run(command).returncode
        seconds = f"{time.perf_counter() - begin:.0f}"
        if code == 1 and "--compare" in command and file.is_file():
            slower.append(name)
        elif code:
            failed.append(name)
            table.append([name, seconds, "failed", "", "", "", ""])
            continue
        table.append([name, seconds, *summary_of(json.loads(file.read_text()))])

    print()
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("ratios are times against torch's in the same process: 2x is twice as fast")
    if slower:
        print(f"slower than in {options.compare}: {', '.join(slower)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed or slower))


if __name__ == "__main__":
    sys.exit(main())
