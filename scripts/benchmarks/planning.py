"""Planning, measured: balance, bytes and time of every planner, of baselines and bounds, as Markdown tables.

    python scripts/benchmarks/planning.py [placed] [fixed] [times] [streams] [--ranks 4 8 64 512] [--seeds 3]

placed   documents are placed: balance on many mixes; bytes against the published planner, and against the counting
         bound; bytes between nodes; optimizer steps of several micro-steps
fixed    tokens stay, tasks move: balance and bytes of the largest rank against the published planner
times    planning and routing, each measured once in fresh processes, the median of several
streams  batches of a stream, filled from a buffer: balance, padding, and tokens per second of one reading rank

`distca plan` has the balance of an epoch, and `distca plan --batch-size` that of a user's batches.

Bytes are of one layer's forward pass of Llama-3-8B in bf16: queries and outputs 8 KB, keys and values 4 KB a token.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product

from distca_hf.layout import Topology
from distca_hf.planning.routing import route
from lib.parser import add_ranks, count, parser_of
from lib.planning.mixes import batch
from lib.planning.plan_tables import print_balance, print_bytes, print_fixed, print_grouped_steps, print_ratio_to_bound
from lib.planning.planners import RANKS_PER_NODE, K, placed_planner, plan_fixed, plan_placed, print_row, table
from lib.planning.stream_tables import print_streams


RANKS = (4, 8, 64, 512)
# Fresh processes for every time: the median of them is reported.
PROCESSES = 7


def print_times(ranks: list[int], seeds: int) -> None:
    """Prints times of the first plan of a process, imports excluded, whatever the number of seeds."""
    table(
        "First plan of a process, ms (limits: placed 3, 5, 15, 300; fixed 5, 8, 100, 2000; routing 5, 5, 15, 80)",
        *("mix", "ranks", "tokens/rank", "documents", "placed ms", "routing ms", "fixed ms", "routing ms"),
    )
    for mix, num_ranks in product(("pretrain", "prolong"), ranks):
        of_kinds = [list(_measure(kind, mix, num_ranks)) for kind in ("placed", "fixed")]
        times = product(of_kinds, ("plan", "route"))
        cells = [f"{1e3 * statistics.median(one[what] for one in measured):.1f}" for measured, what in times]
        print_row(mix, num_ranks, "128K", int(of_kinds[0][0]["documents"]), *cells)


TABLES: dict[str, tuple[Callable[[list[int], int], None], ...]] = {
    "placed": (print_balance, print_bytes, print_ratio_to_bound, print_grouped_steps),
    "fixed": (print_fixed,),
    "times": (print_times,),
    "streams": (print_streams,),
}


def _measure(kind: str, mix: str, num_ranks: int) -> Iterator[dict[str, float]]:
    """Measures in fresh processes, one after the other."""
    command = [sys.executable, __file__, "--measure", kind, mix, str(num_ranks)]
    for _ in range(PROCESSES):
        yield json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_once(kind: str, mix: str, num_ranks: int) -> None:
    """Plans and routes once, and prints seconds as JSON."""
    lengths = batch(mix, num_ranks, 128 * K, 128 * K, seed=0)
    topology = Topology(num_ranks, RANKS_PER_NODE)
    placed_planner(topology)
    gc.collect()  # garbage of imports does not belong to planning
    gc.freeze()
    began = time.perf_counter()
    plan = plan_placed(lengths, topology) if kind == "placed" else plan_fixed(lengths, topology)
    planned = time.perf_counter()
    route(plan, num_ranks // 2)
    routed = time.perf_counter()
    print(json.dumps({"documents": len(lengths), "plan": planned - began, "route": routed - planned}))


def main() -> None:
    parser = parser_of(__doc__)
    add_ranks(parser, RANKS)
    parser.add_argument("--seeds", type=count, default=3, help="batches that are drawn for every row")
    parser.add_argument("--measure", nargs=3, metavar=("KIND", "MIX", "RANKS"), help=argparse.SUPPRESS)
    parser.add_argument("tables", nargs="*", help=f"any of {', '.join(TABLES)}; without it, all")
    options = parser.parse_args()
    options.tables = options.tables or [*TABLES]
    if unknown := [name for name in options.tables if name not in TABLES]:
        parser.error(f"argument tables: no table is called {unknown[0]}; there are {', '.join(TABLES)}")
    if options.measure:
        kind, mix, num_ranks = options.measure
        measure_once(kind, mix, int(num_ranks))
        return
    for name in options.tables:
        for print_table in TABLES[name]:
            print_table(options.ranks, options.seeds)


if __name__ == "__main__":
    main()
