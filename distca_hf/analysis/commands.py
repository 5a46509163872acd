"""Commands: `distca plan`, `check`, `profile`, `simulate` and `env`: versions, devices and attention kernels that can
run, for bug reports."""

import functools
import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import typer
from rich.console import Console
from rich.table import Table

from distca_hf.analysis.options import CheckOptions, PlanOptions, ProfileOptions, SimulateOptions
from distca_hf.errors import ConfigError
from distca_hf.version import __version__


# Packages on which bugs have depended: packages that training imports, and packages with kernels.
PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "trl", "peft", "deepspeed"),
    *("liger-kernel", "flash-attn-4", "flash-attn", "ffpa-attn"),
)
# Processes on a machine without GPUs.
CPU_PROCESSES = 2


def add_to(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Adds the commands to an application.

    Args:
        errors: makes the context of a command, which turns refused input into one line.
    """
    for command, example in (
        (plan, "plan pretrain --gpus 8 --tokens-per-rank 16384 --compare"),
        (check, "check llama3-8b --gpus 16 --tokens-per-rank 65536 --liger"),
        (profile, "profile --cpu --dry-run"),
        (simulate, "simulate prolong --gpus 8 --context 262144 --liger --batches 4"),
    ):
        app.command(epilog=f"Example: distca {example}")(_with_options(command, errors))


def _with_options(
    command: Callable[[Any], None], errors: Callable[[], AbstractContextManager[None]]
) -> Callable[..., None]:
    """Returns a command whose options are the fields of the class that it takes."""
    fields = inspect.signature(command).parameters["options"].annotation

    @functools.wraps(command)
    def run(**given: object) -> None:
        with errors():
            command(fields(**given))

    vars(run).update(__signature__=inspect.signature(fields))
    run.__annotations__ = fields.__annotations__
    return run


def plan(options: PlanOptions) -> None:
    """Estimates a training on documents of these lengths: balance of an epoch, speed and memory.

    Give --tokens-per-rank for placed batches, which distca makes, or --batch-size for your own, whose rows are placed
    inside the model.

    With --tokens-per-rank documents are shuffled and packed as training does it: an epoch has as few micro-batches as
    hold all documents, of nearly equal tokens. The first optimizer step is planned in full, with its bytes. Speed and
    memory are estimated for other numbers of tokens per rank, too.

    Speed and memory are estimates; no GPU is needed. Bytes are counted in one layer's forward pass.

    With and without a pipeline: distca plan pretrain --gpus 8 --tokens-per-rank 65536 --pipeline 4 --micro-steps 8
    """
    from distca_hf.analysis.command import run_plan
    from distca_hf.analysis.given import run_given

    if options.batch_size is not None:
        run_given(options)
        return
    if options.tokens_per_rank is None:
        raise ConfigError(
            "neither --tokens-per-rank nor --batch-size is given: give the first for placed batches, the second for "
            "your own"
        )
    if options.context is not None:
        raise ConfigError(
            f"--context {options.context} cuts rows of --batch-size, which is not given. With --tokens-per-rank use "
            "--overlong truncate or split"
        )
    run_plan(options, options.tokens_per_rank)


def check(options: CheckOptions) -> None:
    """Says whether a model works, layer by layer: with which limits and kernels, whether documents may be cut, and
    which tokens per rank fit the GPU's memory.

    The model is built without weights and checked as training checks it; a tiny version of it trains a step on two
    ranks of this CPU, and its numbers must equal single documents' numbers. No GPU is needed. Memory is an estimate.

    Exit status: 0 works, 1 refused, 2 bad input.

    Show the numbers, too: distca check Qwen3ForCausalLM --numerics
    """
    from distca_hf.analysis.check.run_check import run_check

    raise typer.Exit(run_check(options))


def profile(options: ProfileOptions) -> None:
    """Measures this machine's GPUs and links, in less than three minutes, for distca simulate --cluster.

    Attention forward and backward over sizes of queries and keys, a layer without attention, matrix products,
    exchanges and FSDP's collectives by size. The file also serves the setting kernel_times. Nothing else may run on
    the GPUs meanwhile. In the end it prints the main figures; the file has all.

    On one node: distca profile --output cluster.json

    With figures for a program: distca profile --output cluster.json --json

    On several: start the printed line on each of them, with --nnodes and --rdzv-endpoint as for a training.
    """
    line = launch_line(options)
    if options.as_json and options.dry_run:
        typer.echo(json.dumps({"command": line, "file": str(options.as_between_nodes or options.output)}))
    else:
        typer.echo(shlex.join(line), err=options.as_json)  # stdout is for the figures
    if not options.dry_run:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line[1:]])  # under the same Python


def launch_line(options: ProfileOptions) -> list[str]:
    """Returns the command that measures on this node.

    Raises:
        ConfigError: there are too few GPUs, or none; the model or the kernel is not known; or the file cannot
            be written, or is not a profile whose links can be measured.
    """
    import torch  # which reading a profile does not need

    from distca_hf.analysis.find_model import find_model
    from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
    from distca_hf.config import DistCAConfig, KernelName

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
            raise ConfigError(f"--as-between-nodes with --processes {number}: the network needs two processes or more")
    target = options.as_between_nodes or options.output
    if target.is_dir():
        raise ConfigError(f"{target} cannot be written: it is a folder")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: its folder is missing")
    line = ["torchrun", "--nproc-per-node", str(number), "-m", "distca_hf.analysis.profiles"]
    line += ["--as-between-nodes" if options.as_between_nodes else "--output", str(target)]
    line += ["--model", options.model, "--kernel", options.kernel, *["--cpu"] * options.cpu]
    return [*line, *["--remarks", options.remarks] * bool(options.remarks), *["--json"] * options.as_json]


def simulate(options: SimulateOptions) -> None:
    """Estimates the step time of a training on a measured cluster, for each way to share attention between GPUs: plain
    packing, sorted packs, whole documents, Ulysses, zigzag rings and distca_hf.

    Says which way to choose and what it gains, if anything. No GPU is needed. Times are summed from measurements of
    single kernels, layers and links; all assumptions are listed.

    Your own batches, unpacked: distca simulate prolong --batch-size 4 --context 32768

    Several at once: distca simulate pretrain --gpus 8,64,512 --micro-steps 1,4 --json

    And a pipeline: distca simulate pretrain --gpus 32 --micro-steps 2 --pipeline 4 --chunks 4 --liger
    """
    from distca_hf.analysis.simulate.command import run_simulate

    run_simulate(options)


def print_environment(console: Console) -> None:
    """Runs `distca env`: prints versions of packages, devices, and kernels in order of preference."""
    import torch  # which `distca plan` does not need

    from distca_hf.kernels.registry import KERNELS

    console.print(f"distca_hf {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version")
    for package in PACKAGES:
        try:
            versions.add_row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.add_row(package, "-")
    console.print(versions)
    if not torch.cuda.is_available():
        console.print(f"devices: CPU only; torch was built for CUDA {torch.version.cuda or '-'}")
    else:
        console.print(f"devices: {torch.cuda.device_count()} GPUs")
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory = f"{gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
            console.print(f"GPU {index}: {gpu.name}, {memory}")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        console.print(f"CUDA {torch.version.cuda or '-'}, ROCm {torch.version.hip or '-'}, NCCL {nccl}")
    kernels = Table(
        "kernel", "runs on", "here", title="attention kernels, in order of preference", title_justify="left"
    )
    for kernel, entry in KERNELS.items():
        device = entry.capabilities.device_type
        there = "available" if device != "cuda" or torch.cuda.is_available() else "installed, needs a GPU"
        kernels.add_row(kernel, device or "any device", entry.missing() or there)
    console.print(kernels)
