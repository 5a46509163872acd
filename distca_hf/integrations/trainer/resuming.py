"""Resuming: a Trainer continues at the saved position in the data, and counts epochs and steps from there.

Trainer saves only the number of steps and derives its place in the data from it, with one number of steps for all
epochs. If ranks, tokens or accumulation steps have changed, that is a different place. And the epoch in which it
resumes has a different number of steps than later epochs. So Trainer is given two numbers: the epoch of the saved
position, and the steps left in it. The loader begins at the position. Transformers has no public interface for this.
Methods of the instance are replaced; the class and every other Trainer stay as they are.

Trainer writes its state last. If the disk is full, or a process is killed while it saves, the checkpoint lacks this
state, and `resume_from_checkpoint=True` takes the newest checkpoint. So a checkpoint must be whole.
"""

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.data.epochs import ResumedEpoch
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.distributed import divided_by_transformers
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# A method of Trainer, of any version: its arguments are looked up by name.
Method = Callable[..., Any]

# Key of the loader's position among the states of callbacks, which `TrainerState` writes into checkpoints.
LOADER_STATE = "distca_loader"

# Methods of Trainer that find its place in the data, and their arguments that matter here.
COUNTING = {
    "_inner_training_loop": {"args", "resume_from_checkpoint"},
    "set_initial_training_values": {"args", "dataloader"},
    "_init_training_state": {"resume_from_checkpoint"},
    "_run_epoch": {"epoch", "steps_in_epoch", "num_update_steps_per_epoch", "steps_trained_in_current_epoch"},
}


