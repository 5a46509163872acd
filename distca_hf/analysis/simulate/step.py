"""Step: seconds of micro-batches and optimizer steps under FSDP, from loads.

Under FSDP all ranks meet in every layer, when its weights are gathered. So a pass of a layer takes as long as on its
slowest rank. Weights of the next layer are gathered meanwhile, and gradients of the one before are reduced:

    gather     | root | layer 0 | layer 1 | layer 2 | ...          | reduce layer 0 | reduce root |
    kernels    |                | layer 0 | layer 1 | ...   | layer 0

At both ends nothing is computed beside. If wires take longer than kernels, a layer takes as long as its wires.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.simulate.costs import HALF_BYTES, Costs, LayerSeconds
from distca_hf.analysis.simulate.load import Attention, Load
from distca_hf.analysis.simulate.wires import Cluster


# Bytes of a weight that AdamW's step under FSDP reads and writes besides: gradients that are cast.
CAST_BYTES = 6
# Exchanges of activations that tensor parallelism makes in a layer, forward and as many backward: hidden states are
# gathered before and reduced behind attention and the MLP.
TENSOR_COLLECTIVES = 2


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        costs: of the model.
        cluster: data ranks, and their links.
        layers_checkpointed: whether layers are computed again in backward.
        has_head: whether the last matrix and the loss are computed.
        has_optimizer: whether AdamW makes a step.
        reduce_bytes: of a number in sums of gradients over ranks.
        root_copies: part of the weights outside of layers that there is; benchmarks leave the head out.
    """

    costs: Costs
    cluster: Cluster
    layers_checkpointed: bool = True
    has_head: bool = True
    has_optimizer: bool = True
    reduce_bytes: int = HALF_BYTES
    root_copies: float = 1.0

    @property
    def shards(self) -> int:
        """GPUs that weights are divided over."""
        return self.cluster.num_ranks

    def micro_batch_seconds(self, load: Load) -> float:
        """Returns the seconds of one micro-batch, forward and backward."""
        layer = self.costs.layer(load.tokens)
        mixers = self.costs.model.size.layers - self.costs.model.attention_layers
        seconds = sum(kind.layers * self._layer_seconds(layer, kind, load) for kind in load.attention)
        if mixers:
            nothing = np.zeros(len(load.tokens))
            seconds += mixers * self._layer_seconds(layer, Attention(nothing, nothing, nothing, nothing, 1), load)
        return seconds + self._ends(load) + load.beside_seconds

    def optimizer_seconds(self) -> float:
        """Returns the seconds of AdamW's step on a rank's share of the weights."""
        if not self.has_optimizer:
            return 0.0
        weights = self.costs.model.size.parameters / self.shards / self.costs.tensor_ranks
        return weights * self.costs.profile.rates.optimizer_seconds

    def _layer_seconds(self, layer: LayerSeconds, attention: Attention, load: Load) -> float:
        """Returns the seconds of a layer: of its slowest rank in each pass, or of the wires if they are slower."""
        gather = self.cluster.all_gather(self.costs.layer_weight_bytes)
        reduce = self._reduce_seconds(self.costs.layer_weight_bytes)
        tensor = self._tensor_seconds(load)
        beside, sent = self.cluster.products_beside, float(attention.sent.max())
        first = layer.forward if self.layers_checkpointed else layer.kept
        forward = float((first + attention.forward).max()) + beside * gather + tensor
        again = 0.0
        backward = layer.backward + attention.backward
        if self.layers_checkpointed:
            again = tensor
            backward = backward + layer.kept + (0.0 if load.saves_attention else attention.recomputed)
        behind = float(backward.max()) + beside * (gather + reduce) + tensor + again
        return max(forward, gather + sent) + max(behind, gather + reduce + sent)

    def _tensor_seconds(self, load: Load) -> float:
        """Returns the seconds in which tensor ranks exchange activations in a pass of a layer; nothing hides them."""
        ranks, links = self.costs.tensor_ranks, self.cluster.profile.within_node
        if ranks == 1 or links is None:
            return 0.0
        hidden = float(load.tokens.max()) * self.costs.model.size.hidden_size * HALF_BYTES
        node = Cluster(self.cluster.profile, ranks, ranks, self.costs.notes)
        return TENSOR_COLLECTIVES * (node.all_gather(hidden) + node.reduce_scatter(hidden))

    def _reduce_seconds(self, weight_bytes: float) -> float:
        """Returns the seconds of summing the gradients of weights of so many bytes in bf16."""
        return self.cluster.reduce_scatter(weight_bytes * self.reduce_bytes / HALF_BYTES)

    def _ends(self, load: Load) -> float:
        """Returns the seconds of embedding, head and loss, and of collectives with nothing beside them."""
        costs, size, tokens = self.costs, self.costs.model.size, float(load.tokens.max())
        root_bytes = costs.root_weight_bytes * self.root_copies
        collectives = sum(
            self.cluster.all_gather(num_bytes) + self._reduce_seconds(num_bytes)
            for num_bytes in (root_bytes, costs.layer_weight_bytes)
        )
        # Rows of the embedding are read and written, and its gradient is cleared and added to.
        rows = tokens * size.hidden_size * HALF_BYTES
        embedding = float(costs.copy_seconds(5 * rows + 2 * root_bytes))
        shards = size.parameters / self.shards / costs.tensor_ranks
        casts = float(costs.copy_seconds(3 * CAST_BYTES * shards))
        head = float(costs.head_seconds(load.tokens).max()) if self.has_head else 0.0
        return collectives + embedding + casts + head
