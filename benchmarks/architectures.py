"""What storing activations does to one training step of many architectures: how many bytes are kept, and how far the
gradients are off.

    python benchmarks/architectures.py          # needs transformers; a minute on two cores

The models are small and their weights random: sizes differ in training, errors too. `exact` must give torch's loss and
gradients bit for bit; the exit code is 1 if it does not.
tests/test_architectures.py runs the same models, with checkpointing too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, machine

import fastamp

COLUMNS = [
    "architecture",
    "exact: bytes of plain's",
    "int8: bytes of plain's",
    "bf16: gradient error",
    "int8: gradient error",
    "int4: gradient error",
]


def measured(name: str) -> tuple[list[Any], bool]:
    """The table's row, and whether what has to be exact is."""
    from _architectures import ARCHITECTURES, gradient_error, loss_and_gradients

    model, inputs = ARCHITECTURES[name]()
    loss, gradients, _ = loss_and_gradients(model, inputs, contextlib.nullcontext())
    exact, kept, errors = True, {}, {}
    for form in ("exact", "bf16", "int8", "int4"):
        region = fastamp.store_activations(form, min_bytes=256)
        found_loss, found, stats = loss_and_gradients(model, inputs, region)
        kept[form], errors[form] = stats.ratio, gradient_error(found, gradients)
        if form == "exact":
            exact = torch.equal(found_loss, loss) and all(torch.equal(found[key], gradients[key]) for key in gradients)
    ratios = [f"{kept[form]:.3f}" for form in ("exact", "int8")]
    return [name, *ratios, *(f"{errors[form]:.1e}" for form in ("bf16", "int8", "int4"))], exact


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for architectures.json")
    options = parser.parse_args()
    try:
        from _architectures import ARCHITECTURES
    except ModuleNotFoundError as error:
        sys.exit(f"architectures: {error}; pip install transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows, wrong = [], []
    print("  ".join(COLUMNS))
    for name in ARCHITECTURES:
        row, exact = measured(name)
        rows.append(row)
        if not exact:
            wrong.append(name)
        print("  ".join(row) + ("" if exact else "  NOT EXACT"), flush=True)
    content = {
        "benchmark": "architectures",
        "machine": machine(),
        "what": f"transformers {importlib.metadata.version('transformers')}, one training step from random weights",
        "columns": COLUMNS,
        "rows": rows,
        "not_exact": wrong,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "architectures.json").write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
