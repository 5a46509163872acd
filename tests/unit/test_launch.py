"""Recipes, and how they reach a script: environment, settings and arguments. The `distca` command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from distca_hf import run
from distca_hf.cli import app
from distca_hf.errors import ConfigError
from distca_hf.kernels.registry import KERNELS
from distca_hf.recipe import RECIPES, Recipe


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a recipe of the given sections."""

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(sections, sort_keys=False))
        return path

    return write


def arguments_of(write: Write, **script: Any) -> list[str]:
    return Recipe.read(write(script=script)).script


def test_recipe_holds_environment_settings_and_arguments(write: Write) -> None:
    recipe = Recipe.read(
        write(
            environment={"SOME_FLAG": True, "SOME_NUMBER": 3},
            plugin={"tokens_per_rank": 64, "deterministic": True},
            script={"output_dir": "out", "steps": 5},
        )
    )

    assert recipe.environment == {"SOME_FLAG": "True", "SOME_NUMBER": "3"}
    assert recipe.plugin == {"tokens_per_rank": 64, "deterministic": True}
    assert recipe.script == ["--output_dir", "out", "--steps", "5"]


@pytest.mark.parametrize("text", ["environment:\nplugin:\nscript:\n", "plugin: {}\n", "{}\n"])
def test_sections_may_be_empty_or_missing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)

    assert Recipe.read(path) == Recipe()


