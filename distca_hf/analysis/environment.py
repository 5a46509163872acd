"""Environment: the report of `distca env` for bug reports: versions, devices, and attention kernels that can run."""

import importlib.metadata
import platform

import torch
from rich.console import Console
from rich.table import Table

from distca_hf.analysis.estimates import GIB
from distca_hf.kernels.registry import KERNELS
from distca_hf.version import __version__


# Packages on which bugs have depended: those that training imports, and those that bring kernels.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "trl",
    "peft",
    "deepspeed",
    "liger-kernel",
    "flash-attn-4",
    "flash-attn",
)


def print_environment(console: Console) -> None:
    """Prints versions of packages, devices, and kernels in order of preference."""
    console.print(f"distca_hf {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version")
    for package in PACKAGES:
        versions.add_row(package, _version(package))
    console.print(versions)
    for line in _devices():
        console.print(line)
    kernels = Table(
        "kernel", "runs on", "here", title="attention kernels, in order of preference", title_justify="left"
    )
    for kernel, entry in KERNELS.items():
        kernels.add_row(kernel, entry.capabilities.device_type or "any device", entry.missing() or "available")
    console.print(kernels)


def _version(package: str) -> str:
    """Returns the installed version of a package, or a dash."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _devices() -> list[str]:
    """Returns a line for each GPU and one for the libraries between them, or one line if there is no GPU."""
    if not torch.cuda.is_available():
        return [f"devices: CPU only; torch was built for CUDA {torch.version.cuda or '-'}"]
    lines = [f"devices: {torch.cuda.device_count()} GPUs"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(
            f"GPU {index}: {gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [*lines, f"CUDA {torch.version.cuda or '-'}, ROCm {torch.version.hip or '-'}, NCCL {nccl}"]
