"""Folds: which ranks compute the states within cut documents, and what they exchange to do so.

Over the tokens of a fragment a state changes by an affine map, S_out = M S_in + B. Ranks compute this summary (M, B)
without knowing S_in, and a chain of summaries gives every state:

    state before f1    B0
    state before f2    M1 B0 + B1
    state before f3    M2 (M1 B0 + B1) + B2

If documents share a prefix, several fragments follow its last one, and chains are the paths of a tree.

Ranks divide this work in one of two ways:

    by ranks    a summary goes to each rank with a later fragment, which folds what it needs
    by heads    ranks of a tree divide its heads: summaries of a head go to one rank, which folds them and returns
                states. This takes one more exchange, but what a rank sends does not grow with the number of ranks

Ranks exchange units: summaries or states of all heads, or of one head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges


# Bytes that one more exchange must save the busiest rank in a layer.
LEAST_SAVED_BYTES = 2**23
# Most heads that ranks should divide: tables of thousands would take long to make.
MOST_HEADS = 128


@dataclass(frozen=True, eq=False)
class Route:
    """Items that this rank sends and receives. Both ranks derive the order in which items arrive.

    Attributes:
        sent: int64, indices of items of this rank, grouped by destination.
        sent_counts, received_counts: int64 `[ranks]`.
    """

    sent: IntArray
    sent_counts: IntArray
    received_counts: IntArray


def route_of(source: IntArray, item: IntArray, destination: IntArray, rank: int, num_ranks: int) -> Route:
    """Returns the route of one rank. All ranks give items in the same order. No item may stay on its rank."""
    sends = source == rank
    by_destination = np.argsort(destination[sends], kind="stable")
    counts = (np.bincount(x, minlength=num_ranks) for x in (destination[sends], source[destination == rank]))
    return Route(item[sends][by_destination], *counts)


@dataclass(frozen=True, eq=False)
class CutFragments:
    """Fragments of all documents, tree after tree, in the order of their tokens; the same on all ranks.

    Attributes:
        tree: int64 `[fragments]`, 0, 1, ... in this order. Fragments of a tree follow the same first one.
        rank: int64 `[fragments]`, the rank that holds the fragment.
        before: int64 `[fragments]`, number of the fragment before it; -1 for the first one of a tree. Several
            fragments may follow the same one.
        summary_number: int64 `[fragments]`, number of its summary among its rank's summaries; -1 for a fragment
            without a following one.
        state_number: int64 `[fragments]`, number of the state before it among its rank's states; -1 for the first
            fragment of a tree.
        num_ranks: ranks of the micro-batch.
    """

    tree: IntArray
    rank: IntArray
    before: IntArray
    summary_number: IntArray
    state_number: IntArray
    num_ranks: int


@dataclass(frozen=True, eq=False)
class Fold:
    """What one rank exchanges and computes to get the states before its fragments.

    Attributes:
        heads: number of heads, if each is a unit; None if all heads are one unit.
        gathered: route of units of summaries.
        placed: int64, places in `[units of this rank | units received]`: step by step, summaries of first fragments,
            then of fragments that follow them, and so on.
        steps: number of summaries of each step.
        before: int64, for each summary after the first step, the place of the state before it in the step before.
        branches: whether `before` is needed. Without shared prefixes these are the first states of the step before,
            because longer chains come first.
        returned: route of units of states, numbered as they are computed, like `placed`; empty by ranks.
        states: int64 `[states * units]` places in `[units computed | units received]`, in the order of states.
        busiest: most units of summaries that any rank sends or receives, plus most units of states; the same on all
            ranks.
    """

    heads: int | None
    gathered: Route
    placed: IntArray
    steps: tuple[int, ...]
    before: IntArray
    branches: bool
    returned: Route
    states: IntArray
    busiest: int

    @classmethod
    def of(cls, cut: CutFragments, rank: int, heads: int | None = None) -> "Fold":
        """Returns the fold of one rank.

        Args:
            heads: number of a layer's heads, which ranks of a tree divide; None to divide by ranks.
        """
        # 1. All summaries that ranks fold, and by which rank. A rank folds a summary once.
        units = 1 if heads is None else heads
        fragment, unit, folder = _folded_by_ranks(cut) if heads is None else _folded_by_heads(cut, heads)
        key, source = fragment * units + unit, cut.rank[fragment]
        summary = cut.summary_number[fragment] * units + unit
        travels = source != folder
        gathered = route_of(source[travels], summary[travels], folder[travels], rank, cut.num_ranks)

        # 2. This rank folds step by step, and the longest chains first.
        mine = folder == rank
        place = np.where(travels, -1, summary)[mine]
        own_units = units * int((cut.summary_number[cut.rank == rank] >= 0).sum())
        place[travels[mine]] = own_units + _arrival(source[mine & travels])
        step = _numbers_in_chains(cut.before)[fragment[mine]]
        chain = cut.tree[fragment[mine]] * units + unit[mine]
        longest = np.zeros(int(chain.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(longest, chain, step)
        order = np.lexsort((key[mine], -longest[chain], step))
        steps = np.bincount(step)
        computed = np.full(len(cut.rank) * units, -1)  # of each fragment and unit
        computed[key[mine][order]] = np.arange(len(order))
        later = order[len(order) - int(steps[1:].sum()) :]
        before = computed[cut.before[fragment[mine][later]] * units + unit[mine][later]]
        before = before - np.repeat(exclusive_cumsum(steps)[:-1], steps[1:])
        branches = not np.array_equal(before, ranges(0, steps[1:]))

        # 3. Each state goes to the ranks whose fragments follow. By ranks, it is there already.
        follows = np.flatnonzero(cut.before >= 0)
        needs = np.repeat(follows, units)
        unit = np.tile(np.arange(units), len(follows))
        needed, needed_by = cut.before[needs] * units + unit, cut.rank[needs]
        folded_by = needed_by if heads is None else folder[np.searchsorted(key, needed)]
        returns = np.unique((needed * cut.num_ranks + needed_by)[folded_by != needed_by])
        returned_key, target = np.divmod(returns, cut.num_ranks)
        origin = folder[np.searchsorted(key, returned_key)]
        returned = route_of(origin, computed[returned_key], target, rank, cut.num_ranks)
        arrived = returned_key[target == rank]
        computed[arrived] = len(order) + _arrival(origin[target == rank])
        held = needed_by == rank
        states = np.full(units * int((cut.state_number[cut.rank == rank] >= 0).sum()), -1)
        states[(cut.state_number[needs] * units + unit)[held]] = computed[needed[held]]
        busiest = _busiest(source[travels], folder[travels]) + _busiest(origin, target)
        return cls(heads, gathered, place[order], tuple(steps.tolist()), before, branches, returned, states, busiest)


def cheaper(by_ranks: Fold, by_heads: Callable[[], Fold], heads: int, head_bytes: int) -> Fold:
    """Returns the fold by heads if it saves the busiest rank more than `LEAST_SAVED_BYTES`, the price of one more
    exchange; otherwise the fold by ranks. States count like summaries, which overestimates the fold by heads.

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
    """Returns how many items the busiest rank sends or receives."""
    return max(int(np.bincount(ranks).max(initial=0)) for ranks in (source, target))


