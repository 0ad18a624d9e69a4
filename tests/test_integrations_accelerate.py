"""accelerate and transformers.Trainer: fastamp's scaler at the places where they take one."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from doc_pages import run_page
from scaler_parity import assert_same
from torch import nn

import fastamp
from fastamp._report import Report
from fastamp.integrations.accelerate import teach_accelerate

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402


def forget_devices():
    """accelerate's choice of a device, which it makes once a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture(autouse=True)
def _a_fresh_accelerate():
    forget_devices()
    yield
    forget_devices()
    fastamp.unpatch()


def test_page():
    names = run_page("integrations/accelerate")
    assert names["accelerator"].optimizer_step_was_skipped is False
    assert names["accelerator"].scaler.get_scale() == 65536.0


class Run:
    """A training run with an accelerator, overflows included."""

    def __init__(self, make_scaler, fused=False, accumulate=1, **kwargs):
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=3, **kwargs)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.skipped = []

    def step(self, number, overflow=False):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        with self.accelerator.accumulate(self.model):
            loss = self.model(x).square().mean() * (float("inf") if overflow else 1.0)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.skipped.append(self.accelerator.optimizer_step_was_skipped)

    def result(self):
        lr = self.optimizer.param_groups[0]["lr"]
        return [p.detach() for p in self.model.parameters()], self.accelerator.scaler.state_dict(), lr


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bit_identical_to_torchs_scaler(accumulate):
    results = []
    for make in (torch.amp.GradScaler, fastamp.GradScaler):
        run = Run(make, accumulate=accumulate)
        for number in range(8):
            run.step(number, overflow=number in (2, 5))
        results.append((run.result(), run.skipped))
    assert_same(results[0], results[1])
    assert True in results[1][1] and False in results[1][1]


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_skipped_step_is_seen_and_holds_the_schedule(fused):
    run = Run(fastamp.GradScaler, fused=fused)
    for number in range(4):
        run.step(number, overflow=number in (0, 2))
    assert run.skipped == [True, False, True, False]
    assert run.scheduler.get_last_lr() == [0.01 * 0.25]


def test_other_scalers_answer_as_before():
    teach_accelerate()
    teach_accelerate()
    run = Run(torch.amp.GradScaler)
    run.step(0, overflow=True)
    run.step(1)
    assert run.skipped == [True, False]
    assert Run(lambda *args, **kwargs: None).optimizer.step_was_skipped is False


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("first", [torch.amp.GradScaler, fastamp.GradScaler], ids=["from torch", "from fastamp"])
@pytest.mark.parametrize("second", [torch.amp.GradScaler, fastamp.GradScaler], ids=["to torch", "to fastamp"])
def test_save_and_load_state(first, second, fused, tmp_path):
    whole = Run(fastamp.GradScaler, fused=fused)
    for number in range(6):
        whole.step(number, overflow=number == 1 and not fused)
    saved = Run(first, fused=fused)
    for number in range(3):
        saved.step(number, overflow=number == 1 and not fused)
    saved.accelerator.save_state(str(tmp_path))
    resumed = Run(second, fused=fused)
    resumed.accelerator.load_state(str(tmp_path))
    for number in range(3, 6):
        resumed.step(number)
    assert_same(resumed.result(), whole.result())


def test_policies_survive_save_and_load_state(tmp_path):
    run = Run(fastamp.GradScaler, min_scale=512.0, hysteresis=2)
    for number in range(5):
        run.step(number, overflow=True)
    assert run.accelerator.scaler.get_scale() == 512.0
    run.accelerator.save_state(str(tmp_path))
    resumed = Run(fastamp.GradScaler)
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.accelerator.scaler.state_dict() == run.accelerator.scaler.state_dict()


