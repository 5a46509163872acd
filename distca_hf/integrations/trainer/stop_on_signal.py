"""Stop on a signal: on SIGTERM or Ctrl-C all ranks end the same step, save a checkpoint, and leave.

Ranks get a signal at different times, or only one of them does. Its next agreements carry the signal
(`Traffic.leave_signal`), so that after a step all ranks have seen it, without a collective of its own.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distca_hf.comm.grid import Grid
from distca_hf.comm.transport import Traffic, Transport
from distca_hf.integrations.models.distributed import divided_by_transformers
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# As `signal.getsignal` returns it: a function, one of two numbers, or None for a handler that Python did not set.
Handler = Callable[[int, FrameType | None], object] | int | None

# The signals, and their handlers in a Python program that installs none.
USUAL_HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
# Steps after which a signal that no agreement has carried is passed on: an agreement takes place in every micro-batch.
MOST_STEPS_UNSHOWN = 2


class LeaveOnSignal(TrainerCallback):
    """Saves and leaves with status 143 when some rank has got SIGTERM, with 130 on Ctrl-C.

    It should be the last callback. Then an evaluation that was due does not come before the checkpoint, and callbacks
    that report to trackers end first. A handler that is installed already, Trainer's `enable_jit_checkpoint` for
    example, stays; so do the default ones where training does not run on the main thread. A second Ctrl-C ends
    training at once, without a checkpoint.

    Args:
        transport_of: the transport for a device, whose agreements carry the signal.
    """

    def __init__(self, transport_of: Callable[[torch.device], Transport]) -> None:
        self._transport_of = transport_of
        self._traffic = Traffic()
        self._grid = Grid.flat(range(1), 0)
        self._signal = 0
        self._steps_unshown = 0
        self._saves_weights_alone = False
        self._earlier: dict[int, Handler] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        transport = self._transport_of(args.device)
        self._traffic, self._grid = transport.traffic, transport.grid
        self._saves_weights_alone = not args.save_only_model and divided_by_transformers(model)
        if self._saves_weights_alone:
            log.info(
                "save_on_signal saves weights alone: Transformers cannot resume a model that was divided as it was "
                "loaded (DistributedConfig), so neither optimizer nor position can be restored"
            )
        self._traffic.leave_signal = self._signal = 0
        self._traffic.leaving.clear()
        self._install()

    @property
    def _is_alone(self) -> bool:
        return len(self._grid.ranks) == 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        got = {self._grid.rank: self._traffic.leave_signal} if self._is_alone else self._traffic.leaving
        self._check_shown(state)
        if any(got.values()):
            first = min(got)
            self._signal, ranks = got[first], ", ".join(map(self._grid.label, sorted(got)))
            name = signal.Signals(self._signal).name
            again = "Ctrl-C again leaves without it; " if self._signal == signal.SIGINT else ""
            log.warning(
                "step %d: %s on rank %s; saving a checkpoint and leaving (%ssave_on_signal=False never saves)",
                state.global_step,
                name,
                ranks,
                again,
            )
            args.save_only_model |= self._saves_weights_alone
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def _check_shown(self, state: TrainerState) -> None:
        """Raises a signal again that has not reached the other ranks for some steps: they agree over other groups."""
        if self._is_alone or not self._traffic.leave_signal or self._traffic.leaving:
            self._steps_unshown = 0
            return
        self._steps_unshown += 1
        if self._steps_unshown > MOST_STEPS_UNSHOWN:
            log.error(
                "step %d: %s has not reached any other rank for %d steps, because they agree over the groups of "
                "another plugin; leaving without a checkpoint",
                state.global_step,
                signal.Signals(self._traffic.leave_signal).name,
                self._steps_unshown,
            )
            self._restore()
            signal.raise_signal(self._traffic.leave_signal)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._signal:  # with a checkpoint of this very step
            control.should_save = control.should_evaluate = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ends the process if a rank has got a signal.

        Raises:
            SystemExit: after the checkpoint, with the status of a process that the signal has ended.
        """
        self._restore()
        if self._signal:
            raise SystemExit(128 + self._signal)
        if self._traffic.leave_signal:  # too late for another agreement
            signal.raise_signal(self._traffic.leave_signal)

    def _install(self) -> None:
        """Takes the signals, where that is possible and no other handler has them. A rank that cannot leaves with the
        others."""
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Remembers the signal. Raises it again if training has ended with an exception, or if Ctrl-C comes again."""
        again = number == signal.SIGINT and self._traffic.leave_signal == number
        self._traffic.leave_signal = number
        if again or not _runs_training(frame):
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        self._earlier.clear()


def _runs_training(frame: FrameType | None) -> bool:
    """Returns whether `Trainer.train` is on the stack."""
    while frame is not None:
        if frame.f_code is Trainer.train.__code__:
            return True
        frame = frame.f_back
    return False
