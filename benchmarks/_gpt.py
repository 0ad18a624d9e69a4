"""The GPT that the activation benchmarks train: pre-norm blocks, dropout on the residual branches."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 1024


class Block(nn.Module):
    """(batch, seq, width) in and out."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = width // 32, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


Runner = Callable[[Iterable[nn.Module], Tensor], Tensor]
Call = Callable[..., Any]


def in_turn(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def call(function: Call, *args: Any) -> Any:
    return function(*args)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def forward(self, inputs: Tensor, targets: Tensor, run: Runner = in_turn, run_loss: Call = call) -> Tensor:
        """The mean loss. run: how the blocks are run (checkpointed, say); run_loss: how the head is."""
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        return run_loss(self._loss, run(self.blocks, x), targets)


def text() -> Tensor:
    """Bytes of some of the standard library's source, as int64: real text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    contents = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8).long()


def batch(data: Tensor, size: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets of (size, seq), from random places."""
    starts = torch.randint(len(data) - seq - 1, (size, 1), generator=generator)
    rows = data[starts + torch.arange(seq + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
