"""fastamp.patch(), unpatch() and patched(): what they replace, what they leave, what training makes of it."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import inspect
import pickle
import subprocess
import sys
import threading
import types
import warnings

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as wrapper
import torch.distributed.fsdp.sharded_grad_scaler
import torch.utils.checkpoint
from torch import nn

import fastamp
from fastamp import patching

SHARDED = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
ORIGINALS = {
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "torch.cuda.amp.GradScaler": torch.cuda.amp.GradScaler,
    "torch.cpu.amp.GradScaler": torch.cpu.amp.GradScaler,
    SHARDED: torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler,
    "torch.utils.checkpoint.checkpoint": torch.utils.checkpoint.checkpoint,
    "torch.utils.checkpoint.checkpoint_sequential": torch.utils.checkpoint.checkpoint_sequential,
}
ALIASES = {
    **{name: name for name in ORIGINALS},
    "torch.GradScaler": "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
    "torch.cpu.amp.grad_scaler.GradScaler": "torch.cpu.amp.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.GradScaler": "torch.amp.GradScaler",
}
SCALERS = [name for name in ORIGINALS if name.endswith("GradScaler")]


@pytest.fixture(autouse=True)
def _torch_gets_its_own_back():
    yield
    fastamp.unpatch()
    assert {name: look_up(name) for name in ORIGINALS} == ORIGINALS


def look_up(path: str):
    value = sys.modules["torch"]
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    return value


def make_scaler(name: str, **kwargs):
    cls = look_up(name)
    if name in ("torch.amp.GradScaler", SHARDED):
        return cls("cpu", **kwargs)
    with warnings.catch_warnings():
        # torch.cuda.amp's on a machine without a GPU warns that it is disabled.
        warnings.simplefilter("ignore")
        return cls(**kwargs)


# ---- what is replaced --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ALIASES)
def test_replaces_and_restores(alias):
    original = ORIGINALS[ALIASES[alias]]
    assert look_up(alias) is original
    fastamp.patch()
    stand_in = look_up(alias)
    assert stand_in is not original and stand_in is look_up(ALIASES[alias])
    if isinstance(original, type):
        assert issubclass(stand_in, fastamp.GradScaler) and issubclass(stand_in, original)
    fastamp.unpatch()
    assert look_up(alias) is original


def test_replaces_names_bound_at_import_and_leaves_other_values(monkeypatch):
    library = types.ModuleType("some_library")
    library.Scaler = torch.cuda.amp.GradScaler
    library.ckpt = torch.utils.checkpoint.checkpoint
    library.number = 5
    monkeypatch.setitem(sys.modules, "some_library", library)
    assert wrapper.torch_utils_checkpoint is ORIGINALS["torch.utils.checkpoint.checkpoint"]
    fastamp.patch()
    assert library.Scaler is torch.cuda.amp.GradScaler is patching.CudaGradScaler
    assert library.ckpt is wrapper.torch_utils_checkpoint is torch.utils.checkpoint.checkpoint is patching.checkpoint
    assert library.number == 5
    fastamp.unpatch()
    assert library.Scaler is ORIGINALS["torch.cuda.amp.GradScaler"]
    assert library.ckpt is wrapper.torch_utils_checkpoint is ORIGINALS["torch.utils.checkpoint.checkpoint"]


def test_restores_names_bound_while_patched(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text(
        "from torch.amp import GradScaler\nfrom torch.utils.checkpoint import checkpoint as ckpt\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with fastamp.patched():
        import imported_late

        assert imported_late.GradScaler is patching.AmpGradScaler
    assert imported_late.GradScaler is ORIGINALS["torch.amp.GradScaler"]
    assert imported_late.ckpt is ORIGINALS["torch.utils.checkpoint.checkpoint"]
    monkeypatch.delitem(sys.modules, "imported_late")


def test_replaces_within_partials():
    model = nn.Linear(2, 2)
    model.run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    bystander = functools.partial(print, torch.utils.checkpoint.checkpoint)
    fastamp.patch()
    assert model.run.func is patching.checkpoint and model.run.keywords == {"use_reentrant": False}
    assert bystander.func is print
    late = functools.partial(torch.utils.checkpoint.checkpoint)
    fastamp.unpatch()
    assert model.run.func is late.func is ORIGINALS["torch.utils.checkpoint.checkpoint"]


def test_lazy_modules_are_not_loaded(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            pytest.fail(f"patch() looked up {name}")

    monkeypatch.setitem(sys.modules, "lazy_library", Lazy("lazy_library"))
    monkeypatch.setitem(sys.modules, "blocked_library", None)
    fastamp.patch()
    fastamp.unpatch()


def test_own_names_stay():
    own = fastamp.GradScaler, fastamp.cuda.amp.GradScaler, fastamp.checkpointing.checkpoint
    fastamp.patch()
    assert own == (fastamp.GradScaler, fastamp.cuda.amp.GradScaler, fastamp.checkpointing.checkpoint)
    assert fastamp.GradScaler("cpu").is_enabled()


def test_idempotent():
    fastamp.patch()
    once = {name: look_up(name) for name in ORIGINALS}
    fastamp.patch()
    assert {name: look_up(name) for name in ORIGINALS} == once
    fastamp.unpatch()
    assert {name: look_up(name) for name in ORIGINALS} == ORIGINALS
    fastamp.unpatch()
    assert not patching.is_patched()


def test_patched_nests_and_leaves_an_outer_patch():
    with fastamp.patched():
        with fastamp.patched():
            pass
        assert torch.amp.GradScaler is patching.AmpGradScaler
    assert torch.amp.GradScaler is ORIGINALS["torch.amp.GradScaler"]
    fastamp.patch()
    with pytest.raises(KeyError), fastamp.patched():
        raise KeyError
    assert torch.amp.GradScaler is patching.AmpGradScaler
    with fastamp.patched():
        fastamp.unpatch()
        assert torch.amp.GradScaler is ORIGINALS["torch.amp.GradScaler"]
    assert torch.amp.GradScaler is ORIGINALS["torch.amp.GradScaler"]


def test_patch_is_a_function_whatever_was_imported_first():
    code = "import fastamp.patching, fastamp; fastamp.patch(); import fastamp.patching; fastamp.unpatch()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch.amp.GradScaler", "torch.cpu.amp.GradScaler", SHARDED])
def test_scaler_options(name):
    fastamp.patch(min_scale=2.0, hysteresis=3)
    scaler = make_scaler(name)
    assert scaler.state_dict()["min_scale"] == 2.0 and scaler.state_dict()["hysteresis"] == 3
    assert make_scaler(name, min_scale=4.0).state_dict()["min_scale"] == 4.0
    fastamp.patch()
    assert "min_scale" not in make_scaler(name).state_dict()


def test_innermost_options_apply():
    fastamp.patch(min_scale=2.0)
    with fastamp.patched(min_scale=8.0):
        assert make_scaler("torch.amp.GradScaler").state_dict()["min_scale"] == 8.0
    assert make_scaler("torch.amp.GradScaler").state_dict()["min_scale"] == 2.0


def test_storage_option_reaches_checkpoint():
    seen = []

    def policy(tensor, context):
        seen.append(context.name)
        return "bf16"

    x = torch.randn(64, 64, requires_grad=True)
    layer = nn.Linear(64, 64)
    with fastamp.patched(storage=policy):
        torch.utils.checkpoint.checkpoint(layer, x * 1, use_reentrant=False).sum().backward()
        assert seen == ["args[0]"]
        torch.utils.checkpoint.checkpoint_sequential([layer, layer], 2, x * 1, use_reentrant=False)
        assert len(seen) == 2
        torch.utils.checkpoint.checkpoint_sequential([layer, layer], 2, x * 1, False)
        assert len(seen) == 3
        torch.utils.checkpoint.checkpoint(layer, x * 1, use_reentrant=False, storage="exact")
        assert len(seen) == 3


def test_storage_makes_reentrant_calls_non_reentrant():
    x = torch.randn(64, 64, requires_grad=True)
    patching._warn_of_reentrant.cache_clear()
    with fastamp.patched(storage="bf16"):
        with pytest.warns(RuntimeWarning, match="use_reentrant=True run as with use_reentrant=False"):
            y = torch.utils.checkpoint.checkpoint(torch.sin, x * 1, use_reentrant=True)
        assert "CheckpointFunction" not in type(y.grad_fn).__name__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.utils.checkpoint.checkpoint(torch.sin, x * 1, use_reentrant=True)
    with fastamp.patched():
        y = torch.utils.checkpoint.checkpoint(torch.sin, x * 1, use_reentrant=True)
        assert "CheckpointFunction" in type(y.grad_fn).__name__


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"min_scal": 1.0},
            TypeError,
            "unknown option min_scal; the scaler takes allow_fp16_grads, hysteresis",
        ),
        ({"use_reentrant": False}, TypeError, "unknown option use_reentrant"),
        ({"min_scale": -1.0}, ValueError, "min_scale must be a positive number, got -1.0"),
        ({"storage": "int7"}, ValueError, "int7"),
    ],
)
def test_unsuitable_options_patch_nothing(options, error, message):
    with pytest.raises(error, match=message):
        fastamp.patch(**options)
    with pytest.raises(error, match=message), fastamp.patched(**options):
        pass
    assert not patching.is_patched() and torch.amp.GradScaler is ORIGINALS["torch.amp.GradScaler"]


@pytest.mark.parametrize("name", SCALERS)
def test_positional_arguments_are_torchs(name):
    fastamp.patch()
    ours = list(inspect.signature(look_up(name)).parameters.values())
    torchs = list(inspect.signature(ORIGINALS[name]).parameters.values())
    assert [(p.name, p.default) for p in ours[:-1]] == [(p.name, p.default) for p in torchs]
    assert ours[-1].kind is inspect.Parameter.VAR_KEYWORD


def test_checkpoint_signature_has_torchs_arguments():
    fastamp.patch()
    torchs = inspect.signature(ORIGINALS["torch.utils.checkpoint.checkpoint"]).parameters
    assert set(torchs) <= set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters)


# ---- isinstance, subclasses, pickles -----------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALERS)
def test_isinstance_both_ways(name):
    torchs = make_scaler(name)
    assert type(torchs) is ORIGINALS[name]
    fastamp.patch()
    ours = make_scaler(name)
    assert isinstance(ours, fastamp.GradScaler)
    for scaler in (torchs, ours):
        assert isinstance(scaler, look_up(name)) and isinstance(scaler, torch.amp.GradScaler)
        assert issubclass(type(scaler), look_up(name))
    fastamp.unpatch()
    for scaler in (torchs, ours):
        assert isinstance(scaler, look_up(name)) and isinstance(scaler, torch.amp.GradScaler)
    assert not isinstance(torchs, fastamp.GradScaler)


def test_isinstance_tells_device_types_apart():
    fastamp.patch()
    cpu, cuda = torch.cpu.amp.GradScaler(), fastamp.GradScaler("cuda", enabled=False)
    assert not isinstance(cpu, torch.cuda.amp.GradScaler)
    assert isinstance(cuda, torch.cuda.amp.GradScaler)
    assert not isinstance(object(), torch.amp.GradScaler) and not issubclass(int, torch.amp.GradScaler)
    for scaler in (cpu, cuda, fastamp.GradScaler("cpu")):
        assert not isinstance(scaler, look_up(SHARDED))


def test_subclasses():
    class Before(torch.amp.GradScaler):
        pass

    fastamp.patch()

    class During(torch.amp.GradScaler):
        pass

    before, during = Before("cpu"), During("cpu")
    assert isinstance(before, torch.amp.GradScaler) and issubclass(Before, torch.amp.GradScaler)
    assert isinstance(during, fastamp.GradScaler)
    assert not isinstance(before, During) and not isinstance(torch.amp.GradScaler("cpu"), During)
    fastamp.unpatch()
    assert isinstance(During("cpu"), torch.amp.GradScaler)


def test_an_abstract_subclass():
    fastamp.patch()

    class Abstract(torch.amp.GradScaler, abc.ABC):
        @abc.abstractmethod
        def hook(self):
            pass

    class Concrete(Abstract):
        def hook(self):
            return self.get_scale()

    with pytest.raises(TypeError, match="abstract"):
        Abstract("cpu")
    assert Concrete("cpu", init_scale=8.0).hook() == 8.0 and isinstance(Concrete("cpu"), torch.amp.GradScaler)


@pytest.mark.parametrize("name", SCALERS)
@pytest.mark.parametrize("move", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "pickle"])
def test_scalers_made_while_patched_copy_and_pickle_after(name, move):
    with fastamp.patched(min_scale=2.0):
        scaler = make_scaler(name)
    moved = move(scaler)
    assert type(moved) is type(scaler) and moved.state_dict() == scaler.state_dict()


def test_models_with_a_checkpoint_in_them_pickle():
    fastamp.patch()
    restored = pickle.loads(pickle.dumps(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)))
    assert restored.func is torch.utils.checkpoint.checkpoint


# ---- FSDP's scaler, which is not imported with torch -------------------------------------------------------

SHARDED_SCRIPT = """
import sys, torch, fastamp
if {before}:
    import torch.distributed.fsdp.sharded_grad_scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as bound
