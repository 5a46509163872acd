"""Row groups: process groups in which trainers and attention servers exchange rows, and which may lose members.

Torch has them in no list, so frameworks see only the trainers. The host waits for gloo's exchanges, in small steps.
NCCL's exchanges run on the GPU: if a member is lost, their kernels wait forever, and so does everything that is
launched later. The group is therefore aborted: its kernels end in a fraction of a second with invalid rows, and the
GPU goes on.
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


# Longest time for ranks that have answered to connect with each other, over gloo, and over NCCL, which prepares more.
MEET_SECONDS, NCCL_MEET_SECONDS = 10.0, 60.0
# Torch's own deadline for NCCL's exchanges: none. Heartbeats reveal a lost member, and `heartbeats.StreamProgress` an
# exchange that does not end.
NO_DEADLINE = timedelta(days=365)


def open_row_group(store: Store, rank: int, num_ranks: int, device: torch.device, timeout_seconds: float) -> RowGroup:
    """Opens a group for rows. A collective call of all its ranks.

    Args:
        store: in which they meet; not used by anything else.
        device: where the rows live; decides between gloo and NCCL, whose group outlives its members.
        timeout_seconds: deadline of an exchange over gloo.

    Raises:
        RuntimeError: some ranks did not come.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as `comm.groups` opens its own
        options._timeout = NO_DEADLINE
        options.config.blocking = 1  # a group that is still connecting refuses its first exchange
        with nccl_errors_end_no_process():
            of_nccl = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        in_time(lambda: _connect(of_nccl, num_ranks, device), NCCL_MEET_SECONDS, "ranks to connect over NCCL")
        return of_nccl
    timeout = timedelta(seconds=timeout_seconds)
    # All have just answered. With the full timeout, one that is lost meanwhile would be waited for that long.
    group = dist.ProcessGroupGloo(store, rank, num_ranks, min(timeout, timedelta(seconds=MEET_SECONDS)))
    group.set_timeout(timeout)
    return group


def _connect(group: RowGroup, num_ranks: int, device: torch.device) -> None:
    """Connects all ranks, and exchanges one element between any two: NCCL connects a pair in its first exchange."""
    with torch.cuda.device(device):
        connect_group(group, device)
        rows, each = torch.zeros(num_ranks, device=device), [1] * num_ranks
        all_to_all_of(group, device)(torch.empty_like(rows), rows, each, each).wait()
        torch.cuda.current_stream(device).synchronize()


def in_time(call: Callable[[], None], seconds: float, of: str) -> None:
    """Makes a call that may never return, in a thread that is then abandoned. Raises the call's own errors.

    Args:
        of: names the call in the error.

    Raises:
        RuntimeError: it did not return in time.
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
    """Ends all exchanges of a group of NCCL, from any thread; does nothing for gloo."""
    if group.name() == "nccl":
        abort_group(group)
