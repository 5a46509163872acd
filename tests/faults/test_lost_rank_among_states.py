"""A rank is killed as mixers exchange halos or summaries, forward or backward: the others name it, the micro-batch,
the mixer and what it exchanged, and leave at once."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import distca_hf
from distca_hf.comm.transport import AllToAll
from distca_hf.testing import NotedTransport
from support.data import random_dataset
from support.harm import CPU, NEVER_SECONDS, finished_steps
from support.models import tiny_model
from support.ranks import Outcome, start_ranks
from support.versions import states_travel


WORLD, KILLED = 3, 1
PLACES = [
    f"micro-batch 1, model.layers.0.linear_attn, {what}, {phase}"
    for what, phase in product(("halos", "summaries"), ("forward", "backward"))
]


def train_until_killed(place: str, folder: Path) -> None:
    """Trains with DDP; one rank ends in the second micro-batch, before it starts this exchange."""
    rank = torch.distributed.get_rank()
    timeouts = distca_hf.Timeouts(exchange_seconds=NEVER_SECONDS, agreement_seconds=NEVER_SECONDS)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, timeouts=timeouts)
    transport = plugin.transport(CPU)

    def note(asked: AllToAll) -> None:
        if asked.where == place:
            (folder / "harmed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == KILLED:
        plugin._transports[CPU] = NotedTransport(transport, note, lambda _: None)
    model = tiny_model("qwen3_5", num_hidden_layers=2).train()
    distca_hf.enable(model, plugin)
    wrapped = nn.parallel.DistributedDataParallel(model)
    batches = plugin.dataloader(random_dataset(lengths=(150, 30)), seed=0, model=model)
    for step, batch in enumerate(batches):
        wrapped(**batch).loss.backward()
        model.zero_grad()
        (folder / f"steps-{rank}").write_text(str(step + 1))


def run(place: str, folder: Path) -> list[Outcome]:
    folder.mkdir()
    return start_ranks(WORLD, train_until_killed, folder, place, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Future[list[Outcome]]]]]:
    """All runs, at once."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(len(PLACES)) as pool:
        folders = {place: folder / str(number) for number, place in enumerate(PLACES)}
        yield {place: (of_run, pool.submit(run, place, of_run)) for place, of_run in folders.items()}
        pool.shutdown(cancel_futures=True)


@states_travel
@pytest.mark.parametrize("place", PLACES)
def test_survivors_name_the_rank_and_the_exchange(
    place: str, runs: dict[str, tuple[Path, Future[list[Outcome]]]]
) -> None:
    folder, outcomes = runs[place]
    for outcome in outcomes.result():
        if outcome.rank == KILLED:
            continue
        assert outcome.exit_code == 1, outcome.output  # it left, and did not wait for a deadline
        assert (folder / "harmed").exists()
        assert finished_steps(folder, outcome.rank) == 1, "no step may be taken after the harm"
        assert f"PeerLostError: rank {outcome.rank}, {place}: rank {KILLED} does not answer" in outcome.output
