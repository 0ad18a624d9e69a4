"""What the op layer and the host module launch on a GPU, read from the records of the emulated build: kernels, grids,
streams; and what they say where a launch fails."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from cuda_emulator.build import ROOT, compiler
from op_inputs import all_same_bits, same_bits, scalar

import fastamp
from fastamp import _library

KERNELS = ROOT / "csrc" / "cuda"
CPU = torch.device("cpu")


def kernels_of_the_source() -> set[str]:
    text = "".join(path.read_text() for path in sorted(KERNELS.glob("*.cuh")))
    return set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", text))


def name_of(launch: dict) -> str:
    return re.search(r"(\w+_kernel)\b", launch["kernel"])[1]


def table_of(emulated) -> int:
    """Address of the emulated build's launchers."""
    library = ctypes.CDLL(emulated.emulator._library._name)
    library.fastamp_launchers.restype = ctypes.c_void_p
    return library.fastamp_launchers(1)


# ---- kernels, grids, blocks


def gradients(*kinds: str) -> list[torch.Tensor]:
    """A gradient for each "dtype", "dtype strided" or "dtype empty"."""
    found = []
    for kind in kinds:
        dtype, _, layout = kind.partition(" ")
        numel = 0 if layout == "empty" else 12
        grad = torch.ones(numel, dtype=getattr(torch, dtype))
        found.append(grad.view(3, 4)[:, 1:3] if layout == "strided" else grad)
    return found


LISTS = [
    ([], []),
    (["float32"] * 5, ["{}_kernel"]),
    (["float32", "float16", "float32", "bfloat16", "float64"], ["{}_kernel"] * 4),
    (["float32", "float32 strided", "float32 strided"], ["{}_kernel", "{}_strided_kernel", "{}_strided_kernel"]),
    (["float16 strided"], ["{}_strided_kernel"]),
    (["float32 empty", "float32 empty"], ["{}_kernel"]),
    (["complex64", "float32"], ["{}_kernel"]),
]


@pytest.mark.parametrize("op", ["unscale_", "check_", "unscale_norm_", "clip_", "accumulate_"])
@pytest.mark.parametrize("kinds, expected", LISTS, ids=lambda value: "-".join(value) or "none")
def test_one_launch_a_dtype_and_one_a_tensor_with_gaps(emulated, op, kinds, expected):
    grads = gradients(*kinds)
    found, factor = scalar(0.0, CPU), scalar(0.5, CPU)
    arguments = {"check_": (grads, found), "clip_": (grads, factor)}.get(op, (grads, found, factor))
    if op == "accumulate_":
        if any("64" in kind for kind in kinds):
            pytest.skip("accumulate_ takes neither float64 nor complex gradients")
        arguments = ([torch.zeros(g.shape) for g in grads], *arguments)
        if kinds:  # main gradients without gaps beside gradients with gaps: the pair goes one by one
            assert all(g.is_contiguous() for g in arguments[0])
    with emulated.emulator.record() as launches:
        getattr(emulated.ops, op)(*arguments)
    names = [name.format(op.rstrip("_")) for name in expected]
    if op == "unscale_norm_" and not kinds:
        names = []
    assert [name_of(launch) for launch in launches] == names
    assert all(launch["block"] == [256, 1, 1] and launch["dynamic_shared_bytes"] == 0 for launch in launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_block_for_every_16_kib_up_to_4096(emulated, dtype):
    chunk = 16384 // dtype.itemsize
    for numel, blocks in ((1, 1), (chunk, 1), (chunk + 1, 2), (10 * chunk, 10), (5000 * chunk, 4096)):
        with emulated.emulator.dry_run() as launches:
            emulated.ops.check_([torch.empty(numel, dtype=dtype)], scalar(0.0, CPU))
        assert [launch["grid"] for launch in launches] == [[blocks, 1, 1]], numel
    # Together as if they were one, each rounded up to whole chunks.
    with emulated.emulator.dry_run() as launches:
        emulated.ops.check_([torch.empty(n, dtype=dtype) for n in (1, chunk + 1, 0, 3 * chunk)], scalar(0.0, CPU))
    assert [launch["grid"][0] for launch in launches] == [6]


def test_storage_grids(emulated):
    x, mask = torch.zeros(100_000), torch.zeros(100_000, dtype=torch.bool)
    payload, scales = emulated.ops.quantize_blockwise(x, "int8", 128, False, None, 0)
    bits = emulated.ops.pack_bits(mask)
    calls = [
        (lambda: emulated.ops.quantize_blockwise(x, "int8", 128, False, None, 0), ["quantize_kernel"], [25]),
        (lambda: emulated.ops.dequantize_blockwise(payload, scales, x.shape, x.dtype), ["dequantize_kernel"], [25]),
        (lambda: emulated.ops.pack_bits(mask), ["pack_bits_kernel"], [4]),
        (lambda: emulated.ops.unpack_bits(bits, mask.shape), ["unpack_bits_kernel"], [4]),
        (
            lambda: emulated.ops.pack_scaled_mask(x),
            ["pack_scaled_mask_kernel", "finish_scaled_mask_kernel"],
            [4, 1],
        ),
    ]
    for call, names, grids in calls:
        with emulated.emulator.record() as launches:
            call()
        assert [name_of(launch) for launch in launches] == names
        assert [launch["grid"] for launch in launches] == [[n, 1, 1] for n in grids]


def test_scalars_take_one_thread(emulated):
    with emulated.emulator.record() as launches:
        emulated.ops.clip_coefficient(scalar(3.0, CPU), 1.0)
        state = scalar(2.0, CPU), scalar(0, CPU, torch.int32)
        emulated.ops.update_scale_(*state, [scalar(0.0, CPU)], 2.0, 0.5, 10)
    assert [name_of(launch) for launch in launches] == ["clip_coefficient_kernel", "update_scale_kernel"]
    assert all(launch["grid"] == launch["block"] == [1, 1, 1] for launch in launches)


def test_losses_of_one_dtype_are_one_launch(emulated):
    half = torch.ones((), dtype=torch.half)
    with emulated.emulator.record() as launches:
        emulated.ops.scale_losses([torch.ones(()), half, half, torch.ones(3), torch.ones(3).half()], scalar(2.0, CPU))
    # float32; float16 of one element, which widens; float16 of three
    assert [name_of(launch) for launch in launches] == ["scale_losses_kernel"] * 3


# ---- streams


@pytest.fixture(scope="module")
def launch_everything(tmp_path_factory):
    library = tmp_path_factory.mktemp("launches") / "launch_everything.so"
    source = Path(__file__).parent / "launch_everything.cpp"
    flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*compiler().split(), *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).launch_everything
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return function


