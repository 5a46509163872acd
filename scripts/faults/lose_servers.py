"""Kills attention servers of a training over and over, and compares every loss with a training without servers.

    python scripts/faults/lose_servers.py --trainers 2 --servers 2 --wrap fsdp2 --accumulation 3 --losses 10
    python scripts/faults/lose_servers.py --wrap zero3 --how stop --losses 5
    python scripts/faults/lose_servers.py --trainers 3 --servers 1 --device cuda --how both --losses 10

A tiny Llama, through `torchrun -m distca_hf.run` and an unmodified Trainer, with supervisors that replace lost
servers: on CPUs over gloo, or with `--device cuda` on one GPU for each process over NCCL, with longer documents in
bf16. A server is lost a random moment after a step has counted with it. Each loss is printed with sizes of a trainer,
and at the end whether they grow. Then the same steps run without servers. Exit status 1: a run failed, a server was
left out, a loss or a norm differs or is NaN, or something grows from loss to loss.

With `--one-gpu` all processes share the first GPU. NCCL must be of version 2.30 or later for that: set
`NCCL_MULTI_RANK_GPU_ENABLE=1`, and LD_PRELOAD to that NCCL if torch brings an earlier one.
"""

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import yaml

from command_lines import count, parser_of, whole


REPOSITORY = Path(__file__).parents[2]
TRAIN = REPOSITORY / "tests" / "support" / "lost_servers_training.py"
print_now = partial(print, flush=True)
SIGNALS = {"kill": (signal.SIGKILL,), "stop": (signal.SIGSTOP,), "both": (signal.SIGKILL, signal.SIGSTOP)}
# Module of the processes to harm: the supervisors that replace them run another one.
SERVER = "distca_hf.servers.server"
# Message of a trainer about a server that was lost too often.
LEFT_OUT = "it is left out for the rest of the training"
# Characters of a training's output that are shown if it fails.
LAST_WORDS = 6000
# Largest difference of a loss, and of a norm as a part of it, in fp32 and in bf16. Differences grow with steps: norms
# were 1e-4 apart after 350 steps in fp32.
LOSS_LIMITS = {"cpu": 1e-5, "cuda": 1e-2}
NORM_LIMITS = {"cpu": 3e-4, "cuda": 5e-2}
# Most that a size may grow from one loss to the next: as a part of its first value, or as a number.
GROWTH = {"mebibytes": (0.01, 0.0), "gpu_mebibytes": (0.01, 0.0), "threads": (0.0, 0.3), "files": (0.0, 1.5)}
# Losses before sizes count: buffers and caches have theirs then. So many losses tell growth from chance.
SETTLED_LOSSES, FEWEST_LOSSES = 1, 5
# Steps whose times are shown.
LONGEST_STEPS = 12


@dataclass(frozen=True)
class Sizes:
    """Sizes of a trainer, to see growth."""

    # mebibytes, gpu_mebibytes: of the host's memory, and of the GPU's, other processes on it counted, too
    mebibytes: float
    gpu_mebibytes: float
    threads: int
    files: int

    def in_words(self) -> str:
        """Returns all of them; the GPU's memory if a GPU is used."""
        gpu = f"{self.gpu_mebibytes:.0f} MiB of the GPU, " if self.gpu_mebibytes else ""
        return f"{self.mebibytes:.0f} MiB, {gpu}{self.threads} threads, {self.files} files"


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--trainers", type=count, default=2, help="processes that train")
    add("--servers", type=count, default=2, help="attention servers")
    add("--wrap", choices=["ddp", "fsdp2", "zero3"], default="fsdp2", help="trains under DDP, FSDP2 or ZeRO-3")
    add("--accumulation", type=count, default=1, help="micro-batches of an optimizer step")
    add("--how", choices=SIGNALS, default="kill", help="servers are lost: killed, stopped, or both in turns")
    add("--losses", type=count, default=10, help="servers to lose, one after the other")
    add("--device", choices=LOSS_LIMITS, default="cpu", help="where all processes compute")
    add("--one-gpu", action="store_true", help="all processes share the first GPU")
    add("--seed", type=whole, default=0, help="of the moments of losses")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this host has no GPU for --device cuda")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    with TemporaryDirectory() as folder:
        sys.exit(compare(options, Path(folder)))