def test_accelerate_makes_fastamps_scaler_while_patched():
    from accelerate.utils import GradScalerKwargs
    from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler
    from accelerate.utils.modeling import get_grad_scaler

    kwargs = GradScalerKwargs(init_scale=8.0).to_kwargs()
    with fastamp.patched(min_scale=2.0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = get_grad_scaler(**kwargs)
        fsdp2 = get_fsdp2_grad_scaler(device="cpu", **kwargs)
    assert isinstance(scaler, fastamp.GradScaler) and isinstance(fsdp2, fastamp.GradScaler)
    assert fsdp2.get_scale() == 8.0 and fsdp2.state_dict()["min_scale"] == 2.0
    assert type(get_fsdp2_grad_scaler(device="cpu")) is torch.amp.GradScaler


# ---- transformers ------------------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("transformers"), reason="transformers is not installed"
)


@needs_transformers
def test_transformers_page():
    import transformers

    torchs = torch.utils.checkpoint.checkpoint
    report = Report()
    report.start()
    names = run_page("integrations/transformers")
    report.stop()
    model = names["model"]
    assert all(p.grad is not None for p in model.parameters())
    # A checkpoint for each of two layers kept its input, 4x16x32 floats.
    assert report.formats.keys() == {"int8"} and report.formats["int8"][:2] == [2, 2 * 4 * 16 * 32 * 4]
    assert transformers.modeling_utils.checkpoint is torch.utils.checkpoint.checkpoint is torchs


def train_with_trainer(folder, scaler=None, callbacks=(), **options):
    """scaler: in place of the one that Trainer makes where it makes one, for float16 on a GPU."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    tokens = torch.randint(0, 100, (64, 40), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    usual = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**usual, **options})
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=data, callbacks=[*callbacks]
    )
    if scaler is not None:
        trainer.accelerator.scaler = scaler
    trainer.train()
    return [p.detach() for p in trainer.model.parameters()], trainer.accelerator.scaler.state_dict()


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_trainer_with_a_scaler_checkpointing_and_accumulation(tmp_path, optimizer):
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Has the fifth micro-batch overflow, the first of the second step. Keeps the parameters after each step and
        which steps accelerate took for skipped."""

        def __init__(self):
            self.micro_batches, self.parameters, self.skipped = 0, [], []

        def on_train_begin(self, args, state, control, model, **kwargs):
            model.register_forward_hook(self.forward)

        def forward(self, model, args, output):
            self.micro_batches += 1
            if self.micro_batches == 5:
                output["loss"] = output["loss"] * float("inf")

        def on_step_end(self, args, state, control, model, optimizer, **kwargs):
            self.parameters.append([p.detach().clone() for p in model.parameters()])
            self.skipped.append(optimizer.step_was_skipped)

    def train(scaler):
        watch = Watch()
        _, state = train_with_trainer(tmp_path, scaler, [watch], optim=optimizer)
        return watch.parameters, watch.skipped, state

    settings = {"device": "cpu", "init_scale": 4096.0, "growth_interval": 2}
    expected = train(torch.amp.GradScaler(**settings))
    report = Report()
    report.start()
    with fastamp.patched():
        scaler = torch.amp.GradScaler(**settings)
        result = train(scaler)
    report.stop()
    assert isinstance(scaler, fastamp.GradScaler)
    parameters, skipped, state = result
    if optimizer == "adamw_torch":
        assert_same(result, expected)
    else:
        # With torch's scaler accelerate does not see that a fused step was skipped, and the learning rate moves on.
        assert_same((parameters[:2], state), (expected[0][:2], expected[2]))
    assert skipped == [False, True, False] and state["scale"] == 2048.0
    unchanged = [all(map(torch.equal, *pair)) for pair in itertools.pairwise(parameters)]
    assert unchanged == [True, False]
    assert "scaler: 3 steps, 1 skipped" in "\n".join(report.lines())

    stored = []
    policy = functools.partial(lambda seen, tensor, context: seen.append(tensor.shape) or "int8", stored)
    with fastamp.patched(storage=policy):
        coded = train(torch.amp.GradScaler(**settings))
    # Two layers in each of twelve micro-batches.
    assert len(stored) == 24 and coded[1:] == result[1:]
    distance = sum((a - b).norm() ** 2 for a, b in zip(coded[0][-1], parameters[-1], strict=True)) ** 0.5
    assert 0 < distance < 0.05
