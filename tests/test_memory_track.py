"""`fastamp.memory.track`: a live step, its table, its JSON and its picture."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import weakref

import pytest
import torch
from memory_models import GPT, allocated_peak, make, storage_bytes
from torch import Tensor, nn

from fastamp.memory import MemoryReport, estimate, track
from fastamp.memory._trace import CATEGORIES
from fastamp.memory.track import _Counters


@pytest.fixture(scope="module")
def trained():
    """A model whose optimizer has its states, and a function that takes one step."""
    model, tokens, loss = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        output = model(tokens)
        loss(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, tokens, loss, optimizer, step


@pytest.fixture(scope="module")
def report(trained) -> MemoryReport:
    model, tokens, _, optimizer, step = trained
    with track(model, optimizer, inputs=tokens) as report:
        step()
    return report


def test_the_peak_is_the_allocators(trained, report):
    model, tokens, _, optimizer, step = trained
    states = [t for state in optimizer.state.values() for t in state.values()]
    standing = storage_bytes(*model.parameters(), *model.buffers(), tokens, *states)
    real = standing + allocated_peak(step)
    assert abs(report.peak.bytes - real) <= 0.02 * real


def test_a_live_step_is_what_was_estimated(trained, report):
    model, tokens, loss, _, _ = trained
    expected = estimate(model, tokens, loss=loss)
    assert report.source == "measured" and expected.source == "estimated"
    for category in ("parameters", "optimizer states", "gradients", "activations", "outputs"):
        assert report.whole[category] == pytest.approx(expected.whole[category], rel=0.001, abs=64), category
    assert report.peak.bytes == pytest.approx(expected.peak.bytes, rel=0.001)
    assert (report.peak.phase, report.peak.module) == (expected.peak.phase, expected.peak.module)
    assert report.activations_by_module == pytest.approx(expected.activations_by_module, abs=64)


def test_phases_times_and_holders(report):
    phases = [sample.phase for sample in report.timeline]
    firsts = [phases.index(phase) for phase in ("forward", "backward", "optimizer")]
    assert firsts == sorted(firsts) and set(phases) == {"forward", "backward", "optimizer"}
    seconds = [sample.seconds for sample in report.timeline]
    assert seconds == sorted(seconds) and 0 < seconds[-1] <= report.seconds
    assert max(sum(sample.bytes) for sample in report.timeline) == report.peak.bytes
    assert sum(holder.bytes for holder in report.peak.holders) <= report.peak.bytes
    assert any(h.module.startswith("blocks.") and h.category == "activations" for h in report.peak.holders)
    text = str(report)
    assert "measured: GPT, AdamW, on cpu" in text and "Held at the peak" in text
    if sys.platform == "linux":
        assert report.measured["growth of the resident set"] >= 0 and "resident set" in text


def test_several_steps_and_micro_batches(trained):
    model, tokens, loss, optimizer, _ = trained
    with track(model, optimizer) as report:
        for _ in range(2):
            for _ in range(2):
                loss(model(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
    phases = [sample.phase for sample in report.timeline]
    changes = [phases[0]] + [b for a, b in itertools.pairwise(phases) if a != b]
    assert changes == 2 * ["forward", "backward", "forward", "backward", "optimizer"]
    # From the second micro-batch on there are gradients at the peak.
    assert report.peak.breakdown["gradients"] > 0.9 * report.gradients > 0


def test_the_first_step_shows_states_being_made():
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    optimizer = torch.optim.Adam(model.parameters())
    with track(model, optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    assert report.optimizer_states == pytest.approx(2 * report.whole["parameters"], abs=64)
    assert report.peak.breakdown["gradients"] == report.whole["parameters"]
    assert report.whole["inputs"] == x.nbytes


def test_states_are_states_from_when_they_are_made():
    model, x = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), torch.randn(1, 128)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with track(model, optimizer) as report:
        model(x).sum().backward()
        optimizer.step()
    states, temporaries = CATEGORIES.index("optimizer states"), CATEGORIES.index("temporaries")
    during = [sample.bytes for sample in report.timeline if sample.phase == "optimizer"]
    one_layer = model[0].weight.nbytes
    assert max(sample[temporaries] for sample in during) < 2.1 * one_layer  # the scratch of one parameter at a time
    assert len({sample[states] for sample in during}) > 4  # they come one by one
    assert report.peak.phase == "optimizer" and report.peak.breakdown["optimizer states"] >= 3 * one_layer
    assert all(h.category == "optimizer states" for h in report.peak.holders if "zeros_like" in h.op)


def test_frozen_and_sparse_parameters():
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8).requires_grad_(False)
    model = nn.Sequential(table, head)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with track(model, optimizer) as report:
        model(torch.tensor([1, 2, 3])).sum().backward()
        optimizer.step()
    assert 0 < report.gradients < table.weight.nbytes
    assert report.optimizer_states == 2 * table.weight.nbytes
    assert report.parameters.trainable_count == table.weight.numel()


def test_a_step_that_fails_is_reported_up_to_there(trained):
    model, tokens, loss, optimizer, _ = trained
    with pytest.raises(IndexError), track(model, optimizer) as report:
        loss(model(tokens)).backward()
        raise IndexError
    optimizer.zero_grad()
    assert report.peak.phase == "backward" and report.gradients > 0


def test_inference_keeps_no_activations(trained):
    model, tokens, *_ = trained
    with torch.no_grad(), track(model) as report:
        output = model(tokens)
    assert report.activations == report.gradients == 0
    assert report.whole["outputs"] == output.nbytes
    assert report.regime.startswith("Inference")


def test_nothing_is_left_behind_or_kept_alive(trained):
    model, tokens, loss, optimizer, _ = trained
    resize = torch.UntypedStorage.resize_
    hooks = len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
    steps = len(optimizer._optimizer_step_post_hooks)
    with track(model, optimizer) as report:
        output = model(tokens)
        dead = weakref.ref(output)
        loss(output).backward()
        del output
        gc.collect()
        assert dead() is None
        optimizer.zero_grad()
    assert torch.UntypedStorage.resize_ is resize
    assert hooks == (
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_forward_pre_hooks),
    )
    assert len(optimizer._optimizer_step_post_hooks) == steps
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    count = len(report.timeline)
    loss(model(tokens)).backward()
    optimizer.zero_grad()
    assert len(report.timeline) == count


def test_tracked_results_are_the_untracked_ones():
    model, tokens, loss = make("cnn")
    grads: list[list[Tensor]] = []
    for tracked in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        if tracked:
            with track(model):
                loss(model(tokens)).backward()
        else:
            loss(model(tokens)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_cuda_counters_tell_reserved_from_allocated(monkeypatch):
    """The bookkeeping, with a stand-in for the device's statistics; test_memory_cuda.py has the real ones."""
    stats = {
        "allocated_bytes.all.peak": 700,
        "reserved_bytes.all.peak": 1000,
        "inactive_split_bytes.all.peak": 200,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    counters = _Counters("cuda:0", 0.001)
    counters.start()
    found = counters.stop()
    report = MemoryReport(source="measured", measured=found)
    assert report.fragmentation == 300 and found["peak of free pieces in segments in use"] == 200
    text = str(report)
    assert "(measured): at most 700 B allocated and 1000 B reserved,\n  so 300 B (30%) beyond" in text
    assert "Measured peak of free pieces in segments in use: 200 B" in text and "Measured peak reserved" not in text


def test_a_cpu_has_no_reserved_memory_to_speak_of(report):
    assert report.fragmentation is None and "(measured)" not in str(report)


# --- the report's other forms ---


def test_json_holds_everything(report, tmp_path):
    path = tmp_path / "memory.json"
    text = report.to_json(path)
    assert path.read_text() == text + "\n"
    read = json.loads(text)
    assert read["peak"]["bytes"] == report.peak.bytes
    assert sum(read["peak"]["breakdown"].values()) == report.peak.bytes
    assert read["whole"] == report.whole
    assert len(read["timeline"]["samples"]) == len(report.timeline)
    assert read["cuda"]["reserved"] == report.cuda.reserved


def test_a_long_timeline_is_thinned_but_keeps_its_peak():
    from fastamp.memory import report as module

    series = [module.Sample(n, "forward", (n % 997,)) for n in range(10_000)]
    thin = module._thinned(series, 100)
    assert len(thin) == 100 and max(s.bytes for s in thin) == (996,)
    assert [s.seconds for s in thin] == sorted(s.seconds for s in thin)


def test_plot_draws_stack_phases_and_peak(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        report.plot(tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    for word in ("activations", "optimizer states", "forward", "backward", "peak", "time (ms", "at the peak"):
        assert word in drawn, word


def test_plot_says_what_is_missing(report, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no timeline"):
        MemoryReport().plot(tmp_path / "x.png")
    pytest.importorskip("matplotlib")
    with pytest.raises(TypeError, match=r'plot: path must be the name of a file such as "memory.png", got NoneType'):
        report.plot(None)
    with pytest.raises(ValueError, match=r"plot: path must end with one of \..*, \.png, .*, got 'memory.doc'"):
        report.plot("memory.doc")
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib; get it with: .*pip install matplotlib"):
        report.plot(tmp_path / "x.png")


def test_bad_arguments(trained):
    model, *_ = trained
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        track([model])
    with pytest.raises(TypeError, match="track: optimizer must be a torch optimizer or None, got str"):
        track(model, "adamw")
    with track(model):
        with pytest.raises(RuntimeError, match="another track is active"), track(GPT()):
            pass
    with track(model):  # and the failed one has not blocked the next
        pass
