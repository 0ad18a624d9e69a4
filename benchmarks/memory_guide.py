"""The numbers of docs/memory-guide.md: python benchmarks/memory_guide.py [--small] [--check] [--only PART]

Estimates the steps of the guide's case and verifies plans of a smaller one by running them on the CPU. Writes
benchmarks/results/memory_guide.json and docs/memory-guide.png, and puts the tables into the page, between
`<!-- memory NAME -->` and `<!-- end -->`. `--check` runs nothing and exits with 1 if the page differs from the JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fastamp.memory import DoesNotFit, MemoryReport, Planner, estimate, format_bytes, parse_bytes  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "memory_guide.json"
PAGE = ROOT / "docs" / "memory-guide.md"
PICTURE = ROOT / "docs" / "memory-guide.png"
BUDGET = "8 GiB"
HEADS = 12
SHARERS = 4  # devices that share a layer: 12 heads do not divide by 8
MARGIN = 0.1  # of the budget, for what is no tensor


class Classifier(nn.Module):
    """A BERT-style classifier in plain torch: 12 layers, width 768, 12 heads are BERT base."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = HEADS, vocabulary: int = 30522, length: int = 512
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.classify = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.norm(self.token(tokens) + self.position(places)))
        for layer in self.layers:
            x = layer(x)
        return self.classify(x[:, 0])


