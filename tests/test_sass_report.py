"""tools/sass_report.py: what it reads from ptxas and cuobjdump, its rules, and the committed table."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "results" / "sass.json"

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addPf' for 'sm_90'
ptxas info    : Function properties for _Z3addPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 34 registers, used 1 barriers, 16 bytes cumulative stack size, 4160 bytes smem
ptxas info    : Compiling entry function '_Z3subPf' for 'sm_90'
ptxas info    : Function properties for _Z3subPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""

SASS = """
\tcode for sm_90
\t\tFunction : _Z3addPf
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                     /* 0x00000a00ff017b82 */
                                                                              /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;  /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E.U16 R5, desc[UR4][R2.64] ;           /* 0x0000000402047981 */
        /*0030*/             @!UP1 LDG.E R5, desc[UR4][R2.64] ;               /* 0x0000000402047981 */
        /*0040*/                   MUFU.RCP R5, R6 ;                          /* 0x0000000402047981 */
        /*0050*/               @P1 STG.E.64 desc[UR4][R2.64], R4 ;            /* 0x0000000402047981 */
        /*0060*/                   STL [R1], R4 ;                             /* 0x0000000402047981 */
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;              /* 0x0000000402047981 */
        /*0080*/                   EXIT ;                                     /* 0x000000000000794d */
        /*0090*/                   NOP ;                                      /* 0x0000000000007918 */
\t\t..........

\t\tFunction : _Z3subPf
        /*0000*/                   EXIT ;                                     /* 0x000000000000794d */
"""


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("sass_report", ROOT / "tools" / "sass_report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sass_report"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_resources(report):
    assert report.parse_resources(PTXAS) == {"_Z3addPf": (34, 20, 16, 4160), "_Z3subPf": (8, 0, 0, 0)}


def test_instructions(report):
    found = report.parse_sass(SASS)
    accesses = {"BAR": 1, "LDG.128": 1, "LDG.16": 1, "LDG.32": 1, "MUFU": 1, "STG.64": 1, "STL.32": 1}
    assert found == {"_Z3addPf": (9, 16 + 2 + 4 + 8, accesses), "_Z3subPf": (1, 0, {})}


@pytest.mark.parametrize(
    "change, rules",
    [
        ({}, []),
        ({"registers": 65}, ["65 registers, more than 64"]),
        ({"spilled_bytes": 8}, ["local memory: 8 bytes spilled, 0 of stack"]),
        ({"stack_bytes": 16}, ["local memory: 0 bytes spilled, 16 of stack"]),
        ({"accesses": {"LDG.128": 1, "STG.128": 1, "STL.64": 1}}, ["local memory: 0 bytes spilled, 0 of stack"]),
        ({"accesses": {"LDG.128": 1, "STG.64": 2}}, ["no STG.128"]),
        ({"accesses": {"LDG.128": 1, "STG.128": 1, "MUFU": 9}}, ["9 reciprocals or roots, more than 8"]),
        ({"kernel": "update_scale_kernel(ScaleUpdate)", "accesses": {}}, []),
    ],
)
def test_rules(report, change, rules):
    fine = {"kernel": "unscale_kernel<float>(int)", "arch": 90, "registers": 64, "spilled_bytes": 0, "stack_bytes": 0}
    fine |= {"shared_bytes": 0, "instructions": 9, "global_bytes": 9, "accesses": {"LDG.128": 1, "STG.128": 1}}
    assert report.Kernel(**(fine | change)).broken_rules() == rules


def test_rows_that_differ_in_the_table_alone_are_one(report):
    def row(name: str, instructions: int):
        return report.Kernel(name, 90, 8, 0, 0, 0, instructions, 4, {})

    a, b = "clip_kernel<float, TensorTable<1, 164> >", "clip_kernel<float, TensorTable<1, 1358> >"
    assert report.merge_tables([row(a, 7), row(b, 7)]) == [row("clip_kernel<float>", 7)]
    assert report.merge_tables([row(a, 7), row(b, 8)]) == [row(b, 8), row(a, 7)]


def test_streaming_rules_name_kernels_that_exist(report):
    names = [f"{name}<" for name in kernels_of_the_source()] + sorted(kernels_of_the_source())
    for pattern in report.STREAMING:
        assert any(re.search(pattern, name) for name in names), pattern


def kernels_of_the_source() -> set[str]:
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu*")))
    found = set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", text))
    assert len(found) == len(re.findall(r"\b__global__\b", text)), "a kernel is declared in a way this test cannot read"
    return found


def test_the_committed_table_is_of_these_kernels_and_breaks_no_rule(report):
    rows = json.loads(TABLE.read_text())["kernels"]
    by_arch = defaultdict(set)
    for row in rows:
        assert row.pop("instructions_per_byte") == pytest.approx(
            row["instructions"] / max(row["global_bytes"], 1), abs=0.01
        )
        kernel = report.Kernel(**row)
        assert kernel.broken_rules() == [], f"{kernel.kernel} on {kernel.arch}"
        by_arch[kernel.arch].add(re.match(r"\w+", kernel.kernel)[0])
    assert sorted(by_arch) == report.ARCHS
    for arch, names in by_arch.items():
        assert names == kernels_of_the_source(), f"{arch}: run tools/sass_report.py --json {TABLE.relative_to(ROOT)}"
