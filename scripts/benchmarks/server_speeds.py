"""Measures how plans follow the speed of attention servers, one of which sleeps as long as it works.

    python scripts/benchmarks/server_speeds.py --steps 20

Trainers and servers are processes on CPUs over gloo. A step is a placed batch of a tiny Llama, in `plugin.attempts`.
Writes the share of the server that sleeps over the mean of the others, step by step, and that of the last five steps.

Each process that attends needs a core of its own: on fewer cores the others gain from one that sleeps. So trainers
leave attention to servers, unless `--trainers-attend` is given. Documents are many, so that servers get equal shapes:
kernels for CPUs take longer for the pairs of a document's beginning than for those of its end.
"""

import os
import statistics
import sys
import time
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lib.parser import at_least_two, count, parser_of


REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]


class Step(NamedTuple):
    """A step of the training: planned work and speed of each rank, and its time."""

    work: tuple[int, ...]
    speeds: tuple[float, ...]
    seconds: float


def sleep_as_long_as_it_works(num_trainers: int) -> None:
    """Lets every kernel call of the first server take twice as long; called in each server."""
    from distca_hf.kernels.varlen import CpuKernel

    if int(os.environ["RANK"]) != num_trainers:
        return

    def slowed(compute: Any) -> Any:
        @wraps(compute)
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = compute(*arguments)
            time.sleep(time.perf_counter() - began)
            return result

        return call

    for name in ("forward", "backward"):
        setattr(CpuKernel, name, slowed(getattr(CpuKernel, name)))


def train(steps: int, documents: int, document_tokens: int, trainers_attend: bool) -> list[Step]:
    """Returns all steps of a training."""
    import torch

    import distca_hf
    from support.data import random_dataset
    from support.models import tiny_model

    plugin = distca_hf.DistCAPlugin(tokens_per_rank=documents * document_tokens, trainers_attend=trainers_attend)
    dataset = random_dataset(documents * torch.distributed.get_world_size() * steps, lengths=(document_tokens,))
    model = distca_hf.enable(tiny_model(num_hidden_layers=2, max_position_embeddings=document_tokens), plugin).train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for batch in plugin.dataloader(dataset, seed=0):
        began = time.perf_counter()
        for attempt in plugin.attempts(wrapped, [batch]):
            with attempt:
                wrapped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        facts = batch["distca_plan"].facts
        found.append(Step(facts.work, facts.speeds, time.perf_counter() - began))
        if len(found) == steps:
            break
    plugin.close()
    return found


def main() -> None:
    from support.ranks import run_ranks

    parser = parser_of(__doc__)
    parser.add_argument("--trainers", type=count, default=1, help="processes that train")
    parser.add_argument("--servers", type=at_least_two, default=2, help="attention servers, the first of which sleeps")
    parser.add_argument("--steps", type=count, default=20, help="optimizer steps")
    parser.add_argument("--documents", type=count, default=16, help="documents of each trainer in a step")
    parser.add_argument("--document-tokens", type=count, default=512, help="tokens of a document")
    parser.add_argument("--trainers-attend", action="store_true", help="trainers compute attention, too")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        results = run_ranks(
            options.trainers,
            train,
            Path(folder),
            options.steps,
            options.documents,
            options.document_tokens,
            options.trainers_attend,
            servers=options.servers,
            before_serving=partial(sleep_as_long_as_it_works, options.trainers),
        )
    shares = []
    for step, (work, speeds, seconds) in enumerate(results[0]):
        slow, *others = work[options.trainers :]
        shares.append(slow / statistics.fmean(others))
        measured = ", ".join(f"{speed:.2f}" for speed in speeds[options.trainers :])
        sys.stdout.write(f"step {step}: {seconds:.2f} s, speeds {measured}, share {shares[-1]:.2f}\n")
    sys.stdout.write(f"share of the last five steps: {statistics.fmean(shares[-5:]):.2f}\n")


if __name__ == "__main__":
    main()
