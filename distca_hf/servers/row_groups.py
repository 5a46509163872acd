"""Row groups: process groups in which trainers and attention servers exchange rows, and which may lose members.

Torch has them in no list, so frameworks see only the trainers. Gloo's exchanges are waited for on the host, in small
steps. NCCL's run on the GPU, where kernels wait for a lost member for ever, and so does all that is launched after.
Their group is therefore aborted: its kernels end in a fraction of a second with rows that mean nothing, and the GPU
goes on.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distca_hf.torch_private import (
    RowGroup,
    abort_group,
    all_to_all_of,
    connect_group,
    nccl_errors_end_no_process,
)


# Longest time for ranks that have answered to connect with each other, over gloo and over NCCL, which prepares more.
MEET_SECONDS, NCCL_MEET_SECONDS = 10.0, 60.0
# Torch's own deadline for NCCL's exchanges: none. A lost member is noticed by its heartbeat, an exchange that does not
# end by `heartbeats.StreamProgress`.
NO_DEADLINE = timedelta(days=365)


def open_row_group(store: Store, rank: int, num_ranks: int, device: torch.device, timeout_seconds: float) -> RowGroup:
    """Opens a group for rows; all ranks of it call this together.

    Args:
        store: where they meet, used by nothing else.
        device: where the rows live; decides between gloo and NCCL, whose group outlives its members.
        timeout_seconds: deadline of an exchange over gloo.

    Raises:
        RuntimeError: some ranks did not come.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as `comm.groups` opens its own
        options._timeout = NO_DEADLINE
        options.config.blocking = 1  # a group that connects meanwhile refuses its first exchange
        with nccl_errors_end_no_process():
            of_nccl = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        in_time(lambda: _connect(of_nccl, num_ranks, device), NCCL_MEET_SECONDS, "ranks to connect over NCCL")
        return of_nccl
    timeout = timedelta(seconds=timeout_seconds)
    # All have just answered. One that is lost meanwhile would be waited for as long as for an exchange.
    group = dist.ProcessGroupGloo(store, rank, num_ranks, min(timeout, timedelta(seconds=MEET_SECONDS)))
    group.set_timeout(timeout)
    return group


def _connect(group: RowGroup, num_ranks: int, device: torch.device) -> None:
    """Connects all ranks, and exchanges one element between any two: NCCL connects pairs in their first exchange."""
    with torch.cuda.device(device):
        connect_group(group, device)
        rows, each = torch.zeros(num_ranks, device=device), [1] * num_ranks
        all_to_all_of(group, device)(torch.empty_like(rows), rows, each, each).wait()
        torch.cuda.current_stream(device).synchronize()


def in_time(call: Callable[[], None], seconds: float, of: str) -> None:
    """Makes a call that may never return, in a thread that is abandoned then.

    Args:
        of: names the call in the error.

    Raises:
        RuntimeError: it did not return in time. Errors of the call are raised here.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="distca-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError(f"waited {seconds:g} s for {of}")
    if errors:
        raise errors[0]


def abort(group: RowGroup) -> None:
    """Ends all exchanges of a group of NCCL, from any thread; a group of gloo has nothing to abort."""
    if group.name() == "nccl":
        abort_group(group)
