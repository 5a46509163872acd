"""Commands about clusters: `distca profile` and `distca simulate`, with their options."""

import functools
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from distca_hf.analysis.profiles.shipped import DEFAULT_FILE, DEFAULT_PROFILE, shipped_profiles


PROFILE_EPILOG = "Example: distca profile --cpu --dry-run"
SIMULATE_EPILOG = "Example: distca simulate prolong --gpus 8 --context 262144 --liger --batches 4"


def add_to(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Adds the commands to an application.

    Args:
        errors: makes the context that a command runs in, which turns refused input into one line.
    """
    for command, epilog in ((profile, PROFILE_EPILOG), (simulate, SIMULATE_EPILOG)):
        app.command(epilog=epilog)(within(errors, command))


def within(errors: Callable[[], AbstractContextManager[None]], command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that runs in such a context."""

    @functools.wraps(command)
    def run(**options: object) -> None:
        with errors():
            command(**options)

    return run


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = DEFAULT_FILE,
    processes: Annotated[int | None, typer.Option(help="processes to start; by default one for each GPU")] = None,
    model: Annotated[str, typer.Option(help="model whose heads and layer are measured")] = "llama3-8b",
    kernel: Annotated[str, typer.Option(help="attention kernel, as in settings")] = "auto",
    cpu: Annotated[bool, typer.Option("--cpu", help="tiny sizes over gloo, to see how it works")] = False,
    as_between_nodes: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="measure only links, and put them into this profile as those between nodes: for one node whose "
            "links are made slow (NCCL_P2P_DISABLE=1), or for a part of a cluster",
        ),
    ] = None,
    remarks: Annotated[str, typer.Option(help="words for the file, such as NCCL_P2P_DISABLE=1")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the line that would be run, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the main figures as one JSON object")] = False,
) -> None:
    """Measures this machine's GPUs and links, in less than three minutes, for distca simulate --cluster.

    Attention forward and backward over sizes of queries and keys, a layer without attention, matrix products,
    exchanges and FSDP's collectives by size. The file also serves the setting kernel_times. Nothing else may run on
    the GPUs meanwhile. In the end it prints the main figures; the file has all.

    On one node: distca profile --output cluster.json

    With figures for a program: distca profile --output cluster.json --json

    On several: start the printed line on each of them, with --nnodes and --rdzv-endpoint as for a training.
    """
    from distca_hf.analysis.profiles import launch

    line = launch.launch_line(
        output=output,
        processes=processes,
        model=model,
        kernel=kernel,
        cpu=cpu,
        as_between_nodes=as_between_nodes,
        remarks=remarks,
        as_json=as_json,
    )
    if as_json and dry_run:
        typer.echo(json.dumps({"command": line, "file": str(as_between_nodes or output)}))
    else:
        typer.echo(shlex.join(line), err=as_json)  # stdout is for the figures
    if not dry_run:
        launch.launch(line)


def simulate(
    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="LENGTHS", help="document lengths, as distca plan reads them; or a sample: pretrain, prolong"
        ),
    ],
    gpus: Annotated[str, typer.Option(help="numbers of GPUs, separated by commas")] = "8",
    tokens_per_rank: Annotated[
        int | None, typer.Option(help="most tokens per GPU and micro-step; 131,072 by default")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="your own batches, unpacked: rows per GPU and micro-step (per_device_train_batch_size)"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="split longer documents, or cut off longer rows of --batch-size (max_length), at this many tokens; "
            "by default none"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="model, as distca plan takes it; llama3-8b by default")] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help=f"a shipped profile of a GPU ({', '.join(shipped_profiles())}), or a file of distca profile"
        ),
    ] = DEFAULT_PROFILE,
    micro_steps: Annotated[str, typer.Option(help="micro-steps of an optimizer step, separated by commas")] = "1",
    ranks_per_node: Annotated[int, typer.Option(help="GPUs that share a node; 1: all links are between nodes")] = 8,
    tensor: Annotated[int, typer.Option(help="GPUs of a node that divide every layer (tensor parallelism)")] = 1,
    pipeline: Annotated[
        int | None, typer.Option(help="also simulate a pipeline of this many stages on the same GPUs; by default none")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(help="with --pipeline: parts of the layers on each stage; from 2 on interleaved 1F1B, else 1F1B"),
    ] = None,
    checkpointing: Annotated[
        str,
        typer.Option(
            help="activation checkpointing: saved (distca keeps attention outputs, other ways recompute them), "
            "recomputed (all ways recompute them) or none"
        ),
    ] = "saved",
    liger: Annotated[bool, typer.Option("--liger", help="with Liger's kernels and loss")] = False,
    sync_each_batch: Annotated[
        bool,
        typer.Option(
            "--sync-each-batch", help="sum gradients in each micro-step; by default, as Trainer, in the last"
        ),
    ] = False,
    gpu_gib: Annotated[float | None, typer.Option(help="memory of a GPU, in GiB; by default the profile's")] = None,
    batches: Annotated[int, typer.Option(help="optimizer steps to simulate")] = 20,
    token_budget: Annotated[float, typer.Option(help="tokens that GPU-hours are counted for")] = 1e9,
    seed: Annotated[int, typer.Option(help="seed of the order of documents")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Estimates the step time of a training on a measured cluster, for each way to share attention between GPUs: plain
    packing, sorted packs, whole documents, Ulysses, zigzag rings and distca_hf.

    Says which way to choose and what it gains, if anything. No GPU is needed. Times are summed from measurements of
    single kernels, layers and links; all assumptions are listed.

    Your own batches, unpacked: distca simulate prolong --batch-size 4 --context 32768

    Several at once: distca simulate pretrain --gpus 8,64,512 --micro-steps 1,4 --json

    And a pipeline: distca simulate pretrain --gpus 32 --micro-steps 2 --pipeline 4 --chunks 4 --liger
    """
    from distca_hf.analysis.simulate.command import SimulateOptions, run_simulate

    run_simulate(
        SimulateOptions(
            lengths=lengths,
            model=model,
            gpus=gpus,
            tokens_per_rank=tokens_per_rank,
            batch_size=batch_size,
            context=context,
            cluster=cluster,
            micro_steps=micro_steps,
            ranks_per_node=ranks_per_node,
            tensor=tensor,
            pipeline=pipeline,
            chunks=chunks,
            checkpointing=checkpointing,
            liger=liger,
            sync_each_batch=sync_each_batch,
            gpu_gib=gpu_gib,
            batches=batches,
            token_budget=token_budget,
            seed=seed,
            as_json=as_json,
        )
    )
