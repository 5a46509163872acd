"""Strategies: choices that a greedy pass cannot make by looking ahead, so that several are tried."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Strategy:
    """Settings of one greedy pass.

    Attributes:
        merge_below: maximum cost of moving the queries of a short tail, as a multiple of the cost of moving its keys.
            Below it the tail is merged with the part before it.
        spare_room: whether a server may be left with room, where using it up would cut a document so deep that too
            many queries travel. It helps where many ranks have room.
        merge_heads: fraction of the heads that are merged; all of them where the document goes on behind the tail.
        quiet_price: price of bytes that no rank with a surplus sends, relative to bytes that one sends.
    """

    merge_below: float = 1.0
    spare_room: bool = False
    quiet_price: float = 0.3
    merge_heads: float = 1.0


# Strategies in the order in which they are tried: each one wins most over the ones before it (measured).
STRATEGIES = (
    Strategy(spare_room=True),
    Strategy(merge_below=2, quiet_price=1),
    Strategy(merge_below=2, quiet_price=0.1, merge_heads=0.75),
    Strategy(spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=0.1, merge_heads=0.75),
)
# Number of stacks in a candidate from which on no further one is tried: its documents are short, and strategies differ
# in long documents.
MANY_DOCUMENTS = 4096


# Maximum number of greedy steps of all candidates together, per rank: bounds the time of planning.
STEPS_PER_RANK = 8
# Ratio of the largest rank's bytes to their estimated minimum up to which no further candidate is tried.
GOOD_ENOUGH = 1.02
# Number of ranks up to which all candidates are tried, whatever their ratio: they take a few milliseconds.
SMALL_WORLD = 16


@dataclass(frozen=True, slots=True)
class Effort:
    """Search budget of a plan.

    Attributes:
        strategies: strategies that are tried.
        rounds: repetitions of the best of them, each with prices that follow from the bytes of the one before.
        steps: greedy steps after which the search ends.
        good_enough: ratio of the largest rank's bytes to their estimated minimum at which it ends. The estimate
            depends on the tails that were merged, so it says little about other strategies.
    """

    strategies: int
    rounds: int
    steps: int
    good_enough: float

    @classmethod
    def for_ranks(cls, num_ranks: int) -> Self:
        """Returns the budget for a number of ranks. A candidate takes 0.4 ms at 4 ranks, 12 at 64 and 120 at 512."""
        strategies = 6 if num_ranks <= 4 else 3 if num_ranks <= SMALL_WORLD else 2
        return cls(strategies, 1, STEPS_PER_RANK * num_ranks, 0.0 if num_ranks <= SMALL_WORLD else GOOD_ENOUGH)
