"""Dispatch: keys and values travel to the servers that need them, and are put into the store in document order.

A row is one token's keys and values side by side: `[G * H | G * V]` elements.
"""

from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Exchange
from distca_hf.runtime.plans import LivePlan


def start_keys(k_TGH: torch.Tensor, v_TGV: torch.Tensor, plan: LivePlan, where: str) -> Exchange:
    """Starts sending the rows that other ranks need."""
    maps = plan.maps
    rows = pack_rows(k_TGH, v_TGV, maps.send_rows)
    return plan.transport.exchange(rows, maps.send_counts, maps.receive_counts, where)


def fill_store(k_TGH: torch.Tensor, v_TGV: torch.Tensor, received: torch.Tensor, plan: LivePlan) -> torch.Tensor:
    """`[store rows, G * (H + V)]`: received and own rows of every document whose keys came from elsewhere."""
    maps = plan.maps
    store = received.new_empty((maps.store_rows, received.shape[1]))
    store.index_copy_(0, maps.received_to_store, received)
    store.index_copy_(0, maps.own_to_store, pack_rows(k_TGH, v_TGV, maps.own_rows))
    return store


def pack_rows(k_TGH: torch.Tensor, v_TGV: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Keys and values of some rows, side by side."""
    return torch.cat([k_TGH.index_select(0, rows).flatten(1), v_TGV.index_select(0, rows).flatten(1)], dim=1)


def unpack_rows(
    rows: torch.Tensor, key_shape: Sequence[int], value_shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the key part and the value part of rows; shapes are `[G, H]` and `[G, V]`."""
    width = key_shape[0] * key_shape[1]
    return rows[:, :width].unflatten(1, tuple(key_shape)), rows[:, width:].unflatten(1, tuple(value_shape))