def test_every_launch_is_on_the_stream_given(emulated, launch_everything):
    with emulated.emulator.dry_run() as launches:
        launch_everything(table_of(emulated), 0x1234)
    assert {launch["stream"] for launch in launches} == {0x1234}
    assert {name_of(launch) for launch in launches} == kernels_of_the_source()
    per_kernel = Counter(name_of(launch) for launch in launches)
    assert per_kernel["unscale_kernel"] == 4 * 2  # a large table and a small one for each dtype
    assert per_kernel["quantize_kernel"] == 3 * 4 * 2 and per_kernel["dequantize_kernel"] == 3 * 4
    assert {tuple(launch["block"]) for launch in launches} == {(256, 1, 1), (1, 1, 1)}
    sizes = [launch["parameter_bytes"] for launch in launches if name_of(launch) == "check_kernel"]
    assert all(size > 4096 for size in sizes[::2]) and all(size <= 4096 for size in sizes[1::2])


def test_every_launch_is_checked_under_an_ops_name():
    for path in sorted(KERNELS.glob("*.cu")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        steps = re.findall(r'FASTAMP_LAUNCH|check_launch\("\w+"\)|\} else \{', text)
        assert "FASTAMP_LAUNCH" in steps
        for step, following, last in zip(steps, steps[1:], [*steps[2:], ""], strict=False):
            if step == "FASTAMP_LAUNCH" and (following, last) != ("} else {", "FASTAMP_LAUNCH"):
                assert following.startswith("check_launch"), (path.name, step, following)
        named = set(re.findall(r'check_launch\("(\w+)"\)', text))
        assert named <= set(fastamp.ops.__all__), path.name


# ---- launches that fail


def test_a_refused_launch_is_an_error_and_leaves_the_next_call_alone(emulated):
    grads = [torch.full((5,), 6.0), torch.full((3,), 6.0)]
    found, half = scalar(0.0, CPU), scalar(0.5, CPU)
    for op, arguments in (
        ("unscale_", (grads, found, half)),
        ("unscale_norm_", (grads, found, half)),
        ("clip_", (grads, half)),
        ("check_", (grads, found)),
        ("scale_losses", (grads, half)),
        ("quantize_blockwise", (grads[0], "int8", 32, False, None, 0)),
        ("pack_bits", (torch.ones(9, dtype=torch.bool),)),
    ):
        with emulated.emulator.settings(parameter_limit=8):
            with pytest.raises(RuntimeError, match=r"bytes of kernel parameters are more than 8"):
                getattr(emulated.ops, op)(*arguments)
        assert grads[0].tolist() == [6.0] * 5 and found.item() == 0.0
    total, norms = emulated.ops.unscale_norm_(grads, found, half)
    assert norms.tolist() == pytest.approx([(5 * 9) ** 0.5, (3 * 9) ** 0.5])
    assert total.item() == pytest.approx(72**0.5)


STUB = """
#pragma once
enum cudaError_t { cudaSuccess, cudaErrorOfTest };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
using cudaStream_t = void*;
#define CUDART_VERSION VERSION_OF_TEST
#define __device__
#define __forceinline__ inline
inline cudaError_t error = cudaSuccess;
inline int driver = 13000;
inline bool capturing = false;
inline cudaError_t cudaGetLastError() { return error; }
inline const char* cudaGetErrorString(cudaError_t) { return "no kernel image is available for execution"; }
inline cudaError_t cudaDriverGetVersion(int* version) { *version = driver; return error; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return error;
}
"""
PROGRAM = """
#include <cstdio>
#include "cuda/runtime.cuh"
int main() {
  fastamp::check_launch("unscale_");
  std::printf("%d ", fastamp::stream_is_capturing(nullptr));
  capturing = true;
  std::printf("%d\\n", fastamp::stream_is_capturing(nullptr));
  driver = DRIVER_OF_TEST;
  std::printf("%zu %lld\\n", fastamp::parameter_limit(), static_cast<long long>(fastamp::grid_limit(4096)));
  error = cudaErrorOfTest;
  try {
    fastamp::check_launch("unscale_");
  } catch (const std::runtime_error& problem) {
    std::printf("%s\\n", problem.what());
  }
}
"""


@pytest.mark.parametrize("toolkit, driver, limit", [(13000, 13000, 32764), (13000, 12000, 4096), (12000, 13000, 4096)])
def test_the_host_side_of_a_launch_under_nvcc(tmp_path, toolkit, driver, limit):
    """The branch of runtime.cuh that nvcc compiles, on top of a CUDA runtime that does what the test says."""
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (tmp_path / name).touch()
    (tmp_path / "cuda_runtime.h").write_text(STUB)
    (tmp_path / "program.cpp").write_text(PROGRAM)
    defines = ["-D__CUDACC__", f"-DVERSION_OF_TEST={toolkit}", f"-DDRIVER_OF_TEST={driver}"]
    includes = [f"-I{tmp_path}", f"-I{ROOT / 'csrc'}"]
    command = [*compiler().split(), "-std=c++17", *defines, *includes, str(tmp_path / "program.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "program")], check=True)
    printed = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "0 1",
        f"{limit} 4096",
        "unscale_: CUDA kernel launch failed: no kernel image is available for execution",
    ]


# ---- the host module, on the emulated kernels


@pytest.fixture
def emulated_host(emulated):
    """fastamp._host with the emulated build's launchers for CPU tensors."""
    if _library.host is None:
        pytest.skip(f"the host module is not loaded: {_library.host_problem}")
    _library.host.bind(table_of(emulated), 0)
    try:
        yield emulated
    finally:
        _library.host.bind(_library.launchers(False), 0)


def trained(steps: int, clip: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 4097, 33)]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = fastamp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            scaler.clip_grad_norm_(optimizer, 0.01)
        scaler.step(optimizer)
        scaler.update()
    return [*(p.detach() for p in params), scalar(scaler.get_scale(), CPU)]


def test_a_scalers_iteration_launches_two_kernels_more_with_clipping(emulated_host):
    with emulated_host.emulator.record() as launches:
        trained(1, clip=False)
    assert [name_of(launch) for launch in launches] == ["unscale_kernel", "update_scale_kernel"]
    with emulated_host.emulator.record() as launches:
        trained(1, clip=True)
    names = [name_of(launch) for launch in launches]
    assert names == [
        "unscale_kernel",
        "unscale_norm_kernel",
        "clip_coefficient_kernel",
        "clip_kernel",
        "update_scale_kernel",
    ]


def test_training_through_the_emulated_host_has_the_cpus_bits(emulated):
    if _library.host is None:
        pytest.skip(f"the host module is not loaded: {_library.host_problem}")
    expected = trained(5, clip=False)
    _library.host.bind(table_of(emulated), 0)
    try:
        found = trained(5, clip=False)
    finally:
        _library.host.bind(_library.launchers(False), 0)
    assert all_same_bits(found, expected)


def test_a_refused_launch_leaves_the_host_modules_gradients_alone(emulated_host):
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.full((5,), 6.0)
    buckets = _library.host.GradientBuckets([{"params": [param]}])
    found, half, version = scalar(0.0, CPU), scalar(0.5, CPU), param.grad._version
    for call in (
        lambda: buckets.unscale(CPU, half, found),
        lambda: buckets.check(CPU, found),
        lambda: buckets.unscale_norm(CPU, half, found),
        lambda: buckets.clip(CPU, half),
        lambda: _library.host.unscale_on_one_device([{"params": [param]}], half, found, True),
        lambda: _library.host.clip_coefficient(half, 1.0),
    ):
        with emulated_host.emulator.settings(parameter_limit=8):
            with pytest.raises(RuntimeError, match=r"bytes of kernel parameters are more than 8"):
                call()
    assert same_bits(param.grad, torch.full((5,), 6.0)) and param.grad._version == version
    buckets.unscale(CPU, half, found)
    assert same_bits(param.grad, torch.full((5,), 3.0)) and param.grad._version == version + 1
