"""Load: one micro-batch as divided by one way to train: tokens, and seconds of attention of every rank.

Seconds of attention include exchanges that are not hidden:

    forward     local calls run while rows are under way; chunk after chunk is attended as it arrives
    backward    gradients leave while the last local calls run

    exchange   | chunk 0 | chunk 1 |                             | gradients |
    kernel     | local calls | chunk 0 | chunk 1 |  | early calls | late calls | waits

If queries move, results of forward leave like gradients of backward, and output gradients come like rows of forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distca_hf.analysis.decoder_size import HALF_BYTES
from distca_hf.analysis.profiles.curves import FloatArray
from distca_hf.analysis.simulate.costs import Costs, Passes, Tiles
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.arrays import IntArray
from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.placement.given import tokens_between
from distca_hf.planning.plan import Plan
from distca_hf.planning.routing import LATE_SHARE
from distca_hf.planning.row_moves import results_between
from distca_hf.planning.transfers import keys_between, queries_between


@dataclass(frozen=True)
class Attention:
    """`[ranks]` seconds of one layer's attention, with exchanges that kernels wait for. `recomputed`: of forward when
    it runs again in backward. `sent`, `sent_backward`: for which the wires are busy. `waits`, `waits_backward`: of
    exchanges that kernels wait for, and that other traffic on the wires delays; may be one number for all ranks."""

    forward: FloatArray
    recomputed: FloatArray
    backward: FloatArray
    sent: FloatArray
    sent_backward: FloatArray
    layers: int
    waits: FloatArray = field(default_factory=lambda: np.zeros(1))
    waits_backward: FloatArray = field(default_factory=lambda: np.zeros(1))


@dataclass(frozen=True)
class Load:
    """One micro-batch on all ranks.

    Attributes:
        tokens, head_tokens: `[ranks]` tokens that each rank's layers compute, and its head; None: the same.
        attention: each kind of attention layers.
        bytes_per_layer, state_bytes: most that a rank sends or receives in a full layer's forward pass, and a
            mixer's.
        left_out_pairs: attended pairs of all layers that are lost because documents are cut at borders.
        saves_attention: whether outputs are kept under activation checkpointing.
        further_seconds: further seconds of the micro-batch, such as planning in the step.
        prefixes: `[documents]` tokens of each document that layers compute for another one; None if there are
            none.
    """

    tokens: IntArray
    attention: Sequence[Attention]
    bytes_per_layer: float = 0.0
    left_out_pairs: float = 0.0
    saves_attention: bool = False
    further_seconds: float = 0.0
    head_tokens: IntArray | None = None
    state_bytes: int = 0
    prefixes: IntArray | None = None

    @property
    def of_head(self) -> IntArray:
        return self.tokens if self.head_tokens is None else self.head_tokens

    def attention_seconds(self, layers_checkpointed: bool) -> float:
        """Returns the mean seconds of ranks in attention, all layers and passes together."""
        again = layers_checkpointed and not self.saves_attention
        passes = ((kind.layers, kind.forward + kind.backward + again * kind.recomputed) for kind in self.attention)
        return float(sum(layers * seconds.mean() for layers, seconds in passes))


Step = Sequence[IntArray]  # document lengths of each micro-batch, in the order of packing


@dataclass(frozen=True)
class Way:
    """One way to train, as it is simulated.

    Attributes:
        key: its name in JSON.
        loads: makes the load of each micro-batch of a step.
        costly: whether it is simulated only on some steps, because planning takes long.
        family: ways of one family differ only in group size, and the fastest is shown; empty if it has no others.
        in_stages: whether it runs in the stages of a pipeline; loads are then of the ranks of one stage.
        servers: data ranks that serve attention, and hold no weights.
    """

    key: str
    label: str
    loads: Callable[[Step], list[Load]]
    costly: bool = False
    family: str = ""
    is_ours: bool = False
    in_stages: bool = False
    servers: int = 0


@dataclass(frozen=True)
class Exchanges:
    """Seconds of a layer's exchanges of rows, each `[ranks]` and as if nothing else were sent.

    Attributes:
        rows: keys and values, and queries that move.
        results, output_gradients: of these queries; equal bytes.
        gradients: of keys and values, and of these queries, back to their owner ranks.
    """

    rows: FloatArray
    results: FloatArray
    output_gradients: FloatArray
    gradients: FloatArray


@dataclass(frozen=True)
class Hidden:
    """Exchanges during the kernels of a layer.

    Attributes:
        exchanges: their seconds.
        chunks: parts that rows come in. Results of a chunk leave while the next one is attended.
        moves_queries: whether queries move on any rank.
        kernel_delay: seconds by which a second of exchange delays kernels.
        keeps: whether rows of others are kept until backward; otherwise they are sent again for recomputation and for
            backward, there with the outputs of queries that move.
        gathering: remaining seconds of gathering the next layer's weights when rows leave: both share the wires.
    """

    exchanges: Exchanges
    chunks: int = 1
    moves_queries: bool = False
    kernel_delay: float = 0.0
    keeps: bool = True
    gathering: float = 0.0

    def attention(self, local: Passes, remote: Passes, late: Passes, layers: int) -> Attention:
        """Returns attention with these exchanges. `local`, `remote`: `[ranks]` seconds of calls that need no rows of
        other ranks, and of all others. `late`: of the local calls that can wait until results leave."""
        kernels, wires = local + remote, self.exchanges
        sent = wires.rows + wires.results
        # Half of them are early if rows both arrive and leave; without results forward has no late calls.
        late_forward = late.forward / 2 if self.moves_queries else np.zeros_like(late.forward)
        early = local.forward - late_forward
        results = np.maximum(late_forward, wires.results / self.chunks)
        rows = wires.rows + np.minimum(wires.rows, self.gathering)
        forward = _in_chunks(early, remote.forward, rows, self.chunks) + results
        forward = forward + self._delay(sent, forward, kernels.forward)
        recomputed = forward
        if self.keeps:
            recomputed = early + remote.forward + results
            recomputed = recomputed + self._delay(wires.results, recomputed, kernels.forward)
        comes = wires.output_gradients if self.keeps else wires.rows + 2 * wires.output_gradients
        late_backward = late.backward / 2 if self.moves_queries or not self.keeps else late.backward
        early = local.backward - late_backward
        backward = _in_chunks(early, remote.backward, comes, 1) + np.maximum(late_backward, wires.gradients)
        backward = backward + self._delay(comes + wires.gradients, backward, kernels.backward)
        return Attention(forward, recomputed, backward, sent, comes + wires.gradients, layers)

    def _delay(self, sent: FloatArray, seconds: FloatArray, kernels: FloatArray) -> FloatArray:
        """Returns the seconds by which exchanges delay kernels that run meanwhile; kernels that wait lose nothing."""
        waits = seconds - kernels
        return self.kernel_delay * np.clip(sent - waits, 0.0, kernels)


def waited_for(kernels: Passes, layers: int, exchanges: FloatArray, sent: FloatArray) -> Attention:
    """Returns attention whose kernels wait for exchanges, which recomputation makes again. `exchanges`: `[ranks]`
    seconds of exchanges and of copies for them, in each pass. `sent`: seconds for which the wires are busy."""
    forward, backward = kernels.forward + exchanges, kernels.backward + exchanges
    return Attention(forward, forward, backward, sent, sent, layers, sent, sent)


def nothing_sent(kernels: Passes, layers: int) -> Attention:
    """Returns attention of ranks that send nothing."""
    nothing = np.zeros_like(kernels.forward)
    return Attention(kernels.forward, kernels.forward, kernels.backward, nothing, nothing, layers)


def _in_chunks(local: FloatArray, remote: FloatArray, seconds: FloatArray, chunks: int) -> FloatArray:
    """Returns seconds until all chunks are attended, each as soon as it has arrived."""
    end = local
    for chunk in range(1, chunks + 1):
        arrives = np.where(remote > 0, seconds * chunk / chunks, 0.0)
        end = np.maximum(end, arrives) + remote / chunks
    return end


# Bytes of each number that moves with a token into the decoder: its id, its position, and if the loss is placed, its
# label.
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
    """Returns the load of a plan. `planning_seconds`: time of planning at the first attention call; 0 if a thread
    plans ahead. `keeps`: whether rows of other ranks are kept until backward. `gather_seconds`: time in which FSDP
    gathers the next layer's weights meanwhile; by default over all ranks."""
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
    waits, state_bytes = max(0.0, planning_seconds - before), 0
    if (states := costs.model.state_size) is not None:
        costs.notes.add("what layers compute twice for parts of documents, so that states travel, is left out")
        state_bytes = states.most_bytes(layout)
        # Forward, and gradients backward, as if nothing hid them. Recomputed layers keep received states.
        waits += 2 * states.mixers * cluster.alike_exchange(state_bytes)
    elif costs.model.has_unknown_states:
        costs.notes.add("sizes of states that travel are not known, and left out")
    return Load(
        layout.rank_tokens,
        kinds,
        wires.most_bytes,
        saves_attention=saves_attention,
        further_seconds=waits,
        state_bytes=state_bytes,
    )


