"""The demo's numbers, and the text that shows them."""

from __future__ import annotations

import argparse
import math
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastamp._version import __version__
from fastamp.demo import memory
from fastamp.demo.text import Text, batches
from fastamp.demo.training import PHASES, Job

Result = dict[str, Any]


def results(jobs: Sequence[Job], text: Text, options: argparse.Namespace) -> list[Result]:
    """One dictionary per job, ready for JSON: what the table and the plot show."""
    held_out = list(batches(text.validation, 8, options))
    tokens = options.batch * options.seq * options.accumulation
    found: list[Result] = [
        {
            "name": job.recipe.name,
            "exact": job.recipe.exact,
            "differs_from_torch": job.differences(jobs[0]),
            "first_loss_difference": first_difference(job, jobs[0]),
            "losses": [float(loss) for loss in job.losses],
            "validation_loss": job.evaluate(held_out),
            "scales": job.scales,
            "skipped": job.skipped,
            "scaler_us": job.scaler.median_us(),
            "tokens_per_second": tokens / statistics.median(job.seconds),
        }
        for job in jobs
    ]
    if options.checkpoint or options.store:
        for index, (job, result) in enumerate(zip(jobs, found, strict=True)):
            result |= memory.measure(options, index)
            result["gradient_error"] = memory.gradient_error(job, jobs[0], held_out[0])
    return found


def first_difference(job: Job, reference: Job) -> tuple[int, float] | None:
    """The first step whose losses differ, and by how much, in nats per byte."""
    differences = (torch.stack(job.losses) - torch.stack(reference.losses)).abs()
    steps = differences.nonzero().flatten().tolist()
    return (steps[0], float(differences[steps[0]])) if steps else None


def describe(options: argparse.Namespace, text: Text, job: Job) -> str:
    """What is about to be run, on what, and why steps will be skipped."""
    where = f"cpu, {options.threads} thread{'s' * (options.threads > 1)}"
    if job.device.type == "cuda":
        where = torch.cuda.get_device_name(job.device)
    how = "fp32, no autocast" if options.dtype == "fp32" else f"{options.dtype} autocast"
    parameters = sum(p.numel() for p in job.model.parameters())
    if options.dtype == "fp16":
        why = "float16 ends at 65504, so that the first steps overflow until the scale has come down"
    else:
        why = "these gradients reach 3e38, so that only a scale this large makes them overflow"
    split = f"{len(text.train) / 1e6:.1f} MB to train on, {len(text.validation) / 1e6:.1f} MB to validate"
    return (
        f"fastamp {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {where}, "
        f"{how}\n"
        f"text:   standard library of this Python, {text.files} files, {split}\n"
        f"model:  byte-level GPT, {options.layers} layers of {options.width}, {parameters:,} parameters\n"
        f"steps:  {options.steps}, each {options.accumulation} micro-batches of {options.batch} sequences of "
        f"{options.seq} bytes, clipped to norm {options.max_norm:g}\n"
        f"scale:  starts at 2^{math.log2(options.init_scale):g}; {why},\n"
        f"        and doubles after {options.growth_interval} steps without one, until it overflows again"
    )


def result_table(found: Sequence[Result], options: argparse.Namespace) -> str:
    """The results as aligned text, a column per recipe."""
    torch_us = found[0]["scaler_us"]["total"]
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("", lambda r: r["name"]),
        ("losses, weights bit-identical", lambda r: "reference" if r is found[0] else _verdict(r)),
        ("skipped steps", lambda r: f"{len(r['skipped'])} of {options.steps}"),
        ("loss, first step (nats/byte)", lambda r: f"{r['losses'][0]:.4f}"),
        ("loss, last step", lambda r: f"{r['losses'][-1]:.4f}"),
        ("validation loss", lambda r: f"{r['validation_loss']:.4f}"),
        ("scaler time (us/step, median)", lambda r: f"{r['scaler_us']['total']:.0f}"),
        *((f"  {phase}", _scaler_time_cell(phase)) for phase in PHASES),
        ("  torch's / this", lambda r: f"{torch_us / r['scaler_us']['total']:.1f}x"),
        ("training speed (tokens/s)", lambda r: f"{r['tokens_per_second']:,.0f}"),
    ]
    if "saved_bytes" in found[0]:
        rows += [
            ("saved for backward (MB)", lambda r: f"{r['saved_bytes'] / 1e6:.2f}"),
            ("peak memory (MB)", lambda r: f"{r['peak_bytes'] / 1e6:.1f}"),
            (
                "gradient error (relative)",
                lambda r: f"{r['gradient_error']:.1e}" if r["gradient_error"] else "0",
            ),
        ]
    return table([[title, *map(cell, found)] for title, cell in rows])


def _verdict(result: Result) -> str:
    differs = ", ".join(result["differs_from_torch"])
    if not differs:
        return "yes"
    if result["exact"]:
        return f"NO: {differs}"
    if result["first_loss_difference"] is None:
        return f"no: {differs}"
    step, difference = result["first_loss_difference"]
    return f"no: {difference:.0e} in step {step + 1}"


def _scaler_time_cell(phase: str) -> Callable[[Result], str]:
    return lambda result: f"{result['scaler_us'][phase]:.0f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text; the first row is the heading, the first column left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(len(first)), *others]).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])
