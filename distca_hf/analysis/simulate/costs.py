"""Costs: seconds of the parts of a step, for one model on one measured cluster.

    attention     a square, and a prefix without a mask; times the share of heads          from `AttentionTimes`
    layer         everything in a layer except attention, by tokens                        from `LayerTimes`
    head, AdamW   per token and word, per weight                                           from `DeviceRates`
    links         an exchange, an all-gather, a reduce-scatter, by bytes                    from `LinkTimes`

If the model's sizes are not the profile's, times are scaled, and `notes` says how.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca_hf.analysis.decoder_size import FLOPS_OF_WEIGHT, HALF_BYTES
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.profiles.cluster_profile import AttentionTimes, ClusterProfile, LayerTimes
from distca_hf.analysis.profiles.curves import Amounts, Curve, FloatArray, Notes, prefix_surface, square_curve
from distca_hf.arrays import BoolArray, IntArray
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import Plan, plan_in_place


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of tasks, squares first; all arrays are `[tiles]`.

    Attributes:
        rank: computes the tile.
        queries: of its task.
        keys: of a prefix; 0 for a square.
        pairs: attended pairs in each head group of the tile.
        one_group: whether the tile has a single head group, and not all heads.
        waits: whether its queries or keys come from other ranks.
    """

    mask: Mask
    rank: IntArray
    queries: IntArray
    keys: IntArray
    pairs: IntArray
    one_group: BoolArray
    waits: BoolArray

    @classmethod
    def of(cls, plan: Plan, mask: Mask = CAUSAL_MASK) -> "Tiles":
        """Returns the tiles of a layer with this mask. `plan`: plan of the full layers. In layers with a window every
        rank computes the queries that it holds."""
        if mask.window_tokens is None:
            tasks, remote = plan.tasks, plan.has_remote_queries
        else:
            tasks = plan_in_place(replace(plan.layout, stripes=()), mask=mask).tasks
            remote = np.zeros(len(tasks), dtype=bool)
        return cls.of_tasks(mask, tasks.rank, tasks.stop - tasks.start, tasks.start, tasks.head != ALL_HEADS, remote)

    @classmethod
    def of_tasks(
        cls, mask: Mask, rank: IntArray, queries: IntArray, before: IntArray, one_group: BoolArray, remote: BoolArray
    ) -> "Tiles":
        """Returns the tiles of tasks; all arrays are `[tasks]`. `before`: tokens of the document before the first
        query. `one_group`: whether the task has a single head group. `remote`: whether its queries come from other
        ranks."""
        first = mask.first_key(before)
        prefix = np.flatnonzero(first < before)
        inside = mask.pairs_inside(before, before + queries)
        outside = (mask.pairs_of(before, before + queries) - inside)[prefix]
        keys = np.concatenate([np.zeros_like(queries), (before - first)[prefix]])
        pairs, waits = np.concatenate([inside, outside]), np.concatenate([remote, np.ones(len(prefix), dtype=bool)])
        rank, queries, one_group = (np.concatenate([x, x[prefix]]) for x in (rank, queries, one_group))
        return cls(mask, rank, queries, keys, pairs, one_group, waits)


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and of backward; numbers, or arrays of one shape."""

    forward: FloatArray
    backward: FloatArray

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: FloatArray | float) -> "Passes":
        return Passes(self.forward * factor, self.backward * factor)

    def total(self) -> "Passes":
        return Passes(self.forward.sum(), self.backward.sum())

    def sum_by(self, rank: IntArray, num_ranks: int) -> "Passes":
        forward, backward = (np.bincount(rank, x, minlength=num_ranks) for x in (self.forward, self.backward))
        return Passes(forward.astype(np.float64), backward.astype(np.float64))


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer without attention: a pass that keeps nothing, one that keeps, and backward only."""

    forward: FloatArray
    kept: FloatArray
    backward: FloatArray


