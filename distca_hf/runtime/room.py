"""Room: whether what attention of one layer has to hold fits the device. Asked once per plan, before anything is sent.

A document's keys gather where its last queries are computed, so a plan may need more memory on some rank than its
tokens suggest; out of memory in the midst of a step all other ranks would have to wait for the deadline.
"""

import torch

from distca_hf.errors import PlanError
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan


def check_room(plan: LivePlan, where: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Compares what backward of this layer holds at the same time, beside its inputs, with what is free.

    Raises:
        PlanError: it cannot fit; names both numbers, and what to change.
    """
    free = free_bytes(q.device)
    needed = needed_bytes(plan.backward_maps, q, k, v)
    if free is not None and needed > free:
        raise PlanError(
            f"rank {plan.transport.rank}, {where}: attention needs {needed} bytes for keys, values and gradients (of "
            f"{plan.maps.store_rows // plan.maps.rows_per_token} tokens of documents that span ranks, among others), "
            f"but {free} bytes are free on {q.device}; nothing was sent. Lower tokens_per_rank, train on more ranks, "
            "or save memory elsewhere (activation checkpointing, sharding, a fused loss)"
        )


def needed_bytes(maps: Maps, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes of one layer's backward: gradients, rows under way, and stored keys and values with their gradients.

    Args:
        maps: of backward, where everything is there in one leg.
        q, k, v: `[T, heads, dim]`.
    """
    groups = maps.rows_per_token
    elements = k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
    summed = accumulation_dtype(k.dtype).itemsize if maps.store_sums else k.element_size()
    stored = maps.store_rows * elements * (k.element_size() + summed)
    on_store = [call for leg in maps.legs for call in (*leg.far, *leg.guests)]
    stored += sum(call.keys.stop - call.keys.start for call in on_store if call.adds) * elements * k.element_size()
    # Keys that were fetched again, and gradients on their way home.
    under_way = 2 * (len(maps.send_rows) + len(maps.received_to_store)) * elements * k.element_size()
    gradients = sum(x.numel() * x.element_size() for x in (q, k, v))
    far = 0  # gradients of queries that are added to those of own calls
    for call in maps.legs[0].far:
        tokens, heads = call.queries.stop - call.queries.start, q.shape[1] * call.rows_per_token // groups
        far += tokens * heads * q.shape[2]
    guests = 0
    if maps.queries is not None:  # queries, outputs, both gradients and log-sum-exps, under way and where they land
        heads, query, value = q.shape[1], q.shape[2] * q.element_size(), v.shape[2] * q.element_size()
        lse, sent = accumulation_dtype(q.dtype).itemsize, len(maps.queries.send_rows)
        guests = heads * (
            maps.queries.num_rows * (3 * query + 4 * value + 2 * lse) + sent * (2 * query + 2 * value + lse)
        )
    return (stored + under_way + guests) // groups + gradients + far * q.element_size()


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be had on a GPU, those that torch holds in reserve included; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
