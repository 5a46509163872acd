"""Totals: sums over the micro-batches of a training, for whoever reports what balancing brought."""

from dataclasses import dataclass, fields
from typing import Self

from distca_hf.planning.rank_plan import PlanFacts


@dataclass(frozen=True)
class PlanTotals:
    """Sums over planned micro-batches, the same on all ranks.

    Attributes:
        micro_batches: how many there were.
        tokens, pairs: of all ranks; a pair of a query and a key counts once for all heads.
        imbalance_before, imbalance: sums of these numbers of every micro-batch.
    """

    micro_batches: int = 0
    tokens: int = 0
    pairs: float = 0.0
    imbalance_before: float = 0.0
    imbalance: float = 0.0

    def plus(self, facts: PlanFacts) -> Self:
        """Returns them with one micro-batch more."""
        return type(self)(
            micro_batches=self.micro_batches + 1,
            tokens=self.tokens + facts.num_tokens,
            pairs=self.pairs + sum(facts.work) / facts.rows_per_token,
            imbalance_before=self.imbalance_before + facts.imbalance_before,
            imbalance=self.imbalance + facts.imbalance,
        )

    def since(self, earlier: Self) -> Self:
        """Returns sums over the micro-batches that came after earlier ones."""
        return type(self)(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )
