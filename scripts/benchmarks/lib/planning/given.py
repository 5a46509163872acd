"""Given: work of a step on batches of a user's own, as they are, with tasks that move, and with rows placed inside."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.request import ModelShape, preset
from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from distca_hf.layout import Layout
from distca_hf.placement.given import place_given
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.row_moves import RowMoves
from distca_hf.topology import Topology
from lib.planning.planners import LLAMA, RANKS_PER_NODE, K, print_row, table


MODELS = ("llama3-8b", "qwen3-0.6b")
ROWS_PER_RANK = (1, 4, 16)
LONGEST_TOKENS = 32 * K


def step_work(model: ModelShape, layer_tokens: IntArray, pairs: IntArray, head_tokens: IntArray) -> IntArray:
    """Returns `[ranks]` operations of forward: matrix products of layers, attention, and the head."""
    assert model.size is not None
    of_pair = 2 * (model.heads.dim + model.heads.value_dim) * model.heads.query * model.size.layers
    return (
        2 * model.size.layer_parameters * layer_tokens + of_pair * pairs + 2 * model.size.head_parameters * head_tokens
    )


def imbalances(model: ModelShape, packs: Sequence[IntArray]) -> list[float]:
    """Returns work of the busiest rank over the mean: as given, with tasks that move, with rows placed inside while
    the head stays, and with the head placed, too; then the tokens that stay on their rank, as a share."""
    groups, topology = model.heads.groups, Topology(len(packs), RANKS_PER_NODE)
    home = Layout.from_packs(packs)
    kept = plan_by_moving(home, groups, topology=topology, token_bytes=LLAMA)
    placed = place_given(home, topology, groups)
    inside = plan_in_place(placed, groups)
    moves = [RowMoves.of(home, placed, rank) for rank in range(len(packs))]
    stays = sum(int(one.sent_counts[rank]) for rank, one in enumerate(moves)) / int(home.document_tokens.sum())
    tokens, kept_pairs = home.rank_tokens, kept.work // kept.tasks.head_groups
    inside_pairs, even = inside.work // inside.tasks.head_groups, placed.rank_tokens
    works = [
        step_work(model, tokens, home.rank_work, tokens),
        step_work(model, tokens, kept_pairs, tokens),
        step_work(model, even, inside_pairs, tokens),
        step_work(model, even, inside_pairs, even),
    ]
    return [*map(imbalance, works), stays]


def print_given(ranks: Sequence[int], draws: int) -> None:
    """Prints every sample of lengths, cut at 32K, with as many rows of every rank as its batch size says."""
    table(
        f"Given batches, lengths cut at 32K, work of a step, max/mean, means of {draws} draws",
        *("model", "lengths", "ranks", "rows per rank", "as given", "tasks move", "results return", "loss is placed"),
        "tokens that stay",
    )
    for name in MODELS:
        for mix in ("prolong", "pretrain"):
            lengths = np.minimum(read_lengths(Path(mix)).tokens, LONGEST_TOKENS)
            for num_ranks in ranks:
                for rows in ROWS_PER_RANK:
                    random = np.random.default_rng(0)
                    drawn = [
                        imbalances(preset(name), [random.choice(lengths, rows) for _ in range(num_ranks)])
                        for _ in range(draws)
                    ]
                    *works, stays = map(statistics.mean, zip(*drawn, strict=True))
                    print_row(name, mix, num_ranks, rows, *(f"{work:.2f}" for work in works), f"{stays:.0%}")
