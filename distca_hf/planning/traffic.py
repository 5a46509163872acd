"""Traffic: what a plan moves between ranks, in one layer, forward."""

import numpy as np

from distca_hf.cost import IntArray, TokenBytes
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import key_transfers


def bytes_between(plan: Plan, token_bytes: TokenBytes) -> IntArray:
    """`[source, destination]` bytes: keys and values, queries that move, and their outputs on the way back."""
    num_ranks, groups = plan.layout.num_ranks, plan.tasks.head_groups
    moved = plan.pieces.select(plan.pieces.moved)
    queries = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(queries, (moved.home, moved.server), moved.rows)
    keys = key_transfers(plan).rows_between(num_ranks)
    return (keys * token_bytes.key_value + queries * token_bytes.query + queries.T * token_bytes.output) // groups
