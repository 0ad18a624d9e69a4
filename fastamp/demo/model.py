"""A byte-level GPT, and the ways to call its blocks: plainly, or recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

BlockRunner = Callable[[nn.ModuleList, Tensor], Tensor]
"""Calls blocks one after the other: (blocks, x of shape (batch, seq, width)) -> a tensor like x."""


class Block(nn.Module):
    """A pre-norm transformer block: (batch, seq, width) in and out."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.heads = width // 16
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, seq, width)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


def run_plainly(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpoint_with_torch(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


def checkpoint_with_fastamp(storage: str) -> BlockRunner:
    """Keeps each block's input in the format ``storage``, and recomputes the block from it for backward."""
    import fastamp

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        if storage.startswith("delta-"):  # codes a block's input as its difference from the one before
            return fastamp.checkpoint_stack(blocks, x, storage=storage)
        for block in blocks:
            x = fastamp.checkpoint(block, x, storage=storage)
        return x

    return run


class GPT(nn.Module):
    """Predicts each next byte. ``run_blocks`` is how its blocks are called: where checkpointing goes in."""

    def __init__(self, layers: int, width: int, seq: int, dropout: float = 0.0, run_blocks: BlockRunner = run_plainly):
        super().__init__()
        self.run_blocks = run_blocks
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Nats per sequence, mean over the batch. inputs, targets: (batch, seq) int64."""
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.run_blocks(self.blocks, x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / inputs.shape[0]
