"""Out of memory: what held it, and the three remedies that free most."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TextIO

import torch
from torch import nn

from fastamp import _last_call
from fastamp.memory import _blocks
from fastamp.memory._sizes import format_bytes
from fastamp.memory._snapshot import largest_lines
from fastamp.memory._step import Precision, split_inputs
from fastamp.memory._variants import Variants, changed
from fastamp.memory.estimate import Setting
from fastamp.memory.report import MemoryReport


@dataclass(frozen=True)
class Remedy:
    """One thing to do about a step's memory, estimated.

    Attributes:
        what: the remedy, in words.
        saves: bytes of the peak that it frees.
        peak: the step's peak with it, in bytes.
        time: the step's time relative to now; None where that is not known.
        how: what to write in the program.
    """

    what: str
    saves: int
    peak: int
    time: float | None
    how: str


def explain_oom(
    exception: BaseException,
    *,
    model: nn.Module | None = None,
    inputs: Any = None,
    optimizer: Any = None,
    file: TextIO | None = None,
) -> NoReturn:
    """Prints where the memory went and the three most effective remedies, then raises `exception` again.

    For an except clause: `except torch.OutOfMemoryError as error: explain_oom(error)`. An error that comes from one of
    those (its `__cause__` or `__context__`) is explained too; any other is raised again without a word. `python -m
    fastamp run` does this for a program that knows nothing of it.

    Bytes and times are estimated on fake tensors, for a loss that keeps nothing itself.

    Args:
        exception: what was caught.
        model, inputs: of the step (inputs as for `estimate`); if not given, they are looked for in the frames that the
            exception came through.
        optimizer: if not given, the one that is alive and holds the model's parameters.
        file: where to print; standard error by default.

    Raises:
        BaseException: `exception`, always.
    """
    if _last_call.out_of_memory_error(exception) is not None:
        print_explanation(exception, model=model, inputs=inputs, optimizer=optimizer, file=file)
    raise exception


def print_explanation(
    exception: BaseException,
    *,
    model: nn.Module | None = None,
    inputs: Any = None,
    optimizer: Any = None,
    file: TextIO | None = None,
) -> None:
    """What `explain_oom` prints. Never raises: the user's own error is what matters."""
    file = file or sys.stderr
    try:
        text = _explanation(exception, model, inputs, optimizer)
    except Exception as problem:
        text = f"fastamp: could not explain the lack of memory: {type(problem).__name__}: {problem}"
    print(text, file=file, flush=True)


def _explanation(exception: BaseException, model: nn.Module | None, inputs: Any, optimizer: Any) -> str:
    call = _found_call(exception, model)
    model = model if model is not None or call is None else call.model()
    if model is None or (inputs is None and call is None):
        return (
            "fastamp: out of memory, and no model was found in the frames of the error. Where the memory goes shows\n"
            "  with fastamp.memory.track(model, optimizer) as report: ...   or   fastamp.memory.estimate(model, inputs)"
        )
    model = _unwrapped(model)
    training = (call is None or call.grad) and any(p.requires_grad for p in model.parameters())
    optimizer = optimizer if optimizer is not None else _found_optimizer(model)
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device != "cuda":
        # The explanation itself needs host memory, and what the failed step still holds is in its frames.
        for each in _last_call.origins(exception):
            traceback.clear_frames(each.__traceback__)
    args, kwargs = split_inputs(inputs) if inputs is not None or call is None else (call.args, call.kwargs)
    setting = Setting(
        model,
        (),
        optimizer,
        _precision(call.autocast if call is not None else None),
        "train" if training else "inference",
        1,
        None,
        None,
        device if device in ("cpu", "cuda") else None,
    )
    setting.args, setting.kwargs = args, kwargs
    variants = Variants(setting)
    report = setting.report_of(variants.plain, {})
    lines = ["", "fastamp: out of memory. By an estimate, the step takes:", "", *_table(report), ""]
    lines += _device_lines(device)
    found = remedies(variants, report)[:3]
    if found:
        lines.append("What frees most:")
    for number, remedy in enumerate(found, 1):
        cost = "time not known" if remedy.time is None else f"{remedy.time:.2f} x the time"
        lines.append(
            f"  {number}. {remedy.what}: frees {format_bytes(remedy.saves)} (peak {format_bytes(remedy.peak)}), {cost}"
        )
        lines.append(f"     {remedy.how}")
    if training:
        missing = ", and the states of an optimizer, for none was found" if optimizer is None else ""
        lines.append(f"Not in these numbers: what the loss keeps{missing}.")
    return "\n".join(lines)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module in what torch.compile or a data-parallel wrapper made of it."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _precision(autocast: torch.dtype | None) -> Any:
    if autocast is None:
        return None
    return Precision(f"autocast {str(autocast).removeprefix('torch.')}", None, autocast)


def _table(report: MemoryReport) -> list[str]:
    rows = [(name, size) for name, size in report.peak.breakdown.items() if size]
    lines = [f"  {name:18}{format_bytes(size):>12}{size / report.peak.bytes:>8.0%}" for name, size in rows]
    lines.append(f"  {'peak':18}{format_bytes(report.peak.bytes):>12}   in {report.peak.where}")
    modules = list(report.by_module(2).items())[:4]
    if modules:
        held = ", ".join(f"{name or 'outside modules'} {format_bytes(size)}" for name, size in modules)
        lines.append(f"  most activations: {held}")
    return lines


