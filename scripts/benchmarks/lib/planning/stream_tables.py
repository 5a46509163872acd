"""Streams: balance and padding of batches that are filled from a buffer, and what the host of a reading rank does."""

import time
from collections.abc import Iterator
from itertools import cycle, islice, pairwise, product

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset

from distca_hf.arrays import IntArray, offsets
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import HostPlans
from distca_hf.batches.stream_feed import StreamFeed, StreamPosition
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.data.documents import split_documents
from distca_hf.data.rows import Reading
from distca_hf.data.stream_buffer import BufferPosition, NewDocuments, StepDocuments, StreamBuffer
from distca_hf.data.streams import StreamSource
from lib.planning.mixes import file_lengths
from lib.planning.planners import RANKS_PER_NODE, K, print_row, table


MIXES = ("pretrain", "prolong")
# Micro-batches of a buffer, looked at for each row, and shards per reader. Documents of a shard keep the file's order.
BUFFER_BATCHES, LOOKED_AT, SHARDS = 4, 12, 8
# Tokens of the stream whose reading is timed, and of its micro-batches.
TIMED_TOKENS, TIMED_RANK_TOKENS = 1 << 24, 128 * K
# Times that they are read, and rows of lists that a generator repeats.
SPEED_ROUNDS, ROWS_OF_LISTS = 3, 256


class StreamOfLengths:
    """Readers of a stream that have only lengths: shards of one pass in random order, dealt to them; passes follow
    each other."""

    def __init__(self, lengths: IntArray, num_readers: int, seed: int) -> None:
        shards = np.array_split(lengths, SHARDS * num_readers)
        order = np.random.default_rng(seed).permutation(len(shards))
        self._parts = [
            np.concatenate([shards[shard] for shard in order[reader::num_readers]]) for reader in range(num_readers)
        ]
        self._at = [0] * num_readers

    def read(self, reader: int, tokens: int) -> NewDocuments:
        """Returns the next documents of a reader, of at least this many tokens."""
        part, found = self._parts[reader], list[int]()
        while sum(found) < tokens:
            found.append(int(part[self._at[reader] % len(part)]))
            self._at[reader] += 1
        documents = np.array(found, dtype=np.int64)
        return NewDocuments(documents, np.zeros_like(documents), has_ended=False)


def steps_of(mix: str, num_ranks: int, tokens_per_rank: int, seed: int) -> list[StepDocuments]:
    """Returns micro-batches of a stream of a shipped file, one in each step."""
    capacity_tokens = num_ranks * tokens_per_rank
    _, _, lengths = split_documents(file_lengths(mix), capacity_tokens)
    stream = StreamOfLengths(lengths, num_ranks, seed)
    begin = BufferPosition.beginning(0, num_ranks)
    buffer = StreamBuffer(begin, capacity_tokens, BUFFER_BATCHES * capacity_tokens, seed)
    steps = []
    for _ in range(LOOKED_AT):
        while share_tokens := buffer.share_tokens():
            buffer.add({reader: stream.read(reader, share_tokens) for reader in range(num_ranks)})
        step = buffer.take(1)
        assert step is not None  # the stream has no end
        steps.append(step)
    return steps


def print_streams(ranks: list[int], seeds: int) -> None:
    """Prints balance and padding, then tokens per second of one reading rank."""
    table(
        f"Streams, buffer of {BUFFER_BATCHES} micro-batches (limits: max/mean 1.01, padding 0.5 %)",
        *("mix", "ranks", "tokens/rank", "token spread", "placed, worst", "padding, worst"),
    )
    for mix, num_ranks, tokens_per_rank in product(MIXES, ranks, (32 * K, 128 * K)):
        config = DistCAConfig(tokens_per_rank=tokens_per_rank, ranks_per_node=min(num_ranks, RANKS_PER_NODE))
        planner = PlacedPlanner(config, num_ranks, head_groups=8)
        steps = [step for seed in range(seeds) for step in steps_of(mix, num_ranks, tokens_per_rank, seed)]
        plans = [planner.plan(step.tokens) for step in steps]
        spread = max(int(np.ptp(plan.layout.rank_tokens)) for plan in plans)
        padding = max(1 - int(step.tokens.sum()) / planner.capacity_tokens for step in steps)
        worst = f"{max(plan.imbalance for plan in plans):.4f}", f"{padding:.3%}"
        print_row(mix, num_ranks, f"{tokens_per_rank // K}K", spread, *worst)
    table(
        f"Streams: million tokens per second of a rank, best of {SPEED_ROUNDS}, by its thread's time and by the clock",
        *("mix", "stored rows", "clock", "arrays", "clock", "lists of a generator", "clock"),
    )
    for mix in MIXES:
        rounds = [[_speed(rows) for rows in _streams(mix)] for _ in range(SPEED_ROUNDS)]
        best = np.max(rounds, axis=0).ravel()
        print_row(mix, *(f"{speed / 1e6:.1f}" for speed in best.tolist()))


def _streams(mix: str) -> tuple[IterableDataset, ...]:
    """Returns streams of the same rows: stored, shown as lists and as arrays; and lists that a generator makes."""
    lengths = np.minimum(file_lengths(mix), TIMED_RANK_TOKENS)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 2 * TIMED_TOKENS))]
    starts = offsets(lengths)
    tokens = np.random.default_rng(0).integers(0, 50_000, starts[-1]).astype(np.int32)
    rows = pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), pa.array(tokens))
    stored = Dataset(pa.table({"input_ids": rows})).to_iterable_dataset(num_shards=SHARDS)
    lists = [tokens[start:stop].tolist() for start, stop in pairwise(starts[: ROWS_OF_LISTS + 1].tolist())]
    made = IterableDataset.from_generator(_made_rows, gen_kwargs={"rows": _Rows(lists)})
    return stored, stored.with_format("numpy"), made


class _Rows:
    """Rows that nothing takes apart or hashes."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __reduce__(self) -> tuple[type, tuple[list[list[int]]]]:
        return _Rows, ([],)


def _made_rows(rows: _Rows) -> Iterator[dict[str, list[int]]]:
    for row in cycle(rows.rows):
        yield {"input_ids": row}


def _speed(stream: IterableDataset) -> tuple[float, float]:
    """Returns tokens per second from rows to micro-batches, by the thread's time and by the clock."""
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=TIMED_RANK_TOKENS), 1)
    begin = StreamPosition(BufferPosition.beginning(0, 1))
    buffer = StreamBuffer(begin.buffer, planner.capacity_tokens, BUFFER_BATCHES * planner.capacity_tokens)
    plans = HostPlans(planner=planner, rank=0, device=torch.device("cpu"))
    source = StreamSource(stream, Reading(), planner.longest_tokens)
    used, began = time.thread_time(), time.perf_counter()
    feed = StreamFeed(source, begin, buffer, LocalTransport(), plans, micro_steps=1)
    batches = islice(feed.micro_batches(), TIMED_TOKENS // TIMED_RANK_TOKENS)
    done = sum(int(fed.prepared.layout.document_tokens.sum()) for fed in batches)
    return done / (time.thread_time() - used), done / (time.perf_counter() - began)
