"""The emulator's own tests: does it compute what a GPU computes, and notice what it promises to notice?

The kernels are tests/cuda_emulator/self_test/kernels.cu, most of them with one planted mistake.
"""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_emulator import build, sanitizers
from cuda_emulator.emulator import SCHEDULES, schedule_id
from cuda_emulator.self_test import KERNELS, SelfTest, aligned_zeros, floats

all_schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_id)


@functools.cache
def self_test_library(kind: str, flags: Sequence[str] = ()) -> Path:
    try:
        sanitizers.runtime_libraries(kind)
        return build.build_library(kind, [KERNELS], name="self_test", torch=False, flags=flags)
    except build.Unavailable as reason:
        pytest.skip(str(reason))


@functools.cache
def load_self_test(flags: Sequence[str] = ()) -> SelfTest:
    return SelfTest(self_test_library("plain", flags))


@pytest.fixture(params=["assembly", "ucontext"])
def any_switch(request: pytest.FixtureRequest) -> SelfTest:
    """Both ways of switching stacks; the second is what other instruction sets than x86-64 use."""
    return load_self_test(("-DCUDA_EMULATOR_UCONTEXT",) if request.param == "ucontext" else ())


@pytest.fixture
def cases() -> SelfTest:
    return load_self_test()


# ---- What must be right under every schedule


@all_schedules
def test_warp_collectives(any_switch: SelfTest, schedule: dict) -> None:
    x = np.random.default_rng(0).integers(-1000, 1000, 32, dtype=np.int32)
    with any_switch.emulator.settings(**schedule):
        out = any_switch.run("collectives", x, np.zeros((32, 17), np.int32))
    lane = np.arange(32)
    unsigned = x.view(np.uint32)
    expected = np.stack(
        [
            np.full(32, x[5]),
            x[lane // 8 * 8 + (lane + 1) % 8],
            np.where(lane < 3, x, x[lane - 3]),
            np.where(lane % 16 < 3, x, x[lane - 3]),
            np.where(lane > 28, x, x[(lane + 3) % 32]),
            np.where(lane % 4 > 0, x, x[(lane + 3) % 32]),
            x[lane ^ 9],
            np.full(32, np.packbits(x > 0, bitorder="little").view(np.int32)[0]),
            np.full(32, 1),
            np.full(32, int((x > 0).all())),
            np.full(32, x.sum()),
            np.full(32, x.min()),
            np.full(32, x.max()),
            np.full(32, np.bitwise_and.reduce(unsigned).view(np.int32)),
            np.full(32, np.bitwise_or.reduce(unsigned).view(np.int32)),
            np.full(32, np.bitwise_xor.reduce(unsigned).view(np.int32)),
            np.where(lane % 3 == 0, x[::3].sum(), 0),
        ],
        axis=1,
    )
    np.testing.assert_array_equal(out, expected)


@all_schedules
@pytest.mark.parametrize("positive", [0, 40, 96])
def test_block_votes(any_switch: SelfTest, schedule: dict, positive: int) -> None:
    x = np.where(np.arange(96) < positive, 1, -1).astype(np.int32)
    with any_switch.emulator.settings(**schedule):
        out = any_switch.run("block_votes", x, np.zeros((96, 3), np.int32))
    assert (out == [int(positive > 0), int(positive == 96), positive]).all()


@all_schedules
def test_atomics(any_switch: SelfTest, schedule: dict) -> None:
    with any_switch.emulator.settings(**schedule):
        out = any_switch.run("atomics", floats(1), np.zeros(9, np.int32))
    assert out[:5].tolist() == [128, 64, -63, 128 % 10, 0xFFFF]
    assert out[5:6].view(np.float32)[0] == 64.0
    assert out[6:8].tolist() == [256, 7]
    assert out[8] == (-128) % 7  # counts 0, 6, 5, ... 0, 6


@all_schedules
def test_shared_memory_and_barriers(any_switch: SelfTest, schedule: dict) -> None:
    x = floats(256)
    with any_switch.emulator.settings(**schedule):
        out = any_switch.run("two_sums", x, np.zeros(512, np.float32))
        reverse = any_switch.run("dynamic_reverse", x, np.zeros(64, np.float32))
    assert (out[:256] == x.sum()).all() and (out[256:] == 2 * x.sum()).all()
    np.testing.assert_array_equal(reverse, x[63::-1])


@all_schedules
def test_sum_over_blocks(any_switch: SelfTest, schedule: dict) -> None:
    x = floats(6 * 256)
    with any_switch.emulator.settings(**schedule):
        out = any_switch.run("last_block", x, np.zeros(7, np.float32))
    assert out[0] == x.sum()


def test_products_are_not_fused_and_subnormals_survive(cases: SelfTest) -> None:
    rng = np.random.default_rng(1)
    n = 512
    a, b, c = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    a[:2], b[:2] = [1e-30, 3e-39], [1e-10, 1.0]  # subnormal product, subnormal operand
    torch.set_flush_denormal(True)  # the host thread's setting must not reach the kernel, nor get lost
    try:
        out = cases.run("products", np.concatenate([a, b, c]), np.zeros((3, n), np.float32), n)
        host_product = torch.tensor([1e-30]) * torch.tensor([1e-10])
    finally:
        can_flush = torch.set_flush_denormal(False)
    assert host_product.item() == 0.0 or not can_flush
    with np.errstate(under="ignore"):
        np.testing.assert_array_equal(out[0], a * b)
        np.testing.assert_array_equal(out[1], a * b + c)
    assert out[0][0] != 0 and out[0][1] != 0
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    np.testing.assert_array_equal(out[2], exact.astype(np.float32))
    assert (out[1] != out[2]).any()


@pytest.mark.parametrize("name", ["half", "bfloat16"])
def test_conversions_are_torchs(cases: SelfTest, name: str) -> None:
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}[name]
    codes = np.arange(65536, dtype=np.uint16)
    widened = cases.run(f"from_{name}", codes, np.zeros(65536, np.float32), 65536)
    expected = torch.from_numpy(codes.view(np.int16)).view(dtype).float()
    torch.testing.assert_close(torch.from_numpy(widened), expected, rtol=0, atol=0, equal_nan=True)

    rng = np.random.default_rng(2)
    finite = widened[np.isfinite(widened)]
    halfway = finite / 2 + np.nextafter(finite, np.float32(np.inf)) / 2  # ties and near ties
    some = rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([halfway, finite * np.float32(1.0004883), some]).astype(np.float32)
    x = x[~np.isnan(x)]
    narrowed = cases.run(f"to_{name}", x, np.zeros(len(x), np.int16), len(x))
    assert torch.equal(torch.from_numpy(narrowed).view(dtype), torch.from_numpy(x).to(dtype))


