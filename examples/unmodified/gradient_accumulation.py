"""Gradients of several micro-batches, one clipped step: torch.amp on whatever device there is.

python examples/unmodified/gradient_accumulation.py
python -m fastamp run --min-scale 1 --report examples/unmodified/gradient_accumulation.py
"""

import argparse

import torch
from torch import nn
from torch.amp import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--accumulate", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# float16 gradients overflow at this scale, so the first steps are skipped until the scale has come down.
scaler = GradScaler(device, init_scale=2.0**24)

for step in range(args.steps):
    total = 0.0
    for _ in range(args.accumulate):
        inputs = torch.randn(16, 64, device=device)
        targets = inputs[:, :10].argmax(dim=1)
        with autocast(device, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {total:.6f}, scale {scaler.get_scale():g}")
