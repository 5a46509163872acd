"""GPUs: generation, memory and peak rate of each, by name. What is said of these elsewhere comes from here."""

import re
from dataclasses import dataclass

from distca_hf.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """A device that a model is checked for, or steps are simulated on.

    Attributes:
        name: as it is given.
        device_type: "cuda" or "cpu".
        compute_capability: generation (major version); None for a CPU.
        gib: memory in GiB; None for a CPU.
        peak_flops: dense bf16 operations per second by data sheet; None if it is not in the table.
    """

    name: str
    device_type: str
    compute_capability: int | None
    gib: float | None
    peak_flops: float | None = None


# Memory that nvidia-smi shows; 143,771 MiB of an H200.
H200_GIB, H100_GIB, A100_GIB = 140.4, 79.6, 79.3
# Compute capability (major version), GiB of memory, of other GPUs the number of the data sheet, and peak rate.
GPUS = {
    name: Gpu(name, "cuda", capability, gib, peak)
    for name, capability, gib, peak in (
        ("b200", 10, 180.0, 2250e12),
        ("gb200", 10, 186.0, None),
        ("b300", 10, 270.0, None),
        ("h200", 9, H200_GIB, 989e12),
        ("h200-nvl", 9, H200_GIB, 835e12),
        ("gh200", 9, 96.0, None),
        ("h100", 9, H100_GIB, 989e12),
        ("h100-pcie", 9, H100_GIB, 756e12),
        ("h100-nvl", 9, 94.0, 835e12),
        ("h800", 9, 80.0, None),
        ("h20", 9, 96.0, None),
        ("a100", 8, A100_GIB, 312e12),
        ("a100-40gb", 8, 40.0, 312e12),
        ("a800", 8, 80.0, None),
        ("a10", 8, 24.0, None),
        ("a40", 8, 48.0, None),
        ("a6000", 8, 48.0, None),
        ("l40s", 8, 48.0, 362e12),
        ("l4", 8, 24.0, 121e12),
        ("rtx3090", 8, 24.0, None),
        ("rtx4090", 8, 24.0, None),
        ("rtx5090", 12, 32.0, None),
        ("rtx-pro-6000", 12, 96.0, None),
        ("v100", 7, 32.0, None),
        ("t4", 7, 16.0, None),
    )
} | {"cpu": Gpu("cpu", "cpu", None, None)}


def find_gpu(name: str) -> Gpu:
    """Returns the GPU of a name.

    Raises:
        ConfigError: it is not known; names the nearest one.
    """
    known = GPUS.get(name.lower())
    if known is None:
        raise ConfigError(f"--gpu {name} is not one of {', '.join(GPUS)}.{did_you_mean(name.lower(), GPUS)}")
    return known


def gpu_of_device(device: str) -> Gpu | None:
    """Returns the GPU that a device is, by the name that torch has for it, such as "NVIDIA H100 80GB HBM3"; None of an
    unknown one, and of a part of a GPU (MIG), which has neither its memory nor its rate."""
    if "MIG" in device:
        return None
    known = [gpu for name, gpu in GPUS.items() if re.search(_pattern(name), device, re.IGNORECASE)]
    return max(known, key=lambda gpu: len(gpu.name), default=None)


def peak_flops(device: str) -> float | None:
    """Returns dense bf16 operations per second of a device; None if unknown, and as `gpu_of_device`."""
    gpu = gpu_of_device(device)
    return None if gpu is None else gpu.peak_flops


def _pattern(name: str) -> str:
    """Returns a regular expression for a name in that of a device: all its words, with anything between them."""
    words = name.replace("rtx", "rtx-").split("-")
    return r"\b" + r"\b.*\b".join(filter(None, words)) + r"\b"
