"""Placement for models with sliding windows, measured: evenness of every kind of layer, keys that move, time of plans.

    python scripts/benchmarks/windows.py [--ranks 2 8 64] [--seeds 6] [--tokens-per-rank 65536]

The shipped lengths, drawn with each seed until all ranks are full, are placed in two ways: only for full attention,
and for the layers of a model. The worst seed is printed for max/mean work, and the mean over seeds for keys and times.
The time of a batch is the shortest processor time of several plans. Ways take turns, and each is called once before.
"""

import statistics
import time
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.cost import LayerMasks, Mask, imbalance
from distca_hf.layout import Topology
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import key_transfers
from lib.parser import add_ranks, add_tokens_per_rank, count, parse_plans, parser_of
from lib.planning.mixes import batch
from lib.planning.planners import RANKS_PER_NODE, placed_planner, print_row, table


MIXES = ("pretrain", "prolong")
MODELS: dict[str, LayerMasks] = {
    "GPT-OSS: 1 full, 1 of 128": ((Mask(), 1), (Mask(128), 1)),
    "Gemma 3: 1 full, 5 of 1024": ((Mask(), 1), (Mask(1024), 5)),
    "Muse: 1 full, 3 of 2048": ((Mask(), 1), (Mask(2048), 3)),
    "OLMo 3: 1 full, 3 of 4096": ((Mask(), 1), (Mask(4096), 3)),
}
# Plans of each batch whose time is taken; the shortest counts.
ROUNDS = 5


@dataclass
class Way:
    """Figures of one way to place, over all seeds."""

    full: list[float] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, plan: Plan, window: Mask) -> None:
        """Measures a plan."""
        self.full.append(plan.imbalance)
        self.window.append(imbalance(plan.layout.rank_work_of(window)))
        transfers = key_transfers(plan)
        self.keys.append(int(transfers.rows_between(plan.layout.num_ranks).sum()) // plan.tasks.head_groups)


def take_times(batches: list[IntArray], planners: list[PlacedPlanner], ways: list[Way]) -> None:
    """Plans every batch in every way, in turns."""
    for documents in batches:
        for each in planners:
            each.plan(documents)
        seconds: list[list[float]] = [[] for _ in ways]
        for of_way, each in list(zip(seconds, planners, strict=True)) * ROUNDS:
            began = time.process_time()
            each.plan(documents)
            of_way.append(time.process_time() - began)
        for of_way, way in zip(seconds, ways, strict=True):
            way.seconds.append(min(of_way))


def main() -> None:
    parser = parser_of(__doc__)
    add_ranks(parser, (2, 8, 64))
    parser.add_argument("--seeds", type=count, default=6, help="batches that are drawn for every row")
    add_tokens_per_rank(parser, 65_536)
    options = parse_plans(parser)
    table(
        f"Placed for all kinds of layers, {options.tokens_per_rank:,} tokens per rank; in brackets: for full alone",
        *("lengths", "ranks", "layers", "full max/mean", "window max/mean", "key tokens, thousands"),
        *("keys ÷ for full alone", "plan ms", "time ÷ for full alone"),
    )
    for mix, num_ranks in product(MIXES, options.ranks):
        tokens = num_ranks * options.tokens_per_rank
        batches = [batch(mix, num_ranks, options.tokens_per_rank, tokens, seed) for seed in range(options.seeds)]
        topology = Topology(num_ranks, min(num_ranks, RANKS_PER_NODE))
        for name, layer_masks in MODELS.items():
            planners = [placed_planner(topology), placed_planner(topology, layer_masks)]
            alone, both = ways = [Way(), Way()]
            for documents in batches:
                for each, way in zip(planners, ways, strict=True):
                    way.add(each.plan(documents), layer_masks[-1][0])
            take_times(batches, planners, ways)
            milliseconds = [1e3 * statistics.mean(way.seconds) for way in ways]
            print_row(
                *(mix, num_ranks, name, f"{max(both.full):.3f} ({max(alone.full):.3f})"),
                f"{max(both.window):.3f} ({max(alone.window):.3f})",
                f"{np.mean(both.keys) / 1e3:.0f} ({np.mean(alone.keys) / 1e3:.0f})",
                f"{sum(both.keys) / max(1, sum(alone.keys)):.2f}",
                f"{milliseconds[1]:.1f} ({milliseconds[0]:.1f})",
                f"{milliseconds[1] / milliseconds[0]:.2f}",
            )


if __name__ == "__main__":
    main()
