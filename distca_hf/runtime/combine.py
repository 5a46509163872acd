"""Combine: gradients of keys and values travel home and are summed there, in max(fp32, their dtype) and in a fixed
order."""

import torch

from distca_hf.comm.transport import Exchange
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.dispatch import side_by_side
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan


class StoreGradients:
    """Gradients of the stored keys and values.

    Attributes:
        dk, dv: `[store rows, ...]`; in the dtype of the keys, or in max(fp32, dtype) if several calls add to them.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, maps: Maps, in_order: bool) -> None:
        self._adds, self._in_order, self._dtype = maps.store_sums, in_order and not maps.store_sums, k.dtype
        if self._in_order:  # laid out as they will travel
            width = k.shape[1] * k.shape[2]
            self._rows = k.new_empty((maps.store_rows, width + v.shape[1] * v.shape[2]))
            self.dk = self._rows[:, :width].unflatten(1, k.shape[1:])
            self.dv = self._rows[:, width:].unflatten(1, v.shape[1:])
            return
        make = torch.zeros if self._adds else torch.empty
        dtype = accumulation_dtype(k.dtype) if self._adds else k.dtype
        self.dk, self.dv = (make((maps.store_rows, *x.shape[1:]), dtype=dtype, device=x.device) for x in (k, v))

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.dk, self.dv

    def target(self, total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Where a call writes its part of some rows of `dk` or `dv`."""
        return torch.empty_like(like, memory_format=torch.contiguous_format) if self._adds else total

    def settle(self, part: torch.Tensor, total: torch.Tensor) -> None:
        """Adds what a call wrote."""
        if self._adds:
            total += part

    def start_home(self, plan: LivePlan, where: str) -> Exchange:
        """Starts the gradients of received rows home, keys and values side by side, one part from every server,
        grouped by server."""
        maps = plan.maps
        if self._in_order:
            rows = self._rows
        elif self._adds:
            parts = [x.index_select(0, maps.received_to_store).to(self._dtype).flatten(1) for x in (self.dk, self.dv)]
            rows = torch.cat(parts, dim=1)
        else:
            rows = side_by_side(self.dk, self.dv, maps.received_to_store)
        return plan.transport.exchange(rows, maps.receive_counts, maps.send_counts, where)


def sum_at_home(gradient: torch.Tensor, dstore: torch.Tensor, returned: torch.Tensor, maps: Maps) -> None:
    """Adds to the gradient of own rows, of keys or of values, what the store and other servers contributed.

    The order is fixed: own calls, own rows of the store, then the servers by rank. Within one part no row comes twice,
    so the sum does not depend on the order in which the device adds.
    """
    if not len(maps.shared_rows):
        return
    total = gradient.index_select(0, maps.shared_rows).to(accumulation_dtype(gradient.dtype))
    if len(maps.own_in_shared):
        total.index_add_(0, maps.own_in_shared, dstore.index_select(0, maps.own_to_store).to(total.dtype))
    for part in maps.returned_parts:
        total.index_add_(0, maps.send_in_shared[part], returned[part].to(total.dtype))
    gradient.index_copy_(0, maps.shared_rows, total.to(gradient.dtype))
