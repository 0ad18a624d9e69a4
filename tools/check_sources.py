"""What no linter checks: kernels are torch-free, and tuning constants have names. Exits with 1 and says where."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA_HEADERS = {"cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_emulator.h"}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.split()]


def problems() -> list[str]:
    found = []
    for path in tracked("csrc/cuda/*", "csrc/*.h"):
        torch_free = path.parent.name == "cuda" or "torch-free" in path.read_text().lower()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            include = re.match(r"\s*#include <([^>]+)>", line)
            if torch_free and include and re.match(r"torch/|ATen/|c10/|pybind11/|Python\.h", include[1]):
                found.append(f"{where}: a torch-free file includes <{include[1]}>")
            if (
                path.parent.name == "cuda"
                and include
                and include[1].startswith("cuda")
                and include[1] not in CUDA_HEADERS
            ):
                found.append(f"{where}: <{include[1]}> is none of the headers that every toolkit has")
            if path.suffix in (".cu", ".cuh") and path.name != "policy.cuh" and re.search(r"\b(256|512|1024)\b", line):
                code = line.split("//")[0]
                if re.search(r"\b(256|512|1024)\b", code):
                    found.append(f"{where}: name this constant in policy.cuh")
    return found


if __name__ == "__main__":
    for problem in problems():
        print(problem)
    sys.exit(bool(problems()))
