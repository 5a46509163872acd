"""Dispatch: keys and values travel to the servers that need them, and are put into the store in document order.

They travel side by side: `[G * H | G * V]` elements a row. In the store they lie apart, as kernels like them.
"""

import torch

from distca_hf.comm.transport import Exchange
from distca_hf.runtime.plans import LivePlan


def start_keys(k: torch.Tensor, v: torch.Tensor, plan: LivePlan, where: str) -> Exchange:
    """Starts sending the rows that other ranks need."""
    maps = plan.maps
    rows = side_by_side(k.index_select(0, maps.send_rows), v.index_select(0, maps.send_rows))
    return plan.transport.exchange(rows, maps.send_counts, maps.receive_counts, where)


def fill_store(
    k: torch.Tensor, v: torch.Tensor, received: torch.Tensor, plan: LivePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[store rows, ...]`, received and own, of every document whose keys came from elsewhere."""
    maps = plan.maps
    stores = tuple(x.new_empty((maps.store_rows, *x.shape[1:])) for x in (k, v))
    for store, own, come in zip(stores, (k, v), apart(received, k, v), strict=True):
        store.index_copy_(0, maps.received_to_store, come)
        store.index_copy_(0, maps.own_to_store, own.index_select(0, maps.own_rows))
    return stores[0], stores[1]


def side_by_side(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[rows, G, H]` and `[rows, G, V]` as `[rows, G * H + G * V]`."""
    return torch.cat([k.flatten(1), v.flatten(1)], dim=1)


def apart(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the key part and the value part of rows, shaped as the rows of `k` and `v`."""
    width = k.shape[1] * k.shape[2]
    return rows[:, :width].unflatten(1, k.shape[1:]), rows[:, width:].unflatten(1, v.shape[1:])


def row_width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Elements of one row of keys and values side by side."""
    return k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
