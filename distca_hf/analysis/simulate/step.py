"""Step: seconds of micro-batches and optimizer steps under FSDP, from loads.

Under FSDP all ranks meet in every layer, when its weights are gathered. So a pass of a layer takes as long as on its
slowest rank. Weights of the next layer are gathered meanwhile, and gradients of the one before are reduced:

    gather     | root | layer 0 | layer 1 | layer 2 | ...          | reduce layer 0 | reduce root |
    kernels    |                | layer 0 | layer 1 | ...   | layer 0

At both ends nothing is computed beside. If wires take longer than kernels, a layer takes as long as its wires.

Gathers and reductions begin with a layer's pass. An exchange of attention that kernels wait for shares the wires with
what is left of them, and takes as much longer.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.memory import Sharding, gradient_bytes
from distca_hf.analysis.profiles.curves import FloatArray
from distca_hf.analysis.simulate.costs import HALF_BYTES, Costs, LayerSeconds
from distca_hf.analysis.simulate.load import Attention, Load
from distca_hf.analysis.simulate.wires import Cluster


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
    """How a model is trained.

    Attributes:
        layers_checkpointed: whether layers are computed again in backward.
        has_head: whether the last matrix and the loss are computed.
        has_optimizer: whether AdamW makes a step.
        reduce_bytes: of a number in sums of gradients over ranks.
        root_share: part of the weights outside of layers that there is; benchmarks leave the head out.
        gathers_layers: whether weights are gathered, and gradients summed, in each layer of each micro-batch. Stages
            of a pipeline do so once in an optimizer step.
        sums_gradients: whether gradients are summed over ranks; under `no_sync` each rank adds them to its own.
    """

    costs: Costs
    cluster: Cluster
    layers_checkpointed: bool = True
    has_head: bool = True
    has_optimizer: bool = True
    reduce_bytes: int = HALF_BYTES
    root_share: float = 1.0
    gathers_layers: bool = True
    sums_gradients: bool = True

    @property
    def shards(self) -> int:
        """GPUs that weights are divided over."""
        return self.cluster.num_ranks

    def micro_batch_seconds(self, load: Load) -> float:
        """Returns the seconds of one micro-batch, forward and backward."""
        return sum(self.layers_seconds(load)) + self._ends(load) + load.beside_seconds

    def layers_seconds(self, load: Load) -> tuple[float, float]:
        """Returns the seconds of all layers, forward and backward."""
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
        if not self.has_optimizer:
            return 0.0
        weights = self.costs.model.size.parameters / self.shards / self.costs.tensor_ranks
        return weights * self.costs.profile.rates.optimizer_seconds

    def gather_seconds(self, weight_bytes: float) -> float:
        """Returns the seconds of gathering weights of so many bytes in bf16."""
        return self.cluster.all_gather(weight_bytes)

    def reduce_seconds(self, weight_bytes: float) -> float:
        """Returns the seconds of summing the gradients of weights of so many bytes in bf16."""
        if not self.sums_gradients:
            return 0.0
        return self.cluster.reduce_scatter(weight_bytes * self.reduce_bytes / HALF_BYTES)

    def embedding_seconds(self, load: Load) -> float:
        """Returns the seconds of the embedding, forward and backward: its rows are read and written, and its gradient
        is cleared and added to."""
        rows = float(load.tokens.max()) * self.costs.model.size.hidden_size * HALF_BYTES
        return float(self.costs.copy_seconds(5 * rows + 2 * self._root_bytes))

    def head_seconds(self, load: Load) -> float:
        """Returns the seconds of the last matrix and the loss, forward and backward."""
        return float(self.costs.head_seconds(load.of_head).max()) if self.has_head else 0.0

    def cast_seconds(self) -> float:
        """Returns the seconds of casting a rank's share of weights, and of gradients."""
        shards = self.costs.model.size.parameters / self.shards / self.costs.tensor_ranks
        return float(self.costs.copy_seconds((GATHERED_CASTS + self.sums_gradients) * CAST_BYTES * shards))

    def adding_seconds(self) -> float:
        """Returns the seconds of adding a micro-batch's gradients to those of earlier ones."""
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
        beside them are delayed. The ranks of an exchange hold equally many tokens, so that it begins as soon as each
        of them comes to it; ranks of other groups may hold fewer, and begin earlier.

        Args:
            collectives: seconds of all of them.
            waits: `[ranks]` seconds of the exchange, alone, or the same of all.
            before: `[ranks]` seconds of kernels before the exchange.
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

    def _ends(self, load: Load) -> float:
        """Returns the seconds of embedding, head and loss, and of collectives with nothing beside them."""
        collectives = sum(
            self.gather_seconds(num_bytes) + self.reduce_seconds(num_bytes)
            for num_bytes in (self._root_bytes, self.costs.layer_weight_bytes)
        )
        return collectives + self.embedding_seconds(load) + self.cast_seconds() + self.head_seconds(load)

    @property
    def _root_bytes(self) -> float:
        return self.costs.root_weight_bytes * self.root_share