class LayerShare(nn.Module):
    """One device's share of an encoder layer under tensor parallelism, and what flows through it there.

    Attention heads and the inner width are divided, as `torch.distributed.tensor.parallel` does with column-wise and
    then row-wise linear layers; norms, dropouts and the residual stream are whole on each device. The two sums over
    devices work in place and keep nothing.
    """

    def __init__(self, width: int, heads: int, devices: int) -> None:
        super().__init__()
        if heads % devices:
            raise ValueError(f"devices must divide the {heads} heads, got {devices}")
        self.heads = heads // devices
        self.qkv = nn.Linear(width, 3 * width // devices)
        self.out = nn.Linear(width // devices, width)
        self.up, self.down = nn.Linear(width, 4 * width // devices), nn.Linear(4 * width // devices, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop, self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = self.norm1(x + self.drop1(self.out(y.transpose(1, 2).reshape(batch, time, -1))))
        return self.norm2(x + self.drop2(self.down(self.drop(F.gelu(self.up(x))))))


def tensor_parallel(layers: int, batch: int, length: int, devices: int) -> MemoryReport:
    """The step of one of `devices` that share each layer; embeddings and the classifier are whole on each."""
    model, tokens, labels = case(layers, batch, length)
    width = model.token.embedding_dim
    with torch.device("meta"):
        model.layers = nn.ModuleList(LayerShare(width, HEADS, devices) for _ in range(layers))
    return estimate(model, tokens, device="cuda", loss=F.cross_entropy, targets=labels)


def shared_layers(layers: int, batch: int, length: int) -> dict[str, Any]:
    return {str(n): _numbers(tensor_parallel(layers, batch, length, n)) for n in (1, SHARERS)}


def case(layers: int, batch: int, length: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model and a batch without memory of their own."""
    with torch.device("meta"):
        model = Classifier(layers, length=length)
        return model, torch.empty(batch, length, dtype=torch.long), torch.empty(batch, dtype=torch.long)


def steps(layers: int, batch: int, length: int, budget: str, picture: bool) -> dict[str, Any]:
    """Each step of the guide, in the order that it is taken."""
    model, tokens, labels = case(layers, batch, length)

    def at(size: int, **settings: Any) -> MemoryReport:
        settings = {"device": "cuda", "loss": F.cross_entropy, "targets": labels[:size], **settings}
        return estimate(model, tokens[:size], **settings)

    half, quarter = batch // 2, batch // 4
    amp = {"precision": "fp16-amp"}
    rows: dict[str, MemoryReport] = {
        "as it is": at(batch),
        f"batch {half}": at(half),
        f"batch {half}, 2 micro-batches": at(half, accumulation=2),
        f"batch {quarter}, 4 micro-batches": at(quarter, accumulation=4),
        "mixed precision (fp16 autocast)": at(batch, **amp),
        f"mixed precision, batch {half}, 2 micro-batches": at(half, accumulation=2, **amp),
        "mixed precision, every block checkpointed": at(batch, checkpoint=True, **amp),
        "mixed precision, every second block checkpointed": at(batch, checkpoint=2, **amp),
        "SGD with momentum": at(batch, optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        "SGD": at(batch, optimizer="sgd"),
        "Adafactor": at(batch, optimizer="adafactor"),
        "bfloat16 parameters and states": at(batch, precision="bf16"),
        "inference": at(batch, mode="inference"),
    }
    rows.update(_with_storage(at, batch, amp))
    model.requires_grad_(False)
    model.classify.requires_grad_(True)
    rows["only the classifier trained"] = at(batch, mode="finetune")
    model.requires_grad_(True)
    if picture:
        rows["as it is"].plot(PICTURE)
    return {
        "layers": layers,
        "batch": batch,
        "length": length,
        "budget": budget,
        "parameters": rows["as it is"].parameters.count,
        "rows": {name: _numbers(report) for name, report in rows.items()},
        "table": str(rows["as it is"]),
        "plan": planned(layers, batch, length, budget),
        "tensor_parallel": shared_layers(layers, batch, length),
    }


def _with_storage(at: Any, batch: int, amp: dict[str, Any]) -> dict[str, MemoryReport]:
    return {
        "mixed precision, activations stored as int8": at(batch, store="int8", **amp),
        "mixed precision, every block checkpointed, int8 inputs": at(batch, checkpoint=True, store="int8", **amp),
    }


def _numbers(report: MemoryReport) -> dict[str, Any]:
    return {
        "peak": report.peak.bytes,
        "where": report.peak.where,
        "whole": report.whole,
        "reserved": report.cuda.reserved if report.cuda else None,
        "expandable": report.cuda.expandable_reserved if report.cuda else None,
    }


def planned(layers: int, batch: int, length: int, budget: str) -> dict[str, Any]:
    """The plan for the case in mixed precision, and what is said of a budget that is too small."""
    model, tokens, labels = case(layers, batch, length)
    planner = Planner(
        model,
        tokens,
        loss=F.cross_entropy,
        targets=labels,
        device="cuda",
        precision="fp16-amp",
        micro_batches=False,
        margin=MARGIN,
    )
    found = planner.plan(budget)
    try:
        planner.plan("1GiB")
        impossible = ""
    except DoesNotFit as problem:
        impossible = str(problem)
    return {**found.as_dict(), "text": found.describe(times=False), "impossible": impossible}


def verified(layers: int, width: int, batch: int, length: int) -> dict[str, Any]:
    """Plans of a small classifier, run on this CPU."""
    torch.manual_seed(0)
    model = Classifier(layers, width, 4, 2000, length)
    tokens, labels = torch.randint(2000, (batch, length)), torch.randint(4, (batch,))
    planner = Planner(model, tokens, loss=F.cross_entropy, targets=labels, micro_batches=False)
    whole = planner.plan("1TB").keep_peak
    rows = []
    for share in (1.0, 0.8, 0.6, 0.45) if layers > 2 else (1.0, 0.8):
        found = planner.plan(int(share * whole))
        run = found.verify(repeats=5)
        rows.append(
            {
                "budget": found.budget,
                "checkpointed": list(found.treatments.values()).count("checkpoint"),
                "predicted_peak": run.predicted_peak,
                "peak": run.peak,
                "predicted_seconds": run.predicted_seconds,
                "seconds": run.seconds,
            }
        )
    return {"layers": layers, "width": width, "batch": batch, "length": length, "rows": rows}


# --- the page ---


def tables(content: dict[str, Any]) -> dict[str, str]:
    main, small = content["case"], content["verified"]
    rows = main["rows"]
    limit = (1 - MARGIN) * main["budget_bytes"]

    def line(name: str) -> str:
        row = rows[name]
        fits = "yes" if row["peak"] <= limit else "no"
        whole = row["whole"]
        cells = [whole["optimizer states"], whole["gradients"], whole["activations"], row["peak"]]
        return f"| {name} | " + " | ".join(format_bytes(cell) for cell in cells) + f" | {fits} |"

    def table(names: list[str]) -> str:
        head = "| | optimizer states | gradients | activations | peak | fits |\n|---|--:|--:|--:|--:|--:|"
        return "\n".join([head, *(line(name) for name in names)])

    def timed(row: dict[str, Any], which: str) -> str:
        return f"{1e3 * row[which]:.0f} ms, {row[which] / small['rows'][0][which]:.2f} x"

    names = list(rows)
    start = rows["as it is"]
    sharded = start["peak"] - start["whole"]["optimizer states"] * 7 // 8
    fully = start["peak"] - (start["whole"]["parameters"] + start["whole"]["optimizer states"]) * 7 // 8
    plans = [
        "| budget | blocks checkpointed | predicted peak | measured peak | predicted time | measured time |",
        "|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {format_bytes(r['budget'])} | {r['checkpointed']} of {small['layers']} "
            f"| {format_bytes(r['predicted_peak'])} | {format_bytes(r['peak'])} "
            f"| {timed(r, 'predicted_seconds')} | {timed(r, 'seconds')} |"
            for r in small["rows"]
        ),
        "",
        f"<sub>{small['layers']} layers, width {small['width']}, batch {small['batch']} of {small['length']} tokens, "
        f"float32, {content['machine']}; medians of processor time; x: of the step as it is</sub>",
    ]
    fragments = [
        "| | peak of tensors | reserved | reserved, expandable segments |",
        "|---|--:|--:|--:|",
        *(
            f"| {name} | {format_bytes(rows[name]['peak'])} | {format_bytes(rows[name]['reserved'])} "
            f"| {format_bytes(rows[name]['expandable'])} |"
            for name in ("as it is", "mixed precision (fp16 autocast)", "mixed precision, every block checkpointed")
        ),
    ]
    parallel = [
        "| on 8 devices, batch the same on each | peak of one |",
        "|---|--:|",
        f"| data parallel (DDP): a whole copy each, and buckets as large as the gradients | "
        f"{format_bytes(start['peak'] + start['whole']['gradients'])} |",
        f"| optimizer states sharded (ZeroRedundancyOptimizer) | {format_bytes(sharded)} |",
        f"| parameters and states sharded (FSDP) | {format_bytes(fully)} |",
        f"| layers split over {SHARERS} of them (tensor parallel) | "
        f"{format_bytes(main['tensor_parallel'][str(SHARERS)]['peak'])} |",
    ]
    return {
        "start": "```\n" + main["table"] + "\n```",
        "batch": table([n for n in names if n.startswith(("as it is", "batch"))]),
        "precision": table([n for n in names if n.startswith(("as it is", "mixed precision (", "bfloat16"))]),
        "checkpoint": table([n for n in names if "check" in n and "int8" not in n]),
        "storage": table([n for n in names if "int8" in n]),
        "optimizer": table([n for n in names if n in ("as it is", "SGD with momentum", "SGD", "Adafactor")]),
        "finetune": table([n for n in names if n.startswith(("only", "inference"))]),
        "plan": "```\n" + main["plan"]["text"] + "\n```",
        "impossible": "```\n" + main["plan"]["impossible"] + "\n```",
        "verified": "\n".join(plans),
        "fragmentation": "\n".join(fragments),
        "parallel": "\n".join(parallel),
    }


def page_with(content: dict[str, Any], page: str) -> str:
    for name, table in tables(content).items():
        pattern = rf"(<!-- memory {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(pattern, lambda m, table=table: m[1] + table + "\n" + m[2], page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE.name} must have one place for <!-- memory {name} -->, it has {count}")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of two layers, to try the script; writes nothing")
    parser.add_argument("--check", action="store_true", help="only compare the page with the JSON")
    parser.add_argument(
        "--only",
        choices=["case", "plan", "tensor-parallel", "verified", "page"],
        help="make one part anew, keep the others",
    )
    options = parser.parse_args()
    if options.check:
        content = json.loads(RESULTS.read_text())
        return int(page_with(content, PAGE.read_text()) != PAGE.read_text())
    torch.set_num_threads(1)
    content = {} if options.small or not options.only else json.loads(RESULTS.read_text())
    size = {"layers": 2, "batch": 8, "length": 64} if options.small else {"layers": 12, "batch": 32, "length": 512}
    if options.only in (None, "case"):
        content["case"] = {
            **steps(**size, budget=BUDGET, picture=not options.small),
            "budget_bytes": parse_bytes(BUDGET),
        }
    if options.only == "plan":
        content["case"]["plan"] = planned(**size, budget=BUDGET)
    if options.only == "tensor-parallel":
        content["case"]["tensor_parallel"] = shared_layers(**size)
    if options.only in (None, "verified"):
        content["machine"] = f"torch {torch.__version__}, one thread of a {platform.machine()} CPU"
        content["verified"] = verified(2 if options.small else 6, 128, 4 if options.small else 16, 128)
    if options.small:
        print(json.dumps(content["verified"], indent=1))
        print("\n\n".join(tables(content).values()))
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    PAGE.write_text(page_with(content, PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