fastamp.patch(min_scale=2.0)
assert {before} or not any(name.startswith("torch.distributed.fsdp") for name in sys.modules)
import torch.distributed.fsdp.sharded_grad_scaler as home
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
if not {before}:
    bound = ShardedGradScaler
assert bound is ShardedGradScaler is home.ShardedGradScaler
scaler = ShardedGradScaler("cpu", 1024.0, 0.25, 4.0, 5)
assert isinstance(scaler, fastamp.GradScaler) and scaler.state_dict() == {{
    "scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 5, "_growth_tracker": 0,
    "min_scale": 2.0,
}}
torchs = ShardedGradScaler.__mro__[ShardedGradScaler.__mro__.index(fastamp.GradScaler) + 1]
fastamp.unpatch()
assert bound is home.ShardedGradScaler is torchs
# As stock as if fastamp were not there.
assert torchs.__mro__ == (torchs, torch.amp.GradScaler, object) and type(torchs) is type
assert home.GradScaler is torch.amp.GradScaler and not any("fastamp.patching" in str(f) for f in sys.meta_path)
stock = home.ShardedGradScaler("cpu")
assert type(stock) is torchs and not isinstance(stock, fastamp.GradScaler) and "min_scale" not in stock.state_dict()
with fastamp.patched():
    assert isinstance(stock, bound) and type(scaler) is bound is home.ShardedGradScaler
