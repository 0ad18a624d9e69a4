"""Parameters of well-known models by their shapes, and small models of the same kinds to train."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """161 tensors, 25.6 million parameters."""

    def convolution(out: int, into: int, kernel: int) -> Iterator[Shape]:
        yield (out, into, kernel, kernel)
        yield from ((out,), (out,))  # the batch norm after it

    yield from convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(width, into, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, into, 1)
            into = 4 * width
    yield from ((1000, 2048), (1000,))


def _linear(out: int, into: int) -> Iterator[Shape]:
    yield from ((out, into), (out,))


def bert_base() -> Iterator[Shape]:
    """199 tensors, 109 million parameters."""
    width = 768
    yield from ((30522, width), (512, width), (2, width), (width,), (width,))
    for _ in range(12):
        for _ in range(4):
            yield from _linear(width, width)
        yield from ((width,), (width,))
        yield from _linear(4 * width, width)
        yield from _linear(width, 4 * width)
        yield from ((width,), (width,))
    yield from _linear(width, width)


def gpt2() -> Iterator[Shape]:
    """148 tensors, 124 million parameters."""
    width = 768
    yield from ((50257, width), (1024, width))
    for _ in range(12):
        yield from ((width,), (width,))
        yield from _linear(3 * width, width)
        yield from _linear(width, width)
        yield from ((width,), (width,))
        yield from _linear(4 * width, width)
        yield from _linear(width, 4 * width)
    yield from ((width,), (width,))


def llama_7b(layers: int) -> Iterator[Shape]:
    """9 tensors and 202 million parameters a layer, of which the model has 32; embeddings left out."""
    width, hidden = 4096, 11008
    for _ in range(layers):
        yield from ((width, width),) * 4
        yield from ((hidden, width), (hidden, width), (width, hidden))
        yield from ((width,), (width,))


SHAPES = {
    "ResNet-50": lambda: list(resnet50()),
    "BERT-base": lambda: list(bert_base()),
    "GPT-2 124M": lambda: list(gpt2()),
    "Llama-7B, 2 of 32 layers": lambda: list(llama_7b(2)),
}


class ConvNet(nn.Module):
    """A residual network for images of 3 x 32 x 32."""

    def __init__(self, width: int = 16, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = F.relu(self.stem(inputs))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


class Classifier(nn.Module):
    """An encoder for sequences, BERT-style."""

    def __init__(self, width: int = 128, layers: int = 4, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(self.embedding(inputs))[:, 0]), targets)


def images(batch: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)


def sentences(batch: int, seq: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randint(1024, (batch, seq), device=device), torch.randint(2, (batch,), device=device)
