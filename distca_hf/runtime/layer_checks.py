"""Layer checks: what goes with an attention call beside its kernels and exchanges.

Room is checked for the first call of each kind of layers in a pass, before anything is sent. A document's keys gather
where its last queries are computed, so a plan may need more memory on some rank than its tokens suggest. Out of memory
in the midst of a step, all other ranks would wait for the deadline.

Finite numbers are looked for if the settings ask for it: the check waits for the device.
"""

import torch

from distca_hf.errors import NotFiniteError, PlanError
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.device_routing import DeviceRouting
from distca_hf.runtime.live_plan import LivePlan


def check_room(
    plan: LivePlan, routing: DeviceRouting, where: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Compares the memory that backward of this layer needs beside its inputs with the free memory.

    Raises:
        PlanError: it cannot fit; names both numbers, and settings to change.
    """
    free, needed = free_bytes(q.device), needed_bytes(routing, q, k, v)
    if free is not None and needed > free:
        raise PlanError(
            f"{plan.transport.grid.name}, {where}: attention needs {needed} bytes for keys, values and gradients (of "
            f"{routing.remote_kv_rows // routing.rows_per_token} tokens of documents that span ranks, among "
            f"others), but {free} bytes are free on {q.device}; nothing was sent. Lower tokens_per_rank, train on "
            "more ranks, or save memory elsewhere (activation checkpointing, sharding, a fused loss)"
        )


def needed_bytes(routing: DeviceRouting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Returns the bytes of one layer's backward: gradients, rows under way, remote keys and values with gradients.

    Args:
        routing: of backward, where everything is there in one chunk.
        q, k, v: `[T, heads, dim]`.
    """
    groups = routing.rows_per_token
    elements = k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
    summed = accumulation_dtype(k.dtype).itemsize if routing.sums_remote_kv else k.element_size()
    stored = routing.remote_kv_rows * elements * (k.element_size() + summed)
    on_store = [call for chunk in routing.chunks for call in (*chunk.prefix, *chunk.remote_queries)]
    stored += sum(call.keys.stop - call.keys.start for call in on_store if call.adds) * elements * k.element_size()
    # Keys that were fetched again; they are gone when as many gradients are sent back, some in a larger dtype first.
    at_once = 2 if routing.sums_remote_kv else 1
    under_way = at_once * (len(routing.send_rows) + len(routing.received_to_remote_kv)) * elements * k.element_size()
    gradients = sum(x.numel() * x.element_size() for x in (q, k, v))
    prefix = 0  # gradients of queries that are added to those of local calls
    for call in routing.chunks[0].prefix:
        tokens, heads = call.queries.stop - call.queries.start, q.shape[1] * call.rows_per_token // groups
        prefix += tokens * heads * q.shape[2]
    remote_queries = 0
    if routing.queries is not None:  # queries, outputs, both gradients and log-sum-exps, under way and where they land
        heads, query, value = q.shape[1], q.shape[2] * q.element_size(), v.shape[2] * q.element_size()
        lse, sent = accumulation_dtype(q.dtype).itemsize, len(routing.queries.send_rows)
        remote_queries = heads * (
            routing.queries.num_rows * (3 * query + 4 * value + 2 * lse) + sent * (2 * query + 2 * value + lse)
        )
    return (stored + under_way + remote_queries) // groups + gradients + prefix * q.element_size()


def free_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of a GPU, with the ones that torch holds in reserve; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_finite(plan: LivePlan, where: str, **tensors: torch.Tensor) -> None:
    """Checks that `[T, ...]` tensors are finite.

    Raises:
        NotFiniteError: names the tensor and the document of the first row that is wrong.
    """
    for name, rows in tensors.items():
        wrong = ~torch.isfinite(rows).flatten(1).all(dim=1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise NotFiniteError(
                f"{plan.transport.grid.name}, {where}: {name} is not finite in row {row}, "
                f"{plan.name_of(row)}; {int(wrong.sum())} of {len(rows)} rows are not"
            )
