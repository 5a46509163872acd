"""`distca profile`: the line that measures, and its launch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distca_hf.errors import ConfigError


# Processes on a machine without GPUs.
CPU_PROCESSES = 2


def launch_line(
    *,
    out: Path,
    processes: int | None,
    model: str,
    kernel: str,
    cpu: bool,
    as_between_nodes: Path | None,
    remarks: str,
) -> list[str]:
    """Returns the command that measures on this node.

    Raises:
        ConfigError: there is no GPU, or fewer than processes; or the file cannot be written.
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
    target = as_between_nodes or out
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: its folder is missing")
    line = ["torchrun", "--nproc-per-node", str(number), "-m", "distca_hf.analysis.profiles"]
    line += ["--as-between-nodes", str(as_between_nodes)] if as_between_nodes else ["--out", str(out)]
    line += ["--model", model, "--kernel", kernel, *(["--cpu"] if cpu else [])]
    return [*line, *(["--remarks", remarks] if remarks else [])]


def launch(line: Sequence[str]) -> None:
    """Replaces this process by torchrun, under the same Python."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line[1:]])
