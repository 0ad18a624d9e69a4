"""The mixed-precision loop of most articles: torch.cuda.amp's autocast and GradScaler.

    python examples/unmodified/amp_loop.py
    python -m fastamp run --report examples/unmodified/amp_loop.py

Without a GPU, torch.cuda.amp turns autocast and the scaler off and the loop trains in float32.
"""

import argparse
import warnings

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

# torch.cuda.amp is deprecated, and says so, and what it does without a GPU, at every turn.
warnings.filterwarnings("ignore", message=".*torch.cuda.amp")
warnings.filterwarnings("ignore", message=".*CUDA is not available")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler()

for step in range(args.steps):
    inputs = torch.randn(32, 64, device=device)
    targets = inputs[:, :10].argmax(dim=1)
    optimizer.zero_grad()
    with autocast():
        loss = nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.6f}")
