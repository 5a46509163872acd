"""Launcher: the file from which torchrun and accelerate read the error that ended a process, for their summary."""

import contextlib
import json
import os
import time
from pathlib import Path

from distca_hf.config import launched_error_file


def leave_for_launcher(words: str, follows: bool = False) -> None:
    """Writes an error into the file that the launcher reads if this process fails.

    Nothing is written if the launcher named no file, or if it exists already (`torch.distributed.elastic`'s `record`).

    Args:
        words: the error.
        follows: whether another process failed first. The launcher shows the error with the earliest second as cause.
    """
    name = launched_error_file()
    if name is None:
        return
    # The format of torch.distributed.elastic. With a call stack, its summary would not show the message.
    content = {"message": {"message": words, "extraInfo": {"timestamp": str(int(time.time()) + follows)}}}
    whole = Path(f"{name}.{os.getpid()}")  # renamed when complete: a partial file would make the launcher fail
    try:
        if not Path(name).exists():
            whole.write_text(json.dumps(content), encoding="utf-8")
            whole.replace(name)
    except OSError:  # the error is printed in any case
        with contextlib.suppress(OSError):
            whole.unlink()