@dataclass(frozen=True)
class Costs:
    """Seconds of a model on a cluster. `notes`: everything that was not measured as needed. `tensor_ranks`: GPUs that
    divide every layer between them."""

    profile: ClusterProfile
    model: SimulatedModel
    liger: bool
    notes: Notes
    tensor_ranks: int = 1

    @property
    def head_groups(self) -> int:
        """Groups that plans divide the heads of a tensor rank into."""
        return self.model.heads.groups_of_rank(self.tensor_ranks)

    # Attention.

    def attention(self, queries: Amounts, before: Amounts, mask: Mask = CAUSAL_MASK) -> Passes:
        """Returns `[tasks]` seconds of tasks of all heads in one layer. `before`: `[tasks]` keys before the first
        query."""
        queries, before = np.asarray(queries, dtype=np.float64), np.asarray(before, dtype=np.float64)
        if mask.window_tokens is not None:
            pairs = mask.pairs_of(before.astype(np.int64), (before + queries).astype(np.int64))
            return self._windows(queries, pairs, mask)
        return self._square(queries) + self.rectangle(queries, before)

    def seconds(self, tiles: Tiles) -> Passes:
        """Returns `[tiles]` seconds of tiles in one layer."""
        if tiles.mask.window_tokens is not None:
            return self._windows(tiles.queries.astype(np.float64), tiles.pairs, tiles.mask)
        forward, backward = np.zeros(len(tiles.rank)), np.zeros(len(tiles.rank))
        for group in (False, True):
            for prefix in (False, True):
                chosen = (tiles.one_group == group) & ((tiles.keys > 0) == prefix)
                if chosen.any():
                    queries, keys = tiles.queries[chosen], tiles.keys[chosen]
                    passes = self.rectangle(queries, keys, group) if prefix else self._square(queries, group)
                    forward[chosen], backward[chosen] = passes.forward, passes.backward
        return Passes(forward, backward)

    def _square(self, queries: Amounts, group: bool = False) -> Passes:
        """Returns seconds of causal attention of queries to their own keys, in all heads or in one head group."""
        times, share = self._times(group)
        curves = (square_curve(times, x) for x in (times.square_forward, times.square_backward))
        return Passes(*(curve.at(queries, self.notes) for curve in curves)).times(share)

    def rectangle(self, queries: Amounts, keys: Amounts, group: bool = False) -> Passes:
        """Returns seconds of attention to other keys without a mask, in all heads or in one head group."""
        times, share = self._times(group)
        surfaces = (prefix_surface(times, x) for x in (times.prefix_forward, times.prefix_backward))
        return Passes(*(surface.at(queries, keys, self.notes) for surface in surfaces)).times(share)

    def _windows(self, queries: FloatArray, pairs: IntArray, mask: Mask) -> Passes:
        """Returns seconds of tasks or tiles with a window: their pairs, at the rate of a square of this many
        queries."""
        window = mask.window_tokens
        assert window is not None
        if mask.chunked:  # kernels compute squares of a chunk
            sizes = np.minimum(queries, window)
            return self._square(sizes).times(pairs / np.maximum(1.0, sizes * (sizes + 1) / 2))
        known = [times for times in self.profile.attention if times.window_tokens]
        if not known:
            self.notes.add("windows were not measured: their pairs are taken at the rate of full attention")
            return self._square(queries).times(pairs / np.maximum(1.0, queries * (queries + 1) / 2))
        nearest = min(known, key=lambda times: abs(np.log(times.window_tokens / window)))
        if nearest.window_tokens != window:
            self.notes.add(f"a window of {window:,} tokens is taken at the rate of one of {nearest.window_tokens:,}")
        share = self._share(nearest, self.model.heads.query)
        whole = queries.astype(np.int64)
        measured = Mask(nearest.window_tokens).pairs_inside(np.zeros_like(whole), whole)
        curves = (square_curve(nearest, x) for x in (nearest.square_forward, nearest.square_backward))
        return Passes(*(curve.at(queries, self.notes) for curve in curves)).times(
            share * pairs / np.maximum(1, measured)
        )

    def _times(self, group: bool) -> tuple[AttentionTimes, float]:
        """Returns the measured times of all heads, or of the fewest, and the ratio of the model's seconds to
        theirs."""
        full = [times for times in self.profile.attention if not times.window_tokens and times.prefix_queries]
        times = min(full, key=lambda times: times.heads) if group else full[0]
        return times, self._share(times, self.model.heads.query / (self.head_groups if group else 1))

    def _share(self, times: AttentionTimes, heads: float) -> float:
        """Returns seconds of these heads over seconds of the measured ones, by operations of a pair."""
        model = self.model.heads
        if (times.head_dim, times.head_dim) != (model.dim, model.value_dim):
            self.notes.add(
                f"heads of {model.dim} and {model.value_dim} numbers are taken at the rate of "
                f"{times.head_dim}, by operations"
            )
        return heads * (model.dim + model.value_dim) / (times.heads * 2 * times.head_dim) / self.tensor_ranks

    # Layers, head, optimizer.

    @cached_property
    def _layer(self) -> tuple[LayerTimes, float]:
        size, heads = self.model.size, self.model.heads
        mlp = size.mlp_size(heads)
        layers = [layer for layer in self.profile.layers if layer.liger == self.liger] or list(self.profile.layers)
        if layers[0].liger != self.liger:
            self.notes.add("layers with Liger's kernels were not measured: these are without")

        def apart(layer: LayerTimes) -> float:
            return abs(np.log(layer.hidden_size / size.hidden_size)) + abs(np.log(layer.mlp_size / max(1.0, mlp)))

        nearest = min(layers, key=apart)
        if apart(nearest) < 0.01 and nearest.heads * nearest.head_dim == heads.query * heads.dim:
            return nearest, 1.0
        weights = size.layer_parameters / size.layers
        measured = 3 * nearest.hidden_size * nearest.mlp_size + 2 * nearest.hidden_size * nearest.head_dim * (
            nearest.heads + nearest.kv_heads
        )
        products = measured * FLOPS_OF_WEIGHT / self.profile.rates.matrix_flops
        total = nearest.forward[-1] / nearest.tokens[-1]
        share = min(1.0, products / total)
        width = (6 * size.hidden_size + 3 * mlp) / (6 * nearest.hidden_size + 3 * nearest.mlp_size)
        factor = share * weights / measured + (1 - share) * width
        self.notes.add(
            f"a layer of hidden size {size.hidden_size:,} is taken from the measured one of {nearest.hidden_size:,}: "
            "products by their operations, the rest by width"
        )
        return nearest, factor

    def layer(self, tokens: IntArray) -> LayerSeconds:
        """Returns `[ranks]` seconds of a layer without attention."""
        layer, factor = self._layer
        asked = np.asarray(tokens, dtype=np.float64)
        times = (layer.forward, layer.kept, layer.backward)
        curves = (Curve.of("tokens of a layer", layer.tokens, x) for x in times)
        return LayerSeconds(*(curve.at(asked, self.notes) * (factor / self.tensor_ranks) for curve in curves))

    def head_seconds(self, tokens: IntArray) -> FloatArray:
        """Returns `[ranks]` seconds of the last matrix and the loss."""
        size, rates = self.model.size, self.profile.rates
        per_token = rates.head_seconds * size.vocabulary / 1000 * size.hidden_size / rates.head_hidden_size
        return np.asarray(tokens, dtype=np.float64) * per_token / self.tensor_ranks

    def rest_seconds(self, tokens: IntArray, recomputes_layers: bool, backward_share: float = 1.0) -> FloatArray:
        """Returns `[ranks]` seconds of all layers without attention, and of the head. `backward_share`: part of a
        layer's backward pass that is computed; below 1 if weights are frozen."""
        layer = self.layer(tokens)
        of_layer = layer.kept + layer.backward * backward_share + layer.forward * recomputes_layers
        return of_layer * self.model.size.layers + self.head_seconds(tokens)

    def copy_seconds(self, num_bytes: Amounts | float) -> FloatArray:
        """Returns seconds of reading and writing, with this many bytes in total."""
        return np.asarray(num_bytes, dtype=np.float64) / self.profile.rates.copy_bytes

    @property
    def share_before_attention(self) -> float:
        """Part of a layer's matrix products that computes queries, keys and values; the rest follows attention."""
        heads, size = self.model.heads, self.model.size
        columns = heads.query * heads.dim + heads.key_value * (heads.dim + heads.value_dim)
        return min(1.0, columns * size.hidden_size * size.layers / size.layer_parameters)

    @property
    def layer_weight_bytes(self) -> float:
        return HALF_BYTES * self.model.size.largest_layer_parameters / self.tensor_ranks

    @property
    def root_weight_bytes(self) -> float:
        return HALF_BYTES * self.model.size.embedding_parameters / self.tensor_ranks

    @property
    def token_bytes(self) -> tuple[float, float, float]:
        """Bytes of a token's queries, keys and values, and outputs in one layer, of one tensor rank."""
        whole = self.model.heads.token_bytes(HALF_BYTES)
        query, key_value, output = (x / self.tensor_ranks for x in (whole.query, whole.key_value, whole.output))
        return query, key_value, output