def _device_lines(device: str) -> list[str]:
    if device != "cuda" or not torch.cuda.is_available():
        return []
    free, total = torch.cuda.mem_get_info()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    lines = [
        f"  the GPU has {format_bytes(total)}; reserved {format_bytes(reserved)}, of it {format_bytes(allocated)} "
        f"allocated; free {format_bytes(free)}"
    ]
    with contextlib.suppress(Exception):  # private to torch
        lines += _history_lines(torch.cuda.memory._snapshot(), torch.cuda.current_device())
    return [*lines, ""]


def _history_lines(snapshot: Mapping[str, Any], device: int) -> list[str]:
    found = largest_lines(snapshot, device)
    head = ["  live now, by the line that allocated it (torch's memory history):"] if found else []
    return head + [
        f"  {format_bytes(line.bytes):>12}  {line.where}" + (f"  ({line.blocks} blocks)" if line.blocks > 1 else "")
        for line in found
    ]


def remedies(variants: Variants, report: MemoryReport) -> list[Remedy]:
    """What could be done about a step, that which frees most first: `report` is of `variants`' plain step."""
    setting, found = variants.setting, []

    def consider(
        what: str, how: str, variant: Setting = setting, pieces: int = 1, treatments: Mapping[str, str] | None = None
    ) -> None:
        with contextlib.suppress(Exception):  # not every model runs so: then it is no remedy for it
            run = variants.run(variant, treatments or {})
            peak = variants.peak(run.trace)
            seconds = pieces * run.seconds + variants.optimizer_seconds
            time = seconds / (variants.seconds + variants.optimizer_seconds)
            found.append(Remedy(what, report.peak.bytes - peak, peak, time, how))

    training = setting.mode != "inference"
    blocks = _blocks.find_blocks(setting.model)
    if training and blocks:
        consider(
            f"checkpoint the {len(blocks)} blocks {blocks[0]} to {blocks[-1]}",
            'fastamp.memory.plan(model, inputs, budget="...").apply(model), or fastamp.checkpoint in their forward',
            treatments=dict.fromkeys(blocks, "checkpoint"),
        )
        consider(
            "store the blocks' activations as int8 (gradients become approximate)",
            'with fastamp.store_activations("int8"): loss = ...',
            treatments=dict.fromkeys(blocks, "store:int8"),
        )
    if setting.precision.autocast is None and setting.precision.parameters is None:
        autocast = changed(setting, precision=Precision("bf16-amp", None, torch.bfloat16))
        consider("bfloat16 autocast", f'with torch.autocast("{setting.device_type}", torch.bfloat16): ...', autocast)
    if variants.batch > 1:
        what = "gradient accumulation: 2 micro-batches of half the batch" if training else "half the batch"
        how = f"split the batch of {variants.batch}" + ("; divide each loss by 2" if training else "")
        consider(what, how, variants.with_pieces(2), 2)
    if report.optimizer_states > report.parameters.trainable_bytes:
        saves = report.optimizer_states * 3 // 4
        how = "an 8-bit AdamW, such as bitsandbytes.optim.AdamW8bit; SGD with momentum frees half of the states"
        found.append(Remedy("8-bit optimizer states", saves, report.peak.bytes - saves, None, how))
    if setting.device_type == "cuda" and torch.cuda.is_available():
        lost = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        how = "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
        found.append(Remedy("less fragmentation", lost, report.peak.bytes, 1.0, how))
    return sorted((remedy for remedy in found if remedy.saves > 0), key=lambda remedy: -remedy.saves)


def _found_call(exception: BaseException, model: nn.Module | None) -> _last_call.Call | None:
    """The outermost call of a module that the exception came through, else the last one that was watched."""
    last = _last_call.last
    # The outer errors have the outer frames.
    frames = (frame for each in _last_call.origins(exception) for frame, _ in traceback.walk_tb(each.__traceback__))
    for frame in frames:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name != "_call_impl" or not isinstance(owner, nn.Module):
            continue
        # Not a loss, which has no parameters and whose call is not the model's.
        if model is owner or (model is None and any(True for _ in owner.parameters())):
            args, kwargs = frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})
            found = _last_call.call_of(owner, args, kwargs, owner.training, None)
            # The autocast and no_grad around it have ended by now; a watched call of the same model has seen them.
            known = last is not None and last.model() is owner
            return replace(found, autocast=last.autocast, grad=last.grad) if last is not None and known else found
    return last if last is not None and model in (None, last.model()) else None


def _found_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    own = {id(p) for p in model.parameters()}
    for thing in gc.get_objects():
        # By its type: isinstance asks lazy objects of other libraries for their class, and they warn.
        if issubclass(type(thing), torch.optim.Optimizer) and thing.param_groups:
            held = [id(p) for group in thing.param_groups for p in group["params"]]
            if held and own.issuperset(held):
                return thing
    return None
