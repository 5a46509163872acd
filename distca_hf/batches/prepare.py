"""Preparer: one rank's part of a micro-batch, made on the host: placed, planned, routed and read.

It runs in the loader's background thread, and uses neither process groups nor the loader.
"""

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.data.accumulation import RegroupedEpoch
from distca_hf.data.collate import RankRows, collate
from distca_hf.data.contents import Cut, cuts_of
from distca_hf.data.documents import DocumentSource
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.rank_plan import PlanFacts, rank_plan
from distca_hf.runtime.device_routing import PinnedRankPlan


@dataclass(frozen=True)
class Cursor:
    """Position in the data: the next micro-batch to hand out.

    Attributes:
        taken: parts of the epoch that were taken before in micro-batches of another size, as (capacity_tokens,
            micro-batches). A run may go on with other ranks than it began with.
        steps_from: a micro-batch of the epoch that an optimizer step begins with.
    """

    epoch: int = 0
    micro_batch: int = 0
    taken: tuple[tuple[int, int], ...] = ()
    steps_from: int = 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A micro-batch as the background thread leaves it: host tensors (pinned if they go to a GPU) and host maps.

    Attributes:
        columns: `[1, rows]` tensors by their names among the arguments of models.
        documents_checksum: of the documents that form the micro-batch.
        cuts: cuts of documents beside this rank's segments.
    """

    cursor: Cursor
    columns: dict[str, torch.Tensor]
    maps: PinnedRankPlan
    facts: PlanFacts
    fingerprint: int
    label_tokens: int
    documents_checksum: int
    cuts: list[Cut]
    plan_seconds: float


@dataclass(frozen=True)
class Preparer:
    """Prepares micro-batches of one rank."""

    source: DocumentSource
    planner: PlacedPlanner
    rank: int
    device: torch.device

    def rest(self, begin: Cursor, epoch: RegroupedEpoch) -> Iterator[Prepared]:
        """Yields micro-batches from `begin` to the end of its epoch."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # or pinning would open a context on the first GPU
        for micro_batch in range(begin.micro_batch, epoch.num_micro_batches):
            yield self.prepare(epoch, replace(begin, micro_batch=micro_batch))

    def prepare(self, epoch: RegroupedEpoch, cursor: Cursor) -> Prepared:
        """Places, plans and reads one micro-batch."""
        began = time.perf_counter()
        documents = epoch.micro_batch(cursor.micro_batch)
        document_tokens = self.source.document_tokens[documents]
        num_ranks = self.planner.num_ranks
        plan = self.planner.plan(document_tokens, epoch.layout(cursor.micro_batch))
        work_before = fill_in_order(document_tokens, num_ranks).rank_work
        mine = rank_plan(plan, self.rank, self.planner.config.num_chunks(num_ranks), work_before)
        pin = self.device.type == "cuda"
        rows = collate(plan.layout, self.rank, documents, self.source)
        return Prepared(
            cursor=cursor,
            columns=_host_tensors(rows, pin),
            maps=PinnedRankPlan.prepare(mine, pin),
            facts=mine.facts,
            fingerprint=plan.fingerprint,
            label_tokens=rows.num_labels,
            documents_checksum=zlib.crc32(documents.astype("<i8").tobytes()),
            cuts=cuts_of(plan.layout, self.rank, documents, self.source),
            plan_seconds=time.perf_counter() - began,
        )


def _host_tensors(rows: RankRows, pin: bool) -> dict[str, torch.Tensor]:
    """Returns the arrays as `[1, rows]` tensors by name."""
    tensors = {name: torch.from_numpy(array).unsqueeze(0) for name, array in vars(rows).items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors
