"""The `distca` command."""

import functools
import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from distca_hf.analysis.options import CheckOptions, PlanOptions, ProfileOptions, SimulateOptions
from distca_hf.cost import Mask
from distca_hf.errors import ConfigError, DistCAError, printable
from distca_hf.launched import is_launched
from distca_hf.recipe import EXAMPLES, RECIPES, Shipped
from distca_hf.version import __version__


app = typer.Typer(
    help="Core attention disaggregation for Hugging Face.",
    epilog="Example: distca plan pretrain --gpus 8 --tokens-per-rank 16384",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs of help are filled to the terminal's width
)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Ends the command with status 2 and one line on stderr if input is refused, or a path is not accessible.

    A closed pipe (`distca plan ... | head`) is not an error: typer then ends the command silently.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (DistCAError, OSError) as error:
        typer.echo(printable(f"distca: {' '.join(str(error).split())}"), err=True)
        raise typer.Exit(2) from error


def _print_version(wanted: bool) -> None:
    """Prints the version and ends the command if `--version` is given."""
    if wanted:
        typer.echo(f"distca_hf {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Options of the command itself."""


@app.command(epilog='Example: sbatch "$(distca recipes two_nodes)" llama3_8b_128k --dataset DATASET')
def recipes(name: str = typer.Argument(None, help="recipe whose path to print; without it all names")) -> None:
    """Lists recipes, configurations of Accelerate and Slurm scripts that come with distca_hf; or prints the path of
    one."""
    _print_shipped(RECIPES, name)


@app.command(epilog='Example: cp "$(distca examples train)" train.py')
def examples(name: str = typer.Argument(None, help="example whose path to print; without it all names")) -> None:
    """Lists the examples that come with distca_hf, or prints the path of one."""
    _print_shipped(EXAMPLES, name)


def _print_shipped(shipped: Shipped, name: str | None) -> None:
    """Prints all names of one kind of shipped files, or the path of one file."""
    with _one_line_errors():
        typer.echo("\n".join(sorted(shipped.files())) if name is None else shipped.find(name))


class LauncherAfterDashes(TyperCommand):
    """A command whose arguments after `--` are for a launcher. They become the context's object."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@app.command(
    cls=LauncherAfterDashes,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: distca train llama3_8b_128k --dataset documents.jsonl --dry-run",
)
def train(
    context: typer.Context,
    recipe: str = typer.Argument(
        ..., metavar="RECIPE", help="a YAML file, or the name of a shipped recipe (distca recipes)"
    ),
    script: str | None = typer.Option(
        None, help="file, or name of a shipped example (distca examples), instead of the recipe's script"
    ),
    accelerate: str | None = typer.Option(
        None, help="configuration of Accelerate, a file or a shipped one, instead of the recipe's"
    ),
    attention_servers: str | None = typer.Option(
        None,
        help="attention servers of each node, its last processes: one number, or one for each node (0,8); "
        "instead of the recipe's number",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="only print the line, without checking it"),
) -> None:
    """Trains from a recipe: starts its script with accelerate launch, one process for each GPU. Dataset, model, recipe
    and arguments are checked before.

    Other arguments go to the script and win over the recipe's (--learning_rate 2e-5). Arguments after -- go to
    accelerate launch (-- --num_processes 4). The whole line is printed first.
    """
    from distca_hf import run as command
    from distca_hf.launch_check import check_launch

    arguments = context.args
    if attention_servers is not None:
        arguments = [command.SERVERS_OPTION, attention_servers, *arguments]
    if is_launched() and not dry_run:
        command.main(["--recipe", recipe, *([script] if script else []), *arguments])
        return
    with _one_line_errors():
        line = command.launch_line(recipe, script, accelerate, arguments, context.obj)
        if not dry_run:
            check_launch(line)
    typer.echo(printable(shlex.join(line)))
    if not dry_run:
        command.launch(line)


def _with_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Returns a command whose options are the fields of the class that it takes; it refuses input in one line."""
    fields = inspect.signature(command).parameters["options"].annotation

    @functools.wraps(command)
    def run(**given: object) -> None:
        with _one_line_errors():
            command(fields(**given))

    vars(run).update(__signature__=inspect.signature(fields))
    run.__annotations__ = fields.__annotations__
    return run


@app.command(epilog="Example: distca plan pretrain --gpus 8 --tokens-per-rank 16384 --compare")
@_with_options
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


@app.command(epilog="Example: distca check llama3-8b --gpus 16 --tokens-per-rank 65536 --liger")
@_with_options
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


@app.command(epilog="Example: distca profile --cpu --dry-run")
@_with_options
def profile(options: ProfileOptions) -> None:
    """Measures this machine's GPUs and links, in less than three minutes, for distca simulate --cluster.

    Attention forward and backward over sizes of queries and keys, a layer without attention, matrix products,
    exchanges and FSDP's collectives by size. The file also serves the setting kernel_times. Nothing else may run on
    the GPUs meanwhile. In the end it prints the main figures; the file has all.

    On one node: distca profile --output cluster.json

    With figures for a program: distca profile --output cluster.json --json

    On several: start the printed line on each of them, with --nnodes and --rdzv-endpoint as for a training.
    """
    from distca_hf.analysis.profiles.__main__ import launch_line

    line = launch_line(options)
    if options.as_json and options.dry_run:
        typer.echo(json.dumps({"command": line, "file": str(options.as_between_nodes or options.output)}))
    else:
        typer.echo(shlex.join(line), err=options.as_json)  # stdout is for the figures
    if not options.dry_run:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line[1:]])  # under the same Python


