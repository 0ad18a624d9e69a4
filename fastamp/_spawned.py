"""What a process spawned under `python -m fastamp run` imports as its main program."""

from fastamp.run import enter_spawned

globals().update(enter_spawned())
