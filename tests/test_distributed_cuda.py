"""NCCL, with one process on one GPU and with two on two: one rank's overflow skips the step on every rank, the scale
stays equal, and results are torch's. test_distributed.py has more cases, with gloo on the CPU."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backends import why_missing
from scaler_parity import assert_same
from test_distributed import SCALES, SKIPPED_ONCE, batch, network, scaler_of
from test_distributed import train as train_with
from torch import nn

pytestmark = [
    pytest.mark.skipif(bool(why_missing("cuda")), reason=why_missing("cuda") or "there is a GPU"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="torch has no NCCL"),
]


def train(model: nn.Module, scaler: Any, device: torch.device, in_one_shard: bool = False) -> tuple[Any, ...]:
    """Under float16 autocast. in_one_shard: the overflow is in the last rank's own gradients, not in its loss."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def backward(step: int, factor: float) -> None:
        x = batch(rank, step).to(device)
        with torch.autocast(device.type, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss if in_one_shard else loss * factor).backward()
        if in_one_shard and factor != 1.0:
            grad = next(p.grad for p in model.parameters())
            (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = factor

    return train_with(rank, model, optimizer, scaler, overflow=(last, 2), backward=backward)


def ddp(kind: str, device: torch.device) -> tuple[Any, ...]:
    ids = [device.index] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(network().to(device), device_ids=ids)
    return train(model, scaler_of(kind, device.type), device)


def fsdp2(kind: str, device: torch.device) -> tuple[Any, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return train(model, scaler_of(kind, device.type), device, in_one_shard=True)


def parts(kind: str, device: torch.device) -> tuple[Any, ...]:
    """Parameters of its own on every rank; torch's scaler has nothing for that."""
    group = {"process_group": dist.group.WORLD} if kind == "fastamp" else {}
    return train(network().to(device), scaler_of(kind, device.type, **group), device, in_one_shard=True)


SCENARIOS = {"ddp": ddp, "fsdp2": fsdp2, "parts": parts}


def one_rank(rank: int, size: int, folder: str, device_type: str) -> None:
    """All scenarios: starting processes takes longer than they do."""
    device = torch.device(device_type, rank if device_type == "cuda" else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        found = {(name, kind): run(kind, device) for name, run in SCENARIOS.items() for kind in ("torch", "fastamp")}
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_all(size: int, folder: Path, device_type: str) -> list[dict[tuple[str, str], Any]]:
    torch.multiprocessing.spawn(one_rank, (size, str(folder), device_type), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 GPU", "2 GPUs"])
def results(request, tmp_path_factory):
    """For each rank, scenario and scaler to what `train` returns."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPU")
    return run_all(request.param, tmp_path_factory.mktemp("nccl"), "cuda")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_overflow_skips_on_every_rank(results, scenario):
    for found in results:
        _, scales, unchanged = found[scenario, "fastamp"]
        assert scales == SCALES and unchanged == SKIPPED_ONCE


@pytest.mark.parametrize("scenario", ["ddp", "fsdp2"])
def test_results_are_torchs(results, scenario):
    for found in results:
        assert_same(found[scenario, "fastamp"], found[scenario, "torch"])
        assert_same(found[scenario, "fastamp"][0], results[0][scenario, "fastamp"][0])
