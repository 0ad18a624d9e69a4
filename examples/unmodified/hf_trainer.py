"""transformers.Trainer with gradient checkpointing and accumulation, on a BERT built from a configuration.

python examples/unmodified/hf_trainer.py
python -m fastamp run --storage int8 --report examples/unmodified/hf_trainer.py
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()


class Dataset(torch.utils.data.Dataset):
    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 1000, (size, 32), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens[0] > 500).long()}


torch.manual_seed(0)
config = BertConfig(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=64,
    num_labels=2,
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            gradient_checkpointing=True,
            fp16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset(64),
    )
    trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']}")
