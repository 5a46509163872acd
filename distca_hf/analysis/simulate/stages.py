"""Stages: seconds and memory of a training whose layers are divided into the stages of a pipeline.

Layers have the seconds of `step.py`, on the data ranks of one stage. `pipelines.schedules` simulates when each part of
the model runs each micro-batch, and when it waits:

    first part    its layers, and the embedding
    last part     its layers, the head and the loss
    a hop         hidden states, or their gradients, from a rank to the same rank of another stage
    weights       gathered once before all micro-batches, and their gradients summed once after them

All parts are taken to have the same mixture of kinds of layers. Every rank computes `tokens_per_rank` rows, because
stages exchange tensors of one shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.memory import SINGLE_BYTES, DecoderSize, TrainingSetup, estimate_memory
from distca_hf.analysis.simulate.costs import HALF_BYTES
from distca_hf.analysis.simulate.load import Load
from distca_hf.analysis.simulate.step import Training
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.schedules import Schedule, held_micro_batches


# Forward seconds of the head over all of its seconds: one product of three.
HEAD_FORWARD_SHARE = 1 / 3
# Bytes of a weight that stays gathered for an optimizer step, and of its gradient that is added to in fp32.
GATHERED_BYTES = HALF_BYTES + SINGLE_BYTES


@dataclass(frozen=True)
class StagedTraining:
    """A pipeline of equal stages.

    Attributes:
        training: on the data ranks of one stage.
        cluster: data ranks of all stages, and their links.
        tokens_per_rank: rows of every rank.
    """

    training: Training
    pipeline: Pipeline
    cluster: Cluster
    tokens_per_rank: int

    def micro_batches_seconds(self, loads: Sequence[Load]) -> float:
        """Returns the seconds of the micro-batches of an optimizer step, in their order, and of its collectives.

        Args:
            loads: on the data ranks of a stage.
        """
        training, num_layers = self.training, self.training.costs.model.size.layers
        shares = np.array(self.pipeline.layers_of_parts(num_layers)) / num_layers
        # [parts, micro-batches]
        passes = np.array([training.layers_seconds(load) for load in loads])
        forward, backward = (shares[:, np.newaxis] * seconds for seconds in passes.T)
        head = np.array([training.head_seconds(load) for load in loads])
        embedding = np.array([training.embedding_seconds(load) for load in loads])
        forward[0] += embedding / 2
        backward[0] += embedding / 2
        forward[-1] += HEAD_FORWARD_SHARE * head
        backward[-1] += (1 - HEAD_FORWARD_SHARE) * head
        schedule = Schedule(self.pipeline, len(loads))
        seconds = schedule.step_seconds_of_parts(forward, backward, self._hop_seconds())
        return float(seconds) + self._collective_seconds()

    def _hop_seconds(self) -> float:
        """Returns the seconds of hidden states from one stage to another, on the slowest links between stages."""
        costs, cluster = self.training.costs, self.cluster
        hidden = self.tokens_per_rank * costs.model.size.hidden_size * HALF_BYTES / costs.tensor_ranks
        crosses = cluster.num_ranks > cluster.ranks_per_node
        of_links = (WireBytes.both_ways(np.array(hidden * is_there)) for is_there in (not crosses, crosses))
        return float(cluster.exchange(*of_links))

    def _collective_seconds(self) -> float:
        """Returns the seconds of gathering all weights of a stage and of summing their gradients."""
        costs = self.training.costs
        layers = math.ceil(costs.model.size.layers / self.pipeline.num_stages)
        return sum(
            times * (self.training.gather_seconds(num_bytes) + self.training.reduce_seconds(num_bytes))
            for times, num_bytes in ((layers, costs.layer_weight_bytes), (1, costs.root_weight_bytes))
        )


def rooms_for_hops(stage: int, pipeline: Pipeline, micro_batches: int) -> int:
    """Returns the number of hidden states and of their gradients that a stage has room for. From the first step on
    torch has room for all that other stages send in a step (`args_recv_info` and `grad_recv_info` of
    `torch.distributed.pipelining.PipelineStage`)."""
    first, last = stage == 0, stage == pipeline.num_stages - 1
    return micro_batches * (2 * pipeline.chunks - first - last)


@dataclass(frozen=True)
class StageMemory:
    """The most bytes that GPUs of a pipeline need at the peak of a step.

    A micro-batch that waits for its backward pass keeps what more layers would keep, and its output, if that is sent.

    Attributes:
        setup: of one stage, whose ranks share its weights.
        tokens, received_bytes: of a GPU, see `estimate_memory`.
    """

    size: DecoderSize
    setup: TrainingSetup
    pipeline: Pipeline
    micro_batches: int
    tokens: int
    received_bytes: int

    @property
    def total(self) -> int:
        """Estimate of the stage that needs most: the first one holds most micro-batches at once, the last one has the
        head, and others receive from two sides."""
        return max(map(self.of_stage, range(self.pipeline.num_stages)))

    def of_stage(self, stage: int) -> int:
        """Returns the estimate of a GPU of one stage, counted from 0."""
        size, pipeline, micro_batches = self.size, self.pipeline, self.micro_batches
        stages = pipeline.num_stages
        is_first, is_last = stage == 0, stage == stages - 1
        held = held_micro_batches(pipeline, stage, micro_batches)
        # Weights that embedding and head share in the whole model are on both stages.
        embedding = size.embedding_parameters - size.head_parameters or size.head_parameters
        outside = embedding if is_first else size.head_parameters * is_last
        parameters = (size.parameters - size.embedding_parameters) // stages + outside
        part = replace(
            size,
            vocabulary=size.vocabulary if is_last else 0,
            parameters=parameters,
            embedding_parameters=outside,
            layers=tuple(replace(layer, count=math.ceil(held * layer.count / stages)) for layer in size.layers),
        )
        memory = estimate_memory(part, self.setup, self.tokens, self.received_bytes)
        # Of all layers, and not of those alone that are computed.
        gathered = GATHERED_BYTES * parameters // self.setup.tensor_ranks
        # Outputs wait, too. Inputs that wait are among what layers keep.
        waiting = held * (is_first - is_last) / pipeline.chunks
        hops = (rooms_for_hops(stage, pipeline, micro_batches) + waiting) * self.tokens * HALF_BYTES * size.hidden_size
        return max(memory.backward - memory.gathered + gathered + round(hops), memory.optimizer_step)
