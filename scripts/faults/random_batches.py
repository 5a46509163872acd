"""Trains on random batches of a user's own pipeline, and compares every step with data parallelism without distca.

    python scripts/faults/random_batches.py --ranks 2 3 4 --draws 200
    python scripts/faults/random_batches.py --ranks 2 --draws 1 --first 137

Each draw has a model (dense, tied, with windows, with experts, with a table of positions, multimodal), parts that are
frozen or adapters, checkpointing, a loss, and for each step and rank a batch: packed or padded in any way, with
images, embeddings of the caller or without a token. Losses of all ranks and gradients of all parameters must be equal.
Exit status 1: some were not, or a rank failed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from command_lines import count, parser_of, whole


sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]

from support.given_batches import draw, train_all_drawn, worst_of  # noqa: E402
from support.ranks import start_ranks  # noqa: E402


# Draws that ranks train one after the other before they are started anew.
DRAWS_PER_START = 20
LAST_WORDS = 3000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", nargs="+", type=count, default=[2, 3, 4])
    parser.add_argument("--draws", type=count, default=200, help="for each number of ranks")
    parser.add_argument("--first", type=whole, default=0, help="seed of the first draw")
    options = parser.parse_args()
    equal = 0
    for ranks in options.ranks:
        for first in range(0, options.draws, DRAWS_PER_START):
            last = min(first + DRAWS_PER_START, options.draws)
            equal += _run(ranks, range(options.first + first, options.first + last))
    total = options.draws * len(options.ranks)
    print(f"{equal} of {total} draws have the losses and gradients of data parallelism", flush=True)
    sys.exit(int(equal < total))


def _run(ranks: int, seeds: Sequence[int]) -> int:
    """Trains on some draws; returns how many of them are equal."""
    with TemporaryDirectory() as folder:
        outcomes = start_ranks(ranks, train_all_drawn, Path(folder), seeds)
    failed = [outcome for outcome in outcomes if outcome.exit_code]
    for outcome in failed:
        print(f"--- rank {outcome.rank} ({outcome.exit_code}):\n{outcome.output[-LAST_WORDS:]}", flush=True)
    if failed:
        print(f"{ranks} ranks, one of the draws {seeds[0]} to {seeds[-1]}: FAILED", flush=True)
        return 0
    equal = 0
    for seed in seeds:
        drawn, (loss, gradient) = draw(seed, ranks), worst_of([outcome.result[seed] for outcome in outcomes])
        is_equal = max(loss, gradient) <= drawn.most
        equal += is_equal
        told = f"loss {loss:.0e}, gradients {gradient:.0e}{'' if is_equal else ', WRONG'}"
        print(f"{ranks} ranks, draw {seed}, {drawn}: {told}", flush=True)
    return equal


if __name__ == "__main__":
    main()