def check_checkpoint(model: nn.Module, output_dir: str, resume_from_checkpoint: str | Path | bool | None) -> None:
    """Checks that a checkpoint was written completely, and that a training of the model can resume from it. Raises
    ConfigError if it is missing; or is not complete (names the newest one that is); or the training cannot resume.

    Args:
        resume_from_checkpoint: as given to `Trainer.train`: a folder, True for the newest one, or nothing.
    """
    if not resume_from_checkpoint:
        return
    given = get_last_checkpoint(output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
    if given is None or not Path(given).is_dir():
        raise ConfigError(
            f"found no checkpoint to resume from at {given or output_dir}: name the folder of one (checkpoint-9), "
            "or leave resume_from_checkpoint out to begin anew"
        )
    reason, folder = _why_not_whole(Path(given)), Path(given)
    if reason is None and not divided_by_transformers(model):
        return
    if reason is None:
        state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        saved = "weights and the state of an optimizer" if (folder / OPTIMIZER_NAME).is_file() else "only weights"
        raise ConfigError(
            f"{folder} holds {saved}, of step {state.global_step}, and Transformers {transformers.__version__} cannot "
            "resume the training of a model that it divides as it loads it (DistributedConfig). Load the model from "
            f'this folder, from_pretrained("{folder}", distributed_config=...), and call train() without '
            "resume_from_checkpoint: its weights go on, and optimizer, learning rate and documents begin anew"
        )
    whole = [other for other in folder.parent.glob("checkpoint-*") if _why_not_whole(other) is None]
    steps = {other: other.name.rpartition("-")[2] for other in whole}
    newest = max(whole, key=lambda other: int(steps[other]) if steps[other].isdecimal() else -1, default=None)
    advice = (
        f'resume_from_checkpoint="{newest}" goes on from there'
        if newest
        else "a whole checkpoint was not found next to it"
    )
    raise ConfigError(
        f"{given} was not written to its end: {reason}. The disk was full, or a process ended while it saved; {advice}"
    )


class Resuming(TrainerCallback):
    """Saves the loader's position with every checkpoint of a Trainer, and resumes there.

    Every document is trained `num_train_epochs` times, even if ranks, tokens or accumulation steps change in between.
    An epoch of Trainer ends with an epoch of the data. `max_steps`, the learning-rate schedule, the progress bar and
    `state.epoch` follow. A run that resumes with unchanged sizes is bit-equal to one that was never interrupted.
    """

    def __init__(self, loader: PlacedLoader | StreamLoader) -> None:
        self._loader = loader
        self._resumed: ResumedEpoch | None = None
        self._step = 0
        self._is_in_resumed_epoch = False
        # Methods that this version of Trainer lacks, or that have other arguments.
        self._missing = [
            name
            for name, arguments in COUNTING.items()
            if not hasattr(Trainer, name)
            or not arguments <= inspect.signature(getattr(Trainer, name)).parameters.keys()
        ]

    def install(self, attachment: Attachment) -> None:
        """Replaces the methods of an attached Trainer that count epochs and steps, and adds itself to its callbacks.

        It comes first: the others then see the epoch that it sets.
        """
        attachment.add_callback(self, first=True)
        methods: tuple[Method, ...] = (self._train, self._count, self._restore, self._run_epoch)
        if not self._missing:
            for name, method in zip(COUNTING, methods, strict=True):
                attachment.replace(attachment.trainer, name, partial(method, getattr(attachment.trainer, name)))

    def _train(
        self, train: Method, *, args: TrainingArguments, resume_from_checkpoint: str | None = None, **others: object
    ) -> object:
        """Moves the loader to the checkpoint's position, or to the beginning, before Trainer counts anything."""
        self._loader.restart()
        self._resumed = None
        if resume_from_checkpoint is not None and not args.ignore_data_skip:
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint, TRAINER_STATE_NAME)))
            saved = state.stateful_callbacks.get(LOADER_STATE)
            if saved is None and state.global_step:
                raise ConfigError(
                    f"the checkpoint of step {state.global_step} holds no position in placed batches: it comes from a "
                    "training without plugin.attach, and its documents are not known. ignore_data_skip=True "
                    "begins the data anew"
                )
            if saved is not None and state.global_step:
                self._loader.load_state_dict(saved)
                self._step, accumulation = state.global_step, args.gradient_accumulation_steps
                if isinstance(self._loader, StreamLoader):  # all of its steps are one epoch
                    left, all_steps = max(0, args.max_steps - self._step) * accumulation, args.max_steps * accumulation
                    self._resumed = ResumedEpoch(0, self._step, left, all_steps, accumulation)
                else:
                    self._resumed = self._loader.resumed_epoch(accumulation)
        return train(args=args, resume_from_checkpoint=resume_from_checkpoint, **others)

    def _count(self, count: Method, args: TrainingArguments, dataloader: object) -> tuple[float, ...]:
        """Returns the epochs and steps of the whole training as Trainer counts them, corrected if it resumes."""
        epochs, steps_per_epoch, examples, samples, batch_size, micro_batches, max_steps = count(args, dataloader)
        if self._resumed is not None:
            if args.max_steps < 0:
                max_steps = self._resumed.max_steps(self._step, args.num_train_epochs)
            epochs = self._resumed.num_train_epochs(self._step, max_steps)
            if isinstance(self._loader, StreamLoader):
                log.info(
                    "step %d: the stream goes on in pass %d, and training ends at step %d",
                    *(self._step, self._loader.pass_number, max_steps),
                )
            else:
                log.info(
                    "step %d is epoch %.2f of the data; %d steps are left in this epoch, and training ends at step %d",
                    *(self._step, self._resumed.epochs_after(0), self._resumed.steps_left, max_steps),
                )
        return epochs, steps_per_epoch, examples, samples, batch_size, micro_batches, max_steps

    def _restore(self, restore: Method, *args: object, **kwargs: object) -> tuple[int, int]:
        """Returns the number of finished epochs, and of finished micro-batches in the next one."""
        epochs, micro_batches = restore(*args, **kwargs)
        if self._resumed is None:
            return epochs, micro_batches
        return self._resumed.number, self._resumed.steps_done * self._resumed.accumulation_steps

    def _run_epoch(self, run: Method, *, epoch: int, **others: object) -> None:
        resumed = self._resumed
        if resumed is None or epoch != resumed.number:
            run(epoch=epoch, **others)
            return
        rest = {
            "steps_in_epoch": resumed.micro_batches_left,
            "num_update_steps_per_epoch": resumed.steps_left,
            "steps_trained_in_current_epoch": 0,  # nothing to skip: the loader begins after them
        }
        self._is_in_resumed_epoch = True
        try:
            run(epoch=epoch, **others | rest)
        finally:
            self._is_in_resumed_epoch = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Checks that the data resumes if the steps do. Raises ConfigError if Trainer resumes, but in a way that did
        not restore the position in the data."""
        if state.global_step > 0 and self._resumed is None and not args.ignore_data_skip:
            changed = f"Transformers {transformers.__version__} has changed {', '.join(self._missing)} of Trainer"
            why = changed if self._missing else "Trainer was not given the checkpoint"
            raise ConfigError(
                f"training goes on at step {state.global_step}, but the documents would begin anew: {why}. Resume "
                "with Transformers 5.6 to 5.24 and train(resume_from_checkpoint=...), or begin the data anew with "
                "ignore_data_skip=True"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Notes the position in the data."""
        state.stateful_callbacks[LOADER_STATE] = self._loader.state_dict()
        if self._resumed is not None and self._is_in_resumed_epoch:
            state.epoch = self._resumed.epochs_after(state.global_step - self._step)


def _why_not_whole(folder: Path) -> str | None:
    """Returns why a checkpoint is not whole; None if it is."""
    state = folder / TRAINER_STATE_NAME
    if not state.is_file():
        return f"it has no {TRAINER_STATE_NAME}"
    try:
        content = json.loads(state.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"its {TRAINER_STATE_NAME} ends early, or is not JSON ({error})"
    step = content.get("global_step") if isinstance(content, dict) else None
    if type(step) is not int or step < 0:
        return f"its {TRAINER_STATE_NAME} has the global_step {step!r}, and not a whole number from 0 on"
    return None
