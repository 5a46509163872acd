"""`python -m distca_hf.run --recipe RECIPE SCRIPT [ARGUMENTS]`: prepares the process from a recipe and runs a script.

Meant for `accelerate launch -m distca_hf.run ...` and `torchrun -m distca_hf.run ...`. RECIPE is a YAML file or the
name of a shipped recipe (`distca recipes` lists them). `--recipe` may also come after the script; all other arguments
after the script are the script's.

Example: torchrun --nproc-per-node 8 -m distca_hf.run --recipe llama3_8b_128k train.py --dataset DATASET
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from distca_hf.errors import ConfigError
from distca_hf.integrations.launch import Recipe, find_recipe, run_script


USAGE = "usage: python -m distca_hf.run --recipe RECIPE SCRIPT [ARGUMENTS]"
OPTION = "--recipe"


def main(arguments: Sequence[str]) -> None:
    """Runs the script; ends the process with status 2 and one line if the command line or the recipe is wrong."""
    if list(arguments[:1]) in (["--help"], ["-h"]):
        sys.stdout.write(f"{__doc__}\n{USAGE}\n")
        return
    try:
        name, script, rest = _parse(arguments)
        recipe = Recipe.read(find_recipe(name))
        if not script.is_file():
            raise ConfigError(f"no script at {script}")
    except ConfigError as error:
        sys.stderr.write(f"distca_hf.run: {error}\n{USAGE}\n")
        sys.exit(2)
    run_script(recipe, script, rest)


def _parse(arguments: Sequence[str]) -> tuple[str, Path, list[str]]:
    """Returns recipe, script and the script's arguments."""
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
        raise ConfigError(f"expected a script, got {rest[0] if rest else 'nothing'}")
    return recipes[0], Path(rest[0]), rest[1:]


if __name__ == "__main__":
    main(sys.argv[1:])
