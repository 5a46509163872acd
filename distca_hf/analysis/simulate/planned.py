"""Planned: loads of distca_hf's ways, computed from plans that training's own planners make.

Kernels are `Tiles` of attention. Squares whose queries stay need no rows of other ranks, so they run while rows are on
their way. Prefixes, and tasks with queries from other ranks, wait for rows. In layers with a window all queries stay,
and wait only for the few keys before each part of a document.
"""

from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.profiles.curves import FloatArray
from distca_hf.analysis.simulate.costs import HALF_BYTES, Costs, Passes
from distca_hf.analysis.simulate.load import Exchanges, Hidden, Load
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.analysis.tiles import Tiles
from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.placement.given import tokens_between
from distca_hf.planning.plan import Plan
from distca_hf.planning.routing import LATE_SHARE
from distca_hf.planning.transfers import keys_between, queries_between


# Bytes of each number that travels with a token into the decoder: its id, its position, and its label if the loss is
# placed.
WHOLE_BYTES = 8


def ours(
    costs: Costs,
    cluster: Cluster,
    plan: Plan,
    chunks: int,
    saves_attention: bool,
    planning_seconds: float = 0.0,
    keeps: bool = True,
    gather_seconds: float | None = None,
) -> Load:
    """Returns the load of a plan.

    Args:
        planning_seconds: time of planning at the first attention call; 0 if a thread has planned before.
        keeps: whether rows of other ranks are kept until backward.
        gather_seconds: time in which FSDP gathers the next layer's weights meanwhile; by default over all ranks.
    """
    layout, wires = plan.layout, RowBytes.of(costs, cluster, plan)
    before = costs.share_before_attention * float(costs.layer(layout.rank_tokens).forward.max())
    if gather_seconds is None:
        gather_seconds = cluster.all_gather(costs.layer_weight_bytes)
    gathering = max(0.0, gather_seconds - before)
    full = Hidden(wires.exchanges(), chunks, plan.moves_queries, cluster.attention_beside, keeps, gathering)
    kinds = []
    for mask, layers in costs.model.masks:
        if mask.window_tokens is None:
            hidden, speeds = full, plan.speeds
        else:
            halos = RowBytes.of(costs, cluster, plan.of_window(mask)).exchanges()
            hidden, speeds = replace(full, exchanges=halos, chunks=1, moves_queries=False), ()
        local, remote = kernel_seconds(costs, plan, mask)
        of_passes = zip(vars(local).values(), vars(remote).values(), strict=True)
        late = Passes(*(_late(own, own + others, bool(speeds)) for own, others in of_passes))
        kinds.append(hidden.attention(local, remote, late, layers))
    waits = max(0.0, planning_seconds - before)
    return Load(layout.rank_tokens, kinds, wires.most_bytes, True, saves_attention, waits)


def rows_placed(
    costs: Costs, cluster: Cluster, home: Layout, load: Load, placed: Layout, loss_is_placed: bool
) -> Load:
    """Adds the exchanges at the borders of the decoder to the load of given batches whose rows are placed inside it.

    Nothing is computed during these exchanges. Rows of even batches stay. Planning takes no time: a thread does it
    during the step before.

    Args:
        loss_is_placed: whether head and loss run on placed rows. Otherwise hidden states and their gradients return.
    """
    load = replace(load, head_tokens=None if loss_is_placed else home.rank_tokens)
    if placed is home:
        return load
    moved = tokens_between(home, placed).astype(np.float64)
    copied = (moved.sum(axis=0) + moved.sum(axis=1)).max()  # rows are gathered, and put where they belong
    np.fill_diagonal(moved, 0.0)
    described, hidden = (2 + loss_is_placed) * WHOLE_BYTES, HALF_BYTES * costs.model.size.hidden_size
    seconds = _seconds(cluster, described * moved).max() + costs.copy_seconds(2 * described * copied)
    if not loss_is_placed:
        seconds += _seconds(cluster, hidden * moved.T).max() + _seconds(cluster, hidden * moved).max()
        seconds += 2 * costs.copy_seconds(2 * hidden * copied)
    return replace(load, beside_seconds=load.beside_seconds + float(seconds))


def kernel_seconds(costs: Costs, plan: Plan, mask: Mask) -> tuple[Passes, Passes]:
    """Returns `[ranks]` seconds of local kernel calls, which need no rows of other ranks, and of remote ones."""
    tiles = Tiles.of(plan, mask)
    seconds, num_ranks = costs.seconds(tiles), plan.layout.num_ranks
    local, remote = (
        seconds.times(of.astype(np.float64)).sum_by(tiles.rank, num_ranks) for of in (~tiles.waits, tiles.waits)
    )
    return local, remote


def _late(local: FloatArray, kernels: FloatArray, has_speeds: bool) -> FloatArray:
    """Returns `[ranks]` seconds of local calls that are deferred until results are sent, as in `planning.routing`."""
    working = kernels > 0
    deferred = LATE_SHARE * kernels[working].mean() if working.any() else 0.0
    if has_speeds:
        leaves = max((kernels - local).max(), kernels.max() - deferred)
        return np.clip(kernels - leaves, 0.0, local)
    return np.minimum(local, min(deferred, local[working].min(initial=np.inf)))


@dataclass(frozen=True)
class RowBytes:
    """Bytes that ranks send each other in one layer, `[source, destination]`.

    Attributes:
        cluster: the ranks and their links.
        keys: keys and values; their gradients on the way back have as many.
        queries: queries that move, `[owner, computing rank]`.
        outputs: outputs of these queries, also `[owner, computing rank]`, although they travel the other way.
    """

    cluster: Cluster
    keys: FloatArray
    queries: FloatArray
    outputs: FloatArray

    @classmethod
    def of(cls, costs: Costs, cluster: Cluster, plan: Plan) -> "RowBytes":
        of_token = costs.model.heads.token_bytes(HALF_BYTES)
        of_row = 1 / plan.tasks.head_groups / costs.tensor_ranks
        keys, queries = (of_row * rows.astype(np.float64) for rows in (keys_between(plan), queries_between(plan)))
        return cls(cluster, keys * of_token.key_value, queries * of_token.query, queries * of_token.output)

    @property
    def forward_bytes(self) -> FloatArray:
        """All bytes of the forward pass, `[source, destination]`."""
        return self.keys + self.queries + self.outputs.T

    @property
    def most_bytes(self) -> float:
        """Most bytes that a rank sends or receives in the forward pass."""
        return float(max(self.forward_bytes.sum(axis=axis).max() for axis in (0, 1)))

    def exchanges(self) -> Exchanges:
        """Returns the seconds of each exchange."""
        return Exchanges(
            self.seconds(self.keys + self.queries),
            self.seconds(self.outputs.T),
            self.seconds(self.outputs),
            self.seconds(self.keys.T + self.queries.T),
        )

    def seconds(self, num_bytes: FloatArray) -> FloatArray:
        """Returns `[ranks]` seconds of an exchange of `[source, destination]` bytes."""
        return _seconds(self.cluster, num_bytes)


def _seconds(cluster: Cluster, num_bytes: FloatArray) -> FloatArray:
    """Returns `[ranks]` seconds of an exchange of `[source, destination]` bytes."""
    node = cluster.node_of
    crosses = node[:, None] != node[None, :]
    of_links = num_bytes * ~crosses, num_bytes * crosses
    return cluster.exchange(*(WireBytes(each.sum(axis=1), each.sum(axis=0)) for each in of_links))
