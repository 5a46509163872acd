"""Dispatch: keys and values travel to the servers that need them, and are put into the store in document order.

They travel side by side: `[G * H | G * V]` elements a row. Where they come in document order and nothing of this rank
belongs between them, the store is what was received; otherwise they are copied, and lie apart.

Shape legend in `kernels.interface`; rows are those of `planning.ranges`.
"""

import torch

from distca_hf.comm.transport import Exchange
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan


def start_keys(k: torch.Tensor, v: torch.Tensor, plan: LivePlan, where: str) -> Exchange:
    """Starts sending the rows that other ranks need, of `[rows, G, H]` and `[rows, G, V]`."""
    maps = plan.maps
    rows = side_by_side(k, v, maps.send_rows)
    return plan.transport.exchange(rows, maps.send_counts, maps.receive_counts, where)


def fill_store(
    k: torch.Tensor, v: torch.Tensor, received: torch.Tensor, maps: Maps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[store rows, ...]`, received and own, of every prefix that is read here."""
    if is_store(received, k, maps):
        return apart(received, k, v)
    stores = tuple(x.new_empty((maps.store_rows, *x.shape[1:])) for x in (k, v))
    for store, own, come in zip(stores, (k, v), apart(received, k, v), strict=True):
        store.index_copy_(0, maps.received_to_store, come)
        store.index_copy_(0, maps.own_to_store, own.index_select(0, maps.own_rows))
    return stores[0], stores[1]


def is_store(received: torch.Tensor, k: torch.Tensor, maps: Maps) -> bool:
    """Whether received rows can be read where they are: in order, and groups of heads of a token side by side."""
    return maps.come_in_order and (maps.rows_per_token == 1 or k.shape[1] == 1)


def side_by_side(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of `[rows, G, H]` and `[rows, G, V]` as `[chosen, G * H + G * V]`."""
    both = k.new_empty((len(rows), row_width(k, v)))
    for part, x in zip(apart(both, k, v), (k, v), strict=True):
        torch.index_select(x, 0, rows, out=part)
    return both


def apart(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the key part and the value part of rows, shaped as the rows of `k` and `v`."""
    width = k.shape[1] * k.shape[2]
    return rows[:, :width].unflatten(1, k.shape[1:]), rows[:, width:].unflatten(1, v.shape[1:])


def row_width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Elements of one row of keys and values side by side."""
    return k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
