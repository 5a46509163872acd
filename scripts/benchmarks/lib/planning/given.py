"""Given: work of a step on batches of a user's own, as they are, with tasks that move, and with rows placed inside.

Rows are drawn at random for every batch, so figures of few ranks and rows differ much between draws: their mean has an
error of itself, and is reported with it and with the range of 19 of 20 draws.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.request import preset
from distca_hf.analysis.simulate.model import SimulatedModel
from distca_hf.arrays import IntArray
from distca_hf.batches.given_plans import GivenPlans
from distca_hf.cost import imbalance
from distca_hf.layout import Layout
from distca_hf.placement.given import tokens_between
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import PlanFacts
from distca_hf.topology import Topology
from lib.planning.planners import LLAMA, RANKS_PER_NODE, K, print_row, table


# The first one's heads are divided into as many groups as those of the others, so all have the same plans.
MODELS = ("llama3-8b", "qwen3-0.6b")
ROWS_PER_RANK = (1, 4, 16)
LONGEST_TOKENS = 32 * K
# Percentiles of the range that is reported.
LOW, HIGH = 2.5, 97.5


def planned(packs: Sequence[IntArray], groups: int) -> tuple[list[PlanFacts], float, float]:
    """Returns facts with tasks that move, with rows placed inside while the head stays, and with the head placed, too;
    then the tokens that stay on their rank, as a share, and seconds of placing and planning."""
    topology, home = Topology(len(packs), RANKS_PER_NODE), Layout.from_packs(packs)
    moving = GivenPlans(topology, groups, LLAMA, places_rows=False)
    moved = RoutedKinds.of(moving.plan(home), 0, work_before=home.rank_work_of).facts.with_tokens(home, home)
    placing = GivenPlans(topology, groups, LLAMA)
    began = time.perf_counter()
    placed = placing.layout(home)
    plan = placing.plan(placed)
    seconds = time.perf_counter() - began
    inside = RoutedKinds.of(plan, 0, work_before=home.rank_work_of).facts.with_tokens(home, placed)
    stays = int(np.trace(tokens_between(home, placed))) / inside.num_tokens
    return [moved, inside, replace(inside, head_tokens=inside.tokens)], stays, seconds


def imbalances(model: SimulatedModel, facts: Sequence[PlanFacts]) -> list[float]:
    """Returns work of the busiest rank over the mean, as given and in each of these ways."""
    works = [one.step_work(model.flops) for one in facts]
    return [imbalance(work.tolist()) for work in (works[0][0], *(after for _, after in works))]


def print_given(ranks: Sequence[int], draws: int) -> None:
    """Prints every sample of lengths, cut at 32K, with as many rows of every rank as its batch size says."""
    models = [SimulatedModel.of(preset(name)) for name in MODELS]
    table(
        f"Given batches, lengths cut at 32K, work of a step, max/mean: means of {draws} draws; where results return "
        "also the standard error, and the range of 19 of 20 draws",
        *("model", "lengths", "ranks", "rows per rank", "as given", "tasks move", "results return", "19 of 20"),
        *("loss is placed", "tokens that stay", "planning ms"),
    )
    for mix in ("prolong", "pretrain"):
        lengths = np.minimum(read_lengths(Path(mix)).tokens, LONGEST_TOKENS)
        for num_ranks in ranks:
            for rows in ROWS_PER_RANK:
                random = np.random.default_rng([num_ranks, rows])
                drawn = [
                    planned([random.choice(lengths, rows) for _ in range(num_ranks)], models[0].heads.groups)
                    for _ in range(draws)
                ]
                stays = statistics.mean(each[1] for each in drawn)
                seconds = statistics.median(each[2] for each in drawn)
                for model in models:
                    works = np.array([imbalances(model, facts) for facts, *_ in drawn])
                    stays, seconds = (
                        statistics.mean(each[1] for each in drawn),
                        statistics.median(each[2] for each in drawn),
                    )
                    cells = *_cells(works), f"{stays:.0%}", f"{1e3 * seconds:.1f}"
                    print_row(model.name, mix, num_ranks, rows, *cells)


def _cells(works: np.ndarray) -> Iterator[str]:
    """Yields figures of `[draws, ways]` imbalances: means, and the range of returned results."""
    given, moved, returned, placed = works.mean(axis=0)
    error = works[:, 2].std() / len(works) ** 0.5
    low, high = np.percentile(works[:, 2], (LOW, HIGH))
    yield from (
        f"{given:.2f}",
        f"{moved:.2f}",
        f"{returned:.2f} ± {error:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{placed:.2f}",
    )
