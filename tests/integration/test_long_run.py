"""Many steps leave nothing behind: memory, tensors, files, threads and live plans stay as they are."""

import ctypes
import gc
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

import distca_hf
from distca_hf.runtime import live_plan
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.ranks import run_ranks


STEPS = 130
SETTLED = 50
MEGABYTE = 1 << 20
RSS_GROWTH_MEGABYTES = 5
# The loader's thread has prepared more or fewer micro-batches; one tensor left behind per step would be 80.
TENSORS_AHEAD = 50


@dataclass(frozen=True)
class Held:
    """What a process holds at the end of a step; memory that its allocator keeps for later is not counted."""

    rss_bytes: int
    tensors: int
    files: int
    threads: int
    live_plans: int


def held() -> Held:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return Held(
        rss_bytes=process.memory_info().rss,
        tensors=sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        files=len(os.listdir("/proc/self/fd")),
        threads=process.num_threads(),
        live_plans=len(live_plan._register._all),
    )


def packs() -> Iterator[dict[str, Any]]:
    """Packs of this rank, endlessly: long documents on rank 0."""
    rank = torch.distributed.get_rank()
    collator = DataCollatorWithFlattening()
    lengths = (180, 90) if rank == 0 else (5, 9, 17)
    for seed in range(10**6):
        documents = random_documents(3, 2 * seed + rank, lengths)
        batch = collator([{"input_ids": ids, "labels": ids} for ids in documents])
        yield {**batch, "num_items_in_batch": 200}


def _train() -> dict[int, dict[str, int]]:
    """What this rank holds in the middle of two epochs, after some and after all steps."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = distca_hf.enable(tiny_model(num_hidden_layers=2), plugin).train()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = plugin.dataloader(random_dataset())
    placed, packed = chain.from_iterable(repeat(loader)), packs()
    found = {}
    for step in range(1, STEPS + 1):
        batch = next(placed if step % 2 else packed)
        wrapped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (SETTLED, STEPS):
            found[step] = asdict(held())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, int]]]:
    return run_ranks(2, _train, tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize(
    ("name", "more"), [("tensors", TENSORS_AHEAD), ("files", 0), ("threads", 0), ("live_plans", 0)]
)
def test_number_stays(name: str, more: int, ranks: list[dict[int, dict[str, int]]]) -> None:
    for rank, found in enumerate(ranks):
        assert 0 < found[STEPS][name] <= found[SETTLED][name] + more, (rank, found)


def test_memory_stays(ranks: list[dict[int, dict[str, int]]]) -> None:
    for rank, found in enumerate(ranks):
        growth_bytes = found[STEPS]["rss_bytes"] - found[SETTLED]["rss_bytes"]
        assert growth_bytes < RSS_GROWTH_MEGABYTES * MEGABYTE, (rank, found)
