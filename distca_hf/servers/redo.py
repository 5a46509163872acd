"""Redo: runs an optimizer step again if an attention server was lost in it.

    begin ── forward and backward of all micro-batches ──▶ counts? ── yes ──▶ clip, step
      ▲                                                       │ no
      └──────── gradients discarded, states restored ◀────────┘

Attention gives zeros from the loss of a server until the step ends. So a step always runs to its last micro-batch, and
collectives of FSDP and ZeRO stay matched. Then its gradients are discarded, and random states and sums are restored:
the second run gives the numbers that the first one would have given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distca_hf.batches.batch_documents import tokens_of
from distca_hf.data.drawn_rows import random_states, set_random_states
from distca_hf.errors import ConfigError, PeerLostError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.parallel_context import ParallelContext
from distca_hf.servers.served_transport import ServedTransport
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Most times that one step runs again.
MOST_REDOS = 3

# Restores a state as it was when the function was made.
Restore = Callable[[], object]
Batch = Mapping[str, Any]


class RepeatableStep:
    """The micro-batches of one optimizer step, until their gradients are known to be whole. Functions in `keep` each
    save a state, and return a function that restores it."""

    def __init__(
        self, transport: ServedTransport, where: str, device: torch.device, keep: Sequence[Callable[[], Restore]]
    ) -> None:
        self.redos = 0
        self._transport, self._where = transport, where
        self._restore: list[Restore] = [partial(set_random_states, random_states(device), device)]
        self._restore += [one() for one in keep]
        transport.begin_step()

    def counts(self) -> bool:
        """Ends the step, after the backward pass of its last micro-batch. A collective call.

        Returns:
            Whether its gradients are whole. If not, states are restored and the step is open again: the caller must
            discard the gradients and run all micro-batches again.

        Raises:
            PeerLostError: servers were lost in every run.
        """
        if self._transport.end_step():
            return True
        if self.redos == MOST_REDOS:
            raise PeerLostError(
                f"{self._transport.grid.name}, {self._where}: attention servers were lost in each of its "
                f"{1 + MOST_REDOS} runs, and it was not taken. The checkpoint before it is whole: resume from it "
                "(resume_from_checkpoint=True), with other servers or with attention_servers=0"
            )
        self.redos += 1
        log.warning("%s runs again: an attention server was lost in it", self._where)
        for restore in self._restore:
            restore()
        self._transport.begin_step()
        return False

    @contextmanager
    def left_by_errors(self) -> Iterator[None]:
        """Leaves the step if the `with` block ends with an error: later code is not in the step."""
        try:
            yield
        except BaseException:
            self._transport.leave_step()
            raise


@contextmanager
def refuse_steps() -> Iterator[None]:
    """Refuses optimizer steps in a `with` block: after the loss of a server they could not be undone.

    Raises:
        ConfigError: in `optimizer.step()`; names the optimizer.
    """

    def refuse(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        raise ConfigError(
            f"{type(optimizer).__name__} steps before it is known whether an attention server was lost, and could not "
            "be undone: call optimizer.step() after all attempts (plugin.attempts), not in one, and in no hook of "
            "backward"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def served_transport(context: ParallelContext, device: torch.device) -> ServedTransport:
    """Returns the transport of a context with attention servers; the first call opens it."""
    return cast(ServedTransport, context.training_transport(device))


def attempts(
    model: nn.Module, batches: Sequence[Batch], context: ParallelContext
) -> Iterator[AbstractContextManager[object]]:
    """Yields an attempt at an optimizer step, and another one for as long as attention servers were lost in the last.

    Args:
        model: as the loop calls it, wrapped or not; must have gradients only from this step.
        batches: all batches of the step on this rank.

    Raises:
        ConfigError: the model was not enabled, it is an engine that steps by itself, or an attempt was not entered.
        PeerLostError: servers were lost in every attempt.
    """
    watch = next(filter(None, map(watch_of, model.modules())), None)
    if watch is None:
        raise ConfigError(
            f"plugin.attempts got {type(model).__name__}, which is not enabled: call distca_hf.enable(model, plugin)"
        )
    if hasattr(model, "zero_optimization_stage"):
        raise ConfigError(
            "plugin.attempts got an engine of DeepSpeed, which steps within an attempt: train with a Trainer "
            "and plugin.attach(trainer), or leave attempts out; then a lost attention server ends the job"
        )
    placed = [batch for batch in batches if batch.get("distca_plan") is not None]
    device = tokens_of(placed[0]).device if placed else context.device
    step = RepeatableStep(served_transport(context, device), "an optimizer step", device, [watch.bookmark_given])
    results: list[bool] = []

    @contextmanager
    def attempt() -> Iterator[None]:
        with refuse_steps(), step.left_by_errors():
            yield
        results.append(step.counts())

    while True:
        yield attempt()
        if not results:
            raise ConfigError("an attempt was not entered: for attempt in plugin.attempts(...): with attempt: ...")
        if results.pop():
            return
        model.zero_grad()
