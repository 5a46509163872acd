"""Decoder size: numbers of a model's layers that decide memory, the bytes of a token in one of them, and sizes of the
states that mixers exchange for cut documents.

`analysis.memory` explains the formulas.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distca_hf.analysis.training_setup import TrainingSetup
from distca_hf.cost import Heads, heads_of_tiles
from distca_hf.layout import Layout
from distca_hf.planning.folds import MOST_HEADS, Fold, cheaper
from distca_hf.planning.fragments import Fragments


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Bytes of a number in bf16 and in fp32.
HALF_BYTES, SINGLE_BYTES = 2, 4
# Bytes of a number that a norm saves, without and with Liger's kernels.
NORM_BYTES, LIGER_NORM_BYTES = 8, 4
# Bytes per token and per unit of an MLP's width while its backward runs: with Liger's kernels gate, up, their product
# and a gradient; without, also the activation, and two gradients.
MLP_BYTES, LIGER_MLP_BYTES = 6 * HALF_BYTES, 4 * HALF_BYTES
# Number of matrices of a gated MLP (gate, up, down), as in most models. An MLP of two counts as two thirds as wide.
MLP_MATRICES = 3
# Forward operations of one token and weight: a multiplication and an addition.
FLOPS_OF_WEIGHT = 2


@dataclass(frozen=True)
class LayerSize:
    """The sizes of one kind of decoder layers that decide memory.

    Attributes:
        parameters: weights of one layer, including all experts.
        mlp_size: width of a gated MLP with as many weights as a token passes outside of attention; of experts only
            those that it is sent to. A mixer counts as a part of it.
        heads: heads of attention; None for a layer without attention.
        norms_heads: whether queries and keys pass norms before attention, as in Qwen3.
        tiles_mlp, tiles_heads: whether the MLP can run on some tokens, and attention on some heads at a time.
            Experts and mixers cannot.
    """

    count: int
    parameters: int
    mlp_size: float
    heads: Heads | None
    window_tokens: int | None = None
    norms_heads: bool = False
    tiles_mlp: bool = True
    tiles_heads: bool = True

    def kv_heads_of_tiles(self, tile_heads: int) -> list[int]:
        """Returns the number of KV heads of each tile of attention, at most `tile_heads`; 0: one tile of all."""
        heads = 0 if self.heads is None else self.heads.key_value
        return heads_of_tiles(heads, tile_heads if self.tiles_heads else 0)

    def heads_share(self, setup: TrainingSetup) -> float:
        """Returns the share of the heads on which attention runs at a time."""
        tiles = self.kv_heads_of_tiles(setup.attention_kv_heads)
        return max(tiles, default=0) / max(1, sum(tiles)) or 1.0

    # The methods below return bytes of a token.

    def kept_bytes(self, hidden_size: int, setup: TrainingSetup) -> float:
        """Returns what a checkpointed layer keeps until backward."""
        outputs = self.output_bytes / setup.tensor_ranks if setup.saves_attention else 0.0
        return HALF_BYTES * hidden_size + outputs

    def kept_tensors(self, hidden_size: int, setup: TrainingSetup) -> tuple[float, ...]:
        """Returns the same for each tensor: the input, and outputs and log-sum-exps of each tile of attention."""
        if self.heads is None or not setup.saves_attention:
            return (HALF_BYTES * hidden_size,)
        outputs, log_sum_exps = HALF_BYTES * self.heads.query * self.heads.value_dim, SINGLE_BYTES * self.heads.query
        tiles = self.kv_heads_of_tiles(setup.attention_kv_heads)
        shares = [tile / self.heads.key_value / setup.tensor_ranks for tile in tiles]
        return HALF_BYTES * hidden_size, *(share * each for share in shares for each in (outputs, log_sum_exps))

    def computed_bytes(self, hidden_size: int, setup: TrainingSetup, mlp_share: float = 1.0) -> float:
        """Returns what a checkpointed layer holds while its backward runs. `mlp_share`: share of the tokens on which
        the MLP runs at a time."""
        in_mlp = self.saved_bytes(hidden_size, setup) + mlp_share * self.mlp_bytes(setup)
        return max(in_mlp, self._attention_bytes(hidden_size, setup))

    def mlp_bytes(self, setup: TrainingSetup) -> float:
        return (LIGER_MLP_BYTES if setup.liger else MLP_BYTES) * self.mlp_size / setup.tensor_ranks

    def saved_bytes(self, hidden_size: int, setup: TrainingSetup) -> float:
        """Returns everything else that a recomputed layer saves until the MLP's backward, and the gradients of the
        MLP's output and input."""
        # Liger's: two norms' outputs, and the sum between them.
        norms = HALF_BYTES * 3 * hidden_size if setup.liger else 2 * NORM_BYTES * hidden_size
        outputs = 0 if setup.saves_attention else self.output_bytes / setup.tensor_ranks
        # Tiles compute queries, keys and values again.
        inputs = self._qkv_bytes(setup.liger) / setup.tensor_ranks if self.heads_share(setup) == 1 else 0.0
        return inputs + outputs + norms + HALF_BYTES * 2 * hidden_size

    def _qkv_bytes(self, liger: bool) -> float:
        """Returns queries, keys and values, and their norms."""
        total = HALF_BYTES * self._attended_numbers
        if self.norms_heads and self.heads is not None:  # their outputs are not saved
            normed = (self.heads.query + self.heads.key_value) * self.heads.dim
            total += ((LIGER_NORM_BYTES if liger else NORM_BYTES) - HALF_BYTES) * normed
        return total

    def _attention_bytes(self, hidden_size: int, setup: TrainingSetup) -> float:
        """Returns what is held in attention's backward: recomputed outputs, the first norm, gradients of the sum after
        attention and of attention's output, and one tile."""
        if self.heads is None:
            return 0.0
        norm = (HALF_BYTES if setup.liger else NORM_BYTES) * hidden_size
        gradients = HALF_BYTES * self.heads.query * self.heads.value_dim
        outputs = gradients + (0 if setup.saves_attention else self.output_bytes)
        tile = self.attending_bytes(hidden_size, setup)
        return norm + HALF_BYTES * hidden_size + outputs / setup.tensor_ranks + tile

    def attending_bytes(self, hidden_size: int, setup: TrainingSetup) -> float:
        """Returns queries, keys and values of one tile, and their gradients, which kernels sum in fp32. If there are
        several, also a copy of its output gradient, or an input gradient, and the fp32 sum of these."""
        if self.heads is None:
            return 0.0
        computed = self._qkv_bytes(setup.liger) + (HALF_BYTES + SINGLE_BYTES) * self._attended_numbers
        if (heads_share := self.heads_share(setup)) == 1:
            return computed / setup.tensor_ranks
        attends = heads_share * (computed + HALF_BYTES * self.heads.query * self.heads.value_dim)
        projects = heads_share * HALF_BYTES * self._attended_numbers + HALF_BYTES * hidden_size
        return SINGLE_BYTES * hidden_size + max(attends, projects)

    @property
    def _attended_numbers(self) -> int:
        if self.heads is None:
            return 0
        keys = self.heads.key_value * (self.heads.dim + self.heads.value_dim)
        return self.heads.query * self.heads.dim + keys

    @property
    def output_bytes(self) -> int:
        """Bytes of a token's attention output, and of the log-sum-exp of each head."""
        if self.heads is None:
            return 0
        return HALF_BYTES * self.heads.query * self.heads.value_dim + SINGLE_BYTES * self.heads.query

    def received_bytes(self, received_bytes: int, tensor_ranks: int = 1) -> int:
        """Returns bytes of keys and values that a rank receives, if a layer of full attention receives that many: a
        window needs only its halos, of the document before each of a rank's two parts."""
        if self.heads is None:
            return 0
        if self.window_tokens is None:
            return received_bytes
        halo = 2 * (self.window_tokens - 1) * self.heads.token_bytes(HALF_BYTES).key_value
        return min(received_bytes, halo // tensor_ranks)

    def matrices(self, hidden_size: int) -> Iterator[int]:
        """Yields the number of weights of each matrix of one layer, as attention and a gated MLP have them."""
        projections: list[int] = []
        if self.heads is not None:
            queries, keys = self.heads.query, self.heads.key_value
            of_heads = (queries, self.heads.dim), (keys, self.heads.dim), (keys, self.heads.value_dim)
            projections = [hidden_size * heads * dim for heads, dim in (*of_heads, (queries, self.heads.value_dim))]
        yield from projections
        yield from [max(0, self.parameters - sum(projections)) // MLP_MATRICES] * MLP_MATRICES


@dataclass(frozen=True)
class DecoderSize:
    """Numbers of weights of a model. `vocabulary`: 0 for a model without a head. `embedding_parameters`: weights
    outside the layers, which FSDP2 gathers for the whole step: of the embedding, and of the head if it has its own."""

    hidden_size: int
    vocabulary: int
    parameters: int
    embedding_parameters: int
    layers: tuple[LayerSize, ...]

    @property
    def tiles_mlps(self) -> bool:
        return any(layer.tiles_mlp for layer in self.layers)

    @property
    def tiles_heads(self) -> bool:
        return any(len(layer.kv_heads_of_tiles(1)) > 1 for layer in self.layers)

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden_size

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    def matrices(self) -> Iterator[int]:
        """Yields the number of weights of each large matrix."""
        for layer in self.layers:
            for weights in layer.matrices(self.hidden_size):
                yield from [weights] * layer.count
        tables = max(1, round(self.embedding_parameters / self.head_parameters)) if self.vocabulary else 1
        yield from [self.embedding_parameters // tables] * tables


@dataclass(frozen=True)
class StateSize:
    """What every mixer of a model exchanges for cut documents in a forward pass.

    Attributes:
        heads: of a state, which ranks of a document may divide.
        head_bytes: of a head's summary (M, B) of a fragment; 0 for a convolution, which has no other state.
        halo_tokens, halo_bytes: tokens before a fragment that convolutions read, and bytes of each.
    """

    mixers: int
    heads: int
    head_bytes: int
    halo_tokens: int
    halo_bytes: int

    def most_bytes(self, layout: Layout) -> int:
        """Returns the most bytes that a rank sends or receives in a mixer. Adds up several exchanges even if their
        busiest ranks differ, and assumes that fragments are longer than a halo."""
        cut = Fragments.of(layout, 0, self.halo_tokens).cut
        if not len(cut.rank):
            return 0
        sends, receives = cut.rank[cut.summary_number >= 0], cut.rank[cut.state_number >= 0]
        halos = max(int(np.bincount(ranks).max()) for ranks in (sends, receives)) * self.halo_tokens * self.halo_bytes
        fold = cheaper(Fold.of(cut, 0), lambda: Fold.of(cut, 0, self.heads), self.heads, self.head_bytes)
        return fold.busiest * self.head_bytes * (self.heads if fold.heads is None else 1) + halos


# Heads, and numbers of a head's summary (`integrations.models.state_rules`), of a mixer whose code calls a function.
SUMMARIES: dict[str, Callable[[Any], tuple[int, int]]] = {
    "torch_chunk_gated_delta_rule": lambda of: (of.num_v_heads, of.head_k_dim * (of.head_k_dim + of.head_v_dim)),
    "chunk_kimi_delta_attention": lambda of: (of.num_heads, of.head_dim * 2 * of.head_dim),
    "mamba2_chunk_scan": lambda of: (of.num_heads, of.head_dim * of.ssm_state_size + 1),
    # Heads are groups of channels.
    "mamba_selective_scan": lambda of: (
        math.gcd(of.intermediate_size, MOST_HEADS),
        of.intermediate_size // math.gcd(of.intermediate_size, MOST_HEADS) * 2 * of.ssm_state_size,
    ),
}


def state_size_of(model: "PreTrainedModel") -> StateSize | None:
    """Returns what mixers exchange, taking all as the largest, in bf16, with states in fp32. None if there are no
    mixers, documents stay whole, or a mixer has other names for its sizes."""
    from distca_hf.integrations.models.carried_mixers import CONVOLUTION, REPLACED
    from distca_hf.integrations.models.mixers import halo_tokens_for, mixers_of

    halo_tokens, mixers, sizes = halo_tokens_for(model), mixers_of(model).values(), []
    if halo_tokens is None:
        return None
    for mixer in mixers:
        called = (REPLACED.keys() - {CONVOLUTION}) & inspect.unwrap(type(mixer).forward).__globals__.keys()
        try:
            heads, numbers = next(SUMMARIES[name](mixer) for name in SUMMARIES if name in called) if called else (1, 0)
        except (AttributeError, StopIteration):
            return None
        channels = sum(getattr(part, "in_channels", 0) for part in mixer.modules())
        sizes.append(StateSize(len(mixers), heads, SINGLE_BYTES * numbers, halo_tokens, HALF_BYTES * channels))
    return max(sizes, key=lambda size: size.heads * size.head_bytes + size.halo_bytes)
