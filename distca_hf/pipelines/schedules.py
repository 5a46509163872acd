"""Schedules: parts and stages of a model, the order of their operations, and the seconds that a step takes.

The layers of a model are divided into parts. Every stage of a pipeline holds one or several of them, its chunks: part
p is on stage p mod stages. A micro-batch runs forward through all parts, then backward through them.

    2 stages, 1 chunk    stage 0 | F0 F1    .  . B0 F2 B1 F3 B2 . B3      numbers are micro-batches; dots wait
    (1F1B)               stage 1 | .  F0 B0 F1 B1 ...

Orders are from `Schedule1F1B` and `ScheduleInterleaved1F1B` in `torch.distributed.pipelining`.

With one chunk, or over gloo, a stage waits only for its next input. Interleaved stages over NCCL also wait for other
transfers: torch posts a receive when the sender posts the send, often long before it is needed. A CUDA stream runs its
transfers in order, so one whose sender still computes delays the ones after it.

This file has only integers and seconds, and does not import torch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distca_hf.errors import ConfigError


Seconds = NDArray[np.float64]

# Parts whose weights are gathered at once in schedules of torch (`max_active_stages`).
GATHERED_PARTS = 3


@dataclass(frozen=True)
class Parts:
    """Parts of a model in a pipeline.

    Raises:
        ConfigError: fewer than two stages, or fewer than one chunk.
    """

    num_stages: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise ConfigError(f"a pipeline of {self.num_stages} stages is none: give at least 2, or leave it out")
        if self.chunks < 1:
            raise ConfigError(f"a pipeline stage has {self.chunks} chunks of layers; give at least 1")

    @property
    def num_parts(self) -> int:
        """Parts into which the layers of the model are divided."""
        return self.num_stages * self.chunks

    def check(self, micro_steps: int, num_layers: int | None = None) -> None:
        """Checks that the schedule can run. Raises ConfigError if there are fewer micro-batches than stages, or with
        interleaving not a multiple of them; or more parts than layers."""
        if micro_steps < self.num_stages:
            raise ConfigError(
                f"{micro_steps} micro-batches per optimizer step do not fill a pipeline of {self.num_stages} stages; "
                f"give at least {self.num_stages}"
            )
        if self.chunks > 1 and micro_steps % self.num_stages:
            below = micro_steps - micro_steps % self.num_stages
            raise ConfigError(
                f"{micro_steps} micro-batches per optimizer step are not a multiple of {self.num_stages} stages, as "
                f"interleaving ({self.chunks} chunks) requires; give {below} or {below + self.num_stages}, or 1 chunk"
            )
        if num_layers is not None and self.num_parts > num_layers:
            raise ConfigError(
                f"{self.num_stages} stages of {self.chunks} chunk{'s' * (self.chunks > 1)} are {self.num_parts} parts "
                f"of a model with {num_layers} layers; give fewer stages or chunks"
            )

    def part_of(self, stage: int, chunk: int) -> int:
        return chunk * self.num_stages + stage

    def place_of(self, part: int) -> tuple[int, int]:
        """Returns the stage that holds a part, and which of its chunks that is."""
        chunk, stage = divmod(part, self.num_stages)
        return stage, chunk

    def layers_of_parts(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each part: as equal as possible, earlier parts may have one more."""
        each, more = divmod(num_layers, self.num_parts)
        return [each + (part < more) for part in range(self.num_parts)]


class Operation(NamedTuple):
    """Forward or backward of one micro-batch through one part."""

    is_forward: bool
    part: int
    micro_batch: int


def operations_of(pipeline: Parts, stage: int, micro_batches: int) -> list[Operation]:
    """Returns the operations of one stage in the order in which torch runs them."""
    if pipeline.chunks == 1:
        return list(_in_1f1b(pipeline, stage, micro_batches))
    return list(_interleaved(pipeline, stage, micro_batches))


