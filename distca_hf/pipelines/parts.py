"""Parts: parts and stages of a model, and the order of operations of 1F1B and interleaved 1F1B.

Layers of a model are divided into parts, and every stage of a pipeline holds one or several of them, its chunks. Part
p is on stage p mod stages. A micro-batch runs forward through all parts, then backward through them.

    2 stages, 1 chunk    stage 0 | F0 F1    .  . B0 F2 B1 F3 B2 . B3      numbers are micro-batches; dots wait
    (1F1B)               stage 1 | .  F0 B0 F1 B1 ...

Orders are those of `Schedule1F1B` and `ScheduleInterleaved1F1B` in `torch.distributed.pipelining`.
`pipelines.schedules` simulates how long a step takes in them.

Here are integers alone, without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca_hf.errors import ConfigError


@dataclass(frozen=True)
class Parts:
    """Parts of a model in a pipeline.

    Attributes:
        num_stages: stages, each of them a group of ranks that hold the same layers.
        chunks: parts of the model on each stage. With 1 stages run 1F1B, with more interleaved 1F1B.

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
        """Parts that the layers of the model are divided into."""
        return self.num_stages * self.chunks

    def check(self, micro_steps: int, num_layers: int | None = None) -> None:
        """Checks that the schedule can run.

        Raises:
            ConfigError: there are too few micro-batches for the stages, or for interleaving no multiple of them; or
                more parts than layers.
        """
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
        """Returns the part that a stage holds as one of its chunks."""
        return chunk * self.num_stages + stage

    def place_of(self, part: int) -> tuple[int, int]:
        """Returns the stage that holds a part, and which of its chunks that is."""
        chunk, stage = divmod(part, self.num_stages)
        return stage, chunk

    def layers_of_parts(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each part: as equal as possible, earlier parts have one more."""
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
    """Yields the order of `ScheduleInterleaved1F1B`: rounds of as many micro-batches as stages go through one chunk
    after the other."""
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
