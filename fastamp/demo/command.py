"""The demo's command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastamp._version import __version__
from fastamp.demo import plot, report
from fastamp.demo.text import standard_library
from fastamp.demo.training import DTYPES, Job, Step, deterministic, recipes, train, training_step


def main(argv: Sequence[str] | None = None, step: Step = training_step, prog: str = "python -m fastamp demo") -> int:
    """Trains, prints a table, writes a plot. Returns the exit code: 1 if an exact recipe was not exact."""
    options = parse(argv, prog)
    with deterministic(options):
        text = standard_library()
        jobs = [Job(recipe, options) for recipe in recipes(options)]
        print(report.describe(options, text, jobs[0]), flush=True)
        train(jobs, text, options, step)
        found = report.results(jobs, text, options)
    print("\n" + report.result_table(found, options))
    if not found[0]["skipped"]:
        print("\nno step overflowed: a larger --steps or --init-scale shows one being skipped")
    if options.json:
        versions = {"torch": torch.__version__, "fastamp": __version__}
        numbers = {"versions": versions, "options": vars(options), "runs": found}
        Path(options.json).write_text(json.dumps(numbers, indent=1) + "\n")
        print(f"numbers: {options.json}")
    if options.out:
        print(plot.write(found, options.out))
    wrong = [result["name"] for result in found if result["exact"] and result["differs_from_torch"]]
    if wrong:
        print(f"NOT bit-identical to torch: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def parse(argv: Sequence[str] | None = None, prog: str = "python -m fastamp demo") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a small byte-level GPT on the source of Python's standard library, with torch's "
        "GradScaler and with fastamp's, and compare losses, scales, weights and time. The exit code is 1 if "
        "they are not bit-identical.",
        formatter_class=_Help,
    )
    count = _positive_int
    add = parser.add_argument_group("training").add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    add(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="autocast's; auto: fp16 where the device is fast at it, else bf16; fp32: no autocast",
    )
    add("--threads", type=count, default=1, help="CPU threads; only larger models gain from more than one")
    add("--steps", type=count, default=120, help="optimizer steps")
    add("--layers", type=count, default=4, help="transformer blocks")
    add("--width", type=count, default=32, help="width of the residual stream, a multiple of 16")
    add("--batch", type=count, default=4, help="sequences in a micro-batch")
    add("--seq", type=count, default=64, help="bytes in a sequence")
    add("--accumulation", type=count, default=2, help="micro-batches in an optimizer step")
    add("--dropout", type=float, default=0.0, help="dropout rate, 0 for none")
    add("--lr", type=float, default=5e-3, help="learning rate of AdamW")
    add("--max-norm", type=float, default=64.0, help="gradient norm to clip to; the loss is in nats per sequence")
    add("--init-scale", type=float, help="first loss scale (default: 2^16, as torch, in fp16, else 2^127)")
    add("--growth-interval", type=count, default=16, help="steps without overflow until the scale doubles")
    add("--seed", type=int, default=0, help="seed of weights, batches and dropout; 0 if not given")
    add = parser.add_argument_group(
        "memory", "Each adds runs to the comparison, with saved memory, peak memory and gradient error."
    ).add_argument
    add("--checkpoint", action="store_true", help="recompute each block in the backward pass")
    add(
        "--storage",
        metavar="FORMAT",
        help="how --checkpoint keeps the blocks' inputs: bf16, int8, delta-int4, ...",
    )
    add(
        "--store",
        metavar="FORMAT",
        help="how all that autograd saves is kept, without recompute: exact, bf16, int8, ...",
    )
    add = parser.add_argument_group("output").add_argument
    add("--out", default="train_gpt.png", metavar="PLOT.png", help="where to write the plot; '' for nowhere")
    add("--json", metavar="OUT.json", help="where to write every number of the run")
    options = parser.parse_args(argv)
    if options.width % 16:
        parser.error(f"argument --width: expected a multiple of 16, the width of a head, got {options.width}")
    if not 0 <= options.dropout < 1:
        parser.error(f"argument --dropout: expected a rate in [0, 1), got {options.dropout}")
    if options.storage and not options.checkpoint:
        parser.error("argument --storage: needs --checkpoint; to store without recompute, use --store")
    _check_formats(parser, options)
    _check_device(parser, options.device)
    if options.dtype == "auto":
        options.dtype = "fp16" if _fast_fp16(options.device) else "bf16"
    if options.init_scale is None:
        options.init_scale = 2.0**16 if options.dtype == "fp16" else 2.0**127
    return options


def _check_formats(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from fastamp import _delta, storage

    for name, formats in (("storage", [*storage.FORMATS, *_delta.FORMATS]), ("store", [*storage.FORMATS])):
        given = getattr(options, name)
        if given is not None and given not in formats:
            parser.error(f"argument --{name}: expected one of {', '.join(formats)}, got {given!r}")


def _check_device(parser: argparse.ArgumentParser, device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:  # whatever a missing device raises
        reason = str(error).splitlines()[0]
        parser.error(f"argument --device: torch {torch.__version__} cannot use {device!r} here: {reason}")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, unless there is none to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _fast_fp16(device: str) -> bool:
    """A GPU is fast at fp16; a CPU is where oneDNN has fp16 kernels for it."""
    if not device.startswith("cpu"):
        return True
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is not None and torch.backends.mkldnn.is_available() and supported()