def rows_placed(
    costs: Costs, cluster: Cluster, home: Layout, load: Load, placed: Layout, loss_is_placed: bool
) -> Load:
    """Adds the exchanges at the borders of the decoder to the load of given batches whose rows are placed inside it.
    Nothing is computed during these exchanges. `loss_is_placed`: whether head and loss run on placed rows; otherwise
    hidden states and their gradients return."""
    load = replace(load, head_tokens=None if loss_is_placed else home.rank_tokens)
    if placed is home:
        return load
    described, hidden = (2 + loss_is_placed) * WHOLE_BYTES, HALF_BYTES * costs.model.size.hidden_size
    moved = tokens_between(home, placed).astype(np.float64)
    copied = (moved.sum(axis=0) + moved.sum(axis=1)).max()  # rows are gathered, and scattered
    np.fill_diagonal(moved, 0.0)
    seconds = exchange_seconds(cluster, described * moved).max() + costs.copy_seconds(2 * described * copied)
    if not loss_is_placed:
        results = results_between(home, placed).astype(np.float64)
        copied = (results.sum(axis=0) + home.rank_tokens).max()
        np.fill_diagonal(results, 0.0)
        # Results go one way, their gradients the other.
        seconds += exchange_seconds(cluster, hidden * results.T).max()
        seconds += exchange_seconds(cluster, hidden * results).max()
        seconds += 2 * costs.copy_seconds(2 * hidden * copied)
    return replace(load, further_seconds=load.further_seconds + float(seconds))


