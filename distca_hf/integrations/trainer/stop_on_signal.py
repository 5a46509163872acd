"""Stop on a signal: on SIGTERM or Ctrl-C all ranks end the same step, save a checkpoint, and leave.

Ranks get a signal at different times, or only one rank gets it. That rank's next agreements carry the signal
(`Traffic.leave_signal`): after a step all ranks have seen it, without another collective.

An evaluation would take longer than launchers wait. Ranks that evaluate agree every few seconds, and leave after the
same batch. The state of the training has not changed since the step before.
"""

import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.transport import LocalTransport, Traffic, Transport
from distca_hf.errors import first_line
from distca_hf.integrations.models.distributed import divided_by_transformers
from distca_hf.patches.data_workers import data_workers
from distca_hf.telemetry import OF_THIS_RANK, get_logger


log = get_logger(__name__)

# What `signal.getsignal` returns: a function, one of two numbers, or None for a handler that Python did not set.
Handler = Callable[[int, FrameType | None], object] | int | None

# The signals, and their default handlers in Python.
USUAL_HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
# A signal that no agreement has carried for more steps is raised again: every micro-batch has an agreement.
MOST_STEPS_UNSHOWN = 2
# Time between two agreements of an evaluation, which are counted in batches: ranks have no common clock.
AGREE_SECONDS = 2.0


