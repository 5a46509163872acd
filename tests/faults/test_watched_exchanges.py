"""A GPU waits for a lost server where no thread can notice: the thread that looks at heartbeats ends the wait. Here
over gloo, by a trainer that waits for nothing."""

import re
import signal
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

import distca_hf
from distca_hf.servers.heartbeats import LOOK_SECONDS
from distca_hf.servers.served_transport import ServedTransport
from support.data import random_dataset
from support.lost_server import harm_server
from support.models import tiny_model
from support.ranks import start_ranks
from support.waiting import wait_until


class Progress:
    """Progress of a stream, as a test says."""

    def __init__(self) -> None:
        self.seconds, self.is_at_rest = 0.0, True

    def note_start(self) -> None:
        self.is_at_rest = False

    def note_wait(self) -> None: ...

    def note_rest(self) -> None:
        self.is_at_rest = True

    def stalled_seconds(self) -> float:
        return self.seconds

    def end(self) -> None:
        pass


class Trainer(NamedTuple):
    """A trainer's end, watched as on a GPU."""

    transport: ServedTransport
    progress: Progress

    @classmethod
    def begin(cls) -> tuple["Trainer", "Step"]:
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
        batches = iter(plugin.dataloader(random_dataset(60), seed=3))
        model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
        transport, progress = plugin.training_transport(torch.device("cpu")), Progress()
        assert isinstance(transport, ServedTransport)
        transport._progress = progress  # type: ignore[assignment]
        return cls(transport, progress), Step(model, batches)


class Step(NamedTuple):
    model: torch.nn.Module
    batches: object

    def run(self) -> None:
        self.model(**next(self.batches)).loss.backward()  # type: ignore[call-overload]


def _lose(folder: Path, transport: ServedTransport) -> None:
    """Has the server killed, and returns once its heartbeat is missed."""
    (folder / "now").touch()
    wait_until((folder / "done").exists)
    wait_until(lambda: transport._lost())
    time.sleep(3 * LOOK_SECONDS)


def _watched(folder: Path) -> list[object]:
    """Words and votes of steps: one as it should be, and one behind the loss of the server."""
    (transport, _), step = Trainer.begin()
    transport.begin_step()
    step.run()
    seen: list[object] = [transport.end_step()]
    _lose(folder, transport)
    seen.append(transport.failed)  # between steps nothing is lost
    transport.begin_step()
    wait_until(lambda: transport.failed)
    seen += [transport.failed, transport.end_step(), len(transport.members)]
    return seen


def _stalled(folder: Path) -> NoReturn:
    """A step that cannot run again, on a GPU that comes no further."""
    (_, progress), step = Trainer.begin()
    step.run()
    progress.seconds = 1e6
    wait_until(lambda: False)
    raise AssertionError


def test_a_step_fails_by_the_thread_that_looks(tmp_path: Path) -> None:
    harm = harm_server(tmp_path, 1, signal.SIGKILL)
    outcome = start_ranks(1, _watched, tmp_path, tmp_path, servers=1, meanwhile=harm, endless=frozenset({1}))[0]

    assert outcome.exit_code == 0, outcome.output
    counts, between, words, counts_lost, members = outcome.result
    assert (counts, between) == (True, None)
    assert "rank 0, after the start of" in words
    assert re.search(r"attention server 0 on \S+ is lost: its last heartbeat", words)
    assert (counts_lost, members) == (False, 0)


def test_a_process_whose_step_cannot_run_again_ends_by_name(tmp_path: Path) -> None:
    outcome = start_ranks(1, _stalled, tmp_path, tmp_path, servers=1, endless=frozenset({1}))[0]

    assert outcome.exit_code == 1, outcome.output
    assert "ServerLostError: rank 0, after the start of" in outcome.output
    assert "the GPU has come no further for 1000000 s (timeouts.exchange_seconds: 300)" in outcome.output
    assert "No step can run again here" in outcome.output