BROKEN: dict[str, tuple[str, list[str]]] = {
    "NUL in a variable": ('environment: {A: "x\\0"}', ["'x\\x00' cannot be an argument or the value of a variable"]),
    "NUL in a setting": ('plugin: {report_folder: "x\\0"}', ["'x\\x00' cannot be"]),
    "half a character": ('launch: {script: "\\ud800"}', ["'\\ud800' cannot be"]),
    "a variable without a name": ('environment: {"": "x"}', ["environment: '' cannot be the name of a variable"]),
    "an equals sign in a name": ('environment: {"A=B": "x"}', ["environment: 'A=B' cannot be the name"]),
    "too deep": ("[" * 5000, ["cannot read", "recursion"]),
    "unknown section": (
        "plugins: {}",
        ["unknown section 'plugins'. Did you mean 'plugin'?", "launch, environment, plugin, script"],
    ),
    "unknown key of launch": (
        "launch: {scripts: a.py}",
        ["'scripts' in launch. Did you mean 'script'?", "accelerate"],
    ),
    "null key of launch": ("launch: {script: }", ["'script' has no value"]),
    "null variable": ("environment: {CUDA_VISIBLE_DEVICES: }", ["'CUDA_VISIBLE_DEVICES' has no value"]),
    "argument that YAML reads as yes": ("script: {on: 5}", ["script: name True is bool, no text", "in quotes"]),
    "sections that are no texts": ("{5: {}, plugins: {}}", ["unknown section 5"]),
    "section that is a list": ("script: [--steps, 5]", ["section 'script' must map names to values, not list"]),
    "list instead of a mapping": ("- plugin", ["must hold a mapping", "not list"]),
    "nothing": ("", ["must hold a mapping", "not NoneType"]),
    "no YAML": ("plugin: {", ["cannot read"]),
    "configuration of Accelerate": (
        "compute_environment: LOCAL_MACHINE\nnum_processes: 2\nuse_cpu: true\n",
        ["is a configuration of Accelerate: ", "launch --config_file", "distca train RECIPE --accelerate"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_recipe_is_refused_with_file_and_key(tmp_path: Path, name: str) -> None:
    text, told = BROKEN[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Recipe.read(path)

    assert [part for part in (str(path), *told) if part not in str(caught.value)] == []


@pytest.mark.parametrize("name", [name for name in RECIPES.files() if name.startswith("accelerate/")])
def test_shipped_configuration_of_accelerate_is_no_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(["--recipe", name, "script.py"])

    assert caught.value.code == 2
    assert "or to accelerate launch --config_file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text with spaces", ["text with spaces"]),
        (3, ["3"]),
        (1.0e-5, ["1e-05"]),
        (True, ["True"]),
        (False, ["False"]),
        (0, ["0"]),
        ("", [""]),
        (["a", 1, True], ["a", "1", "True"]),
        ({"use_reentrant": False, "depth": None}, ['{"use_reentrant": false, "depth": null}']),
        ([{"a": 1}, {"b": 2}], ['{"a": 1}', '{"b": 2}']),
        ({"until": date(2026, 1, 31)}, ['{"until": "2026-01-31"}']),
    ],
)
def test_script_argument_is_written_as_a_command_line_has_it(write: Write, value: Any, expected: list[str]) -> None:
    assert arguments_of(write, name=value) == ["--name", *expected]


def test_arguments_can_be_read_back_by_transformers(write: Write, tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    arguments = arguments_of(
        write,
        output_dir=str(tmp_path),
        bf16=False,
        use_cpu=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=["none"],
        learning_rate=1.0e-5,
        max_steps=7,
    )
    (read,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)

    assert (read.bf16, read.use_cpu, read.max_steps, read.learning_rate) == (False, True, 7, 1.0e-5)
    assert read.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_variables_that_are_set_keep_their_value_but_settings_of_the_recipe_win(write: Write) -> None:
    recipe = Recipe.read(
        write(environment={"SET": "recipe", "FREE": "recipe"}, plugin={"tokens_per_rank": 5, "deterministic": True})
    )
    environment = {"SET": "shell", "DISTCA_TOKENS_PER_RANK": "1", "DISTCA_PREFETCH": "9", "OTHER": "shell"}
    recipe.prepare(environment)

    assert environment == {
        "SET": "shell",
        "FREE": "recipe",
        "OTHER": "shell",
        "DISTCA_TOKENS_PER_RANK": "1",
        "DISTCA_PREFETCH": "9",
        "DISTCA_SETTINGS_OF_RECIPE": '{"tokens_per_rank": 5, "deterministic": true}',
    }


FAILING_SCRIPT = """
import sys
from distca_hf import ConfigError
if "exit" in sys.argv:
    sys.exit(7)
raise ConfigError("mine")
"""
SCRIPT = """
import os, sys
heavy = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
import neighbour
from distca_hf.config import DistCAConfig
if __name__ == "__main__":
    config = DistCAConfig()
    print(sys.argv, heavy, neighbour.__name__, __file__, sys.modules["__main__"].__file__, sep="|")
    print(os.environ["FROM_RECIPE"], os.environ["FROM_SHELL"], config.tokens_per_rank, config.deterministic, sep="|")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script with a module beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def launched(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m distca_hf.run` with the given arguments."""
    command = [sys.executable, "-m", "distca_hf.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | environment)


def test_script_runs_as_if_python_ran_it_with_everything_prepared(write: Write, script: Path, tmp_path: Path) -> None:
    """Arguments of the command line come last, so that they win; heavy packages are not imported yet."""
    recipe = write(
        environment={"FROM_RECIPE": "recipe", "FROM_SHELL": "recipe"},
        plugin={"tokens_per_rank": 77, "deterministic": True},
        script={"steps": 5, "flag": True},
    )
    done = launched("--recipe", str(recipe), "project/script.py", "--steps", "6", cwd=tmp_path, FROM_SHELL="shell")

    assert done.returncode == 0, done.stderr
    path = "project/script.py"
    argv = [path, "--steps", "5", "--flag", "True", "--steps", "6"]
    assert done.stdout.splitlines() == [f"{argv}|[]|neighbour|{path}|{path}", "recipe|shell|77|True"]


def test_a_script_runs_without_a_recipe(script: Path, tmp_path: Path) -> None:
    """With settings of its own: for attention servers nothing else is needed."""
    done = launched("project/script.py", "--attention-servers", "0", cwd=tmp_path, FROM_SHELL="", FROM_RECIPE="")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("['project/script.py']|[]|neighbour|")


@pytest.mark.parametrize("attaches", [True, False])
def test_a_module_runs_as_if_python_ran_it(attaches: bool, write: Write, tmp_path: Path) -> None:
    """Its package, its path and its arguments are as with `python -m`. The flag is not among them, even if it is given
    twice."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(
        "import sys\n"
        "print(sys.argv, __name__, __package__, sys.modules['__main__'].__file__ == __file__, sys.path[0])\n"
        + ("import transformers; print(hasattr(transformers.Trainer.train, '_distca_trained'))\n" * attaches)
    )
    recipe = write(script={"steps": 5})
    flag = ["--attach"] * attaches
    done = launched(*flag, "--recipe", str(recipe), "-m", "package.program", "-m", "x", *flag, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    argv = [str(package / "program.py"), "--steps", "5", "-m", "x"]
    assert done.stdout.splitlines() == [f"{argv} __main__ package True {tmp_path}", *["True"] * attaches]
    assert done.stderr.count("--attach: no Trainer has trained, so nothing was attached") == attaches


@pytest.mark.parametrize(
    "arguments",
    [
        ["--recipe", "R", "S", "--a", "1"],
        ["--recipe=R", "S", "--a", "1"],
        ["S", "--recipe", "R", "--a", "1"],
        ["S", "--a", "1", "--recipe", "R"],
        ["S", "--a", "1", "--recipe=R"],
    ],
)
def test_recipe_is_given_before_or_after_the_script(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(run, "RECIPES", SimpleNamespace(find=seen.append))
    monkeypatch.setattr(run.Recipe, "read", lambda path: Recipe())
    monkeypatch.setattr(run, "run_script", lambda script, rest: seen.extend([script, rest]))
    monkeypatch.setattr(run, "EXAMPLES", SimpleNamespace(find=Path))
    run.main(arguments)

    assert seen == ["R", Path("S"), ["--a", "1"]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected --recipe or a script, got neither"),
        (["script.py"], "'script.py' is neither a file nor a shipped example"),
        (["-m"], "expected a module after -m, got none"),
        (["--attach", "-m", "--lr"], "expected a module after -m, got --lr"),
        (["-m", "no_such_module"], "no module no_such_module: install its package"),
        (["script.py", "--recipe"], "expected a value after --recipe, got none"),
        (["--recipe", "quickstart", "--recipe=quickstart", "script.py"], "expected one --recipe, got 2"),
        (["--recipe", os.devnull], f"{os.devnull} must hold a mapping"),
        (["--recipe", "quickstart", "quickstar"], "'quickstar' is neither a file nor a shipped example. Did you mean"),
        (["--recipe", "no_such_recipe", "script.py"], "'no_such_recipe' is neither a file nor a shipped recipe"),
    ],
)
def test_wrong_command_line_ends_with_status_2_and_says_why(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(arguments)

    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert told in lines[0]
    assert lines[-1].startswith("usage: python -m distca_hf.run [--recipe RECIPE] [--attach] [--attention-servers N] ")


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 2), ("1", 0)])
def test_mistake_is_said_once_on_a_node_and_to_the_launcher(
    local_rank: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        run.main(["--lr", "1"])

    assert len(capsys.readouterr().err.splitlines()) == lines
    assert "expected --recipe or a script, got neither" in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize(
    ("end", "words"),
    [("raise OSError('no model owner/nosuch')", "OSError: no model owner/nosuch"), ("raise SystemExit('no')", "no")],
)
def test_what_a_script_ends_with_before_it_has_a_plugin_is_left_for_the_launcher(
    end: str, words: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(end)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises((OSError, SystemExit)) as ended:
        run.main([str(script)])
    if ended.type is OSError:
        sys.excepthook(ended.type, ended.value, ended.tb)

    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == words


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_shows_how_to_call_it_and_ends_with_0(option: str, tmp_path: Path) -> None:
    done = launched(option, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == run.USAGE
    assert "accelerate launch -m distca_hf.run" in done.stdout


def test_help_behind_the_script_is_the_scripts(write: Write, script: Path) -> None:
    script.write_text("import sys; print(sys.argv[1:])")
    done = launched("--recipe", str(write()), str(script), "--help", cwd=script.parent)

    assert (done.returncode, done.stdout) == (0, "['--help']\n")


def test_error_of_the_script_is_its_own(write: Write, script: Path) -> None:
    script.write_text(FAILING_SCRIPT)
    failed, left = (launched("--recipe", str(write()), str(script), last, cwd=script.parent) for last in ("", "exit"))

    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert "ConfigError: mine" in failed.stderr
    assert left.returncode == 7


def test_distca_env_shows_versions_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = CliRunner().invoke(app, ["env"])

    assert shown.exit_code == 0, shown.output
    assert all(version(package) in shown.output for package in ("torch", "transformers", "accelerate"))
    assert all(kernel in shown.output for kernel in KERNELS)
    assert "devices: " in shown.output
    assert "available" in shown.output
    assert "installed, needs a GPU" in shown.output


def test_distca_env_shows_gpus_and_the_libraries_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30, major=9, minor=0)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    shown = CliRunner().invoke(app, ["env"]).output

    assert "devices: 2 GPUs" in shown
    assert "GPU 1: NVIDIA H200, 141 GiB, compute capability 9.0" in shown
    assert "NCCL 2.27.5" in shown
