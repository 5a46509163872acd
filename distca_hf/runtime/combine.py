"""Combine: gradients of keys and values travel home and are summed there, in max(fp32, their dtype) and in a fixed
order."""

import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.plans import LivePlan


def send_home(dstore: torch.Tensor, dtype: torch.dtype, plan: LivePlan, where: str) -> torch.Tensor:
    """Returns the gradients of the rows this rank had sent, one part from every server, grouped by server."""
    maps = plan.maps
    rows = dstore.index_select(0, maps.received_to_store).to(dtype)
    return plan.transport.exchange(rows, maps.receive_counts, maps.send_counts, where).wait()


def sum_at_home(
    dk_TGH: torch.Tensor, dv_TGV: torch.Tensor, dstore: torch.Tensor, returned: torch.Tensor, plan: LivePlan
) -> None:
    """Adds to the gradients of own rows what the store and other servers contributed.

    The order is fixed: own calls, own rows of the store, then the servers by rank. Within one part no row comes twice,
    so the sum does not depend on the order in which the device adds.
    """
    maps = plan.maps
    shared = maps.shared_rows
    width = dk_TGH.shape[1] * dk_TGH.shape[2]
    parts = [dk_TGH.index_select(0, shared).flatten(1), dv_TGV.index_select(0, shared).flatten(1)]
    total = torch.cat(parts, dim=1).to(accumulation_dtype(dk_TGH.dtype))
    total.index_add_(0, maps.own_in_shared, dstore.index_select(0, maps.own_to_store).to(total.dtype))
    for part in maps.returned_parts:
        total.index_add_(0, maps.send_in_shared[part], returned[part].to(total.dtype))
    dk_TGH.index_copy_(0, shared, total[:, :width].to(dk_TGH.dtype).unflatten(1, dk_TGH.shape[1:]))
    dv_TGV.index_copy_(0, shared, total[:, width:].to(dv_TGV.dtype).unflatten(1, dv_TGV.shape[1:]))
