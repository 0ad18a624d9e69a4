"""fastamp in a training loop, and the proof that nothing else changed.

    python examples/train_gpt.py                    # about a minute, on one core
    python examples/train_gpt.py --dtype fp16 --out plot.png --json numbers.json

One line of an existing loop changes:

    - scaler = torch.amp.GradScaler("cuda")
    + scaler = fastamp.GradScaler("cuda")

This program trains a byte-level GPT on the source of Python's standard library, three times side by side,
from one seed: with torch's scaler, with fastamp's in the same lines, with fastamp's own clipping call. The
first two must agree in every bit of every loss, scale and weight, skipped steps included; the exit code is 1
if they do not.

`training_step` below is the whole body of the loop: put yours in its place to see whether it still gives the
same bits, and what the scaler takes of a step. Model, text, clocks, table and plot are in fastamp/demo.
`python -m fastamp demo` runs the same program without a checkout.
"""

import sys

import torch

from fastamp import demo


def training_step(job, micro_batches):
    """One optimizer step: gradients of all micro-batches are accumulated, clipped and applied.

    Returns the step's loss.
    """
    model, optimizer, scaler = job.model, job.optimizer, job.scaler
    losses = []

    for inputs, targets in micro_batches:
        # store() does nothing unless asked for: with --store int8 it is fastamp.store_activations("int8"),
        # which keeps what autograd saves in a quarter of the bytes.
        with (
            torch.autocast(job.device.type, dtype=job.dtype, enabled=job.dtype != torch.float32),
            job.store(),
        ):
            loss = model(inputs, targets) / len(micro_batches)
        # A loss that is multiplied by the scale makes gradients that float16 can hold.
        scaler.scale(loss).backward()
        losses.append(loss.detach())

    if job.fused_clip:
        # fastamp's own call unscales, looks for inf and NaN and takes the norm in one pass over the
        # gradients, and makes another only if they have to be clipped.
        scaler.clip_grad_norm_(optimizer, job.max_norm)
    else:
        # The lines for torch's scaler, which work unchanged with fastamp's.
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)

    scaler.step(optimizer)  # skipped if a gradient was inf or NaN
    scaler.update()  # a smaller scale after a skipped step, a larger one after many that were not
    optimizer.zero_grad()
    return torch.stack(losses).sum()


if __name__ == "__main__":
    sys.exit(demo.main(step=training_step, prog="python examples/train_gpt.py"))
