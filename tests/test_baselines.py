"""The benchmarks' adapters to other libraries, against small modules that hold to those libraries' call contracts."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def baselines(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_baselines")


@pytest.fixture
def install(monkeypatch):
    """Puts a module, and packages above it, where imports find it."""

    def put(name: str, **attributes) -> None:
        for end in [i for i, c in enumerate(name) if c == "."]:
            if name[:end] not in sys.modules:
                monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def applier(kernel, flag, lists, *rest):
    return kernel(2048 * 32, flag, lists, *rest)


def multi_tensor_scale(chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """out = in * scale; 1 to the flag if an input is not finite."""
    assert isinstance(chunk_size, int) and isinstance(scale, float)
    assert flag.dtype == torch.int32 and flag.numel() == 1
    sources, targets = lists
    for source, target in zip(sources, targets, strict=True):
        if not source.isfinite().all():
            flag.fill_(1)
        target.copy_(source.detach() * scale)


def multi_tensor_l2norm(chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool):
    """The norm in one element, and each tensor's if asked for."""
    assert isinstance(chunk_size, int) and flag.dtype == torch.int32 and per_tensor is False
    (tensors,) = lists
    return torch.cat([t.flatten() for t in tensors]).norm().reshape(1), torch.empty(0)


@pytest.fixture(params=["apex", "transformer_engine"])
def multi_tensor(request, install):
    """The name of a library whose kernels are given, on whatever device the tensors are."""
    kernels = {"multi_tensor_scale": multi_tensor_scale, "multi_tensor_l2norm": multi_tensor_l2norm}

    def put(**others) -> str:
        if request.param == "apex":
            install("apex.multi_tensor_apply", multi_tensor_applier=applier)
            install("amp_C", **{**kernels, **others})
        else:
            together = {"multi_tensor_applier": applier, **kernels, **others}
            install("transformer_engine.pytorch.optimizers", **together)
        return request.param

    return put


def test_multi_tensor_kernels_agree_with_torch(baselines, multi_tensor):
    name = multi_tensor()
    baselines.compare_with_torch(name, getattr(baselines, name)("cuda"), "cpu")


def test_a_baseline_that_computes_something_else_is_refused(baselines, multi_tensor):
    def divides(chunk_size, flag, lists, scale):
        multi_tensor_scale(chunk_size, flag, lists, 1.0 / scale)

    def blind(chunk_size, flag, lists, scale):
        multi_tensor_scale(chunk_size, torch.zeros_like(flag), lists, scale)

    for kernel, words in ((divides, "not close"), (blind, "does not find inf")):
        name = multi_tensor(multi_tensor_scale=kernel)
        with pytest.raises(AssertionError, match=f"{name}.*{words}"):
            baselines.compare_with_torch(name, getattr(baselines, name)("cuda"), "cpu")


def test_one_that_disagrees_is_left_out(baselines, fake_deepspeed, monkeypatch):
    monkeypatch.setattr(CheckOverflow, "has_overflow", lambda self, params: False)
    found, outcome = baselines.available("cpu")
    assert found == {} and outcome["DeepSpeed"] == "not run: DeepSpeed does not find inf"


def test_kernels_that_an_older_build_lacks(baselines, install):
    install("apex.multi_tensor_apply", multi_tensor_applier=applier)
    install("amp_C", multi_tensor_scale=multi_tensor_scale)
    assert "multi_tensor_l2norm" in baselines.apex("cuda")


class CheckOverflow:
    def has_overflow(self, params) -> bool:
        return any(not p.grad.isfinite().all() for p in params)


class FP16Optimizer:
    def unscale_and_clip_grads(self, grad_groups_flat, total_norm, apply_scale=True):
        scale, limit = self.loss_scale_config.cur_scale, self.clip_grad
        if limit > 0:
            scale = scale * max(1.0, (total_norm / scale + 1e-6) / limit)
        for grad in grad_groups_flat:
            grad.div_(scale)


@pytest.fixture
def fake_deepspeed(install):
    device = SimpleNamespace(device_name=lambda: "cpu")
    install("deepspeed.accelerator", get_accelerator=lambda: device)
    install("deepspeed.runtime.fp16.fused_optimizer", FP16_Optimizer=FP16Optimizer)
    install(
        "deepspeed.runtime.utils",
        CheckOverflow=CheckOverflow,
        get_global_norm_of_tensors=lambda tensors: math.sqrt(sum(float(t.square().sum()) for t in tensors)),
    )
    install("deepspeed.runtime.activation_checkpointing.checkpointing", checkpoint=torch.utils.checkpoint.checkpoint)
    return device


def test_deepspeeds_functions_agree_with_torch(baselines, fake_deepspeed):
    baselines.compare_with_torch("DeepSpeed", baselines.deepspeed("cpu"), "cpu")
    assert baselines.deepspeed_checkpoint() is torch.utils.checkpoint.checkpoint


def test_deepspeed_works_on_its_own_device(baselines, fake_deepspeed):
    fake_deepspeed.device_name = lambda: "cuda"
    assert baselines.deepspeed("cpu") == baselines.deepspeed_checkpoint() == "works on cuda on this machine"


@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
def test_the_real_deepspeed(baselines):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, _ = baselines.available(device)
    assert "DeepSpeed" in found


def test_reasons(baselines, monkeypatch):
    for package in ("apex", "amp_C", "transformer_engine", "deepspeed", "deepspeed.accelerator"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    found, outcome = baselines.available("cpu")
    assert found == {} and outcome["apex"] == outcome["TransformerEngine"] == "not run: needs CUDA"
    assert outcome["DeepSpeed"].startswith("not run: not importable: ") and "deepspeed" in outcome["DeepSpeed"]
    for library in (baselines.apex, baselines.transformer_engine):
        assert library("cuda").startswith("not importable: ")
    assert baselines.deepspeed_checkpoint().startswith("not importable: ")
