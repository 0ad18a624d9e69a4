"""The PTX translator: what each class of instructions becomes and computes, and that nothing unknown passes.

The snippets are compiled with the emulator and run; a few on the C++ text alone.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess
from pathlib import Path

import pytest
from cuda_emulator import build
from cuda_emulator.ptx_to_cpp import TranslationError, translate

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


def module(body: str, registers: str = "", parameters: str = ".param .u64 p0, .param .u64 p1") -> str:
    declared = (
        ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .f64 %fd<9>;"
    )
    return f"{HEADER}.visible .entry k({parameters})\n{{\n{declared} {registers}\n{body}\nret;\n}}\n"


def body_of(text: str) -> str:
    return translate(module(text))


# ---- what must be refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction: frobnicate.b32 %r1, %r2"),
        ("tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [t, {%r1}];", "unknown instruction: tex"),
        ("wgmma.fence.sync.aligned;", "unknown instruction: wgmma"),
        ("add.ftz.f32 %f1, %f2, %f3;", r"\.ftz is not supported: add\.ftz\.f32"),
        ("fma.rz.f32 %f1, %f2, %f3, %f4;", r"\.rz is not supported"),
        ("fma.f32 %f1, %f2, %f3, %f4;", "not rounded to nearest"),
        ("div.approx.f32 %f1, %f2, %f3;", r"\.approx is not supported"),
        ("sqrt.approx.f32 %f1, %f2;", r"\.approx is not supported"),
        ("cvt.rz.f16.f32 %rs1, %f1;", "cvt.rz.f16.f32"),
        ("cvt.rn.satfinite.tf32.f32 %r1, %f1;", r"\.tf32 is not supported"),
        ("mad.f32 %f1, %f2, %f3, %f4;", "mad.f32"),
        ("ld.acquire.gpu.global.u32 %r1, [%rd1];", r"\.acquire is not supported"),
        ("shfl.up.b32 %r1|%p1, %r2, %r3, %r4;", "shfl.up"),
        ("mov.u32 %r1, %smid;", "unknown operand %smid"),
        ("mov.u32 %r1, %r99;", "unknown operand %r99"),
        ("add.f32 %f1, %rd2, %f3;", "register %rd2 is read as f32"),
        ("add.f32 %f1, %f2, 1;", "integer 1 where a float is read"),
        ("ld.global.v2.f32 {%f1}, [%rd1];", "ld.global.v2.f32"),
        ("bar.sync 1, 64;", "bar.sync 1, 64"),
        ("@%q1 mov.u32 %r1, 0;", "unknown operand %q1"),
        (".surprise 3;", "surprise"),
    ],
)
def test_unknown_is_an_error_with_its_line(statement, message):
    with pytest.raises(TranslationError, match=message) as error:
        body_of(f"mov.u32 %r1, 0;\n{statement}")
    assert re.match(r"PTX line \d+: ", str(error.value))


@pytest.mark.parametrize(
    "text", [".tex .u64 t;", ".global .texref t;", ".func (.param .b32 r) f(.param .b32 a) { ret; }", "nonsense;"]
)
def test_unknown_module_level_is_an_error(text):
    with pytest.raises(TranslationError, match="PTX line"):
        translate(HEADER + text + "\n")


def test_unfinished_text_is_an_error():
    with pytest.raises(TranslationError, match=r"unbalanced|unfinished"):
        translate(module("mov.u32 %r1, 0;").rstrip().rstrip("}"))
    with pytest.raises(TranslationError, match="unfinished statement: mov"):
        translate(HEADER + "mov.u32 %r1, 0")


# ---- what must be right: each snippet maps inputs (in) to one output (out) -----------------------------------

F32_MAX = 3.4028234663852886e38
INF, NAN = math.inf, math.nan
M32 = 2**32 - 1

# name: PTX from %r1 %r2 %r3 to %r4, rows of (a, b, c, result), all as 32-bit words
INTEGERS = {
    "add wraps": ("add.s32 %r4, %r1, %r2;", [(M32, 2, 0, 1), (2**31 - 1, 1, 0, 2**31)]),
    "sub wraps": ("sub.u32 %r4, %r1, %r2;", [(0, 1, 0, M32)]),
    "mul.lo": ("mul.lo.u32 %r4, %r1, %r2;", [(0x10001, 0x10001, 0, 0x20001)]),
    "mul.hi.s32": ("mul.hi.s32 %r4, %r1, %r2;", [(M32, 5, 0, M32), (2**30, 8, 0, 2)]),
    "mul.hi.u32": ("mul.hi.u32 %r4, %r1, %r2;", [(M32, 5, 0, 4)]),
    "mul.wide": ("mul.wide.s32 %rd1, %r1, %r2; shr.u64 %rd1, %rd1, 32; cvt.u32.u64 %r4, %rd1;", [(M32, 5, 0, M32)]),
    "mad.lo": ("mad.lo.s32 %r4, %r1, %r2, %r3;", [(7, 6, M32, 41)]),
    "div.s32": ("div.s32 %r4, %r1, %r2;", [(2**32 - 7, 2, 0, 2**32 - 3)]),
    "rem.s32": ("rem.s32 %r4, %r1, %r2;", [(2**32 - 7, 2, 0, M32), (7, 4, 0, 3)]),
    "min and max": ("min.s32 %r4, %r1, %r2; max.u32 %r4, %r4, %r3;", [(M32, 4, 9, M32), (5, 4, 9, 9)]),
    "shl beyond": ("shl.b32 %r4, %r1, %r2;", [(1, 31, 0, 2**31), (1, 32, 0, 0), (1, 255, 0, 0)]),
    "shr.s32 beyond": ("shr.s32 %r4, %r1, %r2;", [(2**31, 40, 0, M32), (2**31, 4, 0, 0xF8000000)]),
    "shr.u32 beyond": ("shr.u32 %r4, %r1, %r2;", [(2**31, 40, 0, 0)]),
    "shf.l.wrap": ("shf.l.wrap.b32 %r4, %r1, %r2, %r3;", [(0xF0000000, 1, 36, 0x1F)]),
    "shf.r.clamp": ("shf.r.clamp.b32 %r4, %r1, %r2, %r3;", [(1, 0xABCD, 99, 0xABCD), (16, 1, 4, 0x10000001)]),
    "prmt": ("prmt.b32 %r4, %r1, %r2, %r3;", [(0x33221100, 0x77665544, 0x7410, 0x77441100), (0x80, 0, 8, 0x808080FF)]),
    "lop3": ("lop3.b32 %r4, %r1, %r2, %r3, 0xca;", [(0xFF00, 0x1234, 0xABCD, 0x12CD)]),
    "lop3 xor": ("lop3.b32 %r4, %r1, %r2, %r3, 0x96;", [(1, 3, 8, 10)]),
    "bfe.s32": ("bfe.s32 %r4, %r1, 4, 4;", [(0x80, 0, 0, M32 - 7), (0x70, 0, 0, 7)]),
    "bfe.u32": ("bfe.u32 %r4, %r1, %r2, %r3;", [(0xABCD, 4, 8, 0xBC), (0xABCD, 4, 0, 0)]),
    "bfi": ("bfi.b32 %r4, %r1, %r2, 8, 4;", [(0x35, 0xFFFF, 0, 0xF5FF)]),
    "popc and clz": ("popc.b32 %r4, %r1; clz.b32 %r3, %r2; add.s32 %r4, %r4, %r3;", [(7, 1, 0, 34), (0, 0, 0, 32)]),
    "brev": ("brev.b32 %r4, %r1;", [(1, 0, 0, 2**31)]),
    "not": ("not.b32 %r4, %r1;", [(5, 0, 0, M32 - 5)]),
    "neg and abs": ("neg.s32 %r4, %r1; abs.s32 %r4, %r4;", [(5, 0, 0, 5), (2**31, 0, 0, 2**31)]),
    "selp": ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r4, %r2, %r3, %p1;", [(M32, 0, 9, 0), (1, 0, 9, 9)]),
    "unsigned comparison": ("setp.lo.u32 %p1, %r1, %r2; selp.b32 %r4, 1, 2, %p1;", [(M32, 0, 0, 2), (0, 1, 0, 1)]),
    "setp.and": ("setp.eq.s32 %p2, %r3, 1; setp.eq.and.s32 %p1, %r1, %r2, %p2; selp.b32 %r4, 1, 0, %p1;",
                 [(4, 4, 1, 1), (4, 4, 0, 0), (4, 5, 1, 0)]),
    "predicates": ("setp.ne.s32 %p1, %r1, 0; setp.ne.s32 %p2, %r2, 0; xor.pred %p3, %p1, %p2; not.pred %p3, %p3; "
                   "selp.b32 %r4, 1, 0, %p3;", [(3, 0, 0, 0), (3, 4, 0, 1)]),
    "guards": ("setp.gt.s32 %p1, %r1, 0; mov.u32 %r4, 5; @%p1 mov.u32 %r4, 6; @!%p1 mov.u32 %r4, 7;",
               [(1, 0, 0, 6), (M32, 0, 0, 7)]),
    "a loop": ("mov.u32 %r4, 0;\n$L1:\nadd.s32 %r4, %r4, %r1; add.s32 %r2, %r2, -1; setp.ne.s32 %p1, %r2, 0;"
               "\n@%p1 bra $L1;", [(3, 5, 0, 15)]),
    "pack and unpack": ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r4, {%rs2, %rs1};", [(0x12345678, 0, 0, 0x56781234)]),
    "sign extension": ("cvt.u16.u32 %rs1, %r1; cvt.s32.s16 %r4, %rs1;", [(0x1FFFE, 0, 0, M32 - 1)]),
    "s8": ("cvt.s32.s8 %r4, %r1;", [(0x1FF, 0, 0, M32)]),
    "local memory": (".local .align 4 .b8 buffer[8]; mov.u64 %rd1, buffer; st.local.u32 [%rd1+4], %r1; "
                     "ld.local.u16 %rs1, [%rd1+6]; cvt.u32.u16 %r4, %rs1;", [(0xABCD1234, 0, 0, 0xABCD)]),
    "shared memory": (".shared .align 16 .b8 tile[32]; mov.u32 %r5, tile; st.shared.v2.u32 [%r5+8], {%r1, %r2}; "
                      "ld.shared.u32 %r4, [%r5+12];", [(1, 77, 0, 77)]),
    "special registers": ("mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; add.s32 %r4, %r4, %r5;", [(0, 0, 0, 1)]),
}  # fmt: skip


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def half(x: float) -> int:
    return struct.unpack("<H", struct.pack("<e", x))[0]


CANONICAL_NAN = 0x7FFFFFFF
# name: PTX from %f1 %f2 %f3 (and %r1 ...) to %r4; rows of (a, b, c, result bits)
FLOATS = {
    "add.f32": (
        "add.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;",
        [(1.0, 2.0**-24, 0, bits(1.0)), (1e-45, 1e-45, 0, 2), (NAN, 1, 0, CANONICAL_NAN)],
    ),
    "mul.rn then add is not fused": (
        "mul.rn.f32 %f4, %f1, %f2; add.rn.f32 %f4, %f4, %f3; mov.b32 %r4, %f4;",
        [(1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11, 0)],
    ),
    "fma is": (
        "fma.rn.f32 %f4, %f1, %f2, %f3; mov.b32 %r4, %f4;",
        [(1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11, bits(2.0**-24))],
    ),
    "div.rn": (
        "div.rn.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;",
        [(1, 3, 0, 0x3EAAAAAB), (0, 0, 0, CANONICAL_NAN), (1, 0, 0, bits(INF))],
    ),
    "sqrt.rn": ("sqrt.rn.f32 %f4, %f1; mov.b32 %r4, %f4;", [(2, 0, 0, 0x3FB504F3), (-1, 0, 0, CANONICAL_NAN)]),
    "rcp.rn": ("rcp.rn.f32 %f4, %f1; mov.b32 %r4, %f4;", [(3, 0, 0, 0x3EAAAAAB)]),
    "neg and abs keep NaNs quiet": ("abs.f32 %f4, %f1; mov.b32 %r4, %f4;", [(-2, 0, 0, bits(2.0)), (-0.0, 0, 0, 0)]),
    "min ignores NaN": ("min.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;", [(NAN, 2, 0, bits(2.0)), (-0.0, 0.0, 0, 2**31)]),
    "max.NaN does not": (
        "max.NaN.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;",
        [(NAN, 2, 0, CANONICAL_NAN), (1, 2, 0, bits(2.0))],
    ),
    "copysign": ("copysign.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;", [(-1, 3, 0, bits(-3.0))]),
    "ne is false for NaN": ("setp.ne.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;", [(NAN, 1, 0, 0), (1, 2, 0, 1)]),
    "neu is true": ("setp.neu.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;", [(NAN, 1, 0, 1), (1, 1, 0, 0)]),
    "geu": (
        "setp.geu.f32 %p1, %f1, 0f7F800000; selp.b32 %r4, 1, 0, %p1;",
        [(NAN, 0, 0, 1), (INF, 0, 0, 1), (1, 0, 0, 0)],
    ),
    "num": ("setp.num.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;", [(NAN, 0, 0, 0), (INF, 0, 0, 1)]),
    "testp": ("testp.finite.f32 %p1, %f1; selp.b32 %r4, 1, 0, %p1;", [(INF, 0, 0, 0), (F32_MAX, 0, 0, 1)]),
    "rni to int": (
        "cvt.rni.s32.f32 %r4, %f1;",
        [(2.5, 0, 0, 2), (-1.5, 0, 0, 2**32 - 2), (NAN, 0, 0, 0), (3e9, 0, 0, 2**31 - 1)],
    ),
    "rzi to unsigned": ("cvt.rzi.u32.f32 %r4, %f1;", [(-5, 0, 0, 0), (2.9, 0, 0, 2)]),
    "rni to float": ("cvt.rni.f32.f32 %f4, %f1; mov.b32 %r4, %f4;", [(2.5, 0, 0, bits(2.0)), (-0.4, 0, 0, 2**31)]),
    "saturation": ("cvt.sat.f32.f32 %f4, %f1; mov.b32 %r4, %f4;", [(7, 0, 0, bits(1.0)), (NAN, 0, 0, 0)]),
    "to half": (
        "cvt.rn.f16.f32 %rs1, %f1; cvt.u32.u16 %r4, %rs1;",
        [(65519, 0, 0, half(65504.0)), (65520, 0, 0, 0x7C00), (2.0**-25, 0, 0, 0), (1 + 2.0**-11, 0, 0, half(1.0))],
    ),
    "from half": (
        "cvt.rn.f16.f32 %rs1, %f1; cvt.f32.f16 %f4, %rs1; mov.b32 %r4, %f4;",
        [(2.0**-24, 0, 0, bits(2.0**-24))],
    ),
    "to bfloat16": (
        "cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r4, %rs1;",
        [(1 + 2.0**-8, 0, 0, 0x3F80), (1 + 3 * 2.0**-8, 0, 0, 0x3F82)],
    ),
    "two halves": ("cvt.rn.f16x2.f32 %r4, %f1, %f2;", [(1, 2, 0, half(1.0) << 16 | half(2.0))]),
    "to fp8": (
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2; cvt.u32.u16 %r4, %rs1;",
        [(448, 1e9, 0, 0x7E7E), (NAN, 0, 0, 0x7F00)],
    ),
    "from fp8": (
        "cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2; cvt.rn.f16x2.e5m2x2 %r4, %rs1;",
        [(1.25, -2, 0, half(1.25) << 16 | half(-2.0))],
    ),
    "double": (
        "cvt.f64.f32 %fd1, %f1; mul.f64 %fd1, %fd1, %fd1; cvt.rn.f32.f64 %f4, %fd1; mov.b32 %r4, %f4;",
        [(1e20, 0, 0, bits(INF)), (3, 0, 0, bits(9.0))],
    ),
    "from integer": ("cvt.rn.f32.u32 %f4, %r1; mov.b32 %r4, %f4;", [(-0.0, 0, 0, bits(2.0**31))]),
}


def entry(name: str, body: str, floats: bool) -> str:
    words = " ".join(f"ld.global.u32 %r{i}, [%rd8+{4 * i - 4}];" for i in (1, 2, 3))
    if floats:
        words += " " + " ".join(f"mov.b32 %f{i}, %r{i};" for i in (1, 2, 3))
    text = module(f"ld.param.u64 %rd7, [p0]; ld.param.u64 %rd8, [p1]; {words}\n{body}\nst.global.u32 [%rd7], %r4;")
    return text.removeprefix(HEADER).replace(".entry k(", f".entry {name}(")


RUNNER = """
#include <map>
#include <string>
#include "cuda_emulator.h"
#include "ptx_runtime.h"
namespace ptx {
static std::map<std::string, cuda_emulator::PtxEntry>& entries() {
  static std::map<std::string, cuda_emulator::PtxEntry> all;
  return all;
}
Registration::Registration(const char* name, cuda_emulator::PtxEntry entry) { entries()[name] = entry; }
}  // namespace ptx
extern "C" int run_entry(const char* name, uint32_t* out, const uint32_t* in) {
  const auto found = ptx::entries().find(name);
  if (found == ptx::entries().end()) return 1;
  const void* parameters[2] = {out, in};
  cuda_emulator::Launch launch{reinterpret_cast<const void*>(&run_entry), 1, 1, 0, nullptr, __FILE__, __LINE__, 16};
  cuda_emulator::run_grid(launch, [&] { found->second(reinterpret_cast<const unsigned char*>(parameters)); });
  return 0;
}
"""


def snippet_name(name: str) -> str:
    return "k_" + re.sub(r"\W", "_", name)


@pytest.fixture(scope="module")
def snippets(tmp_path_factory):
    """All snippets in one library."""
    try:
        build.compiler()
        build.cuda_include_dirs()
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("ptx")
    entries = [entry(snippet_name(name), text, False) for name, (text, _) in INTEGERS.items()]
    entries += [entry(snippet_name(name), text, True) for name, (text, _) in FLOATS.items()]
    (folder / "snippets.cpp").write_text(translate(HEADER + "\n".join(entries)))
    (folder / "runner.cpp").write_text(RUNNER)
    library = build.build_library(
        "plain", [folder / "snippets.cpp", folder / "runner.cpp"], name="ptx_snippets", torch=False
    )
    return ctypes.CDLL(str(library))


def run(library: ctypes.CDLL, name: str, words: list[int]) -> int:
    out, given = (ctypes.c_uint32 * 1)(0xDEADBEEF), (ctypes.c_uint32 * 3)(*words)
    assert library.run_entry(snippet_name(name).encode(), out, given) == 0
    return out[0]


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_and_control_instructions(snippets, name):
    for *words, expected in INTEGERS[name][1]:
        assert run(snippets, name, words) == expected, words


@pytest.mark.parametrize("name", FLOATS)
def test_float_instructions(snippets, name):
    for *values, expected in FLOATS[name][1]:
        assert run(snippets, name, [bits(float(x)) for x in values]) == expected, values


# ---- what nvcc makes of the vector helpers -------------------------------------------------------------------

VECTORS = """
#include "vector.cuh"
using namespace fastamp;
// As in dequantize_kernel: values computed one by one, and a tail that writes them one by one.
template <class T>
__global__ void convert(const float* in, T* out, int left) {
  Vec<T> v;
#pragma unroll
  for (int k = 0; k < Vec<T>::N; ++k) v.v[k] = from_float<T>(in[k] * 3.0f);
  if (left >= Vec<T>::N) {
    store128(out, v);
  } else {
#pragma unroll
    for (int k = 0; k < Vec<T>::N; ++k)
      if (k < left) out[k] = v.v[k];
  }
}
template <class T>
__global__ void copy(const T* in, T* out) {
  store128(out, load128(in));
}
template __global__ void convert<float>(const float*, float*, int);
template __global__ void convert<__half>(const float*, __half*, int);
template __global__ void convert<__nv_bfloat16>(const float*, __nv_bfloat16*, int);
template __global__ void copy<float>(const float*, float*);
template __global__ void copy<double>(const double*, double*);
template __global__ void copy<__half>(const __half*, __half*);
"""


@pytest.mark.parametrize("arch", [75, 90])
def test_a_vector_is_stored_by_one_instruction(tmp_path: Path, arch: int):
    try:
        nvcc = build.nvcc()
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    source, target = tmp_path / "vectors.cu", tmp_path / "vectors.ptx"
    source.write_text(VECTORS)
    command = [nvcc, "-std=c++17", "-O3", f"-arch=compute_{arch}", "-ptx", str(source), "-o", str(target)]
    command += [f"-I{build.ROOT / 'csrc' / 'cuda'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = target.read_text()
    translate(text)
    entries = text.split(".entry ")[1:]
    assert len(entries) == 6
    for kernel in entries:
        name = kernel[: kernel.index("(")]
        stores = re.findall(r"st\.global\.(\S+)", kernel)
        wide = [store for store in stores if re.fullmatch(r"v4\.[uf]32|v2\.[uf]64", store)]
        assert len(wide) == 1, (name, stores)
        if "copy" in name:
            assert len(stores) == 1, (name, stores)
            assert len(re.findall(r"ld\.global(?:\.nc)?\.(?:v4\.\w32|v2\.\w64)", kernel)) == 1, name