@app.command(epilog="Example: distca simulate prolong --gpus 8 --context 262144 --liger --batches 4")
@_with_options
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


@app.command(epilog="Example: distca plan pretrain --gpus 8 --tokens-per-rank 65536 --json | distca report -")
def report(
    source: Path = typer.Argument(
        ...,
        metavar="RUN_OR_PLAN",
        help="a run: its output folder, or a folder of traces that training wrote (setting report_every_steps); "
        "or a file with the output of distca plan --json or distca simulate --json; or - for standard input",
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="the page to write (report.html; with --json none)"
    ),
    cluster: str | None = typer.Option(
        None,
        help="measured profile that seconds of a run are predicted from: h200, h100, or a file of distca profile; "
        "by default the one in the run's setting kernel_times, or one of its GPUs",
    ),
    as_json: bool = typer.Option(False, "--json", help="print all figures as one JSON object"),
) -> None:
    """Shows a run, or a plan, in one HTML file that needs no network.

    It has the attention work of every rank before and after, who sends how much to whom, what the time of a layer was
    spent on, predicted and measured seconds, memory, and the rank that others wait for.

    Of a training with report_every_steps=100: distca report output -o run.html
    """
    from distca_hf.analysis.report.run_report import run_report

    with _one_line_errors():
        run_report(source, output, as_json, cluster)


@app.command(epilog="Example: distca explain 64,2x24 --gpus 2 --rank 1")
def explain(
    documents: str = typer.Argument(
        ..., metavar="LENGTHS", help="tokens of each document of the micro-batch, as in 2x32768,4096"
    ),
    gpus: int = typer.Option(2, min=1, help="GPUs (ranks) that hold the documents"),
    rank: int | None = typer.Option(None, min=0, help="show only this rank, counted from 0; by default all"),
    window: int | None = typer.Option(None, min=1, help="sliding window of the layer, in tokens; by default none"),
    chunked: bool = typer.Option(
        False, "--chunked", help="the window does not slide: documents are divided into chunks of its length"
    ),
    kv_heads: int = typer.Option(8, min=1, help="KV heads of the layer"),
    head_groups: int = typer.Option(1, min=1, help="groups that the heads of very long documents may be divided into"),
    chunks: int = typer.Option(1, min=1, help="chunks of each exchange in the forward pass"),
    refetch: bool = typer.Option(
        False, "--refetch", help="send keys again in the backward pass instead of keeping them"
    ),
) -> None:
    """Shows, step by step, what one layer's attention does on each rank for a micro-batch: which rows it sends and
    receives, and what it computes meanwhile."""
    from distca_hf.analysis.explain import documents_of, explained

    with _one_line_errors():
        if chunked and window is None:
            raise ConfigError("--chunked needs --window, the length of a chunk")
        mask = Mask(window, chunked)
        text = explained(documents_of(documents), gpus, rank, mask, kv_heads, head_groups, chunks, refetch)
    typer.echo(text)


# Packages on which bugs have depended: packages that training imports, and packages with kernels.
PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "trl", "peft", "deepspeed"),
    *("liger-kernel", "flash-attn-4", "flash-attn", "ffpa-attn"),
)


@app.command(epilog="Example: distca env > environment.txt")
def env() -> None:
    """Shows versions, and which attention kernels can run here; paste it into bug reports."""
    with _one_line_errors():
        import torch  # which `distca plan` does not need

        from distca_hf.kernels.registry import KERNELS

        console = Console()
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


def main() -> None:
    """Runs the console script. Wrong usage ends with one line, like all wrong input."""
    try:
        sys.exit(app(standalone_mode=False))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # in exceptions of click, of which newer typers have their own
        if usage is None:
            raise
        if message := " ".join(usage().split()):
            context = getattr(error, "ctx", None)
            command = f" {context.info_name}" if context is not None and context.parent is not None else ""
            typer.echo(f"distca: {message} (see distca{command} --help)", err=True)
        sys.exit(2)