def test_conversions_to_integers_saturate(cases: SelfTest) -> None:
    x = np.array([0.5, 1.5, -0.5, -2.5, 2.5e9, -2.5e9, 4.4e9, np.nan, np.inf, -np.inf, 2147483520.0], np.float32)
    out = cases.run("to_integers", x, np.zeros((len(x), 5), np.int32), len(x))
    int_max, int_min, uint_max = 2**31 - 1, -(2**31), -1
    assert out.tolist() == [
        [0, 0, 0, 1, 0],
        [2, 1, 1, 2, 2],
        [0, 0, -1, 0, 0],
        [-2, -2, -3, -2, 0],
        [int_max, int_max, int_max, int_max, 2500000000 - 2**32],
        [int_min, int_min, int_min, int_min, 0],
        [int_max, int_max, int_max, int_max, uint_max],
        [0, 0, 0, 0, 0],
        [int_max, int_max, int_max, int_max, uint_max],
        [int_min, int_min, int_min, int_min, 0],
        [2147483520, 2147483520, 2147483520, 2147483520, 2147483520],
    ]


@pytest.mark.parametrize("shift", [0x3210, 0x7654, 0x8FA1, 5, 32, 40])
def test_bit_operations(cases: SelfTest, shift: int) -> None:
    a, b = 0x8A34F678, 0x12BC00EF
    out = cases.run("bits", np.array([a, b, shift], np.uint32), np.zeros(10, np.uint32)).tolist()
    wide = b << 32 | a
    selected = 0
    for i in range(4):
        nibble = shift >> (4 * i) & 15
        byte = wide >> (8 * (nibble & 7)) & 255
        selected |= (byte if nibble < 8 else 255 * (byte >> 7)) << (8 * i)
    mask = 2**32 - 1
    assert out[0] == selected
    assert out[1] == (wide << (shift & 31) >> 32) & mask
    assert out[2] == (wide >> (shift & 31)) & mask
    assert out[3] == (wide << min(shift, 32) >> 32) & mask
    assert out[4] == (wide >> min(shift, 32)) & mask
    assert out[5:] == [bin(a).count("1"), 0, 4, a * b >> 32, int(f"{a:032b}"[::-1], 2)]


