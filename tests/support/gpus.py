"""GPUs of this machine, and ranks that train on them over NCCL."""

import ctypes
import os

import torch


def gpu_ranks() -> int:
    """Returns how many ranks can meet over NCCL: one per GPU, at most 4. Since NCCL 2.30 two may share one."""
    devices = torch.cuda.device_count()
    return 2 if devices == 1 and loaded_nccl_version() >= (2, 30) else min(4, devices)


def loaded_nccl_version() -> tuple[int, ...]:
    """Returns the version of the NCCL in this process, which may be preloaded in place of torch's."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:  # it is a part of torch's own library
        return torch.cuda.nccl.version()
    code = ctypes.c_int()
    assert nccl.ncclGetVersion(ctypes.byref(code)) == 0
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def use_gpu(rank: int) -> None:
    """Gives this process the GPU of its rank, or the only one, which ranks then share."""
    devices = torch.cuda.device_count()
    os.environ.update(LOCAL_RANK=str(rank % devices), NCCL_MULTI_RANK_GPU_ENABLE=str(int(devices == 1)))
    torch.cuda.set_device(rank % devices)
