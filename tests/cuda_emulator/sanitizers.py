"""How a Python process has to be started so that a library built with a sanitizer can be loaded into it."""

import os
import shutil
import subprocess
from pathlib import Path

from .build import Unavailable, compiler

HERE = Path(__file__).resolve().parent
# Distinct from what Python and pytest return, so that a report is never mistaken for a failed test.
EXIT_STATUS = {"asan": 86, "tsan": 66}
_LIBRARIES = {"plain": [], "asan": ["libasan.so", "libubsan.so"], "tsan": ["libtsan.so"]}


def runtime_libraries(kind: str) -> list[str]:
    """Paths of the sanitizer's runtime libraries; raises Unavailable if the compiler does not have them."""
    paths = []
    for name in _LIBRARIES[kind]:
        found = subprocess.run(
            [*compiler().split(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if not Path(found).is_absolute():
            raise Unavailable(f"{compiler()} has no {name}")
        paths.append(str(Path(found).resolve()))
    return paths


def environment(kind: str) -> dict[str, str]:
    """The environment for a Python process that loads a library of this kind."""
    result = dict(os.environ)
    # torch's OpenMP threads synchronise in ways TSan cannot see; the emulator needs none of them.
    result["OMP_NUM_THREADS"] = "1"
    if kind == "plain":
        return result
    result["LD_PRELOAD"] = " ".join(runtime_libraries(kind))
    result["PYTHONMALLOC"] = "malloc"  # so that small Python-owned buffers have red zones too
    status = EXIT_STATUS[kind]
    if kind == "asan":
        # Python and torch keep memory until the process ends: no leak reports.
        result["ASAN_OPTIONS"] = f"detect_leaks=0:exitcode={status}:allocator_may_return_null=1"
        result["UBSAN_OPTIONS"] = f"print_stacktrace=1:halt_on_error=1:exitcode={status}"
    if kind == "tsan":
        result["TSAN_OPTIONS"] = f"halt_on_error=1:exitcode={status}:suppressions={HERE / 'tsan.supp'}"
    return result


def command_prefix(kind: str) -> list[str]:
    """What to put before the command: TSan's shadow memory collides with large address randomisation."""
    if kind != "tsan" or shutil.which("setarch") is None:
        return []
    works = subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    return ["setarch", "-R"] if works else []
