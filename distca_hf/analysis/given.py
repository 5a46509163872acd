"""Given: `distca plan --batch-size`, about batches that the user's own sampler deals.

Micro-batches are planned as training plans them, and counted as it logs them. Speed and memory are from `distca
simulate`, with the same options. Text is readable at 80 columns.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from rich.console import Console, RenderableType

from distca_hf.analysis import tables
from distca_hf.analysis.answer import steps_worth_it
from distca_hf.analysis.epoch import MOST_PLANNED_RANKS
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.fit import RankLoad, advice
from distca_hf.analysis.groups import Groups
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.memory import Memory
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.options import PlanOptions
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile
from distca_hf.analysis.request import assumed
from distca_hf.analysis.simulate.command import DEFAULT_TOKENS_PER_RANK
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, simulate
from distca_hf.analysis.tables import counted
from distca_hf.analysis.training_setup import GIB
from distca_hf.arrays import IntArray
from distca_hf.batches.placed import GivenPlans
from distca_hf.cost import imbalance
from distca_hf.errors import ConfigError
from distca_hf.layout import Layout
from distca_hf.placement.given import tokens_between
from distca_hf.planning.kinds import PlanTotals, RoutedKinds
from distca_hf.planning.plan import Plan, PlanFacts


PETA = 1e15
# Parts of the work of a step.
PARTS = {"layers": "layers without attention", "attention": "attention", "head": "head and loss"}


@dataclass(frozen=True)
class SharingFigures:
    """The same micro-batches with shared prefixes and without them, if hidden states return."""

    request: SimulationRequest  # says whether prefixes are shared at all
    groups: Groups
    # Facts of each micro-batch, with shared prefixes and without.
    facts: Sequence[PlanFacts]
    facts_unshared: Sequence[PlanFacts]

    @property
    def tokens(self) -> int:
        return sum(facts.num_tokens for facts in self.facts)

    @property
    def computed_tokens(self) -> int:
        """Number of the tokens that layers compute."""
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
        """The beginning of a sentence; empty if nothing is shared."""
        computed = 100 * (1 - self.saved_share)
        return f"layers compute {computed:.0f} % of the tokens, and " if self.saved_share else ""

    def as_json(self) -> dict[str, object]:
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
        count, grouped, tokens = len(self.facts), self.groups.counts, (self.tokens, self.computed_tokens)
        table = tables.plain_table("unshared", "shared")
        table.add_row("tokens that layers compute", *(f"{each / count:,.0f}" for each in tokens))
        for part, name in PARTS.items():
            table.add_row(f"{name}, PFLOP", *(f"{each / PETA:,.2f}" for each in self.work[part]))
        table.add_row("sum, PFLOP", *(f"{sum(each) / PETA:,.2f}" for each in zip(*self.work.values(), strict=True)))
        table.add_row("busiest rank / mean, work of a step", *(f"{each:.2f}" for each in self.step_imbalance))
        note = f"{counted(grouped.total(), 'row')} in {counted(len(grouped), 'group')} begin alike. "
        if self.request.unshared:
            note += f"Nothing is shared: {self.request.unshared}."
        else:
            note += (
                f"{self.saved_share:.1%} of the tokens are not computed again. Prefixes are shared from "
                f"{self.request.least_tokens} tokens on (shared_prefix_tokens); results return. With placed loss "
                "they are shared if they have no labels to learn, as is assumed here. Groups are dealt as TRL's GRPO "
                "trainer deals them."
            ).replace("%", " %")
        return tables.block("shared prefixes, mean of a micro-batch", table, note)


@dataclass(frozen=True)
class GivenMicroBatch:
    """One micro-batch of all ranks. `facts`, `facts_placed_loss`: of the plan as in training, if hidden states return,
    and if head and loss run on placed rows. `stays`: whether no row moves. `moved_tokens`: tokens that are computed on
    a rank other than their batch's. `planning_seconds`: measured in this process."""

    facts: PlanFacts
    facts_placed_loss: PlanFacts
    stays: bool
    moved_tokens: int
    planning_seconds: float

    @classmethod
    def of(
        cls, request: SimulationRequest, plans: GivenPlans, tokens: IntArray, groups: Groups | None = None
    ) -> "GivenMicroBatch":
        """Plans a micro-batch of `[rows]` lengths, rank after rank."""
        began = time.perf_counter()
        home = Layout.from_packs(np.split(tokens, request.num_ranks))
        layout = request.given_layout(plans, home, groups)
        plan = plans.plan(layout)
        seconds = time.perf_counter() - began

        def facts_of(plan: Plan) -> PlanFacts:
            kinds = RoutedKinds.of(plan, 0, layer_masks=plans.layer_masks, work_before=home.rank_work_of)
            return kinds.facts.with_tokens(home, plan.layout)

        facts = of_loss = facts_of(plan)
        if layout.shared is not None:  # the last token of a prefix predicts a label
            of_loss = facts_of(plans.plan(request.given_layout(plans, home, groups, loss_is_placed=True)))
        moved = tokens_between(home, layout)
        of_loss = replace(of_loss, head_tokens=of_loss.tokens)
        return cls(facts, of_loss, layout is home, int(moved.sum() - np.trace(moved)), seconds)


