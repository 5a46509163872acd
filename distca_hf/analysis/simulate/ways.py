"""Ways: other ways to train, to compare distca_hf with. They share attention without a planner.

Each is a function from the document lengths of a micro-batch to a `Load`.

| function | what a rank holds | what it attends |
|---|---|---|
| plain_packing | a pack of whole documents; all packs have equal tokens | its documents |
| sorted_packs | the same packs; equally heavy ones run at the same time | its documents |
| whole_documents | whole documents, dealt longest first to the least loaded rank | its documents |
| ulysses | a part of its group's documents, in order | all tokens of the group, with some of the heads |
| ring | a zigzag part of every document of its group | keys of one rank after another, in a ring |

Groups are filled in order, and documents are cut at the borders of groups. Packs cut documents that are longer than a
pack. Attention across cuts is left out, which favours these ways. A way with groups is simulated for each group size
that holds the context, and the fastest is shown.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.profiles.curves import Amounts, FloatArray
from distca_hf.analysis.simulate.costs import Costs, Passes
from distca_hf.analysis.simulate.load import Attention, Load, Step, Way, nothing_sent, waited_for
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.cost import causal_pairs_of
from distca_hf.data.documents import split_documents
from distca_hf.placement.place import fill_in_order


# Bytes that ring attention reads and writes for a number of queries' results when it merges a step's output in fp32,
# and at both ends of a layer; then the same of gradients. From the code of ring-flash-attention 0.1.8, zigzag varlen.
RING_MERGE_BYTES, RING_END_BYTES = 30, 12
RING_GRADIENT_BYTES, RING_GRADIENT_END_BYTES = 10, 12
# Copies of an exchange that is packed or unpacked: each byte is read and written.
READ_AND_WRITTEN = 2


def packs(costs: Costs, held: Sequence[IntArray], document_tokens: IntArray) -> Load:
    """Returns the load of ranks that compute only their own documents. `held`: lengths of each rank's documents.
    `document_tokens`: lengths of the same documents before they were cut."""
    rank = np.repeat(np.arange(len(held)), [len(lengths) for lengths in held])
    lengths = np.concatenate(held)
    attention = [
        nothing_sent(costs.attention(lengths, np.zeros(len(lengths)), mask).sum_by(rank, len(held)), layers)
        for mask, layers in costs.model.masks
    ]
    left_out = left_out_pairs(costs.model, held, document_tokens)
    return Load(np.array([int(x.sum()) for x in held]), attention, left_out_pairs=left_out)


def left_out_pairs(model: SimulatedModel, held: Sequence[IntArray], document_tokens: IntArray) -> float:
    """Counts the attended pairs that are lost by cutting documents into the parts in `held`."""
    return model.pairs(document_tokens) - model.pairs(np.concatenate(held))


def best_fit(document_tokens: IntArray, num_packs: int) -> list[IntArray]:
    """Packs documents as TRL does (bfd): the longest first, each whole into the fullest pack that has room for it.

    Documents longer than a pack are cut. So are the last few that find no pack with enough room: all packs together
    hold hardly more tokens than the documents.
    """
    size = int(ceil_div(document_tokens.sum(), num_packs))
    pieces = split_documents(document_tokens, size)[2]
    rooms = [(size, pack) for pack in range(num_packs)]  # ascending
    held: list[list[int]] = [[] for _ in range(num_packs)]

    def put(at: int, tokens: int) -> None:
        room, pack = rooms.pop(at)
        held[pack].append(tokens)
        if room > tokens:
            insort(rooms, (room - tokens, pack))

    left = []
    for tokens in np.sort(pieces)[::-1].tolist():
        at = bisect_left(rooms, (tokens, -1))
        if at < len(rooms):
            put(at, tokens)
        else:
            left.append(tokens)
    for tokens in left:
        while tokens > 0:
            part = min(tokens, rooms[-1][0])
            put(len(rooms) - 1, part)
            tokens -= part
    return [np.array(lengths, dtype=np.int64) for lengths in held]


def fill_groups(document_tokens: IntArray, num_groups: int) -> list[IntArray]:
    """Fills groups in order with equal tokens, and returns the lengths of each group's documents.

    Groups attend separately: a document cut at the border of two groups continues as a new document. That is less
    attention work than uncut documents have, to the advantage of baselines with groups.
    """
    layout = fill_in_order(document_tokens, num_groups)
    return np.split(layout.segment_tokens, layout.rank_segments[1:-1])


def plain_packing(costs: Costs, document_tokens: IntArray, num_ranks: int) -> Load:
    """Returns the load of packs with equal tokens."""
    return packs(costs, best_fit(document_tokens, num_ranks), document_tokens)


def sorted_packs(costs: Costs, step: Step, num_ranks: int) -> list[Load]:
    """Returns the loads of a step whose packs are sorted by work, so that equally heavy ones run at the same time."""
    lengths = np.concatenate(step)
    held = best_fit(lengths, num_ranks * len(step))
    work = np.array([causal_pairs_of(np.zeros_like(pack), pack).sum() for pack in held])
    order = np.argsort(-work, kind="stable").reshape(len(step), num_ranks)
    left_out = left_out_pairs(costs.model, held, lengths) / len(step)
    at_once = [[held[pack] for pack in of_step] for of_step in order]
    loads = [packs(costs, together, np.concatenate(together)) for together in at_once]
    return [replace(load, left_out_pairs=left_out) for load in loads]


def whole_documents(costs: Costs, document_tokens: IntArray, num_ranks: int) -> Load:
    """Returns the load of whole documents, each on the rank with least work so far; ranks hold unequal tokens."""
    return packs(costs, longest_first(costs, document_tokens, num_ranks), document_tokens)


def longest_first(costs: Costs, document_tokens: IntArray, num_groups: int) -> list[IntArray]:
    """Deals documents to groups, and returns the lengths of each group's documents. Documents that take longest are
    dealt first, each to the group with the fewest seconds so far. Seconds count matrix products and attention, as in
    WLB-LLM."""
    attention = [
        costs.attention(document_tokens, np.zeros(len(document_tokens)), mask).times(layers)
        for mask, layers in costs.model.masks
    ]
    of_group = ceil_div(document_tokens.sum(), num_groups)
    layer = costs.layer(np.array([of_group]))
    of_token = float((layer.kept + layer.backward)[0]) * costs.model.size.layers / max(1, of_group)
    seconds = document_tokens * of_token + sum(x.forward + x.backward for x in attention)
    least = [(0.0, group) for group in range(num_groups)]  # a heap: the group with fewest seconds comes first
    numbers: list[list[int]] = [[] for _ in range(num_groups)]
    for number in np.argsort(-seconds, kind="stable").tolist():
        so_far, group = least[0]
        heapq.heapreplace(least, (so_far + float(seconds[number]), group))
        numbers[group].append(number)
    return [document_tokens[np.array(held, dtype=np.int64)] for held in numbers]


def ulysses(costs: Costs, cluster: Cluster, document_tokens: IntArray, group: int) -> Load:
    """Returns the load of heads divided over groups of neighbours. Queries, keys and values are exchanged before
    attention, outputs after it."""
    held = fill_groups(document_tokens, cluster.num_ranks // group)
    load = packs(costs, held, document_tokens)
    tokens = np.repeat(ceil_div(load.tokens, group), group)
    query, key_value, output = costs.token_bytes
    # A KV head goes to every rank that has one of its query heads.
    copies = max(1.0, group / costs.model.heads.key_value)
    sizes = [x * tokens for x in (query, key_value / 2 * copies, key_value / 2 * copies, output)]
    seconds = np.sum([group_exchange(cluster, size * (group - 1) / group, group) for size in sizes], axis=0)
    all_bytes = np.sum(sizes, axis=0)
    copied = costs.copy_seconds(READ_AND_WRITTEN * all_bytes)
    attention = [
        waited_for(
            Passes(*(np.repeat(each / group, group) for each in (x.forward, x.backward))),
            x.layers,
            seconds + copied,
            seconds,
        )
        for x in load.attention
    ]
    return Load(tokens, attention, float(np.max(all_bytes * (group - 1) / group, initial=0.0)), load.left_out_pairs)


def ring(costs: Costs, cluster: Cluster, document_tokens: IntArray, group: int) -> Load:
    """Returns the load of zigzag context parallelism in a ring. Keys and values of the next rank arrive while
    the previous ones are attended. Steps take as long with windows as without."""
    held = fill_groups(document_tokens, cluster.num_ranks // group)
    tokens = np.repeat(ceil_div(np.array([int(x.sum()) for x in held]), group), group)
    kernels = [_ring_kernels(costs, lengths, group) for lengths in held]
    first, step = (
        Passes(np.repeat([x[at].forward for x in kernels], group), np.repeat([x[at].backward for x in kernels], group))
        for at in (0, 1)
    )
    query, key_value, _ = costs.token_bytes
    numbers, keys = query / 2 * tokens, key_value / 2 * tokens
    steps = group - 1
    sends = cluster.to_next(key_value * tokens, group) * (steps > 0)
    # Keys and values, and fp32 gradients of both.
    sends_gradients = cluster.to_next(3 * key_value * tokens, group) * (steps > 0)
    merge = costs.copy_seconds(0.75 * RING_MERGE_BYTES * numbers)  # of half of the queries in half of the steps
    add = costs.copy_seconds(0.75 * RING_GRADIENT_BYTES * numbers + RING_GRADIENT_BYTES * keys)
    ends = costs.copy_seconds(RING_END_BYTES * numbers)
    gradient_ends = costs.copy_seconds(RING_GRADIENT_END_BYTES * (numbers + keys))
    late = cluster.attention_beside
    forward = first.forward + ends + steps * merge + _steps(first.forward, step.forward, sends, steps, late)
    backward = first.backward + gradient_ends + steps * add
    backward = backward + _steps(first.backward, step.backward, sends_gradients, steps, late)
    backward = backward + np.maximum(0.0, sends_gradients - sends)  # gradients come home after the last step
    sent, sent_backward = steps * sends, steps * sends_gradients
    # If kernels wait for keys, other traffic on the wires delays them as well.
    waits = sent * (sends > step.forward), sent_backward * (sends_gradients > step.backward)
    attention = [Attention(forward, forward, backward, sent, sent_backward, costs.model.attention_layers, *waits)]
    left_out = left_out_pairs(costs.model, held, document_tokens)
    return Load(tokens, attention, float(np.max(steps * key_value * tokens, initial=0.0)), left_out)


def _ring_kernels(costs: Costs, lengths: IntArray, group: int) -> tuple[Passes, Passes]:
    """Returns the seconds of a ring's first step, on own keys, and of each later one, on half of a rectangle."""
    chunk = lengths / (2 * group)
    own = costs.attention(2 * chunk, np.zeros(len(lengths)))
    if group == 1:
        return own.total(), Passes(np.array(0.0), np.array(0.0))
    early, late = costs.rectangle(2 * chunk, chunk), costs.rectangle(chunk, 2 * chunk)
    return own.total(), (early + late).times(0.5).total()