class LeaveOnSignal(TrainerCallback):
    """Saves and leaves when some rank has got a signal: with status 143 on SIGTERM, with 130 on Ctrl-C.

    It should be the last callback. Then an evaluation that was due does not delay the checkpoint, and callbacks that
    report to trackers end first. An evaluation that has begun ends at one of its next batches. A handler that is
    already installed (for example by Trainer's `enable_jit_checkpoint`) stays; so do the default ones if training does
    not run on the main thread. A second Ctrl-C ends training immediately, without a checkpoint.

    Workers of data loaders that start from now on survive both signals (see `patches.data_workers`).
    """

    def __init__(self, transport_of: Callable[[torch.device], Transport]) -> None:
        data_workers.apply()
        self._transport_of = transport_of
        self._transport: Transport = LocalTransport()
        self._signal = 0
        self._steps_unshown = 0
        self._first_step = self._saved_step = 0
        self._saves_only_weights = False
        self._earlier: dict[int, Handler] = {}
        self._is_training = False
        self._batches, self._agree_at, self._stride, self._agreed = 0, 1, 1, time.monotonic()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        self._transport = self._transport_of(args.device)
        self._saves_only_weights = not args.save_only_model and divided_by_transformers(model)
        if self._saves_only_weights:
            log.info(
                "save_on_signal saves only weights: Transformers cannot resume a model that was divided as it was "
                "loaded (DistributedConfig), so neither optimizer nor position can be restored"
            )
        self._traffic.leave_signal = self._signal = 0
        self._traffic.leaving.clear()
        self._first_step = self._saved_step = state.global_step
        self._is_training = True
        self._install()

    @property
    def _traffic(self) -> Traffic:
        return self._transport.traffic

    @property
    def _is_only_rank(self) -> bool:
        return len(self._transport.grid.ranks) == 1

    @property
    def _leaving(self) -> dict[int, int]:
        """Ranks that got a signal, each with the signal, as far as all ranks know."""
        if not self._is_only_rank:
            return self._traffic.leaving
        return {self._transport.grid.rank: self._traffic.leave_signal} if self._traffic.leave_signal else {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        is_unshown = self._traffic.leave_signal and not self._traffic.leaving and not self._is_only_rank
        self._steps_unshown = self._steps_unshown + 1 if is_unshown else 0
        if self._steps_unshown > MOST_STEPS_UNSHOWN:  # it is raised again
            log.error(
                "step %d: %s has not reached any other rank for %d steps, because they agree over the groups of "
                "another plugin; leaving without a checkpoint",
                state.global_step,
                signal.Signals(self._traffic.leave_signal).name,
                self._steps_unshown,
            )
            self._restore()
            signal.raise_signal(self._traffic.leave_signal)
        if self._leaving:
            self._announce(args, state, "saving a checkpoint and leaving")
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def _announce(self, args: TrainingArguments, state: TrainerState, does: str) -> None:
        """Chooses the signal of the lowest rank for all ranks, and logs what follows."""
        first, ranks = min(self._leaving), ", ".join(map(self._transport.grid.label, sorted(self._leaving)))
        self._signal = self._leaving[first]
        log.warning(
            "step %d: %s on rank %s; %s (%ssave_on_signal=False never saves)",
            state.global_step,
            signal.Signals(self._signal).name,
            ranks,
            does,
            "Ctrl-C again leaves without it; " if self._signal == signal.SIGINT else "",
        )
        args.save_only_model |= self._saves_only_weights

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Leaves an evaluation during training after the same batch on all ranks, with a checkpoint of the step before
        it.

        Raises:
            SystemExit: after the checkpoint.
        """
        if not self._is_training:
            return
        self._batches += 1
        if self._batches == self._agree_at and not self._is_only_rank:
            # Ranks show their signals and the time since the last agreement. The next one comes after at most twice as
            # many batches as this one did.
            now, name = time.monotonic(), "milliseconds since the last agreement"
            passed = {name: round(1e3 * (now - self._agreed))}
            slowest = max(Agreement.start(self._transport, Occasion.EVALUATE, self._batches, {}, passed).wait()[name])
            self._stride = max(1, round(self._stride * min(2.0, 1e3 * AGREE_SECONDS / max(1, slowest))))
            self._agree_at, self._agreed = self._batches + self._stride, now
        # If Trainer runs an evaluation neither between two steps nor before the first one, let it finish: a step may
        # be running.
        between_steps = _frame_of(Trainer._maybe_log_save_evaluate) if self._leaving else None
        frame = between_steps or (_frame_of(Trainer._evaluate) if self._leaving else None)
        if frame is None:
            return
        trainer: Trainer = frame.f_locals["self"]
        if between_steps is not None:
            self._save_and(trainer, "leaving an evaluation")
        else:
            self._announce(args, state, "leaving an evaluation before the first step")
        trainer.callback_handler.on_train_end(args, state, control)

    def on_evaluate(self, *event: object, **kwargs: object) -> None:
        """Lets ranks agree at the first batch of the next evaluation: its batches may take a different time."""
        self._agree_at, self._stride, self._agreed = self._batches + 1, 1, time.monotonic()

    on_predict = on_evaluate

    def _save_and(self, trainer: Trainer, does: str) -> None:
        """Saves the step that has ended, unless it is saved already."""
        if self._saved_step == trainer.state.global_step:
            self._announce(trainer.args, trainer.state, f"{does}; this step is saved")
            return
        self._announce(trainer.args, trainer.state, f"{does} and saving a checkpoint")
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._saved_step = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._signal:  # with a checkpoint of this very step
            control.should_save = control.should_evaluate = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ends the process if a rank has got a signal. If the signal came after the last step, saves that step,
        provided all ranks have seen the signal in their last report.

        Raises:
            SystemExit: after the checkpoint, with the status of a process that the signal has ended.
        """
        self._restore()
        self._is_training = False
        training = _frame_of(Trainer.train)
        if self._leaving and not self._signal and training is not None:
            trainer: Trainer = training.f_locals["self"]
            if args.load_best_model_at_end:  # the weights are no longer from the last step
                self._saved_step = state.global_step
            self._save_and(trainer, "leaving after the last step")
        if self._signal:
            raise SystemExit(128 + self._signal)
        if self._traffic.leave_signal:  # too late for another agreement
            signal.raise_signal(self._traffic.leave_signal)

    def _install(self) -> None:
        """Installs handlers of the signals, if possible and no other handler is installed. Ranks that cannot install
        them leave with the others."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, usual in USUAL_HANDLERS.items():
            owner = getattr(signal.getsignal(number), "__self__", None)
            if isinstance(owner, LeaveOnSignal):  # of a training that ended with an exception
                owner._restore()
            if signal.getsignal(number) is usual:
                self._earlier[number] = signal.signal(number, self._handle)
            elif (number, signal.getsignal(number)) != (signal.SIGINT, signal.SIG_IGN):  # shells: jobs in background
                log.warning(
                    "another handler of %s is installed and stays: distca_hf will not save on this signal",
                    signal.Signals(number).name,
                )
        of_children = signal.getsignal(signal.SIGCHLD)
        if self._earlier and callable(of_children):
            self._earlier[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, partial(self._handle_child, of_children))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Remembers the signal. Raises it again if training has ended with an exception, even if another Trainer is
        training now, or if Ctrl-C comes again."""
        again = number == signal.SIGINT and self._traffic.leave_signal == number
        self._traffic.leave_signal = number
        training = _frame_of(Trainer.train, frame)
        if again or training is None or self not in training.f_locals["self"].callback_handler.callbacks:
            self._restore()
            signal.raise_signal(number)

    def _handle_child(
        self, handler: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None
    ) -> None:
        """Passes the end of a child on to torch, which raises an error within a step if a worker was killed.
        If the signal has ended a worker that started before this training, training ends with a checkpoint.
        """
        try:
            handler(number, frame)
        except RuntimeError as error:
            ended_by = [one for one in USUAL_HANDLERS if f"{signal.strsignal(one)}." in str(error)]
            if not ended_by:
                raise
            self._traffic.leave_signal = self._traffic.leave_signal or ended_by[0]
            log.warning("training ends with this step: %s", first_line(error), extra=OF_THIS_RANK)

    def _restore(self) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        self._earlier.clear()


def _frame_of(method: Callable[..., object], frame: FrameType | None = None) -> FrameType | None:
    """Returns the frame of a method of Trainer that is on the stack; None if there is none.

    Callbacks do not get their Trainer, and do not learn in which part of a training they are called.
    """
    frame = frame or sys._getframe(1)
    while frame is not None and frame.f_code is not inspect.unwrap(method).__code__:
        frame = frame.f_back
    return frame