# ---- What must be an error


ERRORS = {
    "barrier_after_exit": r"__syncthreads at .*kernels.cu:\d+ after 1 thread\(s\) of the block have exited",
    "two_barriers": r"__syncthreads at .*kernels.cu:\d+ while other threads .* wait at .*kernels.cu:\d+",
    "barrier_for_some": r"is not in mask 00000001",
    "shuffle_outside_mask": r"__shfl_sync at .*kernels.cu:\d+: the calling lane 16 is not in mask 0000ffff",
    "shuffle_with_exited_lane": r"mask ffffffff names lane 0, which has exited",
    "shuffle_by_some": r"deadlock in .*shuffle_by_some.* 32 thread\(s\) are stuck; .*kernels.cu:\d+",
    "shuffle_beyond_block": r"mask ffffffff names lane 8, but the block of 40 threads ends before it",
    "shuffle_from_outside_mask": r"reads lane 20, which is not in mask 0000ffff",
    "masks_overlap": r"mask ffff0000 overlaps mask 0001ffff of a pending __shfl_sync",
    "different_collectives": r"meet at different collectives: __shfl_xor_sync at .* and __shfl_sync at ",
    "misaligned_load": r"misaligned address: load128 of 16 bytes",
    "misaligned_store": r"misaligned address: store128 of 16 bytes",
    "shared_overflow": r"shared_overflow.* wrote outside its shared arrays",
    "dynamic_overflow": r"dynamic_overflow.* wrote outside its shared arrays",
    "too_much_shared": r"65536 bytes of static and 0 of dynamic shared memory are more than 48 KiB",
    "traps": r"__trap\(\) was called \[block \(0,0,0\) thread \(0,0,0\) of self_test::traps\(",
    "launches_a_kernel": r"launched from device code at .*kernels.cu:\d+",
    "outside_a_kernel": r"__syncthreads was called outside a kernel",
    "empty_grid": r"invalid launch of .*reads_junk.* at .*kernels.cu:\d+: grid \(0,1,1\)",
    "large_grid_y": r"grid \(1,65536,1\)",
    "empty_block": r"block \(0,1,1\)",
    "large_block": r"block \(1025,1,1\)",
    "deep_block": r"block \(1,1,65\)",
    "large_dynamic_shared": r"49153 bytes of dynamic shared memory are more than 48 KiB",
    "static_and_dynamic_shared": r"256 bytes of static and 49152 of dynamic shared memory",
    "too_large_parameter": r"32768 bytes of kernel parameters are more than 32764",
}


@pytest.mark.parametrize("case", ERRORS)
def test_error(any_switch: SelfTest, case: str) -> None:
    data = aligned_zeros(128)
    with pytest.raises(RuntimeError, match=ERRORS[case]):
        raise RuntimeError(any_switch.error(case, data, aligned_zeros(128)))
    # The failed launch leaves nothing behind.
    assert any_switch.run("two_sums", floats(256), np.zeros(512, np.float32))[0] == 256 * 257 / 2


def test_parameter_limit(cases: SelfTest) -> None:
    out = np.zeros(4, np.int32)
    assert cases.run("largest_parameter", out, out).tolist() == [42] * 4
    with cases.emulator.settings(parameter_limit=4096):
        assert "are more than 4096" in cases.error("largest_parameter", out, out)


@pytest.mark.parametrize("junk", [0xCD, 0xFF])
def test_shared_memory_starts_as_junk(cases: SelfTest, junk: int) -> None:
    with cases.emulator.settings(junk_byte=junk):
        out = cases.run("reads_junk", floats(64), np.zeros(64, np.float32))
    assert (out.view(np.uint8) == junk).all()


