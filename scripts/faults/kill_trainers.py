"""Kills a trainer of a job with an attention server, over and over, and measures until all processes are gone.

    python scripts/faults/kill_trainers.py --kills 10

Two trainers and a server under `torchrun -m distca_hf.run`, a tiny Llama on CPUs over gloo. Trainers are killed in
turn at the beginning of their fourth step. Exit status 1: a process was left, the launcher ended well, or did not name
the rank.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from command_lines import count, parser_of


REPOSITORY = Path(__file__).parents[2]
# A variable that all processes of a job inherit.
MARK = "DISTCA_KILLED_JOB"
# Longest time that processes may stay.
LIMIT_SECONDS = 60.0
STEP = 3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=count, default=10)
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        _train(Path(options.train[0]), int(options.train[1]))
        return
    seconds = []
    for number in range(options.kills):
        with TemporaryDirectory() as folder:
            seconds.append(_kill(Path(folder), number % 2))
        print(f"kill {number + 1}: rank {number % 2}, all processes gone after {seconds[-1]:.1f} s", flush=True)
    print(f"{min(seconds):.1f} to {max(seconds):.1f} s", flush=True)


def _kill(folder: Path, rank: int) -> float:
    """Runs a job until a rank is killed, and returns the seconds until all its processes are gone."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    line += ["-m", "distca_hf.run", "--attention-servers", "1", __file__, "--train", str(folder), str(rank)]
    paths = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", MARK: str(folder)}
    log, killed = folder / "log", folder / "killed"
    with log.open("w") as output:
        job = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, env=environment)
    while not killed.exists() and job.poll() is None:
        time.sleep(0.01)
    began = time.monotonic()
    while (left := _of_job(str(folder))) and time.monotonic() - began < LIMIT_SECONDS:
        job.poll()
        time.sleep(0.05)
    passed = time.monotonic() - began
    shown = log.read_text()
    if left or job.wait() == 0 or f"local_rank: {rank}" not in shown:
        sys.exit(f"{len(left)} processes are left, status {job.returncode}:\n{shown[-3000:]}")
    return passed


def _of_job(mark: str) -> list[int]:
    """Returns processes that inherited the mark, and have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:  # it ended, or is another user's
            continue
    return found


def _train(folder: Path, killed: int) -> None:
    """Trains until a rank kills itself."""
    from transformers import Trainer, TrainingArguments

    import distca_hf
    from support.data import random_dataset
    from support.models import tiny_model
    from support.signalled import At
    from support.training import quiet_arguments

    def kill() -> None:
        if int(os.environ["RANK"]) == killed:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    arguments = TrainingArguments(**quiet_arguments(folder, max_steps=1000, use_cpu=True))
    trainer = Trainer(
        tiny_model(), arguments, train_dataset=random_dataset(60), callbacks=[At("on_step_begin", kill, STEP)]
    )
    distca_hf.DistCAPlugin(tokens_per_rank=96).attach(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