def _steps(first: FloatArray, step: FloatArray, sends: FloatArray, steps: int, kernel_delay: float) -> FloatArray:
    """Returns the seconds of all steps after the first. Each waits for keys that arrive during the step before.
    `kernel_delay`: seconds by which a second of exchange delays kernels."""
    if not steps:
        return np.zeros_like(first)
    waits = np.maximum(0.0, sends - first) + (steps - 1) * np.maximum(0.0, sends - step)
    return steps * step + waits + kernel_delay * steps * np.minimum(sends, np.maximum(first, step))


def group_exchange(cluster: Cluster, num_bytes: Amounts, group: int) -> FloatArray:
    """Returns the seconds of an exchange within groups of neighbours. If a group spans nodes, the share of bytes that
    goes between nodes is the share of its ranks on other nodes."""
    beyond = cluster.share_beyond(group)
    return cluster.exchange(WireBytes.both_ways(num_bytes * (1 - beyond)), WireBytes.both_ways(num_bytes * beyond))


class Grouped(NamedTuple):
    """A way to compare with, in which groups of ranks share documents. `name`: for sentences that say why it cannot
    run. `load`: from costs, cluster, document lengths and group size. `most_group`: returns the largest group size."""

    key: str
    label: str
    name: str
    load: Callable[[Costs, Cluster, IntArray, int], Load]
    most_group: Callable[[SimulationRequest], int]
    costly: bool = False

    def groups(self, request: SimulationRequest) -> list[int]:
        """Returns group sizes that hold the context: powers of two, at least 2, that divide the number of ranks."""
        most, ranks = self.most_group(request), request.num_ranks
        powers = (1 << power for power in range(1, most.bit_length()))
        return [group for group in powers if request.least_group <= group <= most and ranks % group == 0]