def compare(options: argparse.Namespace, folder: Path) -> int:
    """Trains twice, and returns the exit status."""
    sizes, disturbed = train(options, folder, servers=options.servers)
    if options.device == "cuda":
        seconds = ", ".join(f"{one:.2f}" for one in sorted(disturbed["seconds"])[-LONGEST_STEPS:])
        print_now(f"longest steps: {seconds} s; median {statistics.median(disturbed['seconds']):.3f} s")
    grows = judge(sizes)
    print_now(f"the same {disturbed['steps']} steps follow without servers")
    _, undisturbed = train(options, folder, servers=0, steps=disturbed["steps"])
    losses = [abs(one - other) for one, other in zip(disturbed["losses"], undisturbed["losses"], strict=True)]
    norms = [abs(one / other - 1) for one, other in zip(disturbed["norms"], undisturbed["norms"], strict=True)]
    print_now(f"largest difference of a loss {largest(losses)}, of a norm, as a part of it, {largest(norms)}")
    same = within(losses, LOSS_LIMITS[options.device]) and within(norms, NORM_LIMITS[options.device])
    return int(not same or grows)


def judge(sizes: Sequence[Sizes]) -> bool:
    """Prints by how much sizes grow, and returns whether one grows too much, which is an exit status of 1."""
    growing = grown(sizes)
    for name, slope in slopes(sizes).items():
        print_now(f"{name}: {slope:+.2f} from loss to loss{', which is growth' * (name in growing)}")
    if len(sizes) < FEWEST_LOSSES:
        print_now(f"too few losses to judge growth: {len(sizes)}, not {FEWEST_LOSSES}")
    else:
        print_now(f"GROWTH of {', '.join(growing)}: exit status 1" if growing else "nothing grows")
    return bool(growing)


def within(differences: Sequence[float], limit: float) -> bool:
    """Returns whether all differences are at most so large; none that is NaN is."""
    return all(difference <= limit for difference in differences)


def largest(differences: Sequence[float]) -> str:
    """Returns as text the largest difference and its step: NaN if one is. Rounding shows late, errors at once."""
    at, difference = max(enumerate(differences, 1), key=lambda one: (math.isnan(one[1]), one[1]))
    return f"{difference:.2e} (step {at} of {len(differences)})"


def slopes(sizes: Sequence[Sizes]) -> dict[str, float]:
    """Returns by how much each size grows from loss to loss, as the slope of its line; nothing for less than two."""
    counted = sizes[SETTLED_LOSSES:]
    if len(counted) < 2:
        return {}
    lines = {name: [float(getattr(one, name)) for one in counted] for name in GROWTH}
    return {name: statistics.linear_regression(range(len(counted)), values).slope for name, values in lines.items()}


def grown(sizes: Sequence[Sizes]) -> dict[str, float]:
    """Returns the sizes that grow from loss to loss by more than they may, each with the slope of its line; none if
    losses are too few to tell."""
    if len(sizes) < FEWEST_LOSSES:
        return {}
    first = sizes[SETTLED_LOSSES]
    most = {name: part * getattr(first, name) + number for name, (part, number) in GROWTH.items()}
    return {name: slope for name, slope in slopes(sizes).items() if slope > most[name]}


