"""The `distca` command."""

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from distca_hf.errors import ConfigError, DistCAError
from distca_hf.integrations.launch import find_recipe, shipped_recipes
from distca_hf.version import __version__


app = typer.Typer(
    help="Core attention disaggregation for Hugging Face.",
    epilog="Example: distca plan lengths.json --ranks 8 --tokens-per-rank 16384",
    no_args_is_help=True,
)

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "trl",
    "peft",
    "deepspeed",
    "flash-attn-4",
    "flash-attn",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distca_hf {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(epilog='Example: accelerate launch --config_file "$(distca recipes fsdp2_8gpu)" train.py')
def recipes(name: str = typer.Argument(None, help="recipe whose path to print; without it all names")) -> None:
    """Lists the shipped recipes, or prints the path of one."""
    if name is None:
        for recipe in shipped_recipes():
            typer.echo(recipe)
        return
    try:
        typer.echo(find_recipe(name))
    except ConfigError as error:
        typer.echo(f"distca: {error}", err=True)
        raise typer.Exit(2) from error


@app.command(epilog="Example: distca plan lengths.json --ranks 64 --tokens-per-rank 16384 --compare")
def plan(
    lengths: Annotated[
        Path,
        typer.Argument(
            help="document lengths, in the dataset's order: .jsonl, .csv or .parquet with a column length, lengths, "
            "num_tokens or input_ids; a flat list in .json or .txt; or a saved datasets folder"
        ),
    ],
    ranks: Annotated[int, typer.Option(help="ranks (GPUs) that train together")],
    tokens_per_rank: Annotated[int, typer.Option(help="tokens each rank holds in a micro-step, at most")],
    ranks_per_node: Annotated[int, typer.Option(help="ranks that share a node")] = 8,
    micro_steps: Annotated[int, typer.Option(help="micro-steps of an optimizer step (gradient accumulation)")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help="llama3-8b (the default) or another name of the table, a model type or class of Transformers (qwen3, "
            "Qwen3ForCausalLM: its default sizes), or the path of a config.json or of its folder"
        ),
    ] = None,
    model_config: Annotated[Path | None, typer.Option(help="path of a config.json, instead of --model")] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="placed: distca chooses who holds what; fixed: tokens stay where documents in order fill the ranks, "
            "tasks move"
        ),
    ] = "placed",
    overlong: Annotated[
        str, typer.Option(help="documents longer than a whole batch: error, split (into several) or truncate")
    ] = "error",
    bytes_limit: Annotated[
        int | None, typer.Option(help="most bytes a rank may send, and receive, per layer; an error if no plan can")
    ] = None,
    checkpointing: Annotated[
        str,
        typer.Option(
            help="what layers keep until backward, for estimates: saved (inputs, attention's outputs), recomputed "
            "(inputs) or none (everything: no checkpointing)"
        ),
    ] = "saved",
    liger: Annotated[bool, typer.Option("--liger", help="estimate with Liger's kernels and loss")] = False,
    gpu_gib: Annotated[float, typer.Option(help="memory of a GPU, in GiB")] = 80.0,
    seed: Annotated[
        int, typer.Option(help="of the training: data_seed or seed of a Trainer, seed of plugin.dataloader")
    ] = 0,
    lengths_are_batch: Annotated[
        bool,
        typer.Option(
            "--lengths-are-batch",
            help="plan exactly these documents; several micro-steps take them in order, nearly equal tokens each",
        ),
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="also run baselines on the same documents")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the work of all ranks into this file")] = None,
) -> None:
    """Says what training on documents of these lengths would be like: how equal the work of all ranks gets in an
    epoch, how much faster that is, how much memory it needs, and what other numbers of tokens per rank would bring.

    Documents are shuffled and packed as training does it: an epoch has as few micro-batches as hold all documents, of
    nearly equal tokens. The first optimizer step is planned in full, with its bytes.

    Speed and memory are estimates; no GPU is needed. Bytes are those of one layer's forward pass.
    """
    from distca_hf.insight.plan_command import run_plan

    try:
        run_plan(
            lengths,
            ranks=ranks,
            tokens_per_rank=tokens_per_rank,
            ranks_per_node=ranks_per_node,
            micro_steps=micro_steps,
            model=model,
            model_config=model_config,
            layout=layout,
            overlong=overlong,
            bytes_limit=bytes_limit,
            checkpointing=checkpointing,
            liger=liger,
            gpu_gib=gpu_gib,
            seed=seed,
            lengths_are_batch=lengths_are_batch,
            compare=compare,
            as_json=as_json,
            plot=plot,
        )
    except DistCAError as error:
        typer.echo(f"distca: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


@app.command(epilog="Example: distca env > environment.txt")
def env() -> None:
    """Shows versions, and which attention kernels can run here; paste it into bug reports."""
    import torch

    from distca_hf.kernels.choose import KERNELS

    console = Console()
    versions = Table("package", "version", title=f"distca_hf {__version__}, Python {platform.python_version()}")
    for package in PACKAGES:
        try:
            versions.add_row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.add_row(package, "-")
    console.print(versions)
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or ["CPU only"]
    console.print(f"devices: {', '.join(devices)}")
    kernels = Table("kernel", "runs on", "here", title="attention kernels, in order of preference")
    for kernel, entry in KERNELS.items():
        kernels.add_row(kernel, entry.capabilities.device_type or "any device", entry.missing() or "available")
    console.print(kernels)


def main() -> None:
    """Runs the console script; bad usage is one line, like all bad input."""
    try:
        sys.exit(app(standalone_mode=False))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of click's exceptions, which newer typers have of their own
        if usage is None:
            raise
        if words := " ".join(usage().split()):
            typer.echo(f"distca: {words} (see distca --help)", err=True)
        sys.exit(2)
