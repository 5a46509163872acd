"""Plan totals: sums over planned micro-batches, and the balance that follows from them in words."""

from dataclasses import dataclass, fields
from typing import Self

from distca_hf.cost import imbalance
from distca_hf.flops import StepFlops
from distca_hf.planning.plan import PlanFacts


@dataclass(frozen=True)
class PlanTotals:
    """Sums over planned micro-batches, the same on all ranks, to report the gain of balancing by.

    Attributes:
        micro_batches: how many there were.
        tokens, pairs: of all ranks; a pair of a query and a key counts once for all heads.
        imbalance_before, imbalance: sums of these numbers of every micro-batch.
        mixed_micro_batches: how many had layers with full attention and layers with a window.
        imbalance_full, imbalance_window: sums of the imbalance of either over these micro-batches.
        token_imbalance_before, token_imbalance: sums of max over mean of the tokens of ranks, before and as planned.
        step_imbalance_before, step_imbalance: the same of the work of a step; 0 if operations are not known.
    """

    micro_batches: int = 0
    tokens: int = 0
    pairs: float = 0.0
    imbalance_before: float = 0.0
    imbalance: float = 0.0
    mixed_micro_batches: int = 0
    imbalance_full: float = 0.0
    imbalance_window: float = 0.0
    token_imbalance_before: float = 0.0
    token_imbalance: float = 0.0
    step_imbalance_before: float = 0.0
    step_imbalance: float = 0.0

    def plus(self, facts: PlanFacts, flops: StepFlops | None = None) -> Self:
        """Returns the sums with one micro-batch more.

        Args:
            flops: operations of a model whose batches are given; None if they are not known.
        """
        mixed = facts.of_full_and_windows
        before, after = (0.0, 0.0) if flops is None else (imbalance(work.tolist()) for work in facts.step_work(flops))
        full, window = (0.0, 0.0) if mixed is None else (kind.imbalance for kind in mixed)
        return type(self)(
            micro_batches=self.micro_batches + 1,
            tokens=self.tokens + facts.num_tokens,
            pairs=self.pairs + sum(facts.work) / facts.rows_per_token,
            imbalance_before=self.imbalance_before + facts.imbalance_before,
            imbalance=self.imbalance + facts.imbalance,
            mixed_micro_batches=self.mixed_micro_batches + (mixed is not None),
            imbalance_full=self.imbalance_full + full,
            imbalance_window=self.imbalance_window + window,
            token_imbalance_before=self.token_imbalance_before + imbalance(facts.tokens_before),
            token_imbalance=self.token_imbalance + imbalance(facts.tokens),
            step_imbalance_before=self.step_imbalance_before + before,
            step_imbalance=self.step_imbalance + after,
        )

    @property
    def balance(self) -> str:
        """Words for the balance, means over these micro-batches: of a step where it is counted, else of attention."""

        def means(name: str) -> str:
            before, after = (getattr(self, f"{name}{when}") / self.micro_batches for when in ("_before", ""))
            return f"{before:.2f} -> {after:.2f}"

        if not self.step_imbalance:
            return f"attention work of the busiest rank {means('imbalance')} times the mean"
        return (
            f"work of the busiest rank in a step {means('step_imbalance')} times the mean (its tokens "
            f"{means('token_imbalance')}, attention {means('imbalance')})"
        )

    def since(self, earlier: Self) -> Self:
        """Returns sums over the micro-batches that came after earlier ones."""
        return type(self)(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )
