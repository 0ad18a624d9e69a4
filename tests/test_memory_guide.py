"""docs/memory-guide.md: its numbers are those of its JSON, and its JSON those that `estimate` gives."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch.nn.functional as F

from fastamp.memory import estimate, format_bytes, parse_bytes

_SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory_guide.py"
_SPEC = importlib.util.spec_from_file_location("memory_guide", _SCRIPT)
guide = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(guide)


@pytest.fixture(scope="module")
def content() -> dict:
    return json.loads(guide.RESULTS.read_text())


def test_tables_are_those_of_the_results(content):
    page = guide.PAGE.read_text()
    assert guide.page_with(content, page) == page
    other = copy.deepcopy(content)
    other["case"]["rows"]["as it is"]["peak"] += 1 << 30
    assert guide.page_with(other, page) != page
    assert f"({guide.PICTURE.name})" in page and guide.PICTURE.stat().st_size > 10_000


def test_numbers_of_the_text_are_those_of_the_results(content):
    case = content["case"]
    text = re.sub(
        r"<!-- memory .*?<!-- end -->|^```.*?^```", "", guide.PAGE.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert f"{case['layers']} layers of width 768" in text
    assert f"{case['parameters'] / 1e6:.0f} million parameters" in text
    assert f"batches of {case['batch']} sequences of {case['length']} tokens" in text
    sizes = {re.sub(r"\s", " ", size) for size in re.findall(r"\d[\d.]*\s[KMGT]i?B", text)}
    assert sizes == {case["budget"]} and parse_bytes(case["budget"]) == case["budget_bytes"]


def test_the_case_does_not_fit_and_the_plan_does(content):
    case = content["case"]
    limit, rows = case["budget_bytes"], case["rows"]
    assert rows["as it is"]["peak"] > limit >= case["plan"]["predicted_peak"]
    assert case["plan"]["budget"] == limit and format_bytes(limit) in case["plan"]["text"]
    plain, *_ = verified = content["verified"]["rows"]
    for row in verified:
        slower, predicted = (row[which] / plain[which] for which in ("seconds", "predicted_seconds"))
        assert predicted == pytest.approx(slower, rel=0.15)
        assert row["peak"] == pytest.approx(row["predicted_peak"], rel=0.1) and row["peak"] <= row["budget"] * 1.01


def test_tensor_parallelism_is_estimated_on_a_share_of_each_layer(content):
    case, shares = content["case"], content["case"]["tensor_parallel"]
    size = [case[name] for name in ("layers", "batch", "length")]
    share = guide.tensor_parallel(*size, guide.SHARERS)
    row = shares[str(guide.SHARERS)]
    assert share.peak.bytes == pytest.approx(row["peak"], rel=0.1)
    # The layer that is not shared is that of the case, and a share has that much less in each layer.
    whole = shares["1"]
    assert whole["whole"]["parameters"] == case["rows"]["as it is"]["whole"]["parameters"]
    assert whole["peak"] == pytest.approx(case["rows"]["as it is"]["peak"], rel=0.1)
    layers = guide.case(*size)[0].layers
    divided = sum(p.nbytes for name, p in layers.named_parameters() if "norm" not in name) * (1 - 1 / guide.SHARERS)
    assert whole["whole"]["parameters"] - row["whole"]["parameters"] == pytest.approx(divided, rel=0.01)
    assert row["whole"]["activations"] < 0.7 * whole["whole"]["activations"]


def test_a_row_is_what_estimate_gives(content):
    case = content["case"]
    model, tokens, labels = guide.case(case["layers"], case["batch"], case["length"])
    report = estimate(model, tokens, optimizer="sgd", loss=F.cross_entropy, targets=labels, device="cuda")
    row = case["rows"]["SGD"]
    assert report.parameters.count == case["parameters"]
    # Another torch may run another kernel.
    assert report.peak.bytes == pytest.approx(row["peak"], rel=0.1)
    assert report.activations == pytest.approx(row["whole"]["activations"], rel=0.1)
