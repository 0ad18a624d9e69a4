"""A BERT classifier from transformers, built from a configuration (no download), with gradient checkpointing.

python examples/unmodified/bert_classifier.py
python -m fastamp run --storage int8 --report examples/unmodified/bert_classifier.py
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = BertConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=64,
    num_labels=2,
)
model = BertForSequenceClassification(config).to(device)
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler(device)

for step in range(args.steps):
    tokens = torch.randint(0, 1000, (16, 32), device=device)
    labels = (tokens[:, 0] > 500).long()
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = model(input_ids=tokens, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step + 1}: loss {loss.item():.6f}")