GROUPED = (
    Grouped(
        "ulysses",
        "Ulysses",
        "Ulysses",
        ulysses,
        lambda request: min(request.data_ranks_per_node, request.model.heads.query // request.tensor_ranks),
    ),
    Grouped(
        "ring",
        "zigzag ring",
        "rings",
        ring,
        lambda request: min(request.num_ranks, max(request.data_ranks_per_node, 4 * request.least_group)),
        costly=True,
    ),
)


def ways_to_compare(request: SimulationRequest, costs: Costs, cluster: Cluster) -> list[Way]:
    """Returns the ways to compare with that can run; ways with groups once for each group size."""
    ranks = request.num_ranks

    def of_ranks(load: Callable[[Costs, IntArray, int], Load]) -> Callable[[Step], list[Load]]:
        return lambda step: [load(costs, batch, ranks) for batch in step]

    def of_groups(of: Grouped, group: int) -> Callable[[Step], list[Load]]:
        return lambda step: [of.load(costs, cluster, batch, group) for batch in step]

    return [
        Way("plain", "plain packing", of_ranks(plain_packing)),
        Way("sorted_packs", "sorted packs", lambda step: sorted_packs(costs, step, ranks)),
        Way("whole_documents", "whole documents", of_ranks(whole_documents)),
        *(
            Way(f"{of.key}_{group}", f"{of.label} over {group}", of_groups(of, group), of.costly, family=of.key)
            for of in (() if request.model.mixer_layers else GROUPED)
            for group in of.groups(request)
        ),
    ]


def missing_to_compare(request: SimulationRequest) -> list[str]:
    """Returns a sentence for each way to compare with that is left out."""
    if layers := request.model.mixer_layers:
        names = " and ".join(of.name for of in GROUPED)
        return [f"{names}: {layers} layers carry a state, which these ways do not send"]
    reasons, tokens, ranks = [], request.longest_tokens, request.num_ranks
    for of in GROUPED:
        most = of.most_group(request)
        if of.groups(request):
            continue
        if request.least_group > most:
            reasons.append(
                f"{of.name}: a group within a node holds at most {most * request.tokens_per_rank:,} tokens, and the "
                f"context has {tokens:,}"
            )
        else:
            reasons.append(
                f"{of.name}: no group of 2, 4, 8, ... data ranks that holds {tokens:,} tokens divides all {ranks}"
            )
    return reasons
