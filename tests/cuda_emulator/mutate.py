"""Plants bugs in the project's kernels, one at a time, and says which layer notices each.

    python tests/cuda_emulator/mutate.py --few | --all | NAME ...   [--every-layer]

A bug is a file in mutants/: its class, the layer that is expected to notice it, a pytest expression that selects
the tests to run, the file to change, and text to search and replace that must occur exactly once. The expected layer
runs; --every-layer runs all three, to see which others notice. --few takes a handful, some for each layer.
Exit status 1 if the expected layer lets a bug survive.
"""

import argparse
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuda_emulator import build, run

MUTANTS = Path(__file__).resolve().parent / "mutants"
TREES = build.ROOT / "build" / "mutants"
FEW = ("storage_barrier", "storage_nonfinite_nan_lost", "shared_bounds", "storage_racy_amax")
# The classes the suite has to prove itself on.
CLASSES = {
    "alignment", "tail", "barrier", "reuse race", "divergent collective", "shared bounds", "uninitialised shared",
    "racy flag", "missing fence", "stride", "32-bit index", "wrong rounding", "non-finite lost",
}  # fmt: skip
FIELDS = ("class", "layer", "select", "file", "about")


@dataclass
class Mutant:
    name: str
    bug_class: str
    layer: str
    select: str
    file: str
    about: str
    search: str
    replace: str


def read_mutant(path: Path) -> Mutant:
    """Reads a mutant's file; raises ValueError if it is malformed."""
    head, _, rest = path.read_text().partition("--- search\n")
    search, separator, replace = rest.partition("--- replace\n")
    fields = dict(re.findall(r"^(\w+): (.*)$", head, re.MULTILINE))
    if not separator or not search.strip() or set(fields) != set(FIELDS):
        raise ValueError(f"{path}: expected the lines {', '.join(FIELDS)}, then --- search and --- replace")
    if fields["class"] not in CLASSES or fields["layer"] not in ("plain", "asan", "tsan"):
        raise ValueError(f"{path}: unknown class or layer")
    values = [fields[name] for name in FIELDS]
    # Without the newline at the end, so that a search can be a part of a line.
    return Mutant(path.stem, *values, search.removesuffix("\n"), replace.removesuffix("\n"))


def mutants() -> list[Mutant]:
    return [read_mutant(path) for path in sorted(MUTANTS.glob("*.txt"))]


def mutated(text: str, mutant: Mutant) -> str:
    """The text with the bug in it; raises ValueError unless the search text occurs exactly once."""
    count = text.count(mutant.search)
    if count != 1:
        raise ValueError(f"mutant {mutant.name}: its search text occurs {count} times in {mutant.file}, not once")
    return text.replace(mutant.search, mutant.replace)


def plant(mutant: Mutant) -> Path:
    """A copy of csrc/ with the bug in it; returns the root of the copy."""
    root = TREES / mutant.name
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(build.ROOT / "csrc", root / "csrc")
    target = root / mutant.file
    target.write_text(mutated(target.read_text(), mutant))
    return root


def noticed_by(mutant: Mutant, every_layer: bool) -> set[str]:
    """Runs the expected layer, or all, reports each, and returns the names of those that noticed."""
    root = plant(mutant)
    noticed = set()
    for layer in run.layers(("plain", "asan", "tsan") if every_layer else (mutant.layer,)):
        # A bug may deadlock outside the emulator or loop for ever: noticed as well.
        arguments = ["-x", "-k", mutant.select]
        outcome = run.run_layer(layer, library_root=root, pytest_arguments=arguments, timeout=600)
        verdict = "not noticed" if outcome.passed else "noticed"
        print(f"  {layer.name:6} {verdict:12} {outcome.seconds:4.0f} s  {outcome.summary[:150]}", flush=True)
        if not outcome.passed:
            noticed.add(layer.name)
    shutil.rmtree(root)
    return noticed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every bug of mutants/")
    parser.add_argument("--few", action="store_true", help=f"only {', '.join(FEW)}")
    parser.add_argument("--every-layer", action="store_true", help="run all three layers on each")
    parser.add_argument("names", nargs="*", help="bugs to plant")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in mutants()}
    names = list(known) if arguments.all else [*(FEW if arguments.few else ()), *arguments.names]
    if not names or not set(names) <= set(known):
        parser.error(f"name bugs, or give --few or --all; there are: {', '.join(known)}")
    bad = []
    try:
        for name in names:
            mutant = known[name]
            print(f"{name} ({mutant.bug_class}): {mutant.about}", flush=True)
            if mutant.layer not in noticed_by(mutant, arguments.every_layer):
                bad.append(f"{name} SURVIVED {mutant.layer}")
    except build.Unavailable as reason:
        sys.exit(f"cannot run on this machine: {reason}")
    print(f"{len(names) - len(bad)} of {len(names)} planted bugs noticed", *bad, sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
