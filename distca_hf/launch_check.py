"""Launch check: refuses a command line of `distca train` that cannot work, before any process is started."""

import argparse
import ast
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from distca_hf.config import DistCAConfig, variable_of
from distca_hf.errors import ConfigError, did_you_mean, first_line
from distca_hf.launched import LaunchedProcess
from distca_hf.recipe import OF_ACCELERATE, Recipe, foreign_format, read_yaml, variables
from distca_hf.run import LAUNCHER, read_command
from distca_hf.settings import names_of


# Top-level names of a script that takes part.
ARGUMENTS, CHECK = "ARGUMENTS", "check"
# Name of the script as a module: its own name could be a library's.
SCRIPT = "distca_train_script"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Transformers' arguments that are a file or folder, unless they are JSON.
PATHS = ("resume_from_checkpoint", "deepspeed", "fsdp_config")


def check_launch(line: Sequence[str]) -> None:
    """Checks a line of `launch_line`. Accelerate's own functions read the configuration.

    A script takes part if it has `ARGUMENTS` at its top level: the dataclasses that it gives to `HfArgumentParser`.
    They parse its arguments. If it also has a function `check`, this gets the parsed arguments, and refuses wrong ones
    by `SystemExit` with a message. Makes no requests to the Hub.

    Raises:
        ConfigError: processes, the script or its arguments cannot work; says why and what to do.
    """
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    _refuse_as(parser, "accelerate launch")
    started = parser.parse_args(list(line[len(LAUNCHER) :]))
    recipe, script, arguments, _ = read_command(started.training_script_args)
    assert isinstance(script, Path)  # `launch_line` names one
    processes, machines = _check_processes(started)
    here = processes // machines
    recipe.role(lambda: LaunchedProcess(0, 0, processes, here, 0, machines))
    _check_script(recipe, script, arguments, frozenset(vars(started)))


def _check_processes(started: argparse.Namespace) -> tuple[int, int]:
    """Returns the numbers of processes and machines."""
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    file = started.config_file
    content = read_yaml(file)
    try:
        config = load_config_from_file(file)
    except Exception as error:  # wrong keys and values of every kind
        other = foreign_format(file, content, OF_ACCELERATE)
        raise ConfigError(other or f"{file} is not a configuration of Accelerate: {first_line(error)}") from error
    if not isinstance(config, ClusterConfig):
        raise ConfigError(f"{file} starts a job of {config.compute_environment.value}, not processes on this machine")
    numbers = {}
    for name in ("num_processes", "num_machines"):
        given = getattr(started, name)
        number = getattr(config, name) if given is None else given
        if number in (None, -1):
            raise ConfigError(f"{file} has no {name}: add it, or give -- --{name} N at the end of the line")
        if type(number) is not int or number < 1:
            where = file if given is None else "accelerate launch"
            raise ConfigError(f"{where}: {name} is {number!r}; write a whole number, at least 1")
        numbers[name] = number
    processes, machines = numbers["num_processes"], numbers["num_machines"]
    if not started.cpu and not config.use_cpu:
        _check_gpus(file, processes // machines, str(started.gpu_ids or config.gpu_ids or "all"))
    return processes, machines


def _check_gpus(file: str, processes: int, gpu_ids: str) -> None:
    """Refuses more processes than this machine has GPUs: Accelerate would start ranks without a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if gpu_ids != "all":
        gpus = sum(word.strip().isdecimal() and int(word) < gpus for word in gpu_ids.split(","))
    if gpus < processes:
        other = (
            f"-- --num_processes {gpus} at the end of the line"
            if gpus
            else "--accelerate cpu_2proc --use_cpu true --bf16 false"
        )
        of_them = "" if gpu_ids == "all" else f" of gpu_ids {gpu_ids}"
        raise ConfigError(
            f"{file} starts {processes} processes on each machine, and this one has {gpus} GPUs{of_them}; give {other}"
        )


def _check_script(recipe: Recipe, script: Path, arguments: Sequence[str], of_launcher: frozenset[str]) -> None:
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{script} is not a Python script: {first_line(error)}") from error
    assigned = (ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    if not any(line.startswith((f"{ARGUMENTS} =", f"{ARGUMENTS}:")) for line in assigned):
        return  # importing any other script might start training
    with _quiet(), variables(OFFLINE):
        module = _imported(script)
        parsed = _parse(getattr(module, ARGUMENTS), recipe, script, arguments, of_launcher)
        try:
            getattr(module, CHECK, lambda parsed: None)(parsed)
        except SystemExit as refused:
            raise ConfigError(str(refused)) from refused
    for name in PATHS:
        value = getattr(parsed, name, None)
        if isinstance(value, str) and not value.startswith("{") and not Path(value).exists():
            raise ConfigError(f"--{name} {value}: no such file or folder")
    folder = getattr(parsed, "output_dir", None)
    if folder is not None:
        path = Path(folder).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as written:
                written.write(b"x")
                written.flush()
        except OSError as error:
            raise ConfigError(f"--output_dir {folder} cannot be written to: {error.strerror or error}") from error


def _parse(
    kinds: Any, recipe: Recipe, script: Path, arguments: Sequence[str], of_launcher: frozenset[str]
) -> argparse.Namespace:
    """Returns the arguments as the script gets them, without creating their objects, which would look for devices."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kinds, allow_abbrev=False, prog=script.name)
    _refuse_as(parser, script.name)
    file = script.with_suffix(".args")  # HfArgumentParser reads it first
    of_file = file.read_text(encoding="utf-8").split() if file.is_file() else []
    parsed, unknown = parser.parse_known_args([*of_file, *recipe.script, *arguments])
    if not unknown:
        return parsed
    option = next((word for word in unknown if word.startswith("-")), None)
    if option is None:
        raise ConfigError(f"{unknown[0]!r} belongs to no argument of {script.name}: write it after its name")
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    where = "section script of the recipe" if option in recipe.script else "the line"
    if name in names_of(DistCAConfig):
        hint = " It is a setting: write it into section plugin of the recipe"
        hint += "" if name in recipe.plugin else f", or set {variable_of(name)}"  # which the recipe would win over
    elif name in of_launcher:
        hint = " It is an option of accelerate launch: write it after -- at the end of the line"
    else:
        hint = did_you_mean(name, (field.name for kind in kinds for field in fields(kind)))
    raise ConfigError(f"{script.name} has no argument {option.partition('=')[0]}, which {where} gives.{hint}")


def _refuse_as(parser: argparse.ArgumentParser, program: str) -> None:
    """Makes a parser raise ConfigError instead of printing its usage and ending the process."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{program}: {message}")

    parser.error = refuse  # type: ignore[method-assign]


def _imported(script: Path) -> ModuleType:
    """Imports a script as a module, with its folder on the path, as when it runs."""
    loader = SourceFileLoader(SCRIPT, str(script))
    sys.modules[SCRIPT] = module = ModuleType(SCRIPT)  # types that are written as text are looked up there
    module.__file__ = str(script)
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{script} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.pop(0)
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences libraries: the refusal is one line."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
