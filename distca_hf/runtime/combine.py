"""Combine: gradients of keys and values travel home and are summed there, in max(fp32, their dtype) and in a fixed
order."""

import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.dispatch import side_by_side
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan


def send_home(
    dstore_k: torch.Tensor, dstore_v: torch.Tensor, dtype: torch.dtype, plan: LivePlan, where: str
) -> torch.Tensor:
    """Returns the gradients of the rows this rank had sent, keys and values side by side, one part from every server,
    grouped by server."""
    maps = plan.maps
    parts = [dstore.index_select(0, maps.received_to_store).to(dtype) for dstore in (dstore_k, dstore_v)]
    return plan.transport.exchange(side_by_side(*parts), maps.receive_counts, maps.send_counts, where).wait()


def sum_at_home(gradient: torch.Tensor, dstore: torch.Tensor, returned: torch.Tensor, maps: Maps) -> None:
    """Adds to the gradient of own rows, of keys or of values, what the store and other servers contributed.

    The order is fixed: own calls, own rows of the store, then the servers by rank. Within one part no row comes twice,
    so the sum does not depend on the order in which the device adds.
    """
    total = gradient.index_select(0, maps.shared_rows).to(accumulation_dtype(gradient.dtype))
    total.index_add_(0, maps.own_in_shared, dstore.index_select(0, maps.own_to_store).to(total.dtype))
    for part in maps.returned_parts:
        total.index_add_(0, maps.send_in_shared[part], returned[part].to(total.dtype))
    gradient.index_copy_(0, maps.shared_rows, total.to(gradient.dtype))
