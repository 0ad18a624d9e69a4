"""Lightning's Trainer and Fabric with fastamp's scaler."""

from __future__ import annotations

import pytest
import torch
from doc_pages import run_page
from scaler_parity import assert_same
from torch import nn

import fastamp

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.precision import MixedPrecision as StockFabric  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision as Stock  # noqa: E402

from fastamp.integrations.lightning import FabricMixedPrecision, MixedPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}


class Model(pl.LightningModule):
    def __init__(self, fused=False, overflows=(), no_loss=()):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 4)
        self.fused, self.overflows, self.no_loss = fused, overflows, no_loss

    def training_step(self, batch, index):
        if index in self.no_loss:
            return None
        return self.layer(batch[0]).square().mean() * (float("inf") if index in self.overflows else 1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


def data():
    x = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)


def trainer(plugin, max_steps=6, accelerator="cpu", **kwargs):
    return pl.Trainer(
        accelerator=accelerator, devices=1, max_steps=max_steps, plugins=plugin, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **kwargs,
    )  # fmt: skip


def fit(plugin, model=None, ckpt_path=None, **kwargs):
    model = model or Model(overflows=(1, 4))
    trainer(plugin, **kwargs).fit(model, data(), ckpt_path=ckpt_path)
    return [p.detach() for p in model.parameters()], plugin.scaler.state_dict()


def test_page():
    names = run_page("integrations/lightning")
    assert names["trainer"].global_step == 3
    assert names["trainer"].precision_plugin.scaler.state_dict()["min_scale"] == 1.0


@pytest.mark.parametrize("plugin", [Stock, MixedPrecision], ids=["Lightning's plugin", "fastamp's plugin"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_trainer_is_bit_identical_to_torchs_scaler(plugin, fused):
    expected = fit(Stock("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SETTINGS)), Model(fused, overflows=(1, 4)))
    result = fit(plugin("16-mixed", "cpu", fastamp.GradScaler("cpu", **SETTINGS)), Model(fused, overflows=(1, 4)))
    assert_same(result, expected)
    assert expected[1]["scale"] != 1024.0


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_trainer_clips_a_fused_optimizers_gradients(algorithm):
    clipping = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Stock("16-mixed", "cpu", fastamp.GradScaler("cpu", **SETTINGS)), Model(fused=True), **clipping)
    expected = fit(Stock("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SETTINGS)), **clipping)
    unclipped = fit(Stock("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SETTINGS)))
    for fused in (False, True):
        plugin = MixedPrecision("16-mixed", "cpu", fastamp.GradScaler("cpu", **SETTINGS))
        result = fit(plugin, Model(fused, overflows=(1, 4)), **clipping)
        assert result[1] == expected[1]
        for mine, truth, other in zip(result[0], expected[0], unclipped[0], strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_a_training_step_without_a_loss():
    plugin = MixedPrecision("16-mixed", "cpu", **SETTINGS)
    result = fit(plugin, Model(fused=True, no_loss=(0, 3)), gradient_clip_val=0.05)
    assert result[1]["scale"] == 2048.0 and result[1]["_growth_tracker"] == 1


def test_policies_go_to_the_scaler_that_is_made():
    assert MixedPrecision("16-mixed", "cpu", min_scale=2.0).scaler.state_dict()["min_scale"] == 2.0
    assert MixedPrecision("bf16-mixed", "cpu").scaler is None
    with pytest.raises(TypeError, match="min_scale can be given for the scaler that the plugin makes"):
        MixedPrecision("16-mixed", "cpu", fastamp.GradScaler("cpu"), min_scale=2.0)


def resume(first, second, path):
    interrupted = trainer(Stock("16-mixed", "cpu", first("cpu", **SETTINGS)), max_steps=2)
    interrupted.fit(Model(overflows=(1, 4)), data())
    interrupted.save_checkpoint(path)
    plugin = Stock("16-mixed", "cpu", second("cpu"))
    return fit(plugin, Model(overflows=(1, 4)), ckpt_path=path, max_steps=6)


@pytest.mark.parametrize("first", [torch.amp.GradScaler, fastamp.GradScaler], ids=["from torch", "from fastamp"])
@pytest.mark.parametrize("second", [torch.amp.GradScaler, fastamp.GradScaler], ids=["to torch", "to fastamp"])
def test_checkpoints_move_both_ways(first, second, tmp_path):
    result = resume(first, second, tmp_path / "model.ckpt")
    assert_same(result, resume(torch.amp.GradScaler, torch.amp.GradScaler, tmp_path / "torch.ckpt"))
    # From the checkpoint, not from a new scaler.
    assert result[1]["growth_interval"] == 3


def test_lightning_makes_fastamps_scaler_while_patched():
    with fastamp.patched(min_scale=2.0):
        plugin = Stock("16-mixed", "cpu")
    assert isinstance(plugin.scaler, fastamp.GradScaler) and plugin.scaler.state_dict()["min_scale"] == 2.0


def fabric_loop(plugin, fused, clip=None, accelerator="cpu"):
    fabric = Fabric(accelerator=accelerator, devices=1, plugins=plugin)
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    for index, (x,) in enumerate(fabric.setup_dataloaders(data())):
        optimizer.zero_grad()
        loss = model(x).square().mean() * (float("inf") if index in (1, 4) else 1.0)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, error_if_nonfinite=False, **clip)
        optimizer.step()
    return [p.detach() for p in model.parameters()], plugin.scaler.state_dict()


@pytest.mark.parametrize("plugin", [StockFabric, FabricMixedPrecision], ids=["Fabric's plugin", "fastamp's plugin"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_fabric_is_bit_identical_to_torchs_scaler(plugin, fused):
    expected = fabric_loop(StockFabric("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SETTINGS)), fused)
    result = fabric_loop(plugin("16-mixed", "cpu", fastamp.GradScaler("cpu", **SETTINGS)), fused)
    assert_same(result, expected)
    assert expected[1]["scale"] != 1024.0


@pytest.mark.parametrize("clip", [{"max_norm": 0.05}, {"clip_val": 0.01}], ids=["norm", "value"])
def test_fabric_clips_a_fused_optimizers_gradients(clip):
    with pytest.raises(NotImplementedError, match="not implemented for optimizers handling the unscaling"):
        fabric_loop(StockFabric("16-mixed", "cpu", fastamp.GradScaler("cpu", **SETTINGS)), True, clip)
    expected = fabric_loop(StockFabric("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SETTINGS)), False, clip)
    result = fabric_loop(FabricMixedPrecision("16-mixed", "cpu", **SETTINGS), True, clip)
    assert result[1] == expected[1]
    for mine, truth in zip(result[0], expected[0], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
