"""`distca profile`: the line that measures, and its launch."""

import os
import sys
from collections.abc import Sequence
from typing import cast

from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.options import ProfileOptions
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.config import DistCAConfig, KernelName
from distca_hf.errors import ConfigError


# Processes on a machine without GPUs.
CPU_PROCESSES = 2


def launch_line(options: ProfileOptions) -> list[str]:
    """Returns the command that measures on this node.

    Raises:
        ConfigError: there is no GPU, or fewer than processes; the model or the kernel is not known; or the file cannot
            be written, or is not a profile whose links can be measured.
    """
    import torch  # which reading a profile does not need

    gpus = torch.cuda.device_count()
    if not options.cpu and not gpus:
        raise ConfigError("this machine has no GPU to measure; --cpu shows with tiny sizes how it works")
    number = options.processes if options.processes is not None else CPU_PROCESSES if options.cpu else gpus
    if number < 1:
        raise ConfigError(f"--processes {number} must be at least 1")
    if not options.cpu and number > gpus:
        raise ConfigError(f"--processes {number}: this machine has {gpus} GPUs")
    DistCAConfig(kernel=cast(KernelName, options.kernel))  # refuses any other
    find_model(options.model)
    if options.as_between_nodes is not None:
        ClusterProfile.load(options.as_between_nodes)
        if number < 2:
            raise ConfigError(f"--as-between-nodes with --processes {number}: links need two processes or more")
    target = options.as_between_nodes or options.output
    if target.is_dir():
        raise ConfigError(f"{target} cannot be written: it is a folder")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: its folder is missing")
    line = ["torchrun", "--nproc-per-node", str(number), "-m", "distca_hf.analysis.profiles"]
    line += (
        ["--as-between-nodes", str(options.as_between_nodes)]
        if options.as_between_nodes
        else ["--output", str(options.output)]
    )
    line += ["--model", options.model, "--kernel", options.kernel, *(["--cpu"] if options.cpu else [])]
    return [
        *line,
        *(["--remarks", options.remarks] if options.remarks else []),
        *(["--json"] if options.as_json else []),
    ]


def launch(line: Sequence[str]) -> None:
    """Replaces this process by torchrun, under the same Python."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line[1:]])
