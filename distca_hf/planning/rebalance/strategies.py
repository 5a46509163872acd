"""Strategies: what a planner that goes step by step cannot know, and therefore tries."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to plan.

    Attributes:
        merge_below: the rest of a document that packing cut is merged with what is before it if moving its queries
            costs less than this times what moving the keys costs.
        spare_room: whether a server may be left with room if its part of a document would otherwise be cut so deep
            that too many queries travel. Good where ranks with room are many.
        merge_heads: for this share of the heads; where the document goes on, for all of them.
        quiet_price: price of bytes that do not leave a rank with too much work, in comparison with those that do.
    """

    merge_below: float = 1.0
    spare_room: bool = False
    quiet_price: float = 0.3
    merge_heads: float = 1.0


# What is tried first, in this order, until a plan is about as good as can be: each adds most to those before it.
STRATEGIES = (
    Strategy(spare_room=True),
    Strategy(merge_below=2, quiet_price=1),
    Strategy(merge_below=2, quiet_price=0.1, merge_heads=0.75),
    Strategy(spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=0.1, merge_heads=0.75),
)
# Nothing more is tried if so many documents were touched: they are short, and strategies differ in long ones.
MANY_DOCUMENTS = 4096


# Nor if all attempts together took so many steps for each rank.
STEPS_PER_RANK = 8
# Nor, on more than a few ranks, if the largest moves this much more than the least it has to, about.
GOOD_ENOUGH = 1.02
SMALL_WORLD = 16


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried: first so many strategies, then the best of them again, with prices that follow from the bytes
    it moves; no more after so many steps, nor if the largest rank moves at most `good_enough` times the least it has
    to, about: how much that is depends on the slivers that were merged, so it says little of other strategies."""

    strategies: int
    rounds: int
    steps: int
    good_enough: float

    @classmethod
    def for_ranks(cls, num_ranks: int) -> Self:
        """What there is time for: an attempt takes 0.4 ms at 4 ranks, 1 at 8, 12 at 64 and 120 at 512."""
        strategies = 6 if num_ranks <= 4 else 3 if num_ranks <= SMALL_WORLD else 2
        return cls(strategies, 1, STEPS_PER_RANK * num_ranks, 0.0 if num_ranks <= SMALL_WORLD else GOOD_ENOUGH)
