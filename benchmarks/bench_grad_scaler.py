"""fastamp.GradScaler against torch.amp.GradScaler in one process, interleaved: what an iteration costs.

    python benchmarks/bench_grad_scaler.py

Cases marked "alone" call each function 20 times in a row and divide, so that what it touches is in the caches: the
work itself. Cases marked "cold" call it once, after others have had the caches: waiting for memory, as after the
backward pass of a model much larger than they are.

apex, TransformerEngine and DeepSpeed take part where they can be imported (see _baselines.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from _baselines import Baseline, available
from _harness import arguments, progress, ratio, report, time_interleaved
from _loop import SCALE, ScalerLoop, sgd

import fastamp


class Loop(ScalerLoop):
    """With gradients of its own, and clips that are active if asked for."""

    def __init__(
        self,
        scaler: type[torch.amp.GradScaler],
        count: int,
        numel: int,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        clips: bool,
        device: str,
    ) -> None:
        self.clips = clips
        generator = torch.Generator(device).manual_seed(0)

        def values() -> torch.Tensor:
            return torch.randn(numel, generator=generator, device=device)

        params = [torch.nn.Parameter(values()) for _ in range(count)]
        for p in params:
            p.grad = values()
        self.grads = [p.grad for p in params]
        self.originals = [g.clone() for g in self.grads]
        super().__init__(scaler, params, device, optimizer)
        self.refill()

    def refill(self) -> None:
        torch._foreach_copy_(self.grads, self.originals)
        self.max_norm = 100.0 if self.clips else 1e9

    def next_max_norm(self) -> float:
        """Below the norm that the last clip has left."""
        if self.clips:
            self.max_norm *= 0.98
        return self.max_norm

    def function_clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        fastamp.clip_grad_norm_(self.params, self.next_max_norm())
        self.scaler.update()

    def optimizer_alone(self) -> None:
        self.optimizer.step()

    def of(self, baseline: Baseline, clip: bool) -> Callable[[], Any]:
        """A library's way to unscale these gradients, and to clip them."""
        if clip:
            return lambda: baseline.unscale_and_clip(self.params, SCALE, self.next_max_norm())
        return lambda: baseline.unscale(self.params, SCALE)


def case(
    options: Any,
    name: str,
    torch_function: str,
    ours: dict[str, str],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    count: int = 1000,
    numel: int = 16,
    clips: bool = False,
    calls: int = 1,
    target: float | None = None,
    optimizer_alone: bool = False,
) -> dict[str, Any]:
    methods = {"torch": torch_function, **ours}
    if optimizer_alone:
        methods["the optimizer alone"] = "optimizer_alone"
    peers = options.baselines if torch_function in ("unscale_update", "torch_clip") else {}
    loops = {}
    for label in (*methods, *peers):
        scaler = fastamp.GradScaler if label in ours else torch.amp.GradScaler
        loops[label] = Loop(scaler, count, numel, optimizer, clips, options.device)
    functions = {label: getattr(loops[label], method) for label, method in methods.items()}
    rounds: dict[str, Any] = dict(rounds=5, min_seconds=0.0) if options.quick else dict(rounds=200, min_seconds=2.0)
    time = functools.partial(
        time_interleaved,
        setup=(lambda name: loops[name].refill()) if clips else None,
        device=options.device,
        calls=1 if options.quick else calls,
        **rounds,
    )
    timing = time(functions)
    result: dict[str, Any] = {"case": name, "timing": timing}
    result["ratios"] = {f"torch / {label}": ratio(timing, "torch", label) for label in ours}
    # In rounds of its own: a library that works its way through the caches would slow down who comes after it.
    for peer, baseline in peers.items():
        function = loops[peer].of(baseline, torch_function == "torch_clip")
        beside = time({peer: function, **{label: functions[label] for label in ours}})
        timing[peer] = beside[peer]
        result["ratios"] |= {f"{peer} / {label}": ratio(beside, peer, label) for label in ours}
    # The targets were set for a CPU.
    if target is not None and options.device == "cpu":
        result["target"] = {f"torch / {next(iter(ours))}": target}
    return result


def cases(options: Any) -> list[Callable[[], dict[str, Any]]]:
    found: list[Callable[[], dict[str, Any]]] = []

    def add(*args: Any, **kwargs: Any) -> None:
        found.append(functools.partial(case, options, *args, **kwargs))

    small = "1,000 x 16"
    both_clips = {"scaler.clip_grad_norm_": "method_clip", "fastamp.clip_grad_norm_": "function_clip"}
    for state, calls in (("alone", 20), ("cold", 1)):
        unscale, clip = (20.0, 15.0) if state == "alone" else (None, None)
        name = f"{small}, {state}: unscale_ + update"
        add(name, "unscale_update", {"fastamp": "unscale_update"}, target=unscale, calls=calls)
        for clips in (False, True):
            what = "active" if clips else "inactive"
            name = f"{small}, {state}: unscale_ + {what} clip + update"
            add(name, "torch_clip", both_clips, clips=clips, target=clip, calls=calls)
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": sgd,
        "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-4, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    }
    for label, optimizer in optimizers.items():
        add(f"{small}: step + update, {label}", "step", {"fastamp": "step"}, optimizer, optimizer_alone=True)
    add(
        f"{small}: active clip + step + update, AdamW fused",
        "torch_clip_step",
        {"fastamp": "method_clip_step", "fastamp, folded": "fold_clip_step"},
        optimizers["AdamW fused"],
        clips=True,
    )
    for count, numel in ((100, 16), (1, 16), (100, 65536)):
        name = f"{count} x {numel:,}: unscale_ + update"
        add(name, "unscale_update", {"fastamp": "unscale_update"}, count=count, numel=numel)
    return found


def main() -> int:
    options = arguments("grad_scaler", __doc__, devices=("cpu", "cuda"))
    options.baselines, outcome = available(options.device)
    return report("grad_scaler", list(progress(cases(options))), options, {"baselines": outcome})


if __name__ == "__main__":
    sys.exit(main())