@pytest.mark.parametrize(
    "text", ["schedule=fair", "seed=x", "seed", "nonsense=1", "resident_blocks=0", "junk_byte=256"]
)
def test_settings_are_checked(cases: SelfTest, text: str) -> None:
    name, _, value = text.partition("=")
    with pytest.raises(ValueError, match="emulator settings"):
        cases.emulator.configure(**{name: value})


# ---- What each schedule is there for: a plain build finds these races by a wrong result


def expected_result(case: str, x: np.ndarray) -> np.ndarray:
    n = len(x)
    if case == "no_barrier":
        return x[::-1]
    if case == "expects_order":
        return np.concatenate([[0], x[:-1]])
    if case == "expects_finished_block":
        return np.concatenate([np.cumsum(x[:8]), np.zeros(n - 8)])
    if case == "lost_update":
        counter = np.zeros(n, np.float32)
        counter.view(np.int32)[0] = 64
        return counter
    raise ValueError(case)


@pytest.mark.parametrize(
    ("case", "unnoticed", "noticed"),
    [
        ("no_barrier", None, {}),
        ("expects_order", {}, {"schedule": "shuffled", "seed": 1}),
        ("expects_finished_block", {}, {"resident_blocks": 3}),
        ("expects_finished_block", {}, {"schedule": "shuffled", "seed": 1}),
        ("lost_update", {"schedule": "shuffled", "seed": 1}, {"seed": 1, "preempt_one_in": 2}),
    ],
)
def test_schedule_finds_race(any_switch: SelfTest, case: str, unnoticed: dict | None, noticed: dict) -> None:
    x = floats(64)
    results = {}
    for name, settings in (("unnoticed", unnoticed), ("noticed", noticed)):
        if settings is not None:
            with any_switch.emulator.settings(**settings):
                results[name] = any_switch.run(case, x, np.zeros(64, np.float32))
    if unnoticed is not None:
        np.testing.assert_array_equal(results["unnoticed"], expected_result(case, x))
    assert (results["noticed"] != expected_result(case, x)).any()


def test_only_starving_finds_reuse_of_shared_memory(any_switch: SelfTest) -> None:
    x = floats(256)

    def is_right(**settings: object) -> bool:
        with any_switch.emulator.settings(**settings):
            out = any_switch.run("two_sums_racy", x, np.zeros(512, np.float32))
        return bool((out[:256] == x.sum()).all() and (out[256:] == 2 * x.sum()).all())

    assert is_right()
    assert not all(is_right(schedule="starving", seed=seed) for seed in range(4))


def test_schedules_repeat(cases: SelfTest) -> None:
    def run(seed: int) -> bytes:
        with cases.emulator.settings(schedule="shuffled", seed=seed):
            return cases.run("expects_order", floats(64), np.zeros(64, np.float32)).tobytes()

    assert run(5) == run(5)
    assert run(5) != run(6)


# ---- Records, partial grids, host threads, environment


def test_launch_records(cases: SelfTest) -> None:
    out = np.zeros(64, np.float32)
    with cases.emulator.record() as launches:
        cases.run("dynamic_reverse", floats(64), out, stream=0x1234)
        cases.run("last_block", floats(6 * 256), out)
        assert launches == []
    assert launches[0] == {
        "kernel": "self_test::dynamic_reverse(float const*, float*)",
        "symbol": "_ZN9self_test15dynamic_reverseEPKfPf",
        "grid": [1, 1, 1],
        "block": [64, 1, 1],
        "dynamic_shared_bytes": 256,
        "stream": 0x1234,
        "parameter_bytes": 16,
    }
    assert launches[1]["grid"] == [6, 1, 1] and launches[1]["parameter_bytes"] == 25
    with cases.emulator.record() as launches:
        pass
    assert launches == []


def test_edge_blocks(cases: SelfTest) -> None:
    data = np.zeros(20 * 256, np.float32)
    with cases.emulator.dry_run() as launches:
        cases.run("add_one_each", data, data, data.size)
    assert launches[0]["grid"] == [20, 1, 1] and not data.any()
    with cases.emulator.edge_blocks(2, 2 * 20):
        cases.run("add_one_each", data, data, data.size)
        assert data.reshape(20, 256).any(axis=1).tolist() == [True] * 2 + [False] * 18
        cases.run("add_one_each", data, data, data.size)
    assert data.reshape(20, 256).any(axis=1).tolist() == [True] * 2 + [False] * 16 + [True] * 2
    assert (data <= 1).all()