@dataclass(frozen=True)
class GivenAnswer:
    """The results of `distca plan --batch-size`."""

    request: SimulationRequest
    source: str  # name of the lengths' file
    row_tokens: IntArray  # `[rows]` all lengths
    micro_batches: Sequence[GivenMicroBatch]
    simulated: Result  # speed and memory, from `distca simulate`
    profile: ClusterProfile  # measured times that these follow from
    sharing: SharingFigures | None = None  # what sharing prefixes brings; None if no documents begin alike

    @property
    def places_rows(self) -> bool:
        """Whether rows are placed inside the model; otherwise tasks move."""
        return not self.request.model.whole_documents

    def totals(self, loss_is_placed: bool) -> PlanTotals:
        """Returns sums over all micro-batches; training logs their means."""
        sums = PlanTotals()
        for facts in self._facts(loss_is_placed):
            sums = sums.plus(facts, self.request.model.flops)
        return sums

    def worst(self, loss_is_placed: bool) -> tuple[float, ...]:
        """Returns the largest imbalance of a step's work in any micro-batch, before and as planned."""
        works = [facts.step_work(self.request.model.flops) for facts in self._facts(loss_is_placed)]
        return tuple(max(imbalance(work.tolist()) for work in way) for way in zip(*works, strict=True))

    def _facts(self, loss_is_placed: bool) -> list[PlanFacts]:
        return [one.facts_placed_loss if loss_is_placed else one.facts for one in self.micro_batches]

    @property
    def moved_share(self) -> float:
        """Share of the tokens that are computed on a rank other than their batch's."""
        return sum(one.moved_tokens for one in self.micro_batches) / self.totals(False).tokens

    @property
    def planning_seconds(self) -> float:
        return float(np.median([one.planning_seconds for one in self.micro_batches]))

    @property
    def load(self) -> RankLoad:
        """What the rank with most tokens holds, in the way of distca_hf that needs most memory."""
        way = max((way for way in self.simulated.ways if way.is_ours), key=lambda way: way.memory_bytes)
        return self.request.rank_load(way.most_tokens, way.received_bytes, way.most_head_tokens, way.state_bytes)

    @property
    def memory(self) -> Memory:
        return self.load.memory(self.request.setup("fsdp2"))

    @property
    def advice(self) -> str:
        """What does not fit, and what makes it fit; empty if everything fits. Your batches do not shrink on more
        ranks."""
        return advice(self.load, self.request.setup("fsdp2"), self.request.room, more_ranks=False)

    @property
    def in_short(self) -> str:
        """The answer in a few sentences: tokens that are shared, balance before and after, speed and memory."""
        count, returned, placed = len(self.micro_batches), self.totals(False), self.totals(True)
        ours = [way for way in self.simulated.ways if way.is_ours]
        before, after, with_loss = (
            each / count for each in (returned.step_imbalance_before, returned.step_imbalance, placed.step_imbalance)
        )
        now = f"{with_loss:.2f} times, or {after:.2f} if results return" if self.places_rows else f"{after:.2f} times"
        faster = " or ".join(f"{way.times_as_fast:.2f}" for way in reversed(ours))
        shared = "" if self.sharing is None else self.sharing.in_short
        return (
            f"In short: {shared}the busiest rank has {before:.2f} times the mean work of a step, with distca {now}. "
            f"Steps are {faster} times as fast as with plain data parallelism; a GPU needs "
            f"{max(way.memory_bytes for way in ours) / GIB:.1f} GiB with FSDP2, instead of "
            f"{self.simulated.plain.memory_bytes / GIB:.1f}"
            f"{self.request.room.on_host(self.memory, self.request.gpus)}. These are estimates; see below."
        )

    def as_json(self) -> dict[str, object]:
        request, count = self.request, len(self.micro_batches)
        returned, placed = self.totals(False), self.totals(True)
        of_both = ("token_imbalance", "imbalance", "step_imbalance")
        names = [name for each in of_both for name in (f"{each}_before", each)]
        return {
            **{"model": request.model.name, "source": self.source, "ranks": request.num_ranks},
            **{"ranks_per_node": request.ranks_per_node, "batch_size": request.batch_size},
            **{"micro_steps": request.accumulation, "context_tokens": request.context_tokens, "seed": request.seed},
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
            "ways": [dict(vars(way)) for way in self.simulated.ways],
            "node_bytes": self.request.room.node_bytes(self.memory, self.request.gpus),
            "shared_prefixes": None if self.sharing is None else self.sharing.as_json(),
            "advice": self.advice or None,
            "in_short": self.in_short,
        }


