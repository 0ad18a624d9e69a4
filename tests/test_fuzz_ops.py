"""Differential fuzzing: on any list of gradients, and on any tensor that is stored in a codec, the CPU kernels, the
emulated CUDA kernels and the reference store the same bits and raise the same flag.

In the suite the examples are always the same. A long run draws new ones; its seed is printed and repeats it:

    python tests/test_fuzz_ops.py --examples 20000 [--seed N]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import dataclass, replace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastamp.ops
from fastamp import reference

EXAMPLES = int(os.environ.get("FASTAMP_FUZZ_EXAMPLES", "0"))
settings = hypothesis.settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=True,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["contiguous", "offset", "transposed", "strided", "rows", "channels_last", "window"]
SPECIALS = ["inf", "-inf", "nan", "largest", "smallest normal", "subnormal", "smallest subnormal", "-0", "0"]
SCHEDULES = [
    {},
    {"schedule": "shuffled", "seed": 3, "resident_blocks": 2, "preempt_one_in": 2},
    {"schedule": "starving", "seed": 4, "resident_blocks": 2},
]


@dataclass
class Gradient:
    """What one tensor is made from; `specials` are places (fractions of the tensor) and kinds of values."""

    dtype: torch.dtype
    layout: str
    numel: int
    exponent: int
    specials: list[tuple[float, str]]
    seed: int

    def make(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        generator = torch.Generator().manual_seed(self.seed)
        tensor = self._empty(dtype)
        values = torch.randn(tensor.numel(), generator=generator, dtype=torch.float64)
        values = torch.ldexp(values, torch.tensor(self.exponent)).to(dtype)
        for place, kind in self.specials:
            if len(values):
                values[min(int(place * len(values)), len(values) - 1)] = special_value(kind, dtype)
        return tensor.copy_(values.reshape(tensor.shape))

    def _empty(self, dtype: torch.dtype) -> Tensor:
        n = self.numel
        if self.layout == "offset":
            return torch.zeros(n + 3, dtype=dtype)[3:]
        if self.layout == "transposed":
            return torch.zeros(max(n // 7, 1), 7, dtype=dtype).t()
        if self.layout == "strided":
            return torch.zeros(2 * n + 1, dtype=dtype)[1::2]
        if self.layout == "rows":
            return torch.zeros(2 * (n // 5) + 2, 5, dtype=dtype)[1::2]
        if self.layout == "channels_last":
            shape = (2, max(n // 18, 1), 3, 3)
            return torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        if self.layout == "window":
            return torch.zeros(9, max(n // 16, 1) + 2, 6, dtype=dtype)[1:5, 1:-1, 2:6]
        return torch.zeros(n, dtype=dtype)


def special_value(kind: str, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return {
        "inf": float("inf"),
        "-inf": -float("inf"),
        "nan": float("nan"),
        "largest": info.max,
        "smallest normal": info.smallest_normal,
        "subnormal": -info.smallest_normal / 3,
        "smallest subnormal": info.smallest_normal * info.eps,
        "-0": -0.0,
        "0": 0.0,
    }[kind]


gradients = st.builds(
    Gradient,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    numel=st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([4095, 4096, 4097, 8193, 16385])),
    exponent=st.integers(-30, 17),
    specials=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(SPECIALS)), max_size=3),
    seed=st.integers(0, 2**31),
)
# Some lists without a non-finite value, or the flag would always be set.
lists = st.lists(gradients, max_size=6)
factors = st.one_of(
    st.sampled_from([1.0, 2.0**-16, 0.5, 65536.0, 0.0, float("inf"), float("nan")]),
    st.floats(width=32, allow_subnormal=True),
)


def bits_differ(ours: Tensor, theirs: Tensor) -> bool:
    """Whether anything but the payload of a NaN differs."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    ours, theirs = ours.contiguous(), theirs.contiguous()
    if integer is torch.uint8:  # codes and masks, whose NaNs are exact
        return not torch.equal(ours.view(integer), theirs.view(integer))
    equal = (ours.view(integer) == theirs.view(integer)) | (ours.isnan() & theirs.isnan())
    return not bool(equal.all())


@pytest.fixture
def implementations(emulated):
    """The functions of the CPU kernels, of the emulated CUDA kernels and of the reference."""
    return {"cpu": fastamp.ops, "cuda-emulated": emulated, "reference": reference}


def run(implementation, op: str, specs: list[Gradient], factor: float, schedule: dict) -> list[Tensor]:
    """All that an op wrote or returned: gradients, flag, norms."""
    ops = getattr(implementation, "ops", implementation)
    grads = [spec.make() for spec in specs]
    found, scalar = torch.zeros(1), torch.tensor(factor)
    emulator = getattr(implementation, "emulator", None)
    if emulator is not None:
        emulator.configure(**schedule)
    try:
        if op == "check_":
            ops.check_(grads, found)
        elif op == "clip_":
            ops.clip_(grads, scalar)
        elif op == "accumulate_":
            grads = [spec.make(torch.float32) for spec in specs]
            added = [spec.make(torch.float32 if spec.dtype == torch.float64 else None) for spec in specs]
            ops.accumulate_(grads, added, found, scalar)
        elif op == "scale_losses":
            grads = [*grads, *ops.scale_losses(grads, scalar)]
        else:
            getattr(ops, op)(grads, found, scalar)
    finally:
        if emulator is not None:
            emulator.configure()
    return [*grads, found]


