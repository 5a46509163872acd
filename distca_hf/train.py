"""`distca train RECIPE [ARGUMENTS]`: one `accelerate launch` of a recipe's script.

In a process that a launcher has started already (`torchrun --no-python distca train ...`) the script runs at once.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from distca_hf import run
from distca_hf.config import read_yaml
from distca_hf.errors import ConfigError
from distca_hf.recipe import Recipe
from distca_hf.shipped import RECIPES


LAUNCHER = ("accelerate", "launch")
MODULE = ("-m", "distca_hf.run")


def launch_line(
    recipe: str, script: str | None, accelerate: str | None, arguments: Sequence[str], launcher: Sequence[str]
) -> list[str]:
    """Returns the command that trains from a recipe.

    Args:
        recipe: file, or name of a shipped recipe.
        script: file, or name of a shipped example; None: the recipe's own.
        accelerate: configuration of Accelerate, file or name of a shipped one; None: the recipe's own.
        arguments: arguments of the script, after the recipe's.
        launcher: further arguments of `accelerate launch`.

    Raises:
        ConfigError: the recipe, the script or the configuration is missing or wrong.
    """
    path = RECIPES.find(recipe)
    read = Recipe.read(path)
    found = run.find_script(read, script, recipe)
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


def train_here(recipe: str, script: str | None, arguments: Sequence[str]) -> None:
    """Runs the script in this process, which a launcher started as one of its ranks."""
    run.main(["--recipe", recipe, *([script] if script else []), *arguments])


def check_gpus(line: Sequence[str]) -> None:
    """Refuses a configuration for more GPUs than this machine has: Accelerate would start ranks without a GPU.

    Arguments of the launcher after the configuration may change its numbers. With such arguments nothing is checked.

    Raises:
        ConfigError: there are too few GPUs; names both numbers.
    """
    configuration, behind = line[len(LAUNCHER) + 1 : len(LAUNCHER) + 3]
    content = read_yaml(configuration)
    if content.get("use_cpu") or behind != MODULE[0]:
        return
    import torch

    processes = _number(content, "num_processes", configuration) // _number(content, "num_machines", configuration)
    gpus = torch.cuda.device_count()
    if gpus < processes:
        other = (
            f"-- --num_processes {gpus} at the end of the line" if gpus else "--accelerate cpu_2proc --use_cpu true"
        )
        raise ConfigError(
            f"{configuration} starts {processes} processes on each machine, and this one has {gpus} GPUs; give {other}"
        )


def _number(content: Mapping[str, object], name: str, where: str) -> int:
    """Returns a number of a configuration; 1 if it is missing.

    Raises:
        ConfigError: the value is no whole number above 0.
    """
    value = content.get(name)
    if value is None:
        return 1
    if not str(value).isdecimal() or not int(str(value)):
        raise ConfigError(f"{where}: {name} is {value!r}; write a whole number, at least 1")
    return int(str(value))
