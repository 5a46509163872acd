"""Recipe: prepares a process, in which the user's script then runs unchanged.

A recipe is a YAML file with up to four sections:

    launch:       `script` and `accelerate`, the configuration that starts it: files, or names of shipped ones
    environment:  variables to set before torch and Transformers are imported
    plugin:       settings of `DistCAPlugin`; the script's `DistCAPlugin()` finds them
    script:       arguments of the script; arguments on the command line win

Recipes, Slurm scripts, examples and samples of lengths come with the package, and are found by name. In a checkout
their folders are next to the package, in an installation inside it (`setup.cfg`).

Nothing here imports torch: the environment must be set before libraries are imported.
"""

import importlib.util
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distca_hf.config import OF_RECIPE, DistCAConfig, variable_of
from distca_hf.errors import ConfigError, did_you_mean
from distca_hf.launched import JOB_SECRET, LaunchedProcess, Role, job_secret, launched_process, read_servers
from distca_hf.settings import check_mapping


PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Shipped:
    """One kind of shipped files."""

    kind: str
    place: str
    endings: tuple[str, ...]  # file name endings; a file is found by its name without the ending

    def folder(self) -> Path:
        """Returns the folder of the files: inside the installed package, or next to it in a checkout. Raises
        ConfigError if the folder does not exist."""
        for folder in (PACKAGE / self.place, PACKAGE.parent / self.place):
            if folder.is_dir():
                return folder
        raise ConfigError(f"no folder {PACKAGE / self.place}; install distca_hf again")

    def files(self) -> dict[str, Path]:
        """Returns all files by name, such as `train/quickstart`."""
        folder = self.folder()
        return {
            path.relative_to(folder).as_posix().removesuffix(ending): path
            for ending in self.endings
            for path in sorted(folder.rglob(f"*{ending}"))
        }

    def find(self, name: str) -> Path:
        """Returns the file at the path `name`, or the shipped file of that name, with or without its folder. Raises
        ConfigError if there is no such file, or several shipped files have that name."""
        if Path(name).exists() and not Path(name).is_dir():
            return Path(name)
        files = self.files()
        matches = [known for known in files if name in (known, known.split("/")[-1])]
        if len(matches) > 1:
            raise ConfigError(f"{name!r} may be {' or '.join(matches)}; write the folder, too")
        if not matches:
            hint = did_you_mean(name, [*files, *(known.split("/")[-1] for known in files)])
            raise ConfigError(
                f"{name!r} is neither a file nor a shipped {self.kind}.{hint} Shipped are {', '.join(files)}"
            )
        return files[matches[0]]


RECIPES = Shipped("recipe", "recipes", (".yaml", ".sbatch"))
EXAMPLES = Shipped("example", "examples", (".py",))
LENGTHS = Shipped("sample of lengths", "examples/lengths", (".json.gz",))


# Files of other programs: their keys, what they are, and what to do. The first row with a key of the file counts.
OF_ACCELERATE, OWN_RECIPE = "a configuration of Accelerate", "a recipe of distca train"
_MOVE_VALUES = "write a recipe with its values (docs/quickstart.md, Recipes of other programs)"
FOREIGN = (
    (
        "compute_environment distributed_type num_processes fsdp_config deepspeed_config",
        OF_ACCELERATE,
        "give it to distca train RECIPE --accelerate, or to accelerate launch --config_file (docs/trainer.md, FSDP)",
    ),
    (
        "zero_optimization train_batch_size train_micro_batch_size_per_gpu",
        "a configuration of DeepSpeed",
        "give it to the script, --deepspeed FILE (docs/trainer.md, DeepSpeed ZeRO)",
    ),
    ("base_model sequence_len micro_batch_size", "a recipe of axolotl", _MOVE_VALUES),
    ("finetuning_type cutoff_len template stage", "a recipe of LLaMA-Factory", _MOVE_VALUES),
    ("model_name_or_path dataset_name", "a configuration of TRL", _MOVE_VALUES),
    (
        "model_type architectures",
        "the configuration of a model",
        "give its folder to --model (docs/quickstart.md, From a recipe)",
    ),
    ("text messages input_ids", "a file of documents", "give it to --dataset (docs/quickstart.md, From a recipe)"),
    (
        "output_dir learning_rate max_steps num_train_epochs per_device_train_batch_size",
        "a file of arguments for Trainer",
        "indent them in a section script (docs/quickstart.md, Recipes of other programs)",
    ),
    ("launch plugin script", OWN_RECIPE, "give it as RECIPE"),
)
# What files with other endings than YAML's probably are.
FOREIGN_ENDINGS = {
    ".py": "a script: give it to --script",
    ".sbatch": "a script for Slurm: call it with sbatch",
    **dict.fromkeys((".jsonl", ".parquet", ".csv", ".txt"), "a file of documents: give it to --dataset"),
}


def foreign_format(path: str | Path, content: Mapping[str, object], expected: str) -> str:
    """Returns what a mapping in a file is, and what to do with it, if it is known but not expected; else empty."""
    for keys, what, do in FOREIGN:
        if what != expected and content.keys() & set(keys.split()):
            return f"{path} is {what}: {do}"
    return ""


