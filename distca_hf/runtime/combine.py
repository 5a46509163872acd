"""Combine: gradients of keys and values travel home and are summed there, in max(fp32, their dtype) and in a fixed
order: own calls, own rows of the store, then the servers by rank."""

import torch

from distca_hf.comm.transport import Exchange
from distca_hf.kernels.sum_rows import add_rows
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan
from distca_hf.runtime.store import StoreGradients, apart


def start_gradients_home(gradients: StoreGradients, plan: LivePlan, where: str) -> Exchange:
    """Starts the gradients of received rows back, one part from every server, grouped by server."""
    maps = plan.maps
    return plan.transport.exchange(gradients.travelling(), maps.receive_counts, maps.send_counts, where)


def sum_at_home(
    dk: torch.Tensor, dv: torch.Tensor, gradients: StoreGradients, returned: torch.Tensor, maps: Maps
) -> None:
    """Adds to the gradients of own rows what the store and other servers contributed."""
    of_store = gradients.total.k, gradients.total.v
    for gradient, own, part in zip((dk, dv), of_store, apart(returned, dk, dv), strict=True):
        add_rows(gradient.flatten(1), own.flatten(1), part.flatten(1), maps.sums)
