"""Folds: which ranks compute the states within cut documents, and what they exchange to do so.

Over the tokens of a fragment a state is an affine map, S_out = M S_in + B. Ranks make this summary (M, B) without
knowing S_in, and a chain of summaries gives every state:

    state before f1    B0
    state before f2    M1 B0 + B1
    state before f3    M2 (M1 B0 + B1) + B2

This work can be divided in two ways:

    by ranks    every summary goes to each rank with a later fragment, which folds what it needs
    by heads    ranks of a document divide its heads: summaries of a head go to one rank, which folds them and returns
                states. One exchange more; what a rank sends does not grow with the number of ranks

Either way, ranks exchange units: summaries or states of all heads, or of one head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges, run_starts


# Bytes that one more exchange must save the busiest rank in a layer.
LEAST_SAVED_BYTES = 2**23
# Most heads that ranks should divide: tables of thousands would take long to make.
MOST_HEADS = 128


@dataclass(frozen=True, eq=False)
class Route:
    """Items that this rank sends and receives. Items from one rank arrive in an order that both ranks derive.

    Attributes:
        sent: int64, indices of items of this rank, grouped by destination.
        sent_counts, received_counts: int64 `[ranks]`.
    """

    sent: IntArray
    sent_counts: IntArray
    received_counts: IntArray


def route_of(source: IntArray, item: IntArray, destination: IntArray, rank: int, num_ranks: int) -> Route:
    """Returns the route of one rank, given items in an order that all ranks know. No item may stay on its rank."""
    sends = source == rank
    by_destination = np.argsort(destination[sends], kind="stable")
    counts = (np.bincount(x, minlength=num_ranks) for x in (destination[sends], source[destination == rank]))
    return Route(item[sends][by_destination], *counts)


@dataclass(frozen=True, eq=False)
class CutFragments:
    """Fragments of all cut documents, in document order; the same on all ranks.

    Attributes:
        document, rank: int64 `[fragments]`, the document and the rank that holds the fragment.
        summary_number: number of its summary among its rank's summaries; -1 for the last fragment of a document.
        state_number: number of the state before it among its rank's states; -1 for the first fragment of a document.
        num_ranks: ranks of the micro-batch.
    """

    document: IntArray
    rank: IntArray
    summary_number: IntArray
    state_number: IntArray
    num_ranks: int


@dataclass(frozen=True, eq=False)
class Fold:
    """What one rank exchanges and computes to get the states before its fragments.

    Attributes:
        heads: heads into which units are divided; None if a unit is all heads.
        gathered: route of units of summaries.
        placed: int64, places in `[units of this rank | units received]`: the first summary of every chain, then the
            second one of every chain that has two, and so on. Longer chains come first.
        steps: how many chains have a first summary, a second one, and so on.
        returned: route of units of states, numbered in the order of their computation, like `placed`; empty by ranks.
        states: int64 `[states * units]` places in `[units computed | units received]`, in the order of states.
        busiest: most units of summaries that a rank sends or receives, plus most of states; the same on all ranks.
    """

    heads: int | None
    gathered: Route
    placed: IntArray
    steps: tuple[int, ...]
    returned: Route
    states: IntArray
    busiest: int

    @classmethod
    def of(cls, cut: CutFragments, rank: int, heads: int | None = None) -> "Fold":
        """Returns the fold of one rank.

        Args:
            heads: number of a layer's heads, which ranks of a document divide; None to divide by ranks.
        """
        # Chains of all ranks, and one entry for each of their summaries.
        first, unit, folder, length = _chains_by_ranks(cut) if heads is None else _chains_by_heads(cut, heads)
        chain = np.repeat(np.arange(len(first)), length)
        fragment = ranges(first, length)
        step = fragment - first[chain]
        units = 1 if heads is None else heads
        source, target = cut.rank[fragment], folder[chain]
        summary = cut.summary_number[fragment] * units + unit[chain]
        travels = source != target
        gathered = route_of(source[travels], summary[travels], target[travels], rank, cut.num_ranks)

        mine = target == rank
        place = np.where(travels, -1, summary)[mine]
        own_units = units * int((cut.summary_number[cut.rank == rank] >= 0).sum())
        place[travels[mine]] = own_units + _arrival(source[mine & travels])
        order = np.lexsort((chain[mine], -length[chain[mine]], step[mine]))
        steps = np.bincount(step[mine])

        # Each computed state goes to the next fragment, if that is on this rank or heads are divided.
        computed = np.full(len(chain), -1)
        computed[np.flatnonzero(mine)[order]] = np.arange(len(order))
        holder, state = cut.rank[fragment + 1], cut.state_number[fragment + 1] * units + unit[chain]
        returns = (holder != target) & (heads is not None)
        returned = route_of(target[returns], computed[returns], holder[returns], rank, cut.num_ranks)
        stays, arrives = mine & (holder == rank), returns & (holder == rank)
        states = np.full(units * int((cut.state_number[cut.rank == rank] >= 0).sum()), -1)
        states[state[stays]] = computed[stays]
        states[state[arrives]] = len(order) + _arrival(target[arrives])
        busiest = _busiest(source[travels], target[travels]) + _busiest(target[returns], holder[returns])
        return cls(heads, gathered, place[order], tuple(steps.tolist()), returned, states, busiest)


def cheaper(by_ranks: Fold, by_heads: Callable[[], Fold], heads: int, head_bytes: int) -> Fold:
    """Returns the fold by heads if it saves the busiest rank more than `LEAST_SAVED_BYTES`, which pays for one more
    exchange; otherwise the fold by ranks. States count as much as summaries, which overestimates the fold by heads.

    Args:
        heads: heads of the layer.
        head_bytes: bytes of one head's summary.
    """
    by_ranks_bytes = by_ranks.busiest * heads * head_bytes
    if by_ranks_bytes <= LEAST_SAVED_BYTES:
        return by_ranks
    divided = by_heads()
    return divided if by_ranks_bytes - divided.busiest * head_bytes > LEAST_SAVED_BYTES else by_ranks


def _busiest(source: IntArray, target: IntArray) -> int:
    """Returns the most items that any rank sends or receives."""
    return max(int(np.bincount(ranks).max(initial=0)) for ranks in (source, target))


def _arrival(source: IntArray) -> IntArray:
    """Returns the position in which each item arrives, given the source ranks of items."""
    arrival = np.empty(len(source), dtype=np.int64)
    arrival[np.argsort(source, kind="stable")] = np.arange(len(source))
    return arrival


def _chains_by_ranks(cut: CutFragments) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns first fragment, unit, folding rank and length of each chain. Every rank folds the fragments of a
    document before its own last one."""
    opens = run_starts(cut.document)
    first = np.flatnonzero(opens)[np.cumsum(opens) - 1]
    number = np.arange(len(first))
    later = number[~opens]
    # The last fragment of each rank in each document, except a document's first fragment.
    order = later[np.lexsort((later, cut.rank[later], first[later]))]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = (first[order][1:] != first[order][:-1]) | (cut.rank[order][1:] != cut.rank[order][:-1])
    chosen = order[last]
    return first[chosen], np.zeros(len(chosen), dtype=np.int64), cut.rank[chosen], number[chosen] - first[chosen]


def _chains_by_heads(cut: CutFragments, heads: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns the same for each chain; each head of a document is folded once. The k-th of D ranks that hold parts of
    a document folds heads k H / D to (k + 1) H / D, counted from another rank in every document."""
    opens = run_starts(cut.document)
    firsts = np.flatnonzero(opens)
    lengths = np.diff(firsts, append=len(opens)) - 1
    number = np.cumsum(opens) - 1
    pairs = np.unique(number * cut.num_ranks + cut.rank)
    holders = np.bincount(pairs // cut.num_ranks, minlength=len(firsts))
    document, unit = np.repeat(np.arange(len(firsts)), heads), np.tile(np.arange(heads), len(firsts))
    # Start from another rank in each document: otherwise few heads would always go to the same ranks.
    turn = ((unit + 1) * holders[document] - 1) // heads
    folder = pairs[exclusive_cumsum(holders)[document] + (turn + document) % holders[document]] % cut.num_ranks
    return firsts[document], unit, folder, lengths[document]
