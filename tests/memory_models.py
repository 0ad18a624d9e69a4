"""Small models of the three kinds that the memory tests measure, and a CPU allocator to measure them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class CNN(nn.Module):
    def __init__(self, channels: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                x = self.pool(x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Its head shares the embedding's weight."""

    def __init__(
        self, vocabulary: int = 300, width: int = 64, heads: int = 4, blocks: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BERT(nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.encoder(x)[:, 0])


class Stack(nn.Module):
    """Blocks of a few operators, no two alike, so that which of them is treated matters."""

    def __init__(self, widths: tuple[int, ...] = (128, 192, 160)) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 32)) for width in widths
        )
        self.head = nn.Linear(32, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make(kind: str, device: str = "cpu") -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A model, a batch for it and a loss that holds on to the model's output as long as a training loop would.

    Small on a CPU; on a GPU large enough for the workspaces of its libraries to be small beside it.
    """
    torch.manual_seed(0)
    large = device != "cpu"
    if kind == "cnn":
        model = CNN(64, 4) if large else CNN()
        images = torch.randn(64, 3, 64, 64) if large else torch.randn(8, 3, 32, 32)
        # On a GPU as its convolutions want it: of the other layout they make copies that count in the peak.
        form = torch.channels_last if large else torch.contiguous_format
        model, images = model.to(device, memory_format=form), images.to(device, memory_format=form)
        return model, images, lambda output: output.logsumexp(1).sum()
    make_model = GPT if kind == "gpt" else BERT
    model = make_model(width=512, heads=8, blocks=4) if large else make_model()
    tokens = torch.randint(300, (32, 256) if large else (4, 64)).to(device)
    return (
        model.to(device),
        tokens,
        lambda output: F.cross_entropy(output.flatten(0, -2), tokens.flatten()[: output[..., 0].numel()] % 2),
    )


def allocated_peak(step: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that the device's allocator hands out during `step`, above what there was before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def storage_bytes(*tensors: Tensor) -> int:
    """Bytes of the storages of `tensors`, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def saved_bytes(forward: Callable[[], object], known: tuple[Tensor, ...]) -> int:
    """Bytes that autograd saves in `forward`, each storage once, without those of `known` and of what it returns."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    own = {t.untyped_storage()._cdata for t in (*known, *pytree.tree_leaves(result))}
    return storage_bytes(*(t for t in kept if t.untyped_storage()._cdata not in own))
