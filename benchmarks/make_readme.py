"""Writes README's tables of numbers from benchmarks/results/*.json: python benchmarks/make_readme.py [--check]

Every table of a README or docs page stands between `<!-- results NAME -->` and `<!-- end -->`; NAME is a file of
benchmarks/results. `<!-- results NAME targets -->` shows the cases alone that have a target. `--check` changes nothing
and exits with 1 if a page differs from its results.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def duration(microseconds: float) -> str:
    return f"{microseconds / 1000:.1f} ms" if microseconds >= 1000 else f"{microseconds:.0f} us"


def setting(machine: dict[str, Any]) -> str:
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return f"{machine['processor']}, {threads}, torch {machine['torch']}"


def conditions(content: dict[str, Any]) -> str:
    what = content.get("what", "medians of interleaved runs and of their ratios")
    return f"{setting(content['machine'])}, Python {content['machine']['python']}; {what}"


def baselines(content: dict[str, Any]) -> str:
    """The other libraries: which version was measured, or why none was."""
    return "".join(f"; {library} {outcome}" for library, outcome in content.get("baselines", {}).items())


def timing_table(content: dict[str, Any], only_targets: bool) -> str:
    """A row a case: each contestant's median, fastamp's ratio, and whether it reached its target."""
    rows = ["| case | torch | fastamp | ratio | target |", "|---|--:|--:|--:|--:|"]
    for result in content["results"]:
        timing, ratios, targets = result["timing"], result.get("ratios", {}), result.get("target", {})
        for name, ratio in ratios.items():
            other = name.removeprefix("against ")
            ours = "fastamp"
            if " / " in name:  # "torch / scaler.clip_grad_norm_": the contestants by name
                other, ours = name.split(" / ")
            if other not in timing or ours not in timing or (only_targets and name not in targets):
                continue
            case = result["case"] if other == "torch" else f"{result['case']}, against `{other}`"
            if ours != "fastamp":
                case += f", `{ours}`"
            target = f"{targets[name]}x" if name in targets else ""
            missed = " (missed)" if name in targets and ratio < targets[name] else ""
            rows.append(
                f"| {case} | {duration(timing[other]['median'])} | {duration(timing[ours]['median'])} "
                f"| {ratio:.2f}x | {target}{missed} |"
            )
    return "\n".join([*rows, "", f"<sub>{conditions(content)}{baselines(content)}</sub>"])


def plain_table(content: dict[str, Any]) -> str:
    """Results that bring their own table: `columns`, and `rows` of values."""
    columns = content["columns"]
    lines = [
        f"| {' | '.join(columns)} |",
        "|" + "|".join("---" if i == 0 else "--:" for i in range(len(columns))) + "|",
    ]
    lines += [f"| {' | '.join(str(value) for value in row)} |" for row in content["rows"]]
    return "\n".join([*lines, "", f"<sub>{conditions(content)}{baselines(content)}</sub>", *missed_targets(content)])


def missed_targets(content: dict[str, Any]) -> list[str]:
    """Of tables whose rows have no column for targets."""
    if "targets" not in content:
        return []
    missed = [f"{t['what']} {t['value']:.3g} (at most {t['target']:g})" for t in content["targets"] if not t["met"]]
    return ["", f"{len(content['targets'])} targets, missed: {'; '.join(missed) or 'none'}."]


def table(name: str, only_targets: bool) -> str:
    content = json.loads((RESULTS / f"{name}.json").read_text())
    return plain_table(content) if "columns" in content else timing_table(content, only_targets)


def rendered(page: str) -> str:
    pattern = r"(<!-- results ([\w-]+)( targets)? -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{table(m[2], bool(m[3]))}\n{m[4]}", page, flags=re.DOTALL)


def main() -> int:
    stale = []
    for path in PAGES:
        page = path.read_text()
        if rendered(page) != page:
            stale.append(path)
            if "--check" not in sys.argv:
                path.write_text(rendered(page))
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from its results' if '--check' in sys.argv else 'written'}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
