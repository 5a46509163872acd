"""Kernels: which attention kernels could compute the layers of a model on a GPU, and why others could not.

The table and its limits are those of `kernels.registry`, which training chooses from. Whether a package is installed
here, or a kernel fails when it is tried on the GPU, is known only there.
"""

from dataclasses import dataclass

import torch

from distca_hf.gpus import Gpu
from distca_hf.integrations.models.check import KernelNeed
from distca_hf.kernels.registry import KERNELS, why_not


@dataclass(frozen=True)
class KernelChoice:
    """Kernels for layers that need the same.

    Attributes:
        need: heads, window and softcap.
        layers: names of the attention layers.
        able: kernels that can compute them, the fastest first; the first whose package is installed is taken.
        unable: why each other kernel for this kind of device cannot; without those that only their name brings.
    """

    need: KernelNeed
    layers: tuple[str, ...]
    able: tuple[str, ...]
    unable: dict[str, str]

    @property
    def why_not(self) -> str:
        """Why kernels cannot, in words; equal reasons once."""
        kernels_of_reason: dict[str, list[str]] = {}
        for name, reason in self.unable.items():
            kernels_of_reason.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in kernels_of_reason.items())

    @property
    def needs_package(self) -> str:
        """How the kernels are installed, if none of those that can compute comes with torch; else empty."""
        if not self.able or any(KERNELS[name].module is None for name in self.able):
            return ""
        return KERNELS[self.able[0]].install


def kernels_for(needs: dict[KernelNeed, list[str]], gpu: Gpu, weights: torch.dtype) -> list[KernelChoice]:
    """Returns the kernels for each need.

    Args:
        needs: see `integrations.models.check.kernel_needs`.
        gpu: the device that computes.
        weights: dtype of the model.
    """
    choices = []
    for need, layers in needs.items():
        operands = need.operands(gpu.device_type, gpu.compute_capability, weights)
        reasons = {
            name: why_not(name, operands, need.spec)
            for name, entry in KERNELS.items()
            if entry.capabilities.device_type in (None, gpu.device_type)
            and (entry.automatic or gpu.device_type == "cpu")
        }
        able = tuple(name for name, reason in reasons.items() if reason is None)
        unable = {name: reason for name, reason in reasons.items() if reason is not None}
        choices.append(KernelChoice(need, tuple(layers), able, unable))
    return choices
