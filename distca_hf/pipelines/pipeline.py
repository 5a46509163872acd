"""Pipeline: what users say of the stages that their batches pass. It shapes the optimizer steps of a loader."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner, StepShape
from distca_hf.data.accumulation import MicroStep, SteppedEpoch
from distca_hf.data.epochs import Epoch
from distca_hf.errors import ConfigError
from distca_hf.pipelines.parts import Parts
from distca_hf.pipelines.schedules import Schedule
from distca_hf.pipelines.shaping import shape_step, work_of_documents


if TYPE_CHECKING:
    from distca_hf.comm.grid import Grid  # imports torch


@dataclass(frozen=True)
class Pipeline(Parts, StepShape):
    """A pipeline: how many stages a micro-batch passes, and in how many chunks each of them holds its layers.

    Attributes:
        num_stages: stages, each of them a group of ranks that hold the same layers.
        chunks: parts of the model on each stage. With 1 stages run 1F1B, with more interleaved 1F1B.

    Raises:
        ConfigError: fewer than two stages, or fewer than one chunk.
    """

    @property
    def numbers(self) -> tuple[int, ...]:
        """Stages and chunks."""
        return self.num_stages, self.chunks

    def check_grid(self, grid: "Grid") -> None:
        """Refuses a pipeline of other stages than the mesh of the ranks has.

        Raises:
            ConfigError: names both numbers.
        """
        if 1 < grid.shape[0] != self.num_stages:
            raise ConfigError(
                f"{grid.name}: the mesh has {grid.in_words()}, and pipeline={self} has {self.num_stages} stages; give "
                "both the same number"
            )

    def shaped(
        self, planner: PlacedPlanner, epoch: Epoch, document_tokens: IntArray, micro_steps: int, steps_from: int
    ) -> SteppedEpoch:
        """Returns the epoch with documents of every optimizer step divided so that stages hardly wait."""
        return ShapedEpoch(planner, Schedule(self, micro_steps), epoch, document_tokens, micro_steps, steps_from)


class ShapedEpoch(SteppedEpoch):
    """An epoch whose optimizer steps are shaped for a pipeline.

    Args:
        planner: of the ranks of a stage.
        schedule: of the operations of a step.
        epoch, document_tokens, micro_steps, steps_from: as for `SteppedEpoch`.
    """

    def __init__(
        self,
        planner: PlacedPlanner,
        schedule: Schedule,
        epoch: Epoch,
        document_tokens: IntArray,
        micro_steps: int,
        steps_from: int,
    ) -> None:
        super().__init__(epoch, document_tokens, micro_steps, steps_from)
        self._planner, self._schedule = planner, schedule

    def _divide(self, document_tokens: IntArray, as_packed: list[IntArray]) -> list[MicroStep]:
        planner = self._planner
        groups = shape_step(
            document_tokens,
            work_of_documents(document_tokens, planner.layer_masks),
            as_packed,
            self._schedule,
            *(planner.num_ranks, planner.config.tokens_per_rank, planner.costs, planner.fits),
        )
        return [MicroStep(documents) for documents in groups]
