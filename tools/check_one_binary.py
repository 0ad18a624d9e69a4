"""Runs the op tests of one built operator library under other versions of torch.

    python tools/check_one_binary.py PYTHON...

Copies the package without its host module, as it is built in this checkout, and runs the tests of the CPU ops with each
PYTHON (which has its own torch, and pytest). Nothing is compiled: the file that loads is the file that was built.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    libraries = list((ROOT / "fastamp").glob("_ops*.so"))
    if len(libraries) != 1:
        sys.exit(
            f"expected one built operator library in fastamp/, found {[p.name for p in libraries]}: build it first"
        )
    print(f"{libraries[0].name}  sha256 {hashlib.sha256(libraries[0].read_bytes()).hexdigest()[:16]}")
    with tempfile.TemporaryDirectory() as folder:
        ignore = shutil.ignore_patterns("_host*.so", "__pycache__")
        shutil.copytree(ROOT / "fastamp", Path(folder) / "fastamp", ignore=ignore)
        shutil.copytree(ROOT / "tests", Path(folder) / "tests", ignore=ignore)
        for python in map(os.path.abspath, sys.argv[1:]):  # the commands below run in the folder
            environment = os.environ | {"PYTHONPATH": folder, "FASTAMP_HOST": "0", "PYTHONDONTWRITEBYTECODE": "1"}
            environment["CXX"] = "nothing-is-compiled-here"  # tests of the emulated kernels are skipped without one
            version = (
                "import torch, sys; print(f'torch {torch.__version__}, Python {sys.version.split()[0]}', flush=True)"
            )
            subprocess.run([python, "-c", version], env=environment, cwd=folder, check=True)
            tests = sorted(str(p.relative_to(folder)) for p in (Path(folder) / "tests").glob("test_op_*.py"))
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not emulated", *tests]
            subprocess.run(command, env=environment, cwd=folder, check=True)


if __name__ == "__main__":
    main()
