"""`python -m distca_hf.run --recipe RECIPE [SCRIPT] [ARGUMENTS]`: runs a script in a process prepared from a recipe.

Meant for `accelerate launch -m distca_hf.run ...` and `torchrun -m distca_hf.run ...`; `distca train` starts both.
RECIPE is a YAML file or the name of a shipped recipe (`distca recipes` lists them). SCRIPT is a file or the name of a
shipped example (`distca examples`). Without it the recipe's own script runs. `--recipe` may also come after the
script; all other arguments are the script's.

Example: torchrun --nproc-per-node 8 -m distca_hf.run --recipe llama3_8b_128k train.py --dataset DATASET
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from distca_hf.config import launched_local_rank
from distca_hf.errors import ConfigError
from distca_hf.launcher import leave_for_launcher
from distca_hf.recipe import Recipe, run_script
from distca_hf.shipped import EXAMPLES, RECIPES


USAGE = "usage: python -m distca_hf.run --recipe RECIPE [SCRIPT] [ARGUMENTS]"
OPTION = "--recipe"


def main(arguments: Sequence[str]) -> None:
    """Runs the script. If the command line or the recipe is wrong, the process ends with status 2 and one line."""
    if list(arguments[:1]) in (["--help"], ["-h"]):
        sys.stdout.write(f"{__doc__}\n{USAGE}\n")
        return
    try:
        name, script, rest = _parse(arguments)
        recipe = Recipe.read(RECIPES.find(name))
        path = find_script(recipe, script, name)
    except ConfigError as error:
        leave_for_launcher(f"distca_hf.run: {error}")
        if launched_local_rank() == 0:  # all processes of a node have the same arguments and files
            sys.stderr.write(f"distca_hf.run: {error}\n{USAGE}\n")
        sys.exit(2)
    run_script(recipe, path, rest)


def find_script(recipe: Recipe, script: str | None, name: str) -> Path:
    """Returns the script to run: the given one, or the recipe's own.

    Args:
        recipe: the recipe.
        script: file, or name of a shipped example; None: the recipe's own.
        name: name of the recipe, for errors.

    Raises:
        ConfigError: no script is named, or there is no such file.
    """
    wanted = script or recipe.launch.get("script")
    if wanted is None:
        raise ConfigError(f"expected a script: {name} names none in its section launch; write one behind the recipe")
    return EXAMPLES.find(wanted)


def _parse(arguments: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """Returns the recipe, the script if one is given, and the script's arguments."""
    rest = list(arguments)
    recipes = []
    for at in reversed(range(len(rest))):
        if rest[at] == OPTION and at + 1 < len(rest):
            recipes.append(rest[at + 1])
            del rest[at : at + 2]
        elif rest[at].startswith(f"{OPTION}="):
            recipes.append(rest.pop(at).removeprefix(f"{OPTION}="))
    if len(recipes) != 1:
        raise ConfigError(f"expected one {OPTION}, got {len(recipes)}")
    if not rest or rest[0].startswith("-"):
        return recipes[0], None, rest
    return recipes[0], rest[0], rest[1:]


if __name__ == "__main__":
    main(sys.argv[1:])
