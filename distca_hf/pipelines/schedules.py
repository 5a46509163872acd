"""Schedules: operations and transfers of an optimizer step of a pipeline, and the seconds that it takes.

With one chunk, and over gloo, a stage waits for its next input alone. Interleaved stages over NCCL also wait for other
transfers: torch posts a receive where the sender posts the send, often long before it is needed. A CUDA stream runs
its transfers in order, so that one whose sender still computes holds up those after it.

Here are integers and seconds alone, without torch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distca_hf.pipelines.parts import Operation, Parts, held_micro_batches, operations_of


Seconds = NDArray[np.float64]

# Parts whose weights are gathered at once in schedules of torch (`max_active_stages`).
GATHERED_PARTS = 3


class Queues(StrEnum):
    """What runs its transfers one after the other, if chunks are interleaved.

    Attributes:
        NONE: nothing does: gloo.
        PAIRS: a pair of stages: NCCL, torch 2.12 and later, which posts each send and receive alone. A pair of ranks
            has its own stream.
        STAGES: a stage: NCCL, torch 2.11, which posts batches of one; any torch, if the process group is bound to a
            device. All transfers of a rank are in the stream of the group.
    """

    NONE = "none"
    PAIRS = "pairs"
    STAGES = "stages"


def _turns(operations: Sequence[Operation]) -> Iterator[Operation | None]:
    """Yields the operations of a stage, and None for each other entry of torch's list: FSDP gathers the weights of
    the next `GATHERED_PARTS`, gives others up, and sums up the gradients of a part after its last backward."""
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
    """An operation, and the transfer of its result.

    Attributes:
        stage: where it runs.
        receiver: the operation that needs the result on another stage, if there is one.
        target: that stage.
        queues: those of the transfer, as numbers.
    """

    stage: int
    operation: Operation
    receiver: Operation | None
    target: int
    queues: tuple[int, ...]


class Schedule:
    """All operations and transfers of an optimizer step, each after those that it waits for.

    Args:
        queues: which transfers wait for each other, with more than one chunk.

    Raises:
        ConfigError: the schedule cannot run, see `Parts.check`.
    """

    def __init__(self, pipeline: Parts, micro_batches: int, queues: Queues = Queues.PAIRS) -> None:
        pipeline.check(micro_batches)
        self.pipeline, self.micro_batches = pipeline, micro_batches
        self.queues = queues if pipeline.chunks > 1 else Queues.NONE

    @cached_property
    def stages(self) -> list[list[Operation]]:
        """Operations of each stage."""
        numbers = range(self.pipeline.num_stages)
        return [operations_of(self.pipeline, stage, self.micro_batches) for stage in numbers]

    @property
    def held_micro_batches(self) -> float:
        """Most micro-batches whose activations a stage holds at once, in parts of its layers."""
        stages = range(self.pipeline.num_stages)
        return max(held_micro_batches(self.pipeline, stage, self.micro_batches) for stage in stages)

    @cached_property
    def actions(self) -> list[Action]:
        """Operations in the order in which torch's `_add_send_recv` comes to them, and posts their transfers: each
        stage in turn has its next one, if the input has been sent."""
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
                    if operation.part != first:  # which has its input, or the loss, from no other stage
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

    def step_seconds(
        self,
        forward_seconds: Seconds,
        backward_seconds: Seconds,
        hop_seconds: float = 0.0,
        part_layers: Sequence[int] | None = None,
    ) -> Seconds:
        """Simulates an optimizer step: every stage runs its operations in order, each as soon as its input is there.

        Args:
            forward_seconds, backward_seconds: `[..., micro_batches]` float64 seconds of a micro-batch in all layers of
                the model, on one rank of a stage. Leading dimensions are steps that are simulated side by side.
            hop_seconds: seconds for activations, or their gradients, from one stage to another.
            part_layers: layers of each part; by default all parts are alike.

        Returns:
            `[...]` float64 seconds until all stages have ended.
        """
        layers = np.ones(self.pipeline.num_parts) if part_layers is None else np.asarray(part_layers, dtype=np.float64)
        shares = (layers / layers.sum())[:, np.newaxis]
        return self.step_seconds_of_parts(
            forward_seconds[..., np.newaxis, :] * shares, backward_seconds[..., np.newaxis, :] * shares, hop_seconds
        )

    def step_seconds_of_parts(
        self, forward_seconds: Seconds, backward_seconds: Seconds, hop_seconds: float = 0.0
    ) -> Seconds:
        """Simulates an optimizer step whose parts take their own times, as `step_seconds`.

        Args:
            forward_seconds, backward_seconds: `[..., parts, micro_batches]` float64 seconds of a micro-batch in each
                part, on one rank of its stage. Leading dimensions are steps that are simulated side by side.
            hop_seconds: as for `step_seconds`.

        Returns:
            `[...]` float64 seconds until all stages have ended.
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
