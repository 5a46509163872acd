"""The `distca` command."""

import importlib.metadata
import platform

import typer
from rich.console import Console
from rich.table import Table

from distca_hf.errors import ConfigError
from distca_hf.integrations.launch import find_recipe, shipped_recipes
from distca_hf.version import __version__


app = typer.Typer(help="Core attention disaggregation for Hugging Face.", no_args_is_help=True, add_completion=False)

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


@app.command()
def recipes(name: str = typer.Argument(None, help="recipe whose path to print; without it all names")) -> None:
    """Lists the shipped recipes, or prints the path of one: accelerate launch --config_file "$(distca recipes
    NAME)"."""
    if name is None:
        for recipe in shipped_recipes():
            typer.echo(recipe)
        return
    try:
        typer.echo(find_recipe(name))
    except ConfigError as error:
        typer.echo(f"distca: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
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
    """Entry point of the console script."""
    app()
