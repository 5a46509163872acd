"""The table of kernels, what each can do, and the choice among them."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from distca_hf.config import KernelName
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.cpu import CpuKernel
from distca_hf.kernels.flash import Flash2Kernel, Flash3Kernel, Flash4Kernel
from distca_hf.kernels.interface import Capabilities, Job, Kernel
from distca_hf.kernels.reference import ReferenceKernel
from distca_hf.kernels.torch_varlen import TorchVarlenKernel
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

HALF = (torch.bfloat16, torch.float16)
FLOATING = (*HALF, torch.float32, torch.float64)


@dataclass(frozen=True)
class Entry:
    """A kernel of the table: its module (None: always there), what it can do, and how it is made."""

    module: str | None
    capabilities: Capabilities
    make: Callable[[], Kernel]
    automatic: bool = True

    def missing(self) -> str | None:
        """Why the kernel cannot be imported, or None if it can."""
        if self.module is None:
            return None
        try:
            found = importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            found = False
        return None if found else f"module {self.module} is not installed"


# In order of preference: the fastest that can do the job is taken. Dimensions and GPU generations are those of the
# packages.
KERNELS: dict[str, Entry] = {
    "flash4": Entry(
        "flash_attn.cute.interface",
        Capabilities("cuda", HALF, max_head_dim=256, head_dim_multiple=8, compute_capability=(9, 10, 11, 12)),
        lambda: Flash4Kernel(importlib.import_module("flash_attn.cute.interface")),
    ),
    "flash3": Entry(
        "flash_attn_interface",
        Capabilities("cuda", HALF, max_head_dim=256, head_dim_multiple=8, equal_dims=True, compute_capability=(9,)),
        lambda: Flash3Kernel(importlib.import_module("flash_attn_interface")),
    ),
    "flash2": Entry(
        "flash_attn.flash_attn_interface",
        Capabilities(
            "cuda",
            HALF,
            max_head_dim=256,
            head_dim_multiple=8,
            equal_dims=True,
            compute_capability=(8, 9, 10, 11, 12),
        ),
        lambda: Flash2Kernel(importlib.import_module("flash_attn.flash_attn_interface")),
    ),
    "torch_varlen": Entry(
        None,
        Capabilities(
            "cuda",
            HALF,
            max_head_dim=256,
            head_dim_multiple=8,
            equal_dims=True,
            compute_capability=(8, 9, 10, 11, 12),
        ),
        TorchVarlenKernel,
    ),
    "cpu": Entry(None, Capabilities("cpu", FLOATING, equal_dims=True), CpuKernel),
    "reference": Entry(None, Capabilities(None, FLOATING), ReferenceKernel, automatic=False),
}


@lru_cache(maxsize=64)
def choose_kernel(name: KernelName, job: Job) -> Kernel:
    """The kernel called `name`; for "auto" the first of the table that can do the job (the reference only on a CPU).

    Raises:
        UnsupportedAttentionError: the kernel, or with "auto" every kernel, cannot do the job; says why.
    """
    if job.num_heads % job.num_kv_heads:
        raise UnsupportedAttentionError(f"{job.num_heads} query heads are no multiple of {job.num_kv_heads} KV heads")
    if name != "auto":
        reason = KERNELS[name].missing() or KERNELS[name].capabilities.refusal(job)
        if reason:
            raise UnsupportedAttentionError(
                f"kernel={name!r} cannot be used: {reason}; kernel='auto' takes one that can"
            )
        return KERNELS[name].make()
    reasons = []
    for candidate, entry in KERNELS.items():
        reason = entry.missing() or entry.capabilities.refusal(job)
        if reason is None and not entry.automatic and job.device_type != "cpu":
            reason = "is exact but slow, and only taken when asked for by name"
        if reason is None:
            log.info("attention kernel %s for %s", candidate, job)
            return entry.make()
        reasons.append(f"{candidate} {reason}")
    raise UnsupportedAttentionError(f"no attention kernel for {job}: " + "; ".join(reasons))