def kernel_seconds(costs: Costs, plan: Plan, mask: Mask) -> tuple[Passes, Passes]:
    """Returns `[ranks]` seconds of local kernel calls, which need no rows of other ranks, and of remote calls."""
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
    """Bytes that ranks send each other in one layer, `[source, destination]`. `keys`: with values; as many as of their
    gradients. `queries`, `outputs`: of queries that move, both `[owner rank, server]`, although outputs travel the
    other way."""

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
        return self.keys + self.queries + self.outputs.T

    @property
    def most_bytes(self) -> float:
        return float(max(self.forward_bytes.sum(axis=axis).max() for axis in (0, 1)))

    def exchanges(self) -> Exchanges:
        return Exchanges(
            exchange_seconds(self.cluster, self.keys + self.queries),
            exchange_seconds(self.cluster, self.outputs.T),
            exchange_seconds(self.cluster, self.outputs),
            exchange_seconds(self.cluster, self.keys.T + self.queries.T),
        )


def exchange_seconds(cluster: Cluster, num_bytes: FloatArray) -> FloatArray:
    """Returns `[ranks]` seconds of an exchange of `[source, destination]` bytes."""
    node = cluster.node_of
    crosses = node[:, None] != node[None, :]
    of_links = num_bytes * ~crosses, num_bytes * crosses
    return cluster.exchange(*(WireBytes(each.sum(axis=1), each.sum(axis=0)) for each in of_links))