SECTIONS = ("launch", "environment", "plugin", "script")
# Keys of the section `launch`.
LAUNCHED = ("script", "accelerate")
# What arguments, values and names of variables cannot hold: NUL, and halves of characters. Names cannot be empty.
NO_TEXT, NO_NAME = re.compile("[\0\ud800-\udfff]"), re.compile("[=\0\ud800-\udfff]|^$")


@dataclass(frozen=True)
class Recipe:
    """Sections of a recipe, after all checks."""

    launch: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    plugin: dict[str, object] = field(default_factory=dict)
    script: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Reads a recipe. Raises ConfigError if a section or setting is unknown, or a value cannot be passed on; names
        file and key."""
        if path.suffix in FOREIGN_ENDINGS:
            raise ConfigError(
                f"{path} is not a recipe, but {FOREIGN_ENDINGS[path.suffix]} (docs/quickstart.md, From a recipe)"
            )
        sections = read_yaml(path)
        unknown = sorted(set(sections) - set(SECTIONS), key=str)
        if unknown and (foreign := foreign_format(path, sections, OWN_RECIPE)):
            raise ConfigError(foreign)
        if unknown:
            raise ConfigError(
                f"{path}: unknown section {unknown[0]!r}.{did_you_mean(unknown[0], SECTIONS)} Sections are "
                f"{', '.join(SECTIONS)}"
            )
        for name, section in sections.items():
            if section is not None and not isinstance(section, Mapping):
                raise ConfigError(f"{path}: section {name!r} must map names to values, not {type(section).__name__}")
        for section in ("launch", "environment", "script"):
            for name, value in (sections.get(section) or {}).items():
                if not isinstance(name, str):  # YAML converts `on`, `yes` and numbers
                    raise ConfigError(
                        f"{path}: {section}: name {name} is {type(name).__name__}, no text; write it in quotes"
                    )
                if value is None:
                    raise ConfigError(f"{path}: {section} {name!r} has no value; remove it, or write the value")
        environment = {name: _text(value) for name, value in (sections.get("environment") or {}).items()}
        plugin = check_mapping(DistCAConfig, sections.get("plugin") or {}, str(path))
        launch, arguments = {}, _arguments(sections.get("script") or {})
        for name, value in (sections.get("launch") or {}).items():
            if name not in LAUNCHED:
                hint = f"{did_you_mean(name, LAUNCHED)} Keys are {', '.join(LAUNCHED)}"
                raise ConfigError(f"{path}: unknown key {name!r} in launch.{hint}")
            launch[name] = str(value)
        texts = [*launch.values(), *environment.values(), *map(str, plugin.values()), *arguments]
        _check_texts(environment, NO_NAME, f"{path}: environment: ", "the name of a variable")
        _check_texts(texts, NO_TEXT, f"{path}: ", "an argument or the value of a variable")
        return cls(launch, environment, plugin, arguments)

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Sets the recipe's environment variables, except those that already have a value. Its settings go into
        another variable, from which `DistCAConfig()` reads them."""
        for name, value in self.environment.items():
            environment.setdefault(name, value)
        if self.plugin:
            environment[OF_RECIPE] = json.dumps(self.plugin)

    def role(self, process: Callable[[], LaunchedProcess] = launched_process) -> Role | None:
        """Returns the role of a process; None without attention servers, when all processes train. Raises ConfigError
        if there are servers, and the processes cannot be divided accordingly."""
        name = "attention_servers"
        of_environment = {**self.environment, **os.environ}.get(variable_of(name), "0")
        servers = str(self.plugin.get(name, of_environment))
        return process().role(servers) if any(read_servers(servers)) else None


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; YAML would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file. Raises ConfigError if the file cannot be read as a YAML mapping, or has a key
    twice."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _EachKeyOnce)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not {type(content).__name__}")
    return content


def prepare_process(recipe: Recipe, role: Role | None) -> None:
    """Sets the environment of this process from a recipe, and its numbers by role. Call before anything reads them.
    Raises ConfigError if there are attention servers, and the processes of the job share no secret."""
    recipe.prepare(os.environ)
    if role is not None:
        os.environ.update(role.environment() | {JOB_SECRET: job_secret()})


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables until the block ends, and then restores them."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Runs a script as `python script arguments` would. Raises ConfigError if there is no such script."""
    if not script.is_file():
        raise ConfigError(f"no script at {script}")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def check_module(module: str) -> None:
    """Checks that there is a module of a name. Raises ConfigError if there is none."""
    try:
        known = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # its own package lacks another one
        known = False
    if not known:
        raise ConfigError(f"no module {module}: install its package, or give a script without -m")


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Runs a module as `python -m module arguments` would."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _check_texts(texts: Iterable[str], impossible: re.Pattern[str], where: str, use: str) -> None:
    """Refuses texts that no operating system accepts for their use."""
    for text in filter(impossible.search, texts):
        raise ConfigError(f"{where}{text!r} cannot be {use}; write another")


def _arguments(section: Mapping[str, object]) -> list[str]:
    """Returns `--name value` for each `name: value`, with lists as several values and mappings as JSON."""
    arguments: list[str] = []
    for name, value in section.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *(_text(item) for item in values)]
    return arguments


def _text(value: object) -> str:
    return json.dumps(value, default=str) if isinstance(value, Mapping) else str(value)