def answer(
    request: SimulationRequest,
    source: str,
    row_tokens: IntArray,
    profile: ClusterProfile,
    progress: tables.PlanProgress | None = None,
    groups: Groups | None = None,
) -> GivenAnswer:
    """Plans and simulates steps of given batches, whose rows have `[rows]` lengths."""
    progress = progress or tables.PlanProgress()
    size, plans = request.num_ranks * request.accumulation, request.given_plans(not request.model.whole_documents)
    steps = replace(request, batches=max(1, MOST_PLANNED_RANKS // size)).dealt_steps(row_tokens, groups)
    dealt = [batch for step in steps for batch in step]
    planned = [
        GivenMicroBatch.of(request, plans, *dealt[number]) for number in progress.over("planning", range(len(dealt)))
    ]
    sharing = None
    if groups is not None:
        shares = request.least_tokens > 0
        unshared = [GivenMicroBatch.of(request, plans, tokens) for tokens, _ in dealt] if shares else planned
        facts, facts_unshared = ([one.facts for one in of] for of in (planned, unshared))
        sharing = SharingFigures(request, groups, facts, facts_unshared)
    with progress.stage("simulating steps"):
        result, _ = simulate(replace(request, batches=steps_worth_it(size)), profile, row_tokens, groups=groups)
    return GivenAnswer(request, source, row_tokens, planned, result, profile, sharing)


# Options that have no effect on given batches.
ONLY_PLACED = "tokens_per_rank layout overlong bytes_limit lengths_are_batch compare pipeline chunks".split()


def run_given(options: PlanOptions) -> None:
    """Runs `distca plan --batch-size`. Prints output at the very end: nothing is printed before an error."""
    changed = {
        field.name
        for field in fields(options)
        if getattr(options, field.name) != getattr(field.default, "default", None)
    }
    if without_effect := [f"--{name.replace('_', '-')}" for name in ONLY_PLACED if name in changed]:
        raise ConfigError(
            f"{', '.join(without_effect)}: only for placed batches, and --batch-size {options.batch_size} is for "
            "your own. Leave out one or the other"
        )
    profile = find_profile(options.cluster)
    model = SimulatedModel.of(find_model(options.model))
    request = SimulationRequest(
        *(model, options.gpus, DEFAULT_TOKENS_PER_RANK, options.context, options.micro_steps),
        ranks_per_node=options.ranks_per_node,
        batch_size=options.batch_size,
        **assumed(options, profile),
    )
    progress = tables.PlanProgress()
    with progress.shown():
        with progress.stage(f"reading {options.lengths.name}"):
            rows = read_lengths(options.lengths)
        found = answer(request, rows.source, rows.tokens, profile, progress, rows.groups)
    if options.as_json:
        tables.print_json(found.as_json())
    else:
        print_given(found, tables.Terminal())


def print_given(found: GivenAnswer, console: Console) -> None:
    """Prints the answer as text."""
    request, rows, count = found.request, found.row_tokens, len(found.micro_batches)
    returned, placed = found.totals(False), found.totals(True)
    steps = f" x {request.accumulation} micro-steps" if request.accumulation > 1 else ""
    cut = "" if request.context_tokens is None else f", longer rows are cut at {request.context_tokens:,}"
    blocks: list[RenderableType] = [
        f"{tables.of_lengths(found.source, rows, 'row')}{cut}. {request.model.name} on "
        f"{counted(request.num_ranks, 'rank')} x {counted(request.batch_size or 0, 'row')}{steps}, "
        f"{request.ranks_per_node} ranks per node, seed {request.seed}: your batches, {counted(count, 'micro-batch')} "
        "of them.",
        found.in_short,
    ]
    table = tables.plain_table("as given", "rows placed" if found.places_rows else "attention moved")

    def add(name: str, totals: PlanTotals, of: str) -> None:
        table.add_row(name, *(f"{getattr(totals, field) / count:.2f}" for field in (f"{of}_before", of)))

    add("tokens", returned, "token_imbalance")
    add("attention", returned, "imbalance")
    ways = {", results return": False, ", placed loss": True} if found.places_rows else {"": False}
    for way, loss_is_placed in ways.items():
        add(f"work of a step{way}", placed if loss_is_placed else returned, "step_imbalance")
    for way, loss_is_placed in ways.items():
        table.add_row(f"  worst micro-batch{way}", *(f"{one:.2f}" for one in found.worst(loss_is_placed)))
    note = (
        "Work of a step: layers, attention, head and loss; training logs its imbalance as distca/step_imbalance. "
        "Padding is not counted. "
    )
    if found.places_rows:
        even = sum(one.stays for one in found.micro_batches)
        note += (
            "Results return to their batch's rank if something reads logits, or the loss of one rank; otherwise head "
            f"and loss run on placed rows. {100 * found.moved_share:.0f} % of the tokens change ranks. {even} of "
            f"{count} micro-batches are even within 2 %: their tokens stay. "
        )
    else:
        note += "Documents of this model stay whole, so tokens stay, and attention moves. "
    note += f"Planning takes {1e3 * found.planning_seconds:.1f} ms."
    blocks.append(tables.block("busiest rank / mean of all", table, note))
    if found.sharing is not None:
        blocks.append(found.sharing.table())
    note = (
        f"Simulated like `distca simulate --batch-size {request.batch_size} --batches "
        f"{found.simulated.plain.steps}`: FSDP2 in bf16, with times measured on "
        f"{found.profile.made.device} (--cluster {found.profile.source}), checkpointing {request.checkpointing} "
        f"(--checkpointing), {'with' if request.liger else 'without'} Liger's kernels and loss (--liger); 90 % of "
        f"{request.gpu_gib:g} GiB may be used (--gpu-gib). x plain: speed over plain data parallelism. Bytes: the "
        "most that a GPU sends or receives in a layer's forward pass."
    )
    note += f" Does not fit: {found.advice}." if found.advice else ""
    tables.print_blocks(
        console, [*blocks, tables.block("speed and memory, simulated", tables.ways_table(found.simulated), note)]
    )
