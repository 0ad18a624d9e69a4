"""``python -m fastamp demo``: train a small GPT with torch's GradScaler and with fastamp's, and compare.

A byte-level GPT is trained under autocast on the source files of the Python standard library, once for each
recipe of training.py, from one seed and on the same batches. The first recipe is stock torch. Others that are
marked exact must give its losses, scales, weights and optimizer state bit for bit, or the exit code is 1.

examples/train_gpt.py is the same program around a training step that is written out in full.

    command.py    options, main()
    text.py       the bytes to train on
    model.py      the GPT, and the ways to call its blocks
    training.py   recipes, and the jobs that train by them, timed
    memory.py     saved bytes, peak memory, gradient error
    report.py     results, table        plot.py   the PNG
"""

from fastamp.demo.command import main
from fastamp.demo.training import Job, training_step

__all__ = ["Job", "main", "training_step"]
