"""A whole training step: python benchmarks/bench_step.py

Forward, backward, unscaling, clipping, optimizer step and update of the scale for a small CNN, a BERT-style classifier
and a GPT, with torch's scaler and clip, and with fastamp's, for torch's optimizers in each implementation: torch's own
choice (a loop on a CPU, foreach on a GPU), foreach and fused. The share of the scaler and the clip shrinks as the model
grows: these are small. On a GPU the models run under float16 autocast; on a CPU in float32, since half precision is
emulated there.

`operators` are those that torch's dispatcher met between backward and the end of the step, `syncs` those among them
that read a device's value on the host.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from _gpt import GPT, batch, text
from _harness import arguments, progress, ratio, report, time_interleaved
from _models import Classifier, ConvNet, images, sentences
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp

# Not among them: LBFGS needs a closure, SparseAdam sparse gradients, Muon matrices alone.
USUAL = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Adafactor")
SETTINGS = {"SGD": {"lr": 1e-3, "momentum": 0.9}}


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}
    for name in USUAL:
        make = functools.partial(getattr(torch.optim, name), **SETTINGS.get(name, {"lr": 1e-4}))
        found[name] = make
        for implementation in ("foreach", "fused"):
            if implementation in inspect.signature(make.func).parameters:
                found[f"{name} {implementation}"] = functools.partial(make, **{implementation: True})
    return found


OPTIMIZERS = optimizers()


def supported(make: Callable[[Any], torch.optim.Optimizer], device: str) -> bool:
    """Not where this torch has the fused implementation for other devices alone, which it says at the first step."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        make([parameter]).step()
    except RuntimeError as error:
        print(f"left out: {error}")
        return False
    return True


def models(device: str) -> dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]]:
    def gpt() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        inputs, targets = batch(text(), 2, 64, torch.Generator().manual_seed(0))
        return GPT(6, 64, 64, 0.0).to(device), (inputs.to(device), targets.to(device))

    return {
        "CNN": lambda: (ConvNet().to(device), images(2, device)),
        "BERT-style": lambda: (Classifier().to(device), sentences(4, 32, device)),
        "GPT-style": gpt,
    }


class Count(TorchDispatchMode):
    """Operators that reach the dispatcher, and those that sync."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.syncs += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Loop:
    def __init__(self, kind: str, make: Any, optimizer: Any, device: str) -> None:
        torch.manual_seed(0)
        self.model, self.batch = make()
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer(self.parameters)
        self.kind, self.device = kind, device
        self.scaler = {"torch": torch.amp.GradScaler, "fastamp": fastamp.GradScaler}[kind](device, init_scale=1024.0)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        half = torch.autocast("cuda", torch.float16) if self.device == "cuda" else contextlib.nullcontext()
        with half:
            loss = self.model(*self.batch)
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        if self.kind == "torch":
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        else:
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def __call__(self) -> None:
        self.backward()
        self.update()

    def counted(self) -> dict[str, int]:
        self.backward()
        with Count() as count:
            self.update()
        return {"operators": count.operators, "syncs": count.syncs}


def case(options: Any, model: str, make: Any, optimizer: str) -> dict[str, Any]:
    loops = {kind: Loop(kind, make, OPTIMIZERS[optimizer], options.device) for kind in ("torch", "fastamp")}
    rounds: dict[str, Any] = dict(rounds=2 if options.quick else 31, min_seconds=0.0)
    timing = time_interleaved(loops, device=options.device, **rounds)
    after = time_interleaved(
        {kind: loop.update for kind, loop in loops.items()},
        setup=lambda kind: loops[kind].backward(),
        device=options.device,
        **rounds,
    )
    return {
        "case": f"{model}, {len(loops['torch'].parameters)} tensors, {optimizer}",
        "model": model,
        "optimizer": optimizer,
        "timing": timing,
        "after backward": after,
        "ratios": {
            "against torch": ratio(timing, "torch", "fastamp"),
            "after backward, against torch": ratio(after, "torch", "fastamp"),
        },
        "counts": {kind: loop.counted() for kind, loop in loops.items()},
    }


def table(results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A row for each optimizer; columns for each model, and the counts of the last."""
    cases = {(result["model"], result["optimizer"]): result for result in results}
    columns, rows = ["optimizer"], []
    kinds = list(dict.fromkeys(result["model"] for result in results))
    for model in kinds:
        columns += [f"{model}: a step", f"{model}: what follows backward"]
    columns += [f"{kinds[-1]}: operators", "syncs"]
    for optimizer in dict.fromkeys(result["optimizer"] for result in results):
        row = [optimizer]
        for model in kinds:
            result = cases[model, optimizer]
            for timing, ratio_ in zip(
                (result["timing"], result["after backward"]), result["ratios"].values(), strict=True
            ):
                before, after = (timing[kind]["median"] / 1000 for kind in ("torch", "fastamp"))
                row.append(f"{before:.1f} to {after:.1f} ms, {ratio_:.2f}x")
        counts = cases[kinds[-1], optimizer]["counts"]
        row += [f"{counts['torch'][what]} to {counts['fastamp'][what]}" for what in ("operators", "syncs")]
        rows.append(row)
    return {"columns": columns, "rows": rows}


def main() -> int:
    options = arguments("step", __doc__, devices=("cpu", "cuda"))
    chosen = ["AdamW fused"] if options.quick else OPTIMIZERS
    cases = [
        functools.partial(case, options, model, make, optimizer)
        for model, make in models(options.device).items()
        for optimizer in chosen
        if supported(OPTIMIZERS[optimizer], options.device)
    ]
    results = list(progress(cases))
    return report("step", results, options, table(results))


if __name__ == "__main__":
    sys.exit(main())
