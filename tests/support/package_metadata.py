"""Metadata of installed packages, read once in a process.

Accelerate reads those of PEFT at every step, to learn whether it is installed. Where steps are small, that is an
eighth of a training.
"""

import functools
import importlib.metadata


def read_once() -> None:
    """Keeps the metadata of every package that somebody asks for in this process."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
