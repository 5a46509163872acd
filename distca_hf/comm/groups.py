"""Groups: opens the process groups that core attention uses, beside those of the training framework.

Exchanges get a group of their own, so that they neither wait behind FSDP's collectives nor get mixed up with them, and
integers a gloo group, so that agreement needs no device. Both span all ranks; their deadlines are ours.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.transport import LocalTransport, TorchTransport, Transport
from distca_hf.config import launched_world_size
from distca_hf.errors import ConfigError


def open_transport(
    device: torch.device, timeout_seconds: float, agreement_timeout_seconds: float | None = None
) -> Transport:
    """Transport over all ranks of the initialised process group; a collective call. One rank needs no group.

    Args:
        device: where the rows to exchange live; decides between NCCL and gloo.
        timeout_seconds: deadline of every exchange.
        agreement_timeout_seconds: deadline for all ranks to come to an agreement; by default the same.

    Raises:
        ConfigError: several processes were launched, but no process group is initialised yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        if launched_world_size() > 1:
            raise ConfigError(
                f"{launched_world_size()} processes were launched, but torch.distributed is not initialised; create "
                "the Accelerator, TrainingArguments or process group before the data loader"
            )
        return LocalTransport()
    if dist.get_world_size() == 1:
        return LocalTransport()
    timeout = timedelta(seconds=timeout_seconds)
    data_group = _nccl_group(timeout) if device.type == "cuda" else dist.new_group(backend="gloo", timeout=timeout)
    patience = timedelta(seconds=agreement_timeout_seconds or timeout_seconds)
    control_group = dist.new_group(backend="gloo", timeout=patience)
    # No public accessor; every backend's rendezvous goes through it.
    store = dist.distributed_c10d._get_default_store()
    rollcall = RollCall(store, dist.get_rank(), dist.get_world_size())
    rollcall.announce_uncaught_errors()
    return TorchTransport(data_group, control_group, rollcall, device)


def _nccl_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group whose exchanges overtake kernels: one that waits for a free multiprocessor behind all blocks of an
    attention kernel would overlap with nothing."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(backend="nccl", timeout=timeout, pg_options=options)


def default_device() -> torch.device:
    """Device that training runs on, as far as the process groups and CUDA say."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
