"""Sends SIGTERM and Ctrl-C to trainings on two CPU ranks at every place of a training, and resumes what they saved.

    python scripts/faults/signal_places.py
    python scripts/faults/signal_places.py --places forward evaluation --workers 2

Workers of data loaders get the signal, too, as launchers and terminals send it. Every training must end with the
status of its signal on both ranks and leave a checkpoint, from which it goes on with the losses of a training that got
no signal. Exit status 1: one of them did not.
"""

import signal
import sys
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from command_lines import parser_of, whole


sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]

from support.ranks import run_ranks, start_ranks  # noqa: E402
from support.signalled import PLACES, RANKS, checkpoints, losses, train_into_signal  # noqa: E402


SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=[*PLACES])
    parser.add_argument("--batches", nargs="+", choices=["placed", "packs"], default=["placed", "packs"])
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=[*SIGNALS])
    parser.add_argument("--workers", nargs="+", type=whole, choices=[0, 2], default=[0, 2], help="of data loaders")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        cases = [*product(options.places, options.batches, options.signals, options.workers)]
        cases = [case for case in cases if case[:2] != ("placed evaluation", "packs")]
        wrong = sum(not _runs_well(*case, Path(folder)) for case in cases)
    print(f"{len(cases) - wrong} of {len(cases)} trainings left a checkpoint and went on as if undisturbed")
    sys.exit(int(wrong > 0))


def _runs_well(place: str, batches: str, name: str, workers: int, scratch: Path) -> bool:
    """Runs a training into a signal, resumes it, and tells whether both went as they must."""
    folder = scratch / f"{place}-{batches}-{name}-{workers}"
    number = SIGNALS[name]
    arguments = (place, batches, workers, folder, number, tuple(range(RANKS)))
    outcomes = start_ranks(RANKS, train_into_signal, folder / "ranks", *arguments)
    codes, saved = [outcome.exit_code for outcome in outcomes], checkpoints(folder)
    problem = f"exit codes {codes}" if codes != [128 + number] * RANKS else "" if saved else "no checkpoint"
    if not problem:
        expected = _undisturbed(batches, scratch)
        resumed = run_ranks(RANKS, losses, folder / "resumed", place, batches, workers, folder, True)[0]
        problem = "" if resumed == expected else f"losses {resumed} for {expected}"
    told = problem and f"; WRONG: {problem}"
    print(f"{place}, {batches}, {name}, {workers} workers: saved {saved}{told}", flush=True)
    if problem:
        print(outcomes[0].output[-2000:], flush=True)
    return not problem


@cache
def _undisturbed(batches: str, scratch: Path) -> dict[int, float]:
    """Returns the losses of a training that gets no signal."""
    folder = scratch / batches
    return run_ranks(RANKS, losses, folder / "ranks", "forward", batches, 0, folder, False)[0]


if __name__ == "__main__":
    main()
