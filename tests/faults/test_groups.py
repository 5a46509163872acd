"""Groups of ranks: opened when all are there, closed in order, and nothing is cut off when a process ends."""

import atexit
import gc
import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed import HashStore
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import distca_hf
from distca_hf.comm import groups, torch_transport
from distca_hf.comm.rollcall import Announcement, RollCall
from distca_hf.comm.transport import REMEMBERED_EXCHANGES, AllToAll
from distca_hf.errors import ConfigError
from support.commands import HANG_SECONDS
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks
from support.training import quiet_arguments


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
        tokens_per_rank=96,
        timeouts=distca_hf.Timeouts(exchange_seconds=allowed_seconds, agreement_seconds=HANG_SECONDS),
    )
    if dist.get_rank() == 1:
        time.sleep(2 * allowed_seconds)
    return sum(1 for _ in zip(range(2), plugin.dataloader(random_dataset()), strict=False))


def test_rank_whose_data_takes_longer_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, _come_late, tmp_path, tmp_path) == [2, 2]


def _attach_on_one(folder: Path) -> None:
    """As where only one of two machines has DISTCA_ATTACH=1."""
    groups.QUIET_SECONDS = 0.1
    if dist.get_rank() == 1:
        os.environ["DISTCA_TIMEOUTS_AGREEMENT_SECONDS"] = "0.5"  # the other rank never comes
        distca_hf.attach_every_trainer()
    ids = [[7] * length for length in (5, 40, 9, 11)]
    Trainer(
        tiny_model(),
        TrainingArguments(**quiet_arguments(folder, max_steps=1, per_device_train_batch_size=2)),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        data_collator=DataCollatorWithFlattening(),
    ).train()


def test_rank_without_distca_is_named(tmp_path: Path) -> None:
    output = start_ranks(2, _attach_on_one, tmp_path, tmp_path)[1].output

    assert "rank 1 waits for rank 0 to begin with distca_hf: 1 of 2 ranks came" in output
    assert "PeerLostError" in output
    assert "rank 0 does not answer" in output


def _never_come(folder: Path) -> None:
    """Rank 1 waits until rank 0 has given up."""
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96, timeouts=distca_hf.Timeouts(exchange_seconds=0.5, agreement_seconds=1.0)
    )
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
    assert "timeouts.agreement_seconds" in rank_0.output


def _end_before_the_groups() -> None:
    """Rank 1 ends with an error of other code, before it opens any group."""
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96, timeouts=distca_hf.Timeouts(agreement_seconds=10 * HANG_SECONDS)
    )
    if dist.get_rank() == 1:
        raise ValueError("the optimizer's file is cut off")
    plugin.dataloader(random_dataset())


def test_rank_that_ended_before_its_groups_is_named_at_once(tmp_path: Path) -> None:
    rank_0, rank_1 = start_ranks(2, _end_before_the_groups, tmp_path)

    assert [rank_0.exit_code, rank_1.exit_code] == [1, 1]
    assert "PeerLostError: rank 0 waited" in rank_0.output
    assert "rank 1 left: ValueError: the optimizer's file is cut off" in rank_0.output
    assert "A rank whose data takes longer" not in rank_0.output


# --- closed


def _close_and_open_again(_: Path) -> tuple[int, int]:
    """Number of groups before, between and behind."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    opened_groups = dist.distributed_c10d._world.pg_map
    before = len(opened_groups)
    for _ in range(3):
        transport = plugin.transport(CPU)
        rank, rows = dist.get_rank(), torch.arange(4.0)[:, None]
        transport.exchange(AllToAll(rows, [2, 2], [2, 2], "here")).wait()
        assert transport.gather([rank], "here").wait() == [[0], [1]]
        opened = len(opened_groups)
        plugin.close()
        assert len(opened_groups) == before
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


class _SlowToDrop:
    """Keeps the thread busy that drops it, as a machine under load does."""

    def __del__(self) -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)


def _drop_ddp_behind_its_group(folder: Path, closes: bool) -> bool:
    """As a script that ends with `accelerator.end_training()`: the model goes last."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    plugin.transport(CPU).gather([1], "here").wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    while dist.get_rank() == 0 and not (folder / "let go").exists():
        time.sleep(0.02)
    for _ in range(3):
        slow = torch.ones(1)
        slow.held = _SlowToDrop()  # type: ignore[attr-defined]
        dist.all_reduce(slow, async_op=True)  # which waits on rank 1, so that a thread of gloo holds it last
        del slow
    if dist.get_rank() == 1:
        (folder / "let go").touch()
    dist.all_reduce(torch.ones(1))  # by the other thread; a barrier would hold operations before it
    if closes:
        plugin.close()
    dist.destroy_process_group()
    del model
    return True