def _arrival(source: IntArray) -> IntArray:
    """Returns the position at which each item arrives, given its source rank."""
    arrival = np.empty(len(source), dtype=np.int64)
    arrival[np.argsort(source, kind="stable")] = np.arange(len(source))
    return arrival


def _jumps(before: IntArray) -> Iterator[IntArray]:
    """Yields the fragment before each one, then the second before it, the fourth, and so on; -1 if there is none."""
    while (before >= 0).any():
        yield before
        before = np.where(before >= 0, before[before], -1)


def _numbers_in_chains(before: IntArray) -> IntArray:
    """Returns how many fragments are before each one."""
    numbers = (before >= 0).astype(np.int64)
    for jump in _jumps(before):
        numbers = numbers + np.where(jump >= 0, numbers[jump], 0)
    return numbers


def _folded_by_ranks(cut: CutFragments) -> tuple[IntArray, IntArray, IntArray]:
    """Returns fragment, unit and folding rank of each summary. A rank folds all fragments before its own ones."""
    follows = np.flatnonzero(cut.before >= 0)
    is_folded = np.zeros(len(cut.rank) * cut.num_ranks, dtype=bool)
    is_folded[cut.before[follows] * cut.num_ranks + cut.rank[follows]] = True
    for jump in _jumps(cut.before):
        fragment, rank = np.divmod(np.flatnonzero(is_folded), cut.num_ranks)
        is_folded[(jump[fragment] * cut.num_ranks + rank)[jump[fragment] >= 0]] = True
    fragment, rank = np.divmod(np.flatnonzero(is_folded), cut.num_ranks)
    return fragment, np.zeros_like(fragment), rank


def _folded_by_heads(cut: CutFragments, heads: int) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the same for heads, each of which one rank folds. The k-th of D ranks that hold parts of a tree folds
    heads k H / D to (k + 1) H / D; every tree counts from another rank."""
    pairs = np.unique(cut.tree * cut.num_ranks + cut.rank)
    holders = np.bincount(pairs // cut.num_ranks)
    followed = np.flatnonzero(cut.summary_number >= 0)
    fragment, unit = np.repeat(followed, heads), np.tile(np.arange(heads), len(followed))
    tree = cut.tree[fragment]
    # If all trees counted from one rank, few heads would always go to the same ranks.
    turn = ((unit + 1) * holders[tree] - 1) // heads
    folder = pairs[exclusive_cumsum(holders)[tree] + (turn + tree) % holders[tree]] % cut.num_ranks
    return fragment, unit, folder
