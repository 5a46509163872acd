"""Launcher: where torchrun and accelerate look for the error that ended a process, to show it in their summary."""

import json
import time
from pathlib import Path

from distca_hf.config import launched_error_file


def leave_for_launcher(words: str) -> None:
    """Leaves words in the file that the launcher reads when this process has failed; does nothing if there is no such
    file, or somebody has written to it (`torch.distributed.elastic`'s `record`)."""
    name = launched_error_file()
    if name is None:
        return
    # The form of torch.distributed.elastic; with a call stack the summary would show that in place of the message.
    content = {"message": {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        with Path(name).open("x", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError:
        return  # it is there already, or cannot be written; the error itself is shown all the same
