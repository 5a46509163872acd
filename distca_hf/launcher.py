"""Launcher: where torchrun and accelerate look for the error that ended a process, to show it in their summary."""

import contextlib
import json
import os
import time
from pathlib import Path

from distca_hf.config import launched_error_file


def leave_for_launcher(words: str, follows: bool = False) -> None:
    """Leaves words in the file that the launcher reads when this process has failed; does nothing if there is no such
    file, or words are there already (of `torch.distributed.elastic`'s `record`).

    Args:
        follows: whether another process ended first. The launcher shows the one with the earliest second as the cause.
    """
    name = launched_error_file()
    if name is None:
        return
    # The form of torch.distributed.elastic; with a call stack the summary would show that in place of the message.
    content = {"message": {"message": words, "extraInfo": {"timestamp": str(int(time.time()) + follows)}}}
    whole = Path(f"{name}.{os.getpid()}")  # the launcher itself fails if it finds a part
    try:
        if not Path(name).exists():
            whole.write_text(json.dumps(content), encoding="utf-8")
            whole.replace(name)
    except OSError:  # the error itself is shown all the same
        with contextlib.suppress(OSError):
            whole.unlink()