def held_micro_batches(pipeline: Parts, stage: int, micro_batches: int) -> float:
    """Returns the most micro-batches whose activations a stage holds at once, in parts of its layers."""
    signs = [1 if operation.is_forward else -1 for operation in operations_of(pipeline, stage, micro_batches)]
    return int(np.cumsum(signs).max()) / pipeline.chunks


def _in_1f1b(pipeline: Parts, stage: int, micro_batches: int) -> Iterator[Operation]:
    """Yields the order of `Schedule1F1B`: some micro-batches forward, then backward and forward in turn."""
    ahead = min(micro_batches, pipeline.num_stages - stage)
    for micro_batch in range(ahead):
        yield Operation(True, stage, micro_batch)
    for micro_batch in range(micro_batches):
        yield Operation(False, stage, micro_batch)
        if micro_batch + ahead < micro_batches:
            yield Operation(True, stage, micro_batch + ahead)


def _interleaved(pipeline: Parts, stage: int, micro_batches: int) -> Iterator[Operation]:
    """Yields the order of `ScheduleInterleaved1F1B`: as many micro-batches as stages go through one chunk after the
    other, then the next ones."""
    stages, chunks = pipeline.num_stages, pipeline.chunks
    total = chunks * micro_batches
    ahead = min(total, (chunks - 1) * stages + 2 * (stages - 1 - stage))

    def operation(is_forward: bool, number: int) -> Operation:
        turn, within = divmod(number, stages)
        chunk = turn % chunks if is_forward else chunks - 1 - turn % chunks
        return Operation(is_forward, pipeline.part_of(stage, chunk), turn // chunks * stages + within)

    for number in range(ahead):
        yield operation(True, number)
    for number in range(total):
        if number + ahead < total:
            yield operation(True, number + ahead)
        yield operation(False, number)


class Queues(StrEnum):
    """Which transfers run one after the other, if chunks are interleaved."""

    NONE = "none"  # none: gloo
    # Transfers of a pair of stages: NCCL with torch 2.12 and later, which posts sends and receives singly. Each pair
    # of ranks has its own stream.
    PAIRS = "pairs"
    # Transfers of a stage: NCCL with torch 2.11, which posts batches of one; any torch, if the process group is bound
    # to a device. All transfers of a rank are in the stream of the group.
    STAGES = "stages"


def _turns(operations: Sequence[Operation]) -> Iterator[Operation | None]:
    """Yields the operations of a stage, and None for each other entry of torch's list: FSDP gathers the weights of the
    next `GATHERED_PARTS` parts, frees others, and reduces the gradients of a part after its last backward."""
    last = {operation.part: place for place, operation in enumerate(operations) if not operation.is_forward}
    gathered: set[int] = set()
    for place, operation in enumerate(operations):
        soon: dict[int, None] = {}
        for one in operations[place:]:
            soon[one.part] = None
            if len(soon) == GATHERED_PARTS:
                break
        yield from [None] * len(gathered ^ soon.keys())
        gathered = set(soon)
        yield operation
        if place == last[operation.part]:
            yield None


class Action(NamedTuple):
    """An operation, and the transfer of its result."""

    stage: int
    operation: Operation
    receiver: Operation | None  # the operation that needs the result on another stage, if there is one
    target: int
    queues: tuple[int, ...]  # numbers of the transfer's queues


class Schedule:
    """All operations and transfers of an optimizer step, each after everything that it waits for. With more than one
    chunk, transfers in a queue wait for each other. Raises ConfigError if the schedule cannot run, see
    `Parts.check`."""

    def __init__(self, pipeline: Parts, micro_batches: int, queues: Queues = Queues.PAIRS) -> None:
        pipeline.check(micro_batches)
        self.pipeline, self.micro_batches = pipeline, micro_batches
        self.queues = queues if pipeline.chunks > 1 else Queues.NONE

    @cached_property
    def stages(self) -> list[list[Operation]]:
        numbers = range(self.pipeline.num_stages)
        return [operations_of(self.pipeline, stage, self.micro_batches) for stage in numbers]

    @cached_property
    def actions(self) -> list[Action]:
        """Operations in the order in which torch's `_add_send_recv` visits them, and posts their transfers: each stage
        in turn gets its next one, if the input has been sent."""
        actions: list[Action] = []
        sent: set[Operation] = set()
        left = [deque(_turns(operations)) for operations in self.stages]
        while any(left):
            before = sum(map(len, left))
            for stage, turns in enumerate(left):
                if not turns:
                    continue
                operation = turns[0]
                if operation is not None and operation not in sent:
                    first = 0 if operation.is_forward else self.pipeline.num_parts - 1
                    if operation.part != first:  # the first part gets its input, or the loss, from no other stage
                        continue
                turns.popleft()
                if operation is not None:
                    actions.append(self._with_transfer(stage, operation))
                    sent.update(filter(None, [actions[-1].receiver]))
            assert sum(map(len, left)) < before, f"{self.pipeline} with {self.micro_batches} micro-batches never ends"
        return actions

    def _with_transfer(self, stage: int, operation: Operation) -> Action:
        part = operation.part + (1 if operation.is_forward else -1)
        if not 0 <= part < self.pipeline.num_parts:
            return Action(stage, operation, None, stage, ())
        target, _ = self.pipeline.place_of(part)
        queues: tuple[int, ...] = ()
        if self.queues is Queues.PAIRS:
            queues = (min(stage, target) * self.pipeline.num_stages + max(stage, target),)
        elif self.queues is Queues.STAGES:
            queues = stage, target
        return Action(stage, operation, operation._replace(part=part), target, queues)

    def step_seconds(self, forward_seconds: Seconds, backward_seconds: Seconds, hop_seconds: float = 0.0) -> Seconds:
        """Simulates an optimizer step: every stage runs its operations in order, each as soon as its input is there.
        Returns `[...]` float64 seconds until all stages have ended.

        Args:
            forward_seconds, backward_seconds: `[..., micro_batches]` float64 seconds of a micro-batch in all layers of
                the model, of which every part has as many, on one rank of a stage. Leading dimensions are steps that
                are simulated side by side.
            hop_seconds: seconds for activations, or their gradients, from one stage to another.
        """
        shares = np.full((self.pipeline.num_parts, 1), 1 / self.pipeline.num_parts)
        forward, backward = (seconds[..., np.newaxis, :] * shares for seconds in (forward_seconds, backward_seconds))
        return self.step_seconds_of_parts(forward, backward, hop_seconds)

    def step_seconds_of_parts(
        self, forward_seconds: Seconds, backward_seconds: Seconds, hop_seconds: float = 0.0
    ) -> Seconds:
        """Simulates an optimizer step as `step_seconds` does, with separate times of each part. Returns `[...]`
        float64 seconds until all stages have ended.

        Args:
            forward_seconds, backward_seconds: `[..., parts, micro_batches]` float64 seconds of a micro-batch in each
                part, on one rank of its stage. Leading dimensions are steps that are simulated side by side.
            hop_seconds: as for `step_seconds`.
        """
        passes = (backward_seconds, forward_seconds)
        idle = np.zeros(forward_seconds.shape[:-2])
        computed = [idle] * self.pipeline.num_stages
        transferred = [idle] * self.pipeline.num_stages**2
        arrived: dict[Operation, Seconds] = {}
        for stage, operation, receiver, target, queues in self.actions:
            is_forward, part, micro_batch = operation
            begin = np.maximum(computed[stage], arrived.pop(operation, idle))
            computed[stage] = begin + passes[is_forward][..., part, micro_batch]
            if receiver is None:
                continue
            begin = computed[stage]
            if queues:  # the receive comes after what its stage computes before it
                begin = np.maximum(begin, computed[target])
            for queue in queues:
                begin = np.maximum(begin, transferred[queue])
            arrived[receiver] = begin + hop_seconds
            for queue in queues:
                transferred[queue] = arrived[receiver]
        return np.max(computed, axis=0)
