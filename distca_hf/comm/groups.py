"""Groups: opens the process groups that core attention uses, beside those of the training framework.

Exchanges get a group of their own, so that they neither wait behind FSDP's collectives nor get mixed up with them.
Integers get a gloo group, so that agreement needs no device. Both span all ranks; their deadlines are ours.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.torch_transport import TorchTransport
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import launched_world_size
from distca_hf.errors import ConfigError, PeerLostError
from distca_hf.torch_private import default_store


def world_size() -> int:
    """Returns the number of ranks that train together: those of the initialised process group, or this one alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def open_transport(
    device: torch.device, timeout_seconds: float, agreement_timeout_seconds: float | None = None
) -> Transport:
    """Opens a transport over all ranks of the initialised process group; a collective call. One rank needs no group.

    Args:
        device: where the rows to exchange live; decides between NCCL and gloo.
        timeout_seconds: deadline of every exchange.
        agreement_timeout_seconds: deadline for all ranks to come to an agreement; by default the same.

    Raises:
        ConfigError: several processes were launched, but no process group is initialised yet.
        PeerLostError: some ranks did not come; names them.
    """
    if launched_world_size() > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{launched_world_size()} processes were launched, but torch.distributed is not initialised; create "
            "the Accelerator, TrainingArguments or process group before the data loader"
        )
    if world_size() == 1:
        return LocalTransport()
    rollcall = RollCall(default_store(), dist.get_rank(), dist.get_world_size())
    timeout, patience = (timedelta(seconds=x) for x in (timeout_seconds, agreement_timeout_seconds or timeout_seconds))
    began = time.monotonic()
    try:
        # Ranks come here when their data is ready, so the group with the longer deadline is where they meet.
        control_group = dist.new_group(backend="gloo", timeout=patience)
        on_gpus = device.type == "cuda"
        data_group = _nccl_group(timeout) if on_gpus else dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise _nobody_came(rollcall, time.monotonic() - began, error) from error
    rollcall.announce_uncaught_errors()
    return TorchTransport(data_group, control_group, rollcall, device)


def _nobody_came(rollcall: RollCall, waited_seconds: float, error: RuntimeError) -> PeerLostError:
    """Returns the error to raise where groups could not be opened; it names the ranks that did not come."""
    missing = "; ".join(f"rank {rank} {words}" for rank, words in rollcall.missing(waited_seconds).items())
    return PeerLostError(
        f"rank {dist.get_rank()} waited {waited_seconds:.0f} s for all {dist.get_world_size()} ranks to open their "
        f"groups (at attach, at the first batch of plugin.dataloader, or at the first packed batch): "
        f"{missing or 'all ranks still answer'}. A rank whose data takes longer needs a longer "
        f"agreement_timeout_seconds. Cause: {str(error).partition(chr(10))[0][:300]}"
    )


def _nccl_group(timeout: timedelta) -> dist.ProcessGroup:
    """Opens a group whose exchanges overtake kernels. One that waits for a free multiprocessor behind all blocks of an
    attention kernel would overlap with nothing."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(backend="nccl", timeout=timeout, pg_options=options)


def default_device() -> torch.device:
    """Returns the device that training runs on, as far as the process groups and CUDA say."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
