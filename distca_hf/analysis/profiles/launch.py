"""`distca profile`: the line that measures, and its launch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.config import DistCAConfig, KernelName
from distca_hf.errors import ConfigError


# Processes on a machine without GPUs.
CPU_PROCESSES = 2


def launch_line(
    *,
    output: Path,
    processes: int | None,
    model: str,
    kernel: str,
    cpu: bool,
    as_between_nodes: Path | None,
    remarks: str,
    as_json: bool,
) -> list[str]:
    """Returns the command that measures on this node.

    Raises:
        ConfigError: there is no GPU, or fewer than processes; the model or the kernel is not known; or the file cannot
            be written, or is no profile whose links can be measured.
    """
    import torch  # which reading a profile does not need

    gpus = torch.cuda.device_count()
    if not cpu and not gpus:
        raise ConfigError("this machine has no GPU to measure; --cpu shows with tiny sizes how it works")
    number = processes if processes is not None else CPU_PROCESSES if cpu else gpus
    if number < 1:
        raise ConfigError(f"--processes {number} must be at least 1")
    if not cpu and number > gpus:
        raise ConfigError(f"--processes {number}: this machine has {gpus} GPUs")
    DistCAConfig(kernel=cast(KernelName, kernel))  # refuses any other
    find_model(model)
    if as_between_nodes is not None:
        ClusterProfile.load(as_between_nodes)
        if number < 2:
            raise ConfigError(f"--as-between-nodes with --processes {number}: links need two processes or more")
    target = as_between_nodes or output
    if target.is_dir():
        raise ConfigError(f"{target} cannot be written: it is a folder")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: its folder is missing")
    line = ["torchrun", "--nproc-per-node", str(number), "-m", "distca_hf.analysis.profiles"]
    line += ["--as-between-nodes", str(as_between_nodes)] if as_between_nodes else ["--output", str(output)]
    line += ["--model", model, "--kernel", kernel, *(["--cpu"] if cpu else [])]
    return [*line, *(["--remarks", remarks] if remarks else []), *(["--json"] if as_json else [])]


def launch(line: Sequence[str]) -> None:
    """Replaces this process by torchrun, under the same Python."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line[1:]])
