"""The `distca` command."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from distca_hf.analysis import commands
from distca_hf.cost import Mask
from distca_hf.errors import DistCAError, printable
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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
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


class LauncherBehindDashes(TyperCommand):
    """A command whose arguments after `--` are for a launcher. They become the context's object."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@app.command(
    cls=LauncherBehindDashes,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: distca train llama3_8b_128k --dataset documents.jsonl --dry-run",
)
def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="a YAML file, or the name of a shipped recipe (distca recipes)",
        ),
    ],
    script: Annotated[
        str | None,
        typer.Option(help="file, or name of a shipped example (distca examples), instead of the recipe's script"),
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option(help="configuration of Accelerate, a file or a shipped one, instead of the recipe's"),
    ] = None,
    attention_servers: Annotated[
        str | None,
        typer.Option(
            help="attention servers of each node, its last processes: one number, or one for each node (0,8); "
            "instead of the recipe's number"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print the line, without checking it")] = False,
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


commands.add_to(app, _one_line_errors)


@app.command(epilog="Example: distca plan pretrain --gpus 8 --tokens-per-rank 65536 --json | distca report -")
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_PLAN",
            help="a run: its output folder, or a folder of traces that training wrote (setting report_every_steps); "
            "or a file with the output of distca plan --json or distca simulate --json; or - for standard input",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the page to write (report.html; with --json none)")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="measured profile that seconds of a run are predicted from: h200, h100, or a file of distca profile; "
            "by default that of the run's setting kernel_times, or of its GPUs"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all figures as one JSON object")] = False,
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
    documents: Annotated[
        str,
        typer.Argument(metavar="LENGTHS", help="tokens of each document of the micro-batch, as in 2x32768,4096"),
    ],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs (ranks) that hold the documents")] = 2,
    rank: Annotated[
        int | None, typer.Option(min=0, help="show only this rank, counted from 0; by default all")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="sliding window of the layer, in tokens; by default none")
    ] = None,
    chunked: Annotated[
        bool,
        typer.Option("--chunked", help="the window does not slide: documents are divided into chunks of its length"),
    ] = False,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of the layer")] = 8,
    head_groups: Annotated[
        int, typer.Option(min=1, help="groups that the heads of very long documents may be divided into")
    ] = 1,
    chunks: Annotated[int, typer.Option(min=1, help="chunks of each exchange in the forward pass")] = 1,
    refetch: Annotated[
        bool, typer.Option("--refetch", help="send keys again in the backward pass instead of keeping them")
    ] = False,
) -> None:
    """Shows, step by step, what one layer's attention does on each rank for a micro-batch: which rows it sends and
    receives, and what it computes meanwhile."""
    from distca_hf.analysis.explain import documents_of, explained

    with _one_line_errors():
        mask = Mask(window, chunked)
        text = explained(documents_of(documents), gpus, rank, mask, kv_heads, head_groups, chunks, refetch)
    typer.echo(text)


@app.command(epilog="Example: distca env > environment.txt")
def env() -> None:
    """Shows versions, and which attention kernels can run here; paste it into bug reports."""
    with _one_line_errors():
        commands.print_environment(Console())


def main() -> None:
    """Runs the console script. Wrong usage ends with one line, like all wrong input."""
    try:
        sys.exit(app(standalone_mode=False))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # in exceptions of click, of which newer typers have their own
        if usage is None:
            raise
        if words := " ".join(usage().split()):
            context = getattr(error, "ctx", None)
            command = f" {context.info_name}" if context is not None and context.parent is not None else ""
            typer.echo(f"distca: {words} (see distca{command} --help)", err=True)
        sys.exit(2)
