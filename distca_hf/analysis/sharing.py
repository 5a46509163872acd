"""Sharing: what it brings that layers compute the prefixes of documents once, in `distca plan --batch-size`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from rich.console import RenderableType

from distca_hf.analysis.groups import Groups
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.tables import block, counted, plain_table
from distca_hf.cost import imbalance
from distca_hf.planning.plan import PlanFacts


PETA = 1e15
# Parts of the work of a step.
PARTS = {"layers": "layers without attention", "attention": "attention", "head": "head and loss"}


@dataclass(frozen=True)
class SharingFigures:
    """The same micro-batches with shared prefixes and without them; hidden states return.

    Attributes:
        request: says whether prefixes are shared at all.
        groups: of all rows.
        facts, facts_unshared: of each micro-batch, with shared prefixes and without.
    """

    request: SimulationRequest
    groups: Groups
    facts: Sequence[PlanFacts]
    facts_unshared: Sequence[PlanFacts]

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batches."""
        return sum(facts.num_tokens for facts in self.facts)

    @property
    def computed_tokens(self) -> int:
        """Tokens of these that layers compute."""
        return sum(sum(facts.tokens) for facts in self.facts)

    @property
    def saved_share(self) -> float:
        """Share of the tokens that layers do not compute, as a part of 1."""
        return 1 - self.computed_tokens / self.tokens

    @cached_property
    def work(self) -> dict[str, tuple[float, float]]:
        """Mean operations of a micro-batch by part, on all ranks together, without sharing and with it."""
        flops = self.request.model.flops

        def of(way: Sequence[PlanFacts]) -> dict[str, float]:
            tokens, head = (sum(sum(getattr(one, name)) for one in way) for name in ("tokens", "head_tokens"))
            pairs = sum(sum(one.work) / one.rows_per_token for one in way)
            amounts = {"layers": (tokens, 0, 0), "attention": (0, pairs, 0), "head": (0, 0, head)}
            return {part: float(flops.work(*map(np.array, each))) / len(way) for part, each in amounts.items()}

        unshared, shared = of(self.facts_unshared), of(self.facts)
        return {part: (unshared[part], shared[part]) for part in PARTS}

    @property
    def step_imbalance(self) -> tuple[float, float]:
        """Mean over micro-batches of max/mean work of a step, as planned, without sharing and with it."""
        flops = self.request.model.flops
        unshared, shared = (
            float(np.mean([imbalance(one.step_work(flops)[1].tolist()) for one in way]))
            for way in (self.facts_unshared, self.facts)
        )
        return unshared, shared

    @property
    def in_short(self) -> str:
        """The first half of a sentence; empty if nothing is shared."""
        computed = 100 * (1 - self.saved_share)
        return f"layers compute {computed:.0f} % of the tokens, and " if self.saved_share else ""

    def as_json(self) -> dict[str, object]:
        """Returns one object; operations are means over micro-batches, of all ranks together."""
        unshared, shared = self.step_imbalance
        return {
            **self.groups.as_json(self.request.unshared),
            "tokens": self.tokens,
            "computed_tokens": self.computed_tokens,
            "saved_share": self.saved_share,
            **{f"{part}_flops_unshared": before for part, (before, _) in self.work.items()},
            **{f"{part}_flops": after for part, (_, after) in self.work.items()},
            "step_imbalance_unshared": unshared,
            "step_imbalance": shared,
        }

    def table(self) -> RenderableType:
        """Returns what is printed for people."""
        count, grouped, tokens = len(self.facts), self.groups.counts, (self.tokens, self.computed_tokens)
        table = plain_table("unshared", "shared")
        table.add_row("tokens that layers compute", *(f"{each / count:,.0f}" for each in tokens))
        for part, name in PARTS.items():
            table.add_row(f"{name}, PFLOP", *(f"{each / PETA:,.2f}" for each in self.work[part]))
        table.add_row("sum, PFLOP", *(f"{sum(each) / PETA:,.2f}" for each in zip(*self.work.values(), strict=True)))
        table.add_row("busiest rank / mean, work of a step", *(f"{each:.2f}" for each in self.step_imbalance))
        words = f"{counted(grouped.total(), 'row')} in {counted(len(grouped), 'group')} begin alike. "
        if self.request.unshared:
            words += f"Nothing is shared: {self.request.unshared}."
        else:
            words += (
                f"{self.saved_share:.1%} of the tokens are not computed again. Prefixes are shared from "
                f"{self.request.least_tokens} tokens on (shared_prefix_tokens); results return. With placed loss "
                "they are shared if they have no labels to learn, as is assumed here. Groups are dealt as TRL's GRPO "
                "trainer deals them."
            ).replace("%", " %")
        return block("shared prefixes, mean of a micro-batch", table, words)
