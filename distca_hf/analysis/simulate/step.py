"""Step: seconds of micro-batches and optimizer steps under FSDP, from loads.

Under FSDP all ranks meet in every layer, when its weights are gathered. So a pass of a layer takes as long as on its
slowest rank. Weights of the next layer are gathered meanwhile, and gradients of the one before are reduced:

    gather     | root | layer 0 | layer 1 | layer 2 | ...          | reduce layer 0 | reduce root |
    kernels    |                | layer 0 | layer 1 | ...   | layer 0

At both ends nothing is computed meanwhile. If wires take longer than kernels, a layer takes as long as its wires.

Gathers and reductions begin with a layer's pass. An exchange of attention that kernels wait for shares the wires with
the rest of them, and takes correspondingly longer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.decoder_size import HALF_BYTES, SINGLE_BYTES, DecoderSize
from distca_hf.analysis.memory import estimate_memory, gradient_bytes
from distca_hf.analysis.profiles.curves import FloatArray
from distca_hf.analysis.simulate.costs import Costs, LayerSeconds
from distca_hf.analysis.simulate.load import Attention, Load
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.analysis.training_setup import Sharding, TrainingSetup
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.schedules import Schedule, held_micro_batches


# Bytes of a number that a cast between fp32 and bf16 reads and writes; and casts of a rank's share in a micro-batch
# under FSDP2: weights before each of two gathers. Gradients are cast after their sum.
CAST_BYTES, GATHERED_CASTS = 6, 2
# Numbers that an addition reads and writes.
ADDED_NUMBERS = 3
# Exchanges of activations that tensor parallelism makes in a layer, forward and as many backward: hidden states are
# gathered before and reduced after attention and the MLP.
TENSOR_COLLECTIVES = 2


@dataclass(frozen=True)
class Training:
    """How a model is trained. `gathers_layers`: whether weights are gathered, and gradients summed, in each layer of
    each micro-batch; stages of a pipeline do so once in an optimizer step. `sums_gradients`: whether gradients are
    summed over ranks; under `no_sync` each rank adds them to its own."""

    costs: Costs
    cluster: Cluster
    layers_checkpointed: bool = True
    gathers_layers: bool = True
    sums_gradients: bool = True

    @property
    def shards(self) -> int:
        return self.cluster.num_ranks

    def micro_batch_seconds(self, load: Load) -> float:
        """Returns the seconds of one micro-batch, forward and backward."""
        layers = sum(self.layers_seconds(load))
        # Nothing is computed meanwhile.
        ends = sum(map(self.collectives_seconds, (self.root_bytes, self.costs.layer_weight_bytes)))
        ends = ends + self.embedding_seconds(load) + self.cast_seconds() + self.head_seconds(load)
        return layers + ends + load.further_seconds

    def layers_seconds(self, load: Load) -> tuple[float, float]:
        """Returns the seconds of all layers, forward and backward.

        A layer without attention takes as long as everything except attention in a layer with this many weights.
        """
        layer = self.costs.layer(load.tokens)
        kinds = [*load.attention]
        mixers = self.costs.model.size.layers - self.costs.model.attention_layers
        if mixers:
            nothing = np.zeros(len(load.tokens))
            kinds.append(Attention(nothing, nothing, nothing, nothing, nothing, mixers))
        passes = [(kind.layers, self._layer_seconds(layer, kind, load)) for kind in kinds]
        return sum(count * forward for count, (forward, _) in passes), sum(count * back for count, (_, back) in passes)

    def optimizer_seconds(self) -> float:
        """Returns the seconds of AdamW's step on a rank's share of the weights."""
        weights = self.costs.model.size.parameters / self.shards / self.costs.tensor_ranks
        return weights * self.costs.profile.rates.optimizer_seconds

    def collectives_seconds(self, weight_bytes: float) -> float:
        """Returns the seconds of gathering weights, and of summing their gradients."""
        return self.gather_seconds(weight_bytes) + self.reduce_seconds(weight_bytes)

    def gather_seconds(self, weight_bytes: float) -> float:
        return self.cluster.all_gather(weight_bytes)

    def reduce_seconds(self, weight_bytes: float) -> float:
        return self.cluster.reduce_scatter(weight_bytes) if self.sums_gradients else 0.0

    @property
    def root_bytes(self) -> float:
        return self.costs.root_weight_bytes

    def embedding_seconds(self, load: Load) -> float:
        """Returns the seconds of the embedding, forward and backward: its rows are read and written, and its gradient
        is cleared and added to."""
        rows = float(load.tokens.max()) * self.costs.model.size.hidden_size * HALF_BYTES
        return float(self.costs.copy_seconds(5 * rows + 2 * self.root_bytes))

    def head_seconds(self, load: Load) -> float:
        return float(self.costs.head_seconds(load.of_head).max())

    def cast_seconds(self) -> float:
        shards = self.costs.model.size.parameters / self.shards / self.costs.tensor_ranks
        return float(self.costs.copy_seconds((GATHERED_CASTS + self.sums_gradients) * CAST_BYTES * shards))

    def adding_seconds(self) -> float:
        """Returns the seconds of adding a micro-batch's gradients to earlier ones."""
        weights = self.costs.model.size.parameters // self.costs.tensor_ranks
        way: Sharding = "fsdp2_synced" if self.sums_gradients else "fsdp2"
        added = gradient_bytes(way, weights, weights // self.shards, micro_steps=2)
        return float(self.costs.copy_seconds(ADDED_NUMBERS * added))

    def _layer_seconds(self, layer: LayerSeconds, attention: Attention, load: Load) -> tuple[float, float]:
        """Returns the seconds of a layer, forward and backward: of its slowest rank, or of the wires if they are
        slower."""
        gather = reduce = 0.0
        if self.gathers_layers:
            gather = self.gather_seconds(self.costs.layer_weight_bytes)
            reduce = self.reduce_seconds(self.costs.layer_weight_bytes)
        tensor = self._tensor_seconds(load)
        sent, sent_backward = float(attention.sent.max()), float(attention.sent_backward.max())
        share = self.costs.share_before_attention
        first = layer.forward if self.layers_checkpointed else layer.kept
        forward = first + attention.forward + self._added_by(gather, attention.waits, share * first)
        if self.layers_checkpointed:
            again = 0.0 if load.saves_attention else attention.recomputed
            backward = layer.kept + again + layer.backward + attention.backward + tensor
            waits = attention.waits_backward + (0.0 if load.saves_attention else attention.waits)
            before = share * layer.kept
        else:
            backward = layer.backward + attention.backward
            waits, before = attention.waits_backward, (1 - share) * layer.backward
        backward = backward + self._added_by(gather + reduce, waits, before)
        slowest, slowest_backward = float(forward.max()) + tensor, float(backward.max()) + tensor
        return max(slowest, gather + sent), max(slowest_backward, gather + reduce + sent_backward)

    def _added_by(self, collectives: float, waits: FloatArray, before: FloatArray) -> FloatArray:
        """Returns `[ranks]` seconds that FSDP's collectives add to a layer's pass, from whose beginning they run.

        An exchange that kernels wait for has half of the wires until it or the collectives end. Kernels that run
        meanwhile are delayed. The ranks of an exchange hold equally many tokens, so it begins when each of them
        reaches it; ranks of other groups may hold fewer, and begin earlier. `waits`: `[ranks]` seconds of only the
        exchange, or one number for all. `before`: `[ranks]` seconds of kernels before it.
        """
        shared = np.minimum(np.maximum(0.0, collectives - before), waits)
        return shared + self.cluster.products_beside * (collectives - shared)

    def _tensor_seconds(self, load: Load) -> float:
        """Returns the seconds in which tensor ranks exchange activations in a pass of a layer; nothing hides them."""
        ranks, links = self.costs.tensor_ranks, self.cluster.profile.within_node
        if ranks == 1 or links is None:
            return 0.0
        hidden = float(load.tokens.max()) * self.costs.model.size.hidden_size * HALF_BYTES
        node = Cluster(self.cluster.profile, ranks, ranks, self.costs.notes)
        return TENSOR_COLLECTIVES * (node.all_gather(hidden) + node.reduce_scatter(hidden))


# Forward seconds of the head over all of its seconds: one product of three.
HEAD_FORWARD_SHARE = 1 / 3
# Bytes of a weight that stays gathered for an optimizer step, and of its gradient, which is summed in fp32.
GATHERED_BYTES = HALF_BYTES + SINGLE_BYTES


@dataclass(frozen=True)
class StagedTraining:
    """A pipeline of equal stages. `training`: on the data ranks of one stage. `cluster`: data ranks of all stages."""

    training: Training
    pipeline: Pipeline
    cluster: Cluster
    tokens_per_rank: int

    def micro_batches_seconds(self, loads: Sequence[Load]) -> float:
        """Returns the seconds of the micro-batches of an optimizer step, in their order, and of its collectives.
        `loads`: on the data ranks of a stage."""
        training, costs = self.training, self.training.costs
        num_layers = costs.model.size.layers
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
        # Hidden states from one stage to another, on the slowest links between stages.
        hidden = self.tokens_per_rank * costs.model.size.hidden_size * HALF_BYTES / costs.tensor_ranks
        schedule, hop = Schedule(self.pipeline, len(loads)), self.cluster.alike_exchange(hidden)
        # All weights of a stage are gathered, and their gradients summed.
        layers = math.ceil(num_layers / self.pipeline.num_stages)
        collectives = layers * training.collectives_seconds(costs.layer_weight_bytes)
        collectives += training.collectives_seconds(costs.root_weight_bytes)
        return float(schedule.step_seconds_of_parts(forward, backward, hop)) + collectives


def rooms_for_hops(stage: int, pipeline: Pipeline, micro_batches: int) -> int:
    """Returns the number of hidden states and of their gradients for which a stage has room. From the first step on,
    torch before 2.15 keeps room for everything that other stages send in a step (`args_recv_info` and `grad_recv_info`
    of `torch.distributed.pipelining.PipelineStage`); later versions need no more."""
    return micro_batches * (2 * pipeline.chunks - (stage == 0) - (stage == pipeline.num_stages - 1))


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
        """Estimate for the stage that needs most: the first one holds most micro-batches at once, the last one has the
        head, and the others receive from two sides."""
        return max(map(self.of_stage, range(self.pipeline.num_stages)))

    def of_stage(self, stage: int) -> int:
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
        # Weights and gradients of all layers, not only of the computed one.
        gathered = GATHERED_BYTES * parameters // self.setup.tensor_ranks - memory.gradients
        # Outputs wait, too. Waiting inputs are part of what layers keep.
        waiting = held * (is_first - is_last) / pipeline.chunks
        hops = (rooms_for_hops(stage, pipeline, micro_batches) + waiting) * self.tokens * HALF_BYTES * size.hidden_size
        return max(memory.backward - memory.gathered + gathered + round(hops), memory.optimizer_step)
