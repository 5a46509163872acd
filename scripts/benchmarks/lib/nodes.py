"""Nodes on one host: groups of ranks that the product takes for ranks of several nodes, and what they send each other.

    ranks            0 1 2 3 | 4 5 6 7        two nodes of four
    --nodes 2        plans and chunks are those of two nodes; links are those of the host
    --apart, too     NCCL takes the groups for two hosts: P2P inside, its network between them

NCCL tells hosts apart by NCCL_HOSTID, and uses neither P2P nor shared memory between two of them. Between
them it uses the host's network adapters, or sockets over the loopback if there are none.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import key_transfers
from lib.check import attend_once
from lib.documents import numbered_tokens
from lib.modes import Place, build_mode
from lib.tables import markdown


# Multicast of NVSwitch and NVLink between hosts know nothing of these nodes; several sockets are faster than one.
BETWEEN_GROUPS = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
COLUMNS = ("rank", "node", "MB to its node, planned", "sent", "MB to other nodes, planned", "sent")


def set_apart(num_nodes: int) -> None:
    """Gives this rank the NCCL_HOSTID of its node, before NCCL starts. Other variables stay if they are set.

    Args:
        num_nodes: of equally many consecutive ranks.

    Raises:
        SystemExit: nodes do not divide the ranks.
    """
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks % num_nodes:
        raise SystemExit(f"--nodes {num_nodes} does not divide {num_ranks} ranks")
    os.environ["NCCL_HOSTID"] = f"node-{rank // (num_ranks // num_nodes)}"
    for name, value in BETWEEN_GROUPS.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class NodeTraffic:
    """What one layer sends, forward and backward.

    Attributes:
        plan: of the documents.
        chunks: of every exchange, at most.
        ranks_per_node: consecutive ranks of one node.
        planned, sent: `[source, destination]` bytes.
    """

    plan: Plan
    chunks: int
    ranks_per_node: int
    planned: IntArray
    sent: IntArray

    @property
    def as_planned(self) -> bool:
        """Returns whether all ranks sent the planned numbers of bytes."""
        return np.array_equal(self.planned, self.sent)

    def report(self) -> str:
        """Returns a line about the plan, and a Markdown table with megabytes of every rank."""
        node = np.arange(len(self.sent)) // self.ranks_per_node
        same = node[:, None] == node
        sums = [np.where(where, x, 0).sum(axis=1) for where in (same, ~same) for x in (self.planned, self.sent)]
        rows = [
            (str(rank), str(node[rank]), *(f"{1e-6 * bytes_of[rank]:.3f}" for bytes_of in sums))
            for rank in range(len(self.sent))
        ]
        layout = self.plan.layout
        stripes = [
            f"tokens {each.start} to {each.stop} of document {each.document} over ranks {each.first_rank} to "
            f"{each.stop_rank - 1}"
            for each in layout.stripes
        ]
        host = os.environ.get("NCCL_HOSTID", "not set")
        first = (
            f"{node[-1] + 1} nodes of {self.ranks_per_node} ranks, NCCL_HOSTID {host} on rank 0; "
            f"{_cut_documents(layout)} of {layout.num_documents} documents cut; exchanges in up to {self.chunks} "
            f"chunks; stripes: {'; '.join(stripes) or 'none'}. One layer, forward and backward:"
        )
        return f"{first}\n\n{markdown(COLUMNS, rows)}"


def traffic_of(place: Place, lengths: Sequence[int]) -> NodeTraffic:
    """Attends once with placed documents, and compares what is sent with the plan; a collective call.

    Args:
        place: this rank, and its model.
        lengths: tokens of the documents.

    Returns:
        planned and sent bytes of one layer, forward and backward.
    """
    with _recorded_plans() as plans:
        mode = build_mode("placed", place, [numbered_tokens(lengths)])
        [batch] = mode.batches
    plan, config = plans[-1], place.plugin(sum(lengths) // place.wires.world_size)
    rows = batch["input_ids"].shape[1]
    q, k, v, dout = (
        torch.randn((rows, *width), device=place.device, dtype=place.dtype) for width in place.shape.widths
    )
    place.wires.reset()
    attend_once(mode, place, batch, q, k, v, dout)
    own = torch.tensor(place.wires.bytes_to, device=place.device)
    own[place.wires.rank] = 0
    sent = [torch.empty_like(own) for _ in range(place.wires.world_size)]
    dist.all_gather(sent, own)
    return NodeTraffic(
        plan=plan,
        chunks=config.num_chunks(config.topology(place.wires.world_size)),
        ranks_per_node=place.wires.world_size // place.num_nodes,
        planned=_planned_bytes(plan, place, config),
        sent=torch.stack(sent).cpu().numpy(),
    )


def _planned_bytes(plan: Plan, place: Place, config: DistCAConfig) -> IntArray:
    """Returns `[source, destination]` bytes of a layer's exchanges.

    Keys and values go there, gradients come back. Queries that move go there and their results come back, then output
    gradients and gradients. Received rows are kept for backward, unless a setting says no.
    """
    num_ranks, groups = plan.layout.num_ranks, plan.tasks.head_groups
    (heads, dim), (kv_heads, _), (_, value_dim), _ = place.shape.widths
    width, sum_width = place.dtype.itemsize, accumulation_dtype(place.dtype).itemsize
    keys, moved = key_transfers(plan).rows_between(num_ranks), plan.pieces.select(plan.pieces.moved)
    queries = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(queries, (moved.owner, moved.server), moved.rows)
    fetches = 2 if config.kv_residency == "refetch" else 1
    again = (dim + value_dim) * width + sum_width if fetches == 2 else 0
    of_keys = kv_heads // groups * (dim + value_dim) * width
    there = heads // groups * ((dim + value_dim) * width + again)
    back = heads // groups * ((dim + value_dim) * width + sum_width)
    return of_keys * (fetches * keys + keys.T) + there * queries + back * queries.T


def _cut_documents(layout: Layout) -> int:
    """Counts documents that more than one rank holds."""
    ranks: list[set[int]] = [set() for _ in range(layout.num_documents)]
    for rank in range(layout.num_ranks):
        for document, _, _ in layout.held_by(rank):
            ranks[document].add(rank)
    return sum(len(holders) > 1 for holders in ranks)


@contextmanager
def _recorded_plans() -> Iterator[list[Plan]]:
    """Yields the plans of placed batches that are made within, in any thread."""
    plans: list[Plan] = []
    make = PlacedPlanner.plan_layout

    def recorded(*arguments: Any) -> Plan:
        plans.append(make(*arguments))
        return plans[-1]

    with mock.patch.object(PlacedPlanner, "plan_layout", recorded):
        yield plans
