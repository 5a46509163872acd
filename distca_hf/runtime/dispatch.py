"""Dispatch: keys and values travel to the servers that need them."""

import torch

from distca_hf.comm.transport import Exchange
from distca_hf.runtime.plans import LivePlan
from distca_hf.runtime.store import side_by_side


def start_keys(k: torch.Tensor, v: torch.Tensor, plan: LivePlan, where: str) -> Exchange:
    """Starts sending the rows that other ranks need, of `[rows, G, H]` and `[rows, G, V]`."""
    maps = plan.maps
    return plan.transport.exchange(side_by_side(k, v, maps.send_rows), maps.send_counts, maps.receive_counts, where)
