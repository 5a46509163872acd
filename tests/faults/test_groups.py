"""Groups of ranks: opened when all are there, closed in order, and nothing is cut off when a process ends."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import distca_hf
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.transport import AllToAll
from distca_hf.errors import ConfigError
from support.commands import HANG_SECONDS
from support.data import random_dataset
from support.ranks import run_ranks, start_ranks


CPU = torch.device("cpu")


# --- opened


def _seconds_to_open_a_group() -> float:
    """How long it takes at present, on the slower rank."""
    began = time.monotonic()
    dist.new_group(backend="gloo")
    took = torch.tensor(time.monotonic() - began)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def _come_late(_: Path) -> int:
    """Rank 1 comes later than an exchange may take."""
    allowed_seconds = max(0.5, 20 * _seconds_to_open_a_group())
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96, exchange_timeout_seconds=allowed_seconds, agreement_timeout_seconds=HANG_SECONDS
    )
    if dist.get_rank() == 1:
        time.sleep(2 * allowed_seconds)
    return sum(1 for _ in zip(range(2), plugin.dataloader(random_dataset()), strict=False))


def test_rank_whose_data_takes_longer_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, _come_late, tmp_path, tmp_path) == [2, 2]


def _never_come(folder: Path) -> None:
    """Rank 1 waits until rank 0 has given up."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, exchange_timeout_seconds=0.5, agreement_timeout_seconds=1.0)
    if dist.get_rank() == 0:
        try:
            plugin.dataloader(random_dataset())
        finally:
            (folder / "gave up").touch()
    while not (folder / "gave up").exists():
        time.sleep(0.02)


def test_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    rank_0, _ = start_ranks(2, _never_come, tmp_path, tmp_path)

    assert rank_0.exit_code == 1
    assert "PeerLostError: rank 0 waited" in rank_0.output
    assert "for all 2 ranks to open their groups" in rank_0.output
    assert "rank 1 does not answer" in rank_0.output
    assert "agreement_timeout_seconds" in rank_0.output


# --- closed


def _close_and_open_again(_: Path) -> tuple[int, int]:
    """Number of groups before, between and behind."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    for _ in range(3):
        transport = plugin.transport(CPU)
        rank, rows = dist.get_rank(), torch.arange(4.0)[:, None]
        transport.exchange(AllToAll(rows, [2, 2], [2, 2], "here")).wait()
        assert transport.gather([rank], "here").wait() == [[0], [1]]
        opened = len(groups)
        plugin.close()
        assert len(groups) == before
    with pytest.raises(ConfigError, match=f"rank {rank}, here: the plugin was closed"):
        transport.gather([rank], "here")
    return before, opened


def test_closed_plugin_leaves_no_group_and_opens_new_ones(tmp_path: Path) -> None:
    assert run_ranks(2, _close_and_open_again, tmp_path, tmp_path) == [(1, 3)] * 2


def _close_behind_the_default_group(_: Path) -> bool:
    """As a script whose framework ends first."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    plugin.transport(CPU).gather([1], "here").wait()
    dist.barrier()
    dist.destroy_process_group()
    plugin.close()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # the harness has a barrier at its end
    return True


def test_plugin_closes_behind_the_default_group(tmp_path: Path) -> None:
    assert run_ranks(2, _close_behind_the_default_group, tmp_path, tmp_path) == [True, True]


def test_hooks_for_uncaught_errors_are_taken_back() -> None:
    usual = sys.excepthook
    calls = [RollCall(HashStore(), 0, 2) for _ in range(2)]
    for call in calls:
        call.announce_uncaught_errors()
    for call in reversed(calls):
        call.be_silent()
    assert sys.excepthook is usual


# --- the end of a process

ABANDONED_LOOP = """
import itertools, sys
from distca_hf.integrations.ahead import Ahead
from distca_hf.telemetry import LoaderTimes

items = iter(Ahead(itertools.count, 2, LoaderTimes()))
assert next(items) == 0
sys.modules["keeps the generator alive"] = items
"""


def test_thread_of_an_abandoned_loop_ends_with_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", ABANDONED_LOOP], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