@pytest.mark.parametrize("op", ["unscale_", "unscale_norm_", "check_", "clip_", "accumulate_", "scale_losses"])
def test_three_implementations_agree(implementations, op):
    @settings
    @given(specs=lists, factor=factors, schedule=st.sampled_from(SCHEDULES))
    def agree(specs: list[Gradient], factor: float, schedule: dict) -> None:
        expected = run(implementations["reference"], op, specs, factor, schedule)
        for name in ("cpu", "cuda-emulated"):
            results = run(implementations[name], op, specs, factor, schedule)
            assert len(results) == len(expected)
            for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                what = "found_inf" if index == len(expected) - 1 else f"tensor {index}"
                assert result.dtype == wanted.dtype, (name, what)
                assert not bits_differ(result, wanted), (name, what)

    agree()


@pytest.mark.parametrize("op", ["unscale_norm_"])
def test_norms_do_not_depend_on_the_schedule(implementations, op):
    @settings
    @given(specs=lists)
    def agree(specs: list[Gradient]) -> None:
        outcomes = []
        emulated = implementations["cuda-emulated"]
        for schedule in SCHEDULES:
            grads = [spec.make() for spec in specs]
            with emulated.emulator.settings(**schedule):
                outcomes.append(emulated.ops.unscale_norm_(grads, torch.zeros(1), torch.tensor(0.5)))
        for total, norms in outcomes[1:]:
            assert not bits_differ(total.reshape(1), outcomes[0][0].reshape(1))
            assert not bits_differ(norms, outcomes[0][1])

    agree()


# ---- storage ----------------------------------------------------------------------------------------------


@dataclass
class Storing:
    """How a tensor is stored. `base`, if any, has another seed and the same shape."""

    format: str
    block_size: int
    stochastic: bool
    seed: int
    offset: int
    base_seed: int | None
    dtype: torch.dtype  # decoded to


storings = st.builds(
    Storing,
    format=st.sampled_from(["int8", "int4", "fp8_e4m3", "fp8_e5m2"]),
    block_size=st.sampled_from([32, 64, 128, 256, 512, 1024, 2048, 4096]),
    stochastic=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**40),
    base_seed=st.none() | st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES[:3]),
)
stored = gradients.map(lambda spec: replace(spec, dtype=DTYPES[DTYPES.index(spec.dtype) % 3]))


def run_storage(implementation, spec: Gradient, how: Storing, schedule: dict) -> dict[str, Tensor]:
    """All that the storage ops returned or wrote for one tensor."""
    ops = getattr(implementation, "ops", implementation)
    emulator = getattr(implementation, "emulator", None)
    x, found, amax = spec.make(), torch.zeros(1), torch.zeros(1)
    base = None if how.base_seed is None else replace(spec, seed=how.base_seed).make()
    coding = (how.format, how.block_size, how.stochastic, how.seed, how.offset, base)
    mask = torch.where(x > 0, torch.tensor(-1.75, dtype=x.dtype), torch.zeros((), dtype=x.dtype))
    if emulator is not None:
        emulator.configure(**schedule)
    try:
        payload, scales = ops.quantize_blockwise(x, *coding)
        ops.quantize_blockwise_stats_(x, found, amax, *coding)
        plain = ops.dequantize_blockwise(payload, scales, x.shape, how.dtype)
        decoded = ops.dequantize_blockwise(payload, scales, x.shape, x.dtype, base)
        bits = ops.pack_bits(x > 0)
        scaled_bits, value = ops.pack_scaled_mask(mask)
        return {
            "payload": payload,
            "scales": scales,
            "found_inf": found,
            "amax": amax,
            "values": plain,
            "values with base": decoded,
            "bits": bits,
            "mask": ops.unpack_bits(bits, x.shape),
            "bits of a scaled mask": scaled_bits,
            "its value": value.reshape(1),
            "scaled mask": ops.unpack_bits(scaled_bits, x.shape, value),
            "value of what may be no mask": ops.pack_scaled_mask(x)[1].reshape(1),
        }
    finally:
        if emulator is not None:
            emulator.configure()


def test_three_implementations_store_alike(implementations):
    @settings
    @given(spec=stored, how=storings, schedule=st.sampled_from(SCHEDULES))
    def agree(spec: Gradient, how: Storing, schedule: dict) -> None:
        expected = run_storage(implementations["reference"], spec, how, schedule)
        for name in ("cpu", "cuda-emulated"):
            for what, result in run_storage(implementations[name], spec, how, schedule).items():
                wanted = expected[what]
                assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape), (name, what)
                assert not bits_differ(result, wanted), (name, what)

    agree()


def main() -> None:
    parser = argparse.ArgumentParser(description="A long fuzzing run; the seed it prints repeats it.")
    parser.add_argument("--examples", type=int, default=2000, help="for each op")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    arguments = parser.parse_args()
    print(f"python {sys.argv[0]} --examples {arguments.examples} --seed {arguments.seed}", flush=True)
    os.environ["FASTAMP_FUZZ_EXAMPLES"] = str(arguments.examples)
    sys.exit(pytest.main([__file__, "-q", "-x", f"--hypothesis-seed={arguments.seed}"]))


if __name__ == "__main__":
    main()