def test_several_host_threads(cases: SelfTest) -> None:
    failures: list[str] = []

    def launch(n: int) -> None:
        for _ in range(20):
            out = cases.run("two_sums", floats(256) * n, np.zeros(512, np.float32))
            if not (out[:256] == n * 256 * 257 / 2).all():
                failures.append(f"thread {n}")
            if "lane 0, which has exited" not in cases.error("shuffle_with_exited_lane", out, out):
                failures.append(f"thread {n}: error lost")

    threads = [threading.Thread(target=launch, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


SUBPROCESS = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
from cuda_emulator.self_test import SelfTest, floats
cases = SelfTest({library!r})
for case in {names!r}:
    x = np.ones(64, np.float32) if case == "global_overflow" else floats(6 * 256)
    for settings in {settings!r}:
        if settings is not None:
            cases.emulator.configure(**settings)
        out = np.zeros(512, np.float32)
        print(case, cases.error(case, x, out), out[0], flush=True)
"""


def run_in_subprocess(
    kind: str, names: Sequence[str], settings: Sequence[dict | None], **variables: str
) -> subprocess.CompletedProcess[str]:
    text = SUBPROCESS.format(
        tests=str(Path(__file__).parent),
        library=str(self_test_library(kind)),
        names=list(names),
        settings=list(settings),
    )
    environment = {**sanitizers.environment(kind), **variables}
    command = [*sanitizers.command_prefix(kind), sys.executable, "-c", text]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_settings_from_the_environment() -> None:
    done = run_in_subprocess("plain", ["traps"], [None], FASTAMP_EMULATOR="schedule=starving seed=77")
    assert "schedule starving seed 77" in done.stdout


RIGHT_CASES = ["last_block", "two_sums", "atomics", "dynamic_reverse"]


@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_report_nothing_where_all_is_right(kind: str) -> None:
    done = run_in_subprocess(kind, RIGHT_CASES, [{}, SCHEDULES[2], SCHEDULES[4]])
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_errors_under_sanitizers_leave_nothing_behind(kind: str) -> None:
    done = run_in_subprocess(kind, ["shuffle_with_exited_lane", "shuffle_by_some", *RIGHT_CASES], [{}, {}])
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("has exited") == 2 and done.stdout.count("deadlock") == 2


@pytest.mark.parametrize(
    ("case", "report"),
    [("shared_overflow_read", "use-after-poison"), ("global_overflow", "heap-buffer-overflow")],
)
def test_address_sanitizer(case: str, report: str) -> None:
    done = run_in_subprocess("asan", [case], [{}])
    assert done.returncode == sanitizers.EXIT_STATUS["asan"]
    assert f"AddressSanitizer: {report}" in done.stderr and "kernels.cu" in done.stderr


@pytest.mark.parametrize("case", ["last_block_no_fence", "two_sums_racy", "no_barrier", "racy_flag"])
def test_thread_sanitizer(case: str) -> None:
    done = run_in_subprocess("tsan", [case], [{}, {}, {}])
    assert done.returncode == sanitizers.EXIT_STATUS["tsan"]
    assert "ThreadSanitizer: data race" in done.stderr and "kernels.cu" in done.stderr


def test_build_names_depend_on_all_inputs(tmp_path: Path) -> None:
    first = self_test_library("plain")
    changed = tmp_path / "kernels.cu"
    changed.write_text(KERNELS.read_text() + "// changed\n")
    assert build.build_library("plain", [KERNELS], name="self_test", torch=False) == first
    assert first.exists()
    second = build.build_library("plain", [changed], name="self_test", torch=False)
    assert second != first
    os.remove(second)


def test_compile_error_is_reported(tmp_path: Path) -> None:
    self_test_library("plain")
    broken = tmp_path / "broken.cu"
    broken.write_text('#include "runtime.cuh"\nint f() { return __fast_but_unknown(1); }\n')
    with pytest.raises(RuntimeError, match="__fast_but_unknown"):
        build.build_library("plain", [broken], name="broken", torch=False)
