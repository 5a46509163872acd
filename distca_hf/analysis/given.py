"""Given: the answer of `distca plan --batch-size`, about batches that the user's own sampler deals.

Micro-batches are planned as training plans them, and counted as it logs them. Speed and memory are those of `distca
simulate`, with the same options.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.command import PlanProgress
from distca_hf.analysis.memory import GIB
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, simulate
from distca_hf.arrays import IntArray
from distca_hf.batches.given_plans import GivenPlans
from distca_hf.cost import imbalance
from distca_hf.layout import Layout
from distca_hf.placement.given import tokens_between
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import PlanFacts
from distca_hf.planning.plan_totals import PlanTotals


# Most ranks x micro-batches that are planned; a plan takes a quarter of a millisecond per rank.
MOST_PLANNED_RANKS = 1024
# Most optimizer steps that are simulated, and ranks x micro-batches of these.
MOST_STEPS, MOST_RANK_STEPS = 20, 2048


@dataclass(frozen=True)
class GivenMicroBatch:
    """One micro-batch of all ranks.

    Attributes:
        facts: as training has them if hidden states return.
        stays: whether no row moves.
        moved_tokens: tokens that are computed on another rank than their batch is on.
        planning_seconds: of planning.
    """

    facts: PlanFacts
    stays: bool
    moved_tokens: int
    planning_seconds: float

    @classmethod
    def of(cls, plans: GivenPlans, packs: Sequence[IntArray]) -> "GivenMicroBatch":
        """Plans a micro-batch from the lengths of each rank's batch."""
        began = time.perf_counter()
        home = Layout.from_packs(packs)
        layout = plans.layout(home)
        plan = plans.plan(layout)
        seconds = time.perf_counter() - began
        kinds = RoutedKinds.of(plan, 0, layer_masks=plans.layer_masks, work_before=home.rank_work_of)
        facts = kinds.facts.with_tokens(home, layout)
        moved = tokens_between(home, layout)
        return cls(facts, layout is home, int(moved.sum() - np.trace(moved)), seconds)


@dataclass(frozen=True)
class GivenAnswer:
    """The results of `distca plan --batch-size`.

    Attributes:
        request: ranks, model and batches.
        source: file or dataset of the lengths.
        row_tokens: `[rows]` all lengths.
        micro_batches: those that were looked at.
        simulated: speed and memory.
        profile: measured times that these follow from.
    """

    request: SimulationRequest
    source: str
    row_tokens: IntArray
    micro_batches: Sequence[GivenMicroBatch]
    simulated: Result
    profile: ClusterProfile

    @property
    def places_rows(self) -> bool:
        """Whether rows are placed inside the model; else tasks move."""
        return not self.request.model.mixers

    def totals(self, loss_is_placed: bool) -> PlanTotals:
        """Returns the sums that training logs means of."""
        sums = PlanTotals()
        for facts in self._facts(loss_is_placed):
            sums = sums.plus(facts, self.request.model.flops)
        return sums

    def worst(self, loss_is_placed: bool) -> tuple[float, float]:
        """Returns the largest imbalance of a step's work in any micro-batch, before and as planned."""
        works = [facts.step_work(self.request.model.flops) for facts in self._facts(loss_is_placed)]
        before, after = (max(imbalance(work.tolist()) for work in way) for way in zip(*works, strict=True))
        return before, after

    def _facts(self, loss_is_placed: bool) -> Iterable[PlanFacts]:
        for one in self.micro_batches:
            yield replace(one.facts, head_tokens=one.facts.tokens) if loss_is_placed else one.facts

    @property
    def moved_share(self) -> float:
        """Share of the tokens that are computed on another rank than their batch is on."""
        return sum(one.moved_tokens for one in self.micro_batches) / self.totals(False).tokens

    @property
    def planning_seconds(self) -> float:
        """Median time of planning a micro-batch."""
        return float(np.median([one.planning_seconds for one in self.micro_batches]))

    @property
    def in_short(self) -> str:
        """The answer in two sentences: balance before and after, then speed and memory."""
        count, returned, placed = len(self.micro_batches), self.totals(False), self.totals(True)
        ours = [way for way in self.simulated.ways if way.is_ours]
        before, after, with_loss = (
            each / count for each in (returned.step_imbalance_before, returned.step_imbalance, placed.step_imbalance)
        )
        now = (
            f"{with_loss:.2f} times, or {after:.2f} where results return" if self.places_rows else f"{after:.2f} times"
        )
        faster = " or ".join(f"{way.times_as_fast:.2f}" for way in reversed(ours))
        return (
            f"In short: the busiest rank has {before:.2f} times the mean work of a step, with distca {now}. Steps are "
            f"{faster} times as fast as with plain data parallelism; a GPU needs "
            f"{max(way.memory_bytes for way in ours) / GIB:.1f} GiB with FSDP2, instead of "
            f"{self.simulated.plain.memory_bytes / GIB:.1f}. These are estimates; see below."
        )

    def as_json(self) -> dict[str, object]:
        """Returns one object. Imbalances are means over micro-batches."""
        request, count = self.request, len(self.micro_batches)
        returned, placed = self.totals(False), self.totals(True)
        of_both = ("token_imbalance", "imbalance", "step_imbalance")
        names = [name for each in of_both for name in (f"{each}_before", each)]
        return {
            "model": request.model.name,
            "source": self.source,
            "ranks": request.num_ranks,
            "ranks_per_node": request.ranks_per_node,
            "batch_size": request.batch_size,
            "micro_steps": request.accumulation,
            "context_tokens": request.context_tokens,
            "seed": request.seed,
            "profile": self.profile.summary(),
            "rows": len(self.row_tokens),
            "tokens": int(self.row_tokens.sum()),
            "micro_batches": count,
            "even_micro_batches": sum(one.stays for one in self.micro_batches) if self.places_rows else None,
            "moved_share": self.moved_share,
            "planning_seconds": self.planning_seconds,
            **{name: getattr(returned, name) / count for name in names},
            "step_imbalance_placed_loss": placed.step_imbalance / count if self.places_rows else None,
            "worst_step_imbalance_before": self.worst(False)[0],
            "worst_step_imbalance": self.worst(False)[1],
            "worst_step_imbalance_placed_loss": self.worst(True)[1] if self.places_rows else None,
            "ways": [way.as_json() for way in self.simulated.ways],
            "in_short": self.in_short,
        }


def answer(
    request: SimulationRequest,
    source: str,
    row_tokens: IntArray,
    profile: ClusterProfile,
    progress: PlanProgress | None = None,
) -> GivenAnswer:
    """Plans and simulates steps of given batches.

    Args:
        row_tokens: `[rows]` lengths.
        profile: measured times.
        progress: shows what is done.

    Raises:
        PackingError: there are too few rows for a step, or rows are longer than the model takes.
    """
    progress = progress or PlanProgress()
    size, plans = request.num_ranks * request.accumulation, request.given_plans(not request.model.mixers)
    steps = replace(request, batches=max(1, MOST_PLANNED_RANKS // size)).steps(row_tokens)
    packs = [np.split(batch, request.num_ranks) for step in steps for batch in step]
    planned = [GivenMicroBatch.of(plans, packs[number]) for number in progress.over("planning", range(len(packs)))]
    simulated = replace(request, batches=max(1, min(MOST_STEPS, MOST_RANK_STEPS // size)))
    with progress.stage("simulating steps"):
        result, _ = simulate(simulated, profile, row_tokens)
    return GivenAnswer(request, source, row_tokens, planned, result, profile)