def train(
    options: argparse.Namespace, folder: Path, servers: int, steps: int = 0
) -> tuple[list[Sizes], dict[str, Any]]:
    """Runs one training, and loses servers in it if it has some; else it has so many steps. Returns sizes of the
    first trainer at all losses, and what the training wrote."""
    recipe, ended = folder / "recipe.yaml", folder / "ended"
    ended.unlink(missing_ok=True)
    plugin = {"attention_servers": servers, "metrics": "all" if servers else "basic"}
    recipe.write_text(yaml.safe_dump({"environment": {"HF_HUB_OFFLINE": 1}, "plugin": plugin}))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    line += [str(options.trainers + servers), "-m", "distca_hf.run", "--recipe", str(recipe), str(TRAIN)]
    line += [str(folder), options.wrap, str(options.accumulation), str(steps), options.device]
    line += ["--one-gpu"] * options.one_gpu
    log = (folder / f"log-{servers}").open("w+")
    paths = [REPOSITORY, REPOSITORY / "tests", *[Path(__file__).with_name("one_gpu")] * options.one_gpu]
    environment = psutil.Process().environ()
    environment["PYTHONPATH"] = ":".join([*map(str, paths), environment.get("PYTHONPATH", "")]).strip(":")
    environment["OMP_NUM_THREADS"] = "1"
    job = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=environment)
    sizes: list[Sizes] = []
    try:
        if servers:
            sizes = lose(options, job, Path(log.name))
            steps, began = num_steps(Path(log.name).read_text()), time.monotonic()
            ended.touch()
        if job.wait() != 0:
            sys.exit(f"the training ended with status {job.returncode}")
    except SystemExit:
        if job.poll() is None:
            whole = psutil.Process(job.pid)
            for process in [*whole.children(recursive=True), whole]:
                process.kill()
        print(Path(log.name).read_text()[-LAST_WORDS:], flush=True)
        raise
    wrote = json.loads((folder / "losses.json").read_text())
    if servers:
        since, seconds = wrote["steps"] - steps, time.monotonic() - began
        print_now(
            f"{options.losses} servers lost ({options.how}), {wrote['steps']} steps, {wrote['redone']:.0f} run again; "
            f"{since} of these steps and {seconds:.1f} s since the last server took part"
        )
    return sizes, wrote


def lose(options: argparse.Namespace, job: "subprocess.Popen[bytes]", log: Path) -> list[Sizes]:
    """Harms servers that have joined, one after the other; returns sizes of the first trainer at each loss. Prints
    each as it comes, so that a run that is cut off has shown the ones before."""
    chance, signals, sizes = random.Random(options.seed), SIGNALS[options.how], list[Sizes]()
    server = _joined(job, log, 1)
    for number in range(1, options.losses + 1):
        time.sleep(chance.uniform(0.0, 1.0))
        harm = signals[(number - 1) % len(signals)]
        print_now(f"loss {number}: {harm.name} to process {server.pid}")
        server.send_signal(harm)
        began = time.monotonic()
        sizes.append(_sizes(job, options.device))
        print_now(f"loss {number}: a trainer has {sizes[-1].in_words()} after {num_steps(log.read_text())} steps")
        server = _joined(job, log, number + 1)
        print_now(f"loss {number}: another server takes part after {time.monotonic() - began:.1f} s")
    return sizes


def _joined(job: "subprocess.Popen[bytes]", log: Path, number: int) -> psutil.Process:
    """Waits until a step has counted with all servers, after so many losses, and returns one that runs."""
    while job.poll() is None:
        text = log.read_text()
        if LEFT_OUT in text:
            sys.exit(f"after {number - 1} losses a server was left out of the training, and none will join")
        running = [one for one in psutil.Process(job.pid).children(recursive=True) if _serves(one)]
        if has_served(text, number - 1) and running:
            return max(running, key=lambda one: one.create_time())
        time.sleep(0.05)
    sys.exit(f"the training ended with status {job.returncode}")


def has_served(log: str, losses: int) -> bool:
    """Returns whether a training's output shows that all servers were replaced that it lost, and that a step has
    counted with the last of these. Five losses without such a step would leave the server out."""
    *joined, rest = log.split("takes part from now on")
    # A server joins between a step and the line of its loss; a step with it has the line after it.
    return len(joined) >= losses and num_steps(rest) >= (2 if joined else 1)


def num_steps(log: str) -> int:
    """Returns the steps that a training's output, or a part of it, shows."""
    return log.count("'loss'")


def _serves(process: psutil.Process) -> bool:
    try:
        return SERVER in process.cmdline() and process.status() != psutil.STATUS_STOPPED
    except psutil.Error:  # it ended
        return False


def _sizes(job: "subprocess.Popen[bytes]", device: str) -> Sizes:
    """Returns the sizes of the first trainer."""
    trainer = psutil.Process(job.pid).children()[0]
    gpu = 0.0
    if device == "cuda":
        free, total = torch.cuda.mem_get_info(0)
        gpu = (total - free) / 2**20
    return Sizes(trainer.memory_info().rss / 2**20, gpu, trainer.num_threads(), trainer.num_fds())


if __name__ == "__main__":
    main()
