"""Epochs: balance, padding and preparation time on real document lengths, as Markdown tables of planning.py.

For every file and world the first micro-batches of an epoch are placed, planned and routed as for an 8B Llama,
documents longer than a micro-batch being split. Balance is counted from the kernel calls of all ranks. The last table
times the loader's background thread for one micro-batch, reading its tokens included.
"""

import statistics
import time

import numpy as np
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar

from distca_hf.analysis.lengths import read_lengths
from distca_hf.arrays import IntArray
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import Cursor
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import EpochPacker
from distca_hf.placement.place import fill_in_order, work_in_order
from distca_hf.planning.routing import route
from distca_hf.planning.transfers import key_transfers
from distca_hf.recipe import LENGTHS
from lib.planning.planners import HEAD_GROUPS, RANKS_PER_NODE, print_row, table


RANKS = (2, 8, 64)
TOKENS_PER_RANK = (32_768, 65_536, 131_072)
MICRO_BATCHES = 8


def settings(tokens_per_rank: int) -> DistCAConfig:
    """Returns the settings of the training."""
    return DistCAConfig(tokens_per_rank=tokens_per_rank, ranks_per_node=RANKS_PER_NODE, overlong="split")


def print_balance(name: str, lengths: IntArray, num_ranks: int, tokens_per_rank: int) -> None:
    """Prints a row: balance of the first micro-batches, and padding of the whole epoch."""
    config = settings(tokens_per_rank)
    planner = PlacedPlanner(config, num_ranks, HEAD_GROUPS)
    capacity_tokens = planner.capacity_tokens
    _, _, documents = fit_documents(lengths, capacity_tokens, config.overlong)
    packer = EpochPacker(documents, capacity_tokens)
    epoch = packer.epoch(0)
    before, placed, spread, sent = [], [], 0, []
    for micro_batch in range(min(MICRO_BATCHES, packer.num_micro_batches)):
        tokens = documents[epoch.micro_batch(micro_batch)]
        plan = planner.plan(tokens)
        transfers = key_transfers(plan)
        work = [route(plan, rank, transfers).pairs for rank in range(num_ranks)]
        before.append(imbalance(work_in_order(tokens, num_ranks)))
        placed.append(imbalance(work))
        spread = max(spread, int(np.ptp(plan.layout.rank_tokens)))
        key_tokens = int(transfers.rows_between(num_ranks).sum()) / plan.tasks.head_groups
        sent.append(key_tokens / max(1, int(tokens.sum())))
    rows = 0
    for micro_batch in range(packer.num_micro_batches):
        layout = fill_in_order(documents[epoch.micro_batch(micro_batch)], num_ranks)
        rows += int(layout.padded(config.pad_to_multiple_of, tokens_per_rank).rank_rows.sum())
    padding = 1 - documents.sum() / rows
    full_padding = 1 - documents.sum() / (packer.num_micro_batches * capacity_tokens)
    print_row(
        *(name, num_ranks, f"{tokens_per_rank // 1024}K", spread, f"{statistics.mean(before):.3f}"),
        *(
            f"{max(placed):.4f}",
            f"{statistics.mean(sent):.2f}",
            f"{100 * padding:.3f} %",
            f"{100 * full_padding:.3f} %",
        ),
    )


class OneOfMany(LocalTransport):
    """Enough of a transport for a loader that only prepares: this rank, and how many there are."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


def print_preparation(name: str, lengths: IntArray, num_ranks: int, tokens_per_rank: int) -> None:
    """Prints a row: milliseconds of one micro-batch, from lengths to the rows of a rank."""
    import torch

    enough = np.searchsorted(np.cumsum(lengths), 12 * num_ranks * tokens_per_rank)
    dataset = Dataset.from_dict({"input_ids": [np.zeros(length, dtype=np.int32) for length in lengths[:enough]]})
    config = settings(tokens_per_rank)
    transport = OneOfMany(1, num_ranks)
    loader = PlacedLoader(dataset, PlacedPlanner(config, num_ranks, HEAD_GROUPS), transport, torch.device("cpu"))
    planner = loader.preparer.planner
    document_tokens = loader._source.document_tokens
    packed = EpochPacker(document_tokens, planner.capacity_tokens).epoch(0)
    epoch = planner.regroup(packed, document_tokens, micro_steps=1)
    planning_seconds, all_seconds, documents = [], [], []
    for micro_batch in range(10):
        chosen = document_tokens[epoch.micro_batch(micro_batch)]
        began = time.perf_counter()
        plan = planner.plan(chosen)
        route(plan, 1, key_transfers(plan))
        planning_seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        loader.preparer.prepare(epoch, Cursor(0, micro_batch))
        all_seconds.append(time.perf_counter() - began)
        documents.append(len(chosen))
    planning, total = 1e3 * statistics.median(planning_seconds), 1e3 * statistics.median(all_seconds)
    documents_mean = statistics.mean(documents)
    print_row(
        name, num_ranks, f"{tokens_per_rank // 1024}K", f"{documents_mean:.0f}", f"{planning:.1f}", f"{total:.1f}"
    )


def print_epochs() -> None:
    """Prints both tables, of the shipped files."""
    disable_progress_bar()
    files = {name: read_lengths(path).tokens for name, path in LENGTHS.files().items()}
    table(
        "Epochs",
        *("lengths", "ranks", "tokens/rank", "token spread", "imbalance in order", "placed (worst)"),
        *("key tokens sent / token", "padding (128)", "padding (full)"),
    )
    for name, lengths in files.items():
        for num_ranks in RANKS:
            for tokens_per_rank in TOKENS_PER_RANK:
                print_balance(name, lengths, num_ranks, tokens_per_rank)
    table(
        "Preparation",
        *("lengths", "ranks", "tokens/rank", "documents", "placing, planning, routing ms", "with collation ms"),
    )
    for name, lengths in files.items():
        for num_ranks, tokens_per_rank in ((8, 32_768), (8, 131_072), (64, 131_072)):
            print_preparation(name, lengths, num_ranks, tokens_per_rank)
