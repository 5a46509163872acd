"""Checkpoints: is the one that a Trainer is to resume from whole?

Trainer writes its state last. A disk that was full, or a process that was killed while it saved, leaves a folder
without it, and `resume_from_checkpoint=True` takes the newest folder.
"""

import json
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from distca_hf.errors import ConfigError


def check_checkpoint(output_dir: str, resume_from_checkpoint: Any) -> None:
    """Checks that a checkpoint has been written to its end.

    Args:
        output_dir: where the Trainer saves.
        resume_from_checkpoint: as given to `Trainer.train`: a folder, True for the newest one, or nothing.

    Raises:
        ConfigError: it has not, or is not there; names the newest one that has.
    """
    if not resume_from_checkpoint:
        return
    named = isinstance(resume_from_checkpoint, str | Path)
    given = resume_from_checkpoint if named else get_last_checkpoint(output_dir)
    if given is None or not Path(given).is_dir():
        raise ConfigError(
            f"there is no checkpoint to resume from at {given or output_dir}: name the folder of one (checkpoint-9), "
            "or leave resume_from_checkpoint out to begin anew"
        )
    reason = _reason_against(Path(given))
    if reason is None:
        return
    whole = [folder for folder in Path(given).parent.glob("checkpoint-*") if _reason_against(folder) is None]
    newest = max(whole, key=_step_of, default=None)
    advice = f'resume_from_checkpoint="{newest}" goes on from there' if newest else "no whole checkpoint is beside it"
    raise ConfigError(
        f"{given} was not written to its end: {reason}. The disk was full, or a process ended while it saved; {advice}"
    )


def _reason_against(folder: Path) -> str | None:
    """Returns why a checkpoint is not whole; None if it is."""
    state = folder / TRAINER_STATE_NAME
    if not state.is_file():
        return f"it has no {TRAINER_STATE_NAME}"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"its {TRAINER_STATE_NAME} ends early ({error})"
    return None


def _step_of(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
