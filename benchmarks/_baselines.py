"""Other libraries' ways to do what follows a backward pass, where they can be imported: peers for the benchmarks.

Each library has one function here. It returns its :class:`Baseline`, or the reason why there is none on this machine:
an import of what was built for another machine may raise anything. All of them keep the loss scale as a number of the
host, so that each call ends by reading there what it found.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Baseline:
    """Both functions take things with a `grad`, all on one device and of one dtype, and the loss scale; they change the
    gradients in place and return whether one was not finite, in which case the gradients' values are of no use."""

    unscale: Callable[[Sequence[Any], float], bool]
    unscale_and_clip: Callable[[Sequence[Any], float, float], bool]  # the third: the largest norm allowed
    version: str


def apex(device: str) -> Baseline | str:
    """Needs apex built with its CUDA extensions."""
    return _multi_tensor(device, "apex", "apex.multi_tensor_apply", "amp_C")


def transformer_engine(device: str) -> Baseline | str:
    """The same interface as apex's."""
    optimizers = "transformer_engine.pytorch.optimizers"
    return _multi_tensor(device, "transformer_engine", optimizers, optimizers)


def _multi_tensor(device: str, package: str, applier: str, kernels: str) -> Baseline | str:
    """`applier(kernel, flag, lists of tensors, ...)`; a kernel sets the int32 flag to 1 where an input is not finite.
    The norm is that of the scaled gradients, so that unscaling and clipping are one multiplication."""
    if device != "cuda":
        return "needs CUDA"
    try:
        apply = importlib.import_module(applier).multi_tensor_applier
        module = importlib.import_module(kernels)
        scale_, l2norm = module.multi_tensor_scale, module.multi_tensor_l2norm
    except Exception as error:
        return f"not importable: {error}"

    def multiply(grads: list[Tensor], factor: float) -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        apply(scale_, flag, [grads, grads], factor)
        return bool(flag.item())

    def unscale(holders: Sequence[Any], scale: float) -> bool:
        return multiply([holder.grad for holder in holders], 1.0 / scale)

    def unscale_and_clip(holders: Sequence[Any], scale: float, max_norm: float) -> bool:
        grads = [holder.grad for holder in holders]
        flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        norm = apply(l2norm, flag, [grads], False)[0].item() / scale
        return multiply(grads, min(1.0, max_norm / (norm + 1e-6)) / scale)

    return Baseline(unscale, unscale_and_clip, version(package))


def deepspeed(device: str) -> Baseline | str:
    """The parts of its FP16_Optimizer's step that come before the optimizer's own, on gradients where they are: without
    its copy into one flat float32 tensor."""
    try:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.utils import CheckOverflow, get_global_norm_of_tensors
    except Exception as error:
        return f"not importable: {error}"
    if get_accelerator().device_name() != device:
        return f"works on {get_accelerator().device_name()} on this machine"
    overflow = CheckOverflow()

    def multiply(grads: list[Tensor], scale: float, max_norm: float, norm: Tensor | None) -> None:
        # What the method reads of its optimizer.
        optimizer = SimpleNamespace(loss_scale_config=SimpleNamespace(cur_scale=scale), clip_grad=max_norm)
        FP16_Optimizer.unscale_and_clip_grads(optimizer, grads, norm)

    def unscale(holders: Sequence[Any], scale: float) -> bool:
        if overflow.has_overflow(holders):
            return True
        multiply([holder.grad for holder in holders], scale, 0.0, None)
        return False

    def unscale_and_clip(holders: Sequence[Any], scale: float, max_norm: float) -> bool:
        if overflow.has_overflow(holders):
            return True
        grads = [holder.grad for holder in holders]
        multiply(grads, scale, max_norm, get_global_norm_of_tensors(grads))
        return False

    return Baseline(unscale, unscale_and_clip, version("deepspeed"))


def deepspeed_checkpoint() -> Callable[..., Any] | str:
    """`checkpoint(function, *args)` as torch's reentrant one, or why there is none."""
    try:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
    except Exception as error:
        return f"not importable: {error}"
    if get_accelerator().device_name() != "cpu":
        return f"works on {get_accelerator().device_name()} on this machine"
    return checkpoint


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


LIBRARIES: dict[str, Callable[[str], Baseline | str]] = {
    "apex": apex,
    "TransformerEngine": transformer_engine,
    "DeepSpeed": deepspeed,
}


def available(device: str) -> tuple[dict[str, Baseline], dict[str, str]]:
    """Those that work here and agree with torch, and what became of every one: its version, or why it is not run."""
    found, outcome = {}, {}
    for name, library in LIBRARIES.items():
        baseline = library(device)
        if isinstance(baseline, str):
            outcome[name] = f"not run: {baseline}"
            continue
        try:
            compare_with_torch(name, baseline, device)
        except Exception as error:
            outcome[name] = f"not run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            continue
        found[name], outcome[name] = baseline, baseline.version
    return found, outcome


def compare_with_torch(name: str, baseline: Baseline, device: str) -> None:
    """Raises AssertionError where the gradients are not those that torch's scaler and clip leave."""
    scale, inv_scale = 1024.0, torch.tensor(2.0**-10, device=device)
    generator = torch.Generator().manual_seed(0)
    originals = [(torch.randn(n, generator=generator) * scale).to(device) for n in (1, 16, 1000, 70_001)]

    def holders() -> list[torch.nn.Parameter]:
        found = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in originals]
        for parameter, grad in zip(found, originals, strict=True):
            parameter.grad = grad.clone()
        return found

    def run(theirs: list[torch.nn.Parameter], max_norm: float | None) -> bool:
        if max_norm is None:
            return baseline.unscale(theirs, scale)
        return baseline.unscale_and_clip(theirs, scale, max_norm)

    for max_norm in (None, 1.0, 1e9):
        theirs, torchs = holders(), holders()
        grads = [parameter.grad for parameter in torchs]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros((), device=device), inv_scale)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(torchs, max_norm)
        assert not run(theirs, max_norm), f"{name} finds a value that is not finite where there is none"
        for parameter, truth in zip(theirs, grads, strict=True):
            torch.testing.assert_close(parameter.grad, truth, rtol=1e-5, atol=0.0, msg=lambda why: f"{name}: {why}")
        for bad in (float("inf"), float("-inf"), float("nan")):
            theirs = holders()
            theirs[2].grad[500] = bad
            assert run(theirs, max_norm), f"{name} does not find {bad}"
