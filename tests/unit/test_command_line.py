"""`distca` as a newcomer meets it: version, completion, and help with examples that work."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from distca_hf import run
from distca_hf.cli import app
from distca_hf.recipe import RECIPES
from distca_hf.version import __version__
from support.commands import SCRIPTS, run_command
from support.lines import run_line


COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]

SIZES = ("plan", "check", "simulate")  # commands that ask for the size of a training


def help_of(*command: str) -> str:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    return shown.output


def example_of(*command: str) -> str:
    (example,) = re.findall(r"Example: (.*)", help_of(*command))
    return example.strip()


run_once = cache(run_line)  # several commands have the same example


def test_what_several_commands_ask_for_has_one_name_in_all() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {word for one in command.params for word in one.opts} for name, command in commands.items()}

    assert all({"--gpus", "--tokens-per-rank", "--checkpointing"} <= options[name] for name in SIZES)
    assert all({"--model", "--micro-steps", "--ranks-per-node"} <= options[name] for name in ("plan", "simulate"))
    assert all("--output" in options[name] for name in ("report", "profile"))
    assert not {"--ranks", "--accumulation", "--model-config", "--out"} & set().union(*options.values())


def test_version_is_shown_and_ends_with_0() -> None:
    assert run_command([SCRIPTS / "distca", "--version"]) == f"distca_hf {__version__}\n"


def test_package_runs_as_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["distca_hf", "recipes", "cpu_2proc"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("distca_hf", run_name="__main__", alter_sys=True)

    assert ended.value.code in (None, 0)
    assert capsys.readouterr().out == f"{RECIPES.find('cpu_2proc')}\n"


def test_shell_completes_commands() -> None:
    asked = {"_DISTCA_COMPLETE": "complete_bash", "COMP_WORDS": "distca re", "COMP_CWORD": "1"}

    assert run_command([SCRIPTS / "distca"], **asked).split() == ["recipes", "report"]
    assert "--install-completion" in help_of()


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_every_help_has_an_example_that_works(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `distca` commands of each example run, each on what the one before printed; what else a shell does around
    them is cut off. Few steps are planned and simulated."""
    for name, most in {"answer.MOST_STEPS": 1, "epoch.MOST_PLANNED_RANKS": 64, "given.MOST_PLANNED_RANKS": 64}.items():
        monkeypatch.setattr(f"distca_hf.analysis.{name}", most)
    (tmp_path / "lengths.json").write_text(json.dumps([3000, 12000, 90000, 500] * 40))
    monkeypatch.chdir(tmp_path)
    example = example_of(*command)
    found = re.search(r"\bdistca [^)>]*", example)
    assert found, example
    assert run_once(found[0]).strip()
    assert not command or f"distca {command[0]}" in example


def test_help_of_the_launcher_has_an_example_of_a_shipped_recipe() -> None:
    (example,) = re.findall(r"^Example: (.*)", str(run.__doc__), re.MULTILINE)
    _, _, arguments = example.partition("-m distca_hf.run ")
    recipe, script, rest = run.parse_names(shlex.split(arguments))

    assert f"train/{recipe}" in RECIPES.files()
    assert (script, rest) == ("train.py", ["--dataset", "DATASET"])


def test_help_fits_a_terminal_of_80_columns() -> None:
    """Examples are cut nowhere but between words."""
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
        assert max(map(len, shown.splitlines())) <= 80
        assert " ".join(example_of(command).split()) in " ".join(shown.split())


def test_option_after_the_command_is_refused_in_one_line() -> None:
    done = subprocess.run([SCRIPTS / "distca", "env", "--version"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "(see distca env --help)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_closed_pipe_ends_a_command_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [SCRIPTS / "distca", "recipes"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)

    assert (done.returncode, done.stderr) == (1, "")


def test_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [SCRIPTS / "distca", "recipes"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.splitlines() == ["distca: [Errno 28] No space left on device"]