@pytest.mark.parametrize("closes", [False, True])
def test_group_that_ends_before_its_model_hangs_nowhere(tmp_path: Path, closes: bool) -> None:
    """DDP drops a group with the interpreter's lock held, for which a thread of the group may wait."""
    assert run_ranks(2, _drop_ddp_behind_its_group, tmp_path, tmp_path, closes) == [True, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_hooks_for_uncaught_errors_are_taken_back(order: tuple[int, int]) -> None:
    usual = sys.excepthook
    calls = [RollCall(HashStore(), 0, range(2)) for _ in range(2)]
    for call in calls:
        call.announce_uncaught_errors()
    for number in order:
        calls[number].be_silent()
    assert sys.excepthook is usual


def test_hooks_of_memberships_do_not_pile_up() -> None:
    """Each membership is opened before the one before it is closed."""
    usual, calls = sys.excepthook, [RollCall(HashStore(), 0, range(2)) for _ in range(5)]
    calls[0].announce_uncaught_errors()
    for earlier, later in itertools.pairwise(calls):
        later.announce_uncaught_errors()
        earlier.be_silent()
    assert isinstance(sys.excepthook, Announcement)
    assert sys.excepthook.earlier is usual
    calls[-1].be_silent()
    assert sys.excepthook is usual


def test_closed_plugin_leaves_no_words_behind_a_hook_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    call = RollCall(store, 0, range(2))
    call.announce_uncaught_errors()
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *given: ours(*given))
    call.be_silent()
    error = ValueError("later")
    sys.excepthook(ValueError, error, None)

    assert seen == [error]
    assert not store.check(["distca_hf/rollcall/left/0"])


# --- the end of a process


def _end_with_threads(_: Path, end: str) -> int:
    """Number of gloo's threads behind the end of our groups."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    transport = plugin.transport(CPU)
    transport.exchange(AllToAll(torch.arange(4.0)[:, None], [2, 2], [2, 2], "here")).wait()
    transport.gather([1], "here").wait()
    while len(torch_transport.gloo_thread_states()) < 6:  # two of each group; they name themselves when they first run
        time.sleep(0.02)
    if end == "close":
        plugin.close()
    else:
        atexit._run_exitfuncs()
    return len(torch_transport.gloo_thread_states())


@pytest.mark.parametrize("end", ["close", "the end of the process"])
def test_threads_of_our_groups_end_before_the_interpreter(tmp_path: Path, end: str) -> None:
    assert run_ranks(2, _end_with_threads, tmp_path, tmp_path, end) == [2, 2]


def _end_alone(folder: Path) -> None:
    """Rank 0 ends as a script does, in the middle of a gather that rank 1 never comes to."""
    transport = distca_hf.DistCAPlugin(tokens_per_rank=96).transport(CPU)
    if dist.get_rank() == 1:
        while not (folder / "ended").exists():
            time.sleep(0.02)
        return
    gather = transport.gather([1], "here")
    atexit._run_exitfuncs()
    del transport, gather
    gc.collect()
    (folder / "ended").touch()


def test_rank_that_ends_in_the_middle_of_a_gather_does_not_wait_for_others(tmp_path: Path) -> None:
    assert run_ranks(2, _end_alone, tmp_path, tmp_path) == [None, None]


def _never_wait(_: Path) -> int:
    """Operations that the transport remembers after many that nobody waited for, as of passes without backward."""
    transport = distca_hf.DistCAPlugin(tokens_per_rank=96).transport(CPU)
    for number in range(5 * REMEMBERED_EXCHANGES):
        transport.gather([number], "agreement of a pass without backward")
        transport.gather([number], "the next one").wait()
    return len(transport._under_way)


def test_operations_that_nobody_waits_for_are_forgotten(tmp_path: Path) -> None:
    assert all(0 < count <= REMEMBERED_EXCHANGES for count in run_ranks(2, _never_wait, tmp_path, tmp_path))


def test_threads_of_other_groups_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all of them sleep in some looks in a row."""
    seen = iter(["SSR", "SSS", "RSS", "SSS", "SSS", "SSR"])
    monkeypatch.setattr(torch_transport, "gloo_thread_states", lambda: next(seen))
    monkeypatch.setattr(torch_transport, "QUIET_LOOKS", 2)

    torch_transport.let_gloo_threads_rest()

    assert next(seen) == "SSR"


def test_a_thread_that_computes_is_seen_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    own_name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
    monkeypatch.setattr(torch_transport, "GLOO_THREAD", own_name)

    assert "R" in torch_transport.gloo_thread_states()


ABANDONED_LOOP = """
import itertools, sys
from distca_hf.batches.prepare import Prefetcher
from distca_hf.telemetry import LoaderTimes

items = iter(Prefetcher(itertools.count, 2, LoaderTimes()))
assert next(items) == 0
sys.modules["keeps the generator alive"] = items
"""


def test_thread_of_an_abandoned_loop_ends_with_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", ABANDONED_LOOP], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
