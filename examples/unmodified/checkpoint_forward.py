"""Activation checkpointing inside a model's forward, with torch.utils.checkpoint.

python examples/unmodified/checkpoint_forward.py
python -m fastamp run --storage int8 --report examples/unmodified/checkpoint_forward.py
"""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Network(nn.Module):
    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Network(width=64, depth=4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)

for step in range(args.steps):
    inputs = torch.randn(64, 64, device=device)
    targets = inputs[:, :10].argmax(dim=1)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step + 1}: loss {loss.item():.6f}")
