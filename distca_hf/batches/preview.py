"""Preview: how a dataset will be trained, from a look at some micro-batches of an epoch before they are due."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.cost import causal_pairs_of, imbalance
from distca_hf.data.accumulation import RegroupedEpoch
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.rank_plan import PlanFacts
from distca_hf.runtime.live_plan import LivePlan


# Micro-batches whose work is counted, and how many of them are also placed. Placing one takes up to a twentieth of a
# second, and all come out alike.
COUNTED = 128
PLACED = 8


@dataclass(frozen=True, eq=False)
class Preview:
    """Some micro-batches of a training.

    Attributes:
        tokens, pairs: `[micro-batches]` of all ranks; a pair of a query and a key counts once for all heads.
        imbalance_before, imbalance: `[micro-batches]` attended pairs of the busiest rank over the mean: as documents
            came, and as they are computed.
    """

    tokens: IntArray
    pairs: IntArray
    imbalance_before: NDArray[np.float64]
    imbalance: NDArray[np.float64]

    @classmethod
    def of(cls, facts: PlanFacts) -> Self:
        """Returns the preview of one micro-batch, which is planned already."""
        pairs = sum(facts.work) // facts.rows_per_token
        return cls(
            *(np.array([number]) for number in (facts.num_tokens, pairs, facts.imbalance_before, facts.imbalance))
        )


@dataclass(frozen=True, eq=False)
class PlacedData:
    """The data that a placed loader is about to hand out.

    Attributes:
        planner: plans its micro-batches.
        document_tokens: `[documents]` lengths of all documents.
        micro_batches: of the epoch, or of the rest of it.
        first: the next one of these.
        micro_steps: micro-batches of an optimizer step within which documents are regrouped.
        per_epoch: micro-batches of a whole epoch.
    """

    planner: PlacedPlanner
    document_tokens: IntArray
    micro_batches: RegroupedEpoch
    first: int
    micro_steps: int
    per_epoch: int

    @cached_property
    def preview(self) -> Preview:
        """Looks at micro-batches all over the epoch."""
        counted = list(self._spread(COUNTED))
        placed = set(islice(self._spread(PLACED), PLACED))
        tokens, pairs, before, after = [], [], [], []
        for index in counted:
            lengths = self.document_tokens[self.micro_batches.micro_batch(index)]
            tokens.append(lengths.sum())
            pairs.append(causal_pairs_of(np.zeros_like(lengths), lengths).sum())
            before.append(imbalance(fill_in_order(lengths, self.planner.num_ranks).rank_work))
            if index in placed:
                after.append(self.planner.plan(lengths, self.micro_batches.layout(index)).imbalance)
        return Preview(np.array(tokens), np.array(pairs), np.array(before), np.full(len(counted), np.mean(after)))

    def _spread(self, most: int) -> Iterator[int]:
        """Yields numbers of about `most` micro-batches all over the epoch, whole optimizer steps together."""
        left = self.micro_batches.num_micro_batches - self.first
        windows = -(-left // self.micro_steps)
        wanted = min(windows, max(1, most // self.micro_steps))
        for window in range(wanted):
            begin = self.micro_steps * (window * windows // wanted)
            for at in range(begin, min(begin + self.micro_steps, left)):
                yield self.first + at


class PlacedPlan(LivePlan):
    """A live plan that leads to the data it comes from."""

    def __init__(self, data: PlacedData, **plan: Any) -> None:
        super().__init__(**plan)
        self.data = data
