"""Real document lengths: equal tokens, equal work and little padding, planned as training plans them, at the sizes
people train with."""

import gzip
import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.data.documents import split_documents
from distca_hf.data.epochs import EpochPacker
from distca_hf.data.stream_buffer import BufferPosition, NewDocuments, StreamBuffer
from distca_hf.planning.routing import route
from distca_hf.planning.transfers import key_transfers
from support.thorough import is_thorough


FOLDER = Path(__file__).parents[3] / "examples" / "lengths"
NAMES = ("pretrain", "prolong")
# Micro-batches looked at per case, spread over an epoch.
LOOKED_AT = {2: 12, 8: 8, 64: 4}


@cache
def lengths_of(name: str, capacity_tokens: int) -> np.ndarray:
    """Lengths of a file, documents longer than the capacity cut into several."""
    lengths = np.array(json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())), dtype=np.int64)
    _, _, split = split_documents(lengths, capacity_tokens)
    assert split.max() <= capacity_tokens
    assert split.sum() == lengths.sum()
    return split


def planner_of(num_ranks: int, tokens_per_rank: int) -> PlacedPlanner:
    """What plans in training: eight ranks a node, eight groups of heads."""
    return PlacedPlanner(DistCAConfig(tokens_per_rank=tokens_per_rank, ranks_per_node=8), num_ranks, head_groups=8)


@pytest.mark.parametrize(
    ("num_ranks", "tokens_per_rank"),
    product([2, 8, 64], [32 * 1024, 128 * 1024])
    if is_thorough()
    else [(2, 128 * 1024), (8, 32 * 1024), (64, 32 * 1024)],
)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_equal_tokens_and_compute_equal_work(name: str, num_ranks: int, tokens_per_rank: int) -> None:
    """Work is counted from the kernel calls that the ranks make."""
    lengths = lengths_of(name, num_ranks * tokens_per_rank)
    epoch = EpochPacker(lengths, num_ranks * tokens_per_rank).epoch(0)
    planner = planner_of(num_ranks, tokens_per_rank)
    chosen = np.linspace(0, epoch.num_micro_batches - 1, min(LOOKED_AT[num_ranks], epoch.num_micro_batches))
    for micro_batch in chosen.astype(int).tolist():
        documents = lengths[epoch.micro_batch(micro_batch)]
        plan = planner.plan(documents)
        transfers = key_transfers(plan)
        work = [route(plan, rank, transfers).pairs for rank in range(num_ranks)]

        tokens = plan.layout.rank_tokens
        assert tokens.max() - tokens.min() <= 1
        assert tokens.max() <= tokens_per_rank
        assert sum(work) == int((documents * (documents + 1) // 2).sum()) * plan.tasks.head_groups
        assert work == plan.work.tolist()
        assert imbalance(work) <= 1.01


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_an_epoch_is_under_one_percent(name: str) -> None:
    num_ranks, tokens_per_rank = 8, 32 * 1024
    lengths = lengths_of(name, num_ranks * tokens_per_rank)[::8]
    epoch = EpochPacker(lengths, num_ranks * tokens_per_rank).epoch(0)
    planner = planner_of(num_ranks, tokens_per_rank)
    rows = tokens = 0
    for micro_batch in range(epoch.num_micro_batches):
        layout = planner.plan(lengths[epoch.micro_batch(micro_batch)]).layout
        assert len(set(layout.rank_rows.tolist())) == 1
        assert layout.rank_rows[0] <= tokens_per_rank
        rows += int(layout.rank_rows.sum())
        tokens += int(layout.rank_tokens.sum())

    assert tokens == lengths.sum()
    assert rows <= 1.01 * tokens


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_are_filled(name: str) -> None:
    """Tokens alone would need this many micro-batches; whole documents need hardly more."""
    for num_ranks, tokens_per_rank in ((2, 32 * 1024), (8, 32 * 1024), (64, 128 * 1024)):
        capacity = num_ranks * tokens_per_rank
        lengths = lengths_of(name, capacity)

        assert EpochPacker(lengths, capacity).num_micro_batches <= 1.002 * (-(-lengths.sum() // capacity)) + 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "tokens_per_rank"), [(1, 128 * 1024), (2, 32 * 1024), (8, 32 * 1024)])
def test_micro_batches_hold_nearly_equal_tokens(name: str, num_ranks: int, tokens_per_rank: int) -> None:
    """Also the last ones of an epoch, for which few documents are left to choose from."""
    lengths = lengths_of(name, num_ranks * tokens_per_rank)
    packer = EpochPacker(lengths, num_ranks * tokens_per_rank)
    for number in (0, 1):
        epoch = packer.epoch(number)
        tokens = np.add.reduceat(lengths[epoch.documents], epoch.offsets[:-1])

        assert tokens.min() >= 0.8 * tokens.mean()
        assert np.quantile(tokens, 0.05) >= 0.98 * tokens.mean()


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_a_stream_are_full_and_even(name: str, num_ranks: int) -> None:
    """Readers of shards in random order; a window of four micro-batches."""
    capacity_tokens = num_ranks * 32 * 1024
    shards = np.array_split(lengths_of(name, capacity_tokens), 8 * num_ranks)
    order = np.random.default_rng(0).permutation(len(shards))
    lengths = [np.concatenate([shards[at] for at in order[reader::num_ranks]]) for reader in range(num_ranks)]
    buffer = StreamBuffer(BufferPosition.beginning(0, num_ranks), capacity_tokens, 4 * capacity_tokens)
    planner, at = planner_of(num_ranks, 32 * 1024), [0] * num_ranks
    for _ in range(LOOKED_AT[num_ranks] // 4):
        while share_tokens := buffer.share_tokens():
            news = {}
            for reader, left in enumerate(lengths):
                read = left[at[reader] :][: int(np.searchsorted(np.cumsum(left[at[reader] :]), share_tokens)) + 1]
                at[reader] += len(read)
                news[reader] = NewDocuments(read, np.zeros_like(read), at[reader] == len(left))
            buffer.add(news)
        step = buffer.take(1)
        assert step is not None
        plan = planner.plan(step.tokens)

        assert np.ptp(plan.layout.rank_tokens) <= 1
        assert plan.imbalance <= 1.01
        assert step.tokens.sum() >= 0.995 * capacity_tokens
