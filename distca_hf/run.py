"""`python -m distca_hf.run [--recipe RECIPE] [--attach] [-m MODULE | SCRIPT] [ARGUMENTS]`: runs a script in a process
prepared from a recipe.

Meant for `accelerate launch -m distca_hf.run ...` and `torchrun -m distca_hf.run ...`; `distca train` starts both.
RECIPE is a YAML file or the name of a shipped recipe (`distca recipes` lists them). SCRIPT is a file or the name of a
shipped example (`distca examples`). Without it the recipe's own script runs. Without a recipe only the script makes
settings. `--attention-servers N` makes the last N processes of each node attention servers, which run no script; it
wins over the recipe. `--attach` attaches every Trainer for as long as it trains, and no line of the program changes;
DISTCA_ATTACH=1 does the same in every process. Options but `-m` may also come after the script; all other arguments
are the script's.

`distca train RECIPE [ARGUMENTS]` is one `accelerate launch` of this, and refuses beforehand, in one line each, what
cannot work. In a process that a launcher has started already (`torchrun --no-python distca train ...`) the script runs
at once.

    accelerate launch -m distca_hf.run --attach -m trl.scripts.sft --model_name_or_path MODEL --dataset_name DATASET

Example: torchrun --nproc-per-node 8 -m distca_hf.run --recipe llama3_8b_128k train.py --dataset DATASET
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import distca_hf
from distca_hf.errors import ConfigError, DistCAError, printable
from distca_hf.launched import launched_local_rank
from distca_hf.recipe import EXAMPLES, RECIPES, Recipe, check_module, prepare_process, run_module, run_script
from distca_hf.servers.supervisor import supervise
from distca_hf.telemetry import get_logger, leave_for_launcher


log = get_logger(__name__)

USAGE = (
    "usage: python -m distca_hf.run [--recipe RECIPE] [--attach] [--attention-servers N] [-m MODULE | SCRIPT] "
    "[ARGUMENTS]"
)
OPTION = "--recipe"
ATTACH_OPTION, MODULE_OPTION = "--attach", "-m"
SERVERS_OPTION = "--attention-servers"
# Parts of the line that `distca train` starts: before the configuration of Accelerate, and before the recipe.
LAUNCHER = ("accelerate", "launch")
MODULE = ("-m", "distca_hf.run")


class Command(NamedTuple):
    """A parsed command line."""

    recipe: Recipe
    program: Path | str  # the script's file, or the name of a module
    arguments: list[str]  # the line's arguments for the program, which follow the recipe's
    attaches: bool  # whether every Trainer of the program is attached


def main(arguments: Sequence[str]) -> None:
    """Runs the script. If the command line or the recipe is wrong, the process ends with status 2 and one line."""
    if list(arguments[:1]) in (["--help"], ["-h"]):
        sys.stdout.write(f"{__doc__}\n{USAGE}\n")
        return
    try:
        recipe, program, rest, attaches = read_command(arguments)
        role = recipe.role()
        prepare_process(recipe, role)
        if isinstance(program, str):
            check_module(program)
    except ConfigError as error:
        leave_for_launcher(f"distca_hf.run: {error}")
        if launched_local_rank() == 0:  # all processes of a node have the same arguments and files
            sys.stderr.write(printable(f"distca_hf.run: {error}\n{USAGE}\n"))
        sys.exit(2)
    if role is not None and role.is_server:
        sys.exit(supervise(role.number, role.num_trainers, role.num_servers))
    if attaches:
        distca_hf.attach_every_trainer()
    try:
        if isinstance(program, Path):
            run_script(program, [*recipe.script, *rest])
        else:
            run_module(program, [*recipe.script, *rest])
        if attaches:
            _tell_of_no_trainer()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            leave_for_launcher(ended.code)
        raise
    except Exception:
        from distca_hf.comm.rollcall import show_errors_once  # imports torch

        show_errors_once()  # also leaves errors for the launcher, even before the script makes a plugin
        raise
    finally:
        if role is not None:
            from distca_hf.servers.job_store import note_end  # imports torch

            with suppress(DistCAError):  # the launcher is gone, and has ended the servers
                note_end(role.number)  # makes the servers of this trainer end, too


def _tell_of_no_trainer() -> None:
    """Logs a line if the program has ended and none of its Trainers has trained."""
    patch = sys.modules.get("distca_hf.patches.every_trainer")  # None if nothing imported Trainer
    if patch is None or not patch.trained_classes():
        log.info(
            "%s: no Trainer has trained, so nothing was attached; your own loop calls distca_hf.enable(model, plugin)",
            ATTACH_OPTION,
        )


def read_command(arguments: Sequence[str]) -> Command:
    """Parses a command line. Raises ConfigError if the line or the recipe is wrong, or there is no such script."""
    servers, others = _take(arguments, SERVERS_OPTION)
    attaches, others = ATTACH_OPTION in others, [word for word in others if word != ATTACH_OPTION]
    name, script, rest = parse_names(others)
    recipe = Recipe() if name is None else Recipe.read(RECIPES.find(name))
    if servers is not None:
        recipe = replace(recipe, plugin=recipe.plugin | {"attention_servers": servers})
    if script == MODULE_OPTION:
        if not rest or rest[0].startswith("-"):
            raise ConfigError(f"expected a module after {MODULE_OPTION}, got {rest[0] if rest else 'none'}")
        return Command(recipe, rest[0], rest[1:], attaches)
    return Command(recipe, find_script(recipe, script, str(name)), rest, attaches)


def find_script(recipe: Recipe, script: str | None, name: str) -> Path:
    """Returns the script to run: the given one, or the recipe's own. Raises ConfigError if no script is named, or
    there is no such file."""
    wanted = script or recipe.launch.get("script")
    if wanted is None:
        raise ConfigError(f"expected a script: {name} names none in its section launch; write one after the recipe")
    return EXAMPLES.find(wanted)


def parse_names(arguments: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """Returns the recipe and the script, or `-m` before a module, if they are given; and the arguments that follow.
    Raises ConfigError if neither is given."""
    recipe, rest = _take(arguments, OPTION)
    script = rest.pop(0) if rest and (rest[0] == MODULE_OPTION or not rest[0].startswith("-")) else None
    if recipe is None and script is None:
        raise ConfigError(f"expected {OPTION} or a script, got neither")
    return recipe, script, rest


def _take(arguments: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """Returns the value of an option if it is given, and the other arguments."""
    rest = list(arguments)
    values = []
    for at in reversed(range(len(rest))):
        if rest[at] == option:
            if at + 1 == len(rest):
                raise ConfigError(f"expected a value after {option}, got none")
            values.append(rest[at + 1])
            del rest[at : at + 2]
        elif rest[at].startswith(f"{option}="):
            values.append(rest.pop(at).removeprefix(f"{option}="))
    if len(values) > 1:
        raise ConfigError(f"expected one {option}, got {len(values)}")
    return (values[0] if values else None), rest


def launch_line(
    recipe: str, script: str | None, accelerate: str | None, arguments: Sequence[str], launcher: Sequence[str]
) -> list[str]:
    """Returns the command that trains from a recipe. Raises ConfigError if the recipe, the script or the configuration
    is missing or wrong.

    Args:
        recipe: file, or name of a shipped recipe.
        script: file, or name of a shipped example; None: the recipe's own.
        accelerate: configuration of Accelerate, file or name of a shipped one; None: the recipe's own.
        arguments: arguments of the script, after the recipe's.
        launcher: further arguments of `accelerate launch`.
    """
    if recipe.startswith("-"):
        raise ConfigError(f"expected a recipe before {recipe}: distca train RECIPE {recipe} ...")
    path = RECIPES.find(recipe)
    read = Recipe.read(path)
    found = find_script(read, script, recipe)
    wanted = accelerate or read.launch.get("accelerate")
    if wanted is None:
        known = ", ".join(name for name in RECIPES.files() if name.startswith("accelerate/"))
        raise ConfigError(
            f"{path} names no configuration of Accelerate; give one with --accelerate: {known}, or a file"
        )
    start = [*LAUNCHER, "--config_file", str(RECIPES.find(wanted)), *launcher, *MODULE]
    return [*start, "--recipe", str(path), str(found), *arguments]


def launch(line: Sequence[str]) -> None:
    """Replaces this process by the launcher of `line`, under the same Python."""
    sys.stdout.flush()
    module = ".".join((LAUNCHER[0], "commands", LAUNCHER[1]))
    os.execv(sys.executable, [sys.executable, "-m", module, *line[len(LAUNCHER) :]])


if __name__ == "__main__":
    main(sys.argv[1:])
