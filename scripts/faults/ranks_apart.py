"""Lets one rank of a training do something else than the others, in every way, and measures until they end.

    python scripts/faults/ranks_apart.py --ranks 2 3 4
    python scripts/faults/ranks_apart.py --ranks 2 --backend nccl
    python scripts/faults/ranks_apart.py --kinds skips --where forward --batches packs

One rank skips a batch, has one more, raises, exits with status 0, is killed or is stopped; in forward, in backward or
between steps; with placed batches and packs. Settings are the default ones, a stopped rank excepted: only a deadline
tells it from a slow one. Exit status 1: a rank was not named, or the others ended later than `LIMIT_SECONDS`.
"""

import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from command_lines import count, parser_of


sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]

from support.apart import BATCHES, KINDS, STOPPED_SECONDS, WHERE, Apart, train  # noqa: E402
from support.ranks import start_ranks  # noqa: E402


LIMIT_SECONDS = 30.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", nargs="+", type=count, default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--where", nargs="+", choices=WHERE, default=WHERE)
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=BATCHES)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="on CPUs, or on one GPU per rank")
    options = parser.parse_args()
    cases = [*product(options.kinds, options.where, options.batches, options.ranks)]
    with TemporaryDirectory() as folder:
        seconds = [
            _run(Apart(kind, where, batches, ranks - 1), ranks, Path(folder, str(number)), options.backend)
            for number, (kind, where, batches, ranks) in enumerate(cases)
        ]
    well = [one for one in seconds if one is not None]
    most = max(well, default=0)
    print(f"{len(well)} of {len(cases)} were noticed and named, after {most:.1f} s at most")
    sys.exit(int(len(well) < len(cases)))


def _run(apart: Apart, ranks: int, folder: Path, backend: str) -> float | None:
    """Runs a training, and returns the seconds until all other ranks had ended; None if they did not as they must."""
    stops = apart.kind == "is stopped"
    timeouts = {"exchange_seconds": STOPPED_SECONDS, "agreement_seconds": STOPPED_SECONDS} if stops else {}
    endless = frozenset([apart.rank] if stops else [])
    arguments = (apart, folder, False, timeouts)
    outcomes = start_ranks(ranks, train, folder, *arguments, endless=endless, backend=backend)
    passed = time.time() - (folder / "apart").stat().st_mtime
    others = [outcome for outcome in outcomes if outcome.rank != apart.rank]
    named = [any(words in outcome.output for words in apart.words()) for outcome in others]
    well = all(named) and all(outcome.exit_code == 1 for outcome in others) and passed <= LIMIT_SECONDS
    what = f"rank {apart.rank} of {ranks} {apart.kind}, {apart.where}, {apart.batches}"
    print(f"{what}: {passed:.1f} s{'' if well else f', WRONG: named {named}'}", flush=True)
    if not well:
        print("\n".join(f"--- {one.rank} ({one.exit_code}):\n{one.output[-1500:]}\n" for one in outcomes), flush=True)
    return passed if well else None


if __name__ == "__main__":
    main()