assert bound is torchs and isinstance(scaler, torchs)
"""


@pytest.mark.parametrize("before", [True, False], ids=["imported before", "imported while patched"])
def test_sharded_scaler_whenever_it_is_imported(before):
    script = SHARDED_SCRIPT.format(before=before)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_sharded_scaler_unpickles_before_anything_is_imported(tmp_path):
    with fastamp.patched(min_scale=2.0):
        (tmp_path / "scaler").write_bytes(pickle.dumps(make_scaler(SHARDED)))
    for prologue in ("", "import fastamp; fastamp.patch()"):
        code = (
            f"import pickle, torch\n{prologue}\nscaler = pickle.load(open({str(tmp_path / 'scaler')!r}, 'rb'))\n"
            "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
            "assert isinstance(scaler, ShardedGradScaler) and scaler.state_dict()['min_scale'] == 2.0\n"
            f"assert (type(scaler) is ShardedGradScaler) == {bool(prologue)}\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_sharded_scaler_works_without_a_process_group():
    # torch's fails for want of one; there is nothing to combine.
    with fastamp.patched():
        scaler = make_scaler(SHARDED, init_scale=16.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0 and weight.tolist() == [1.0, 1.0]


def test_sharded_scaler_keeps_dtypes():
    with fastamp.patched():
        ours = make_scaler(SHARDED, init_scale=16.0)
    theirs = make_scaler(SHARDED, init_scale=16.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loss = torch.tensor(3.0, dtype=dtype)
        for outputs in (loss, loss.reshape(1), [loss, (loss,)]):
            mine, truth = ours.scale(outputs), theirs.scale(outputs)
            torch.testing.assert_close(mine, truth, rtol=0, atol=0)
    assert ours.scale(torch.ones((), dtype=torch.float16)).dtype is torch.float16


def test_sharded_scaler_disabled_holds_as_little_as_torchs():
    theirs = make_scaler(SHARDED, enabled=False)
    with fastamp.patched():
        assert vars(make_scaler(SHARDED, enabled=False)) == vars(theirs)


# ---- training ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


def train(overflow_at=(2,)):
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 32)).square().mean()
        scaler.scale(loss * (float("inf") if step in overflow_at else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach() for p in model.parameters()], scales, type(scaler)


def test_training_is_bit_identical():
    torchs, torch_scales, torch_type = train()
    with fastamp.patched():
        ours, our_scales, our_type = train()
    assert torch_type is ORIGINALS["torch.amp.GradScaler"] and our_type is patching.AmpGradScaler
    assert torch_scales == our_scales and 512.0 in our_scales
    assert all(torch.equal(a, b) for a, b in zip(torchs, ours, strict=True))


def test_checkpoint_wrapper_uses_the_stand_in():
    seen = []
    layer = wrapper.checkpoint_wrapper(nn.Linear(64, 64))
    with fastamp.patched(storage=lambda tensor, context: seen.append(context.name) or "exact"):
        layer(torch.randn(64, 64, requires_grad=True) * 1).sum().backward()
    assert seen == ["args[0]"]


def test_tracing_while_patched_reaches_torchs_checkpoint():
    from torch.fx.experimental.proxy_tensor import make_fx

    fastamp.patch()
    for function in (torch.utils.checkpoint.checkpoint, fastamp.checkpointing.checkpoint):
        run = functools.partial(function, torch.sin, use_reentrant=False)
        graph = make_fx(lambda x: run(x))(torch.randn(3))  # noqa: B023
        assert "aten.sin" in graph.code


# ---- threads -----------------------------------------------------------------------------------------------


def test_overlapping_blocks_in_threads():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with fastamp.patched(min_scale=2.0):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    with fastamp.patched():
        thread.start()
        assert entered.wait(30)
    assert torch.amp.GradScaler is patching.AmpGradScaler
    leave.set()
    thread.join()
    assert torch.amp.GradScaler is ORIGINALS["torch.amp.GradScaler"]


@pytest.mark.parametrize("how", ["patched", "patch"])
def test_one_thread_takes_out_while_another_puts_in(monkeypatch, how):
    """What the first has begun ends before the second begins: it is held up as it gives torch its own back."""
    rebind = patching._rebind
    taking_out, put_in = threading.Event(), threading.Event()

    def slowly(replacements):
        if threading.current_thread() is first:
            # As long as it takes a thread that no lock keeps from it.
            taking_out.set()
            put_in.wait(1.0)
        rebind(replacements)
        if threading.current_thread() is second:
            put_in.set()

    def take_out():
        with fastamp.patched() if how == "patched" else contextlib.nullcontext():
            monkeypatch.setattr(patching, "_rebind", slowly)
            if how == "patch":
                fastamp.unpatch()

    def put_in_again():
        assert taking_out.wait(30)
        if how == "patch":
            fastamp.patch(min_scale=4.0)
        with fastamp.patched(min_scale=4.0) if how == "patched" else contextlib.nullcontext():
            first.join(30)
            seen.append((torch.amp.GradScaler, torch.amp.GradScaler("cpu").state_dict().get("min_scale")))

    seen = []
    if how == "patch":
        fastamp.patch()
    first, second = threading.Thread(target=take_out), threading.Thread(target=put_in_again)
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join(60)
    assert seen == [(patching.AmpGradScaler, 4.0)]
    fastamp.unpatch()
    assert torch.amp.GradScaler is ORIGINALS["torch.amp.GradScaler"]
