"""`distca train`: the line it launches, what it refuses, and that it runs the script where a launcher called it."""

import os
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from distca_hf import run
from distca_hf.cli import app
from distca_hf.recipe import EXAMPLES, RECIPES


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Programs that this process would have become; it runs under no launcher."""
    programs: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: programs.append(words))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return programs


def train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


def line_of(*arguments: str) -> list[str]:
    shown = train(*arguments, "--dry-run")
    assert shown.exit_code == 0, shown.output
    return shlex.split(shown.output)


def test_line_has_script_and_configuration_of_the_recipe() -> None:
    assert line_of("llama3_8b_128k", "--dataset", "my texts.jsonl") == [
        *("accelerate", "launch", "--config_file", str(RECIPES.find("fsdp2_8gpu")), "-m", "distca_hf.run", "--recipe"),
        *(str(RECIPES.find("llama3_8b_128k")), str(EXAMPLES.find("train_causal_lm")), "--dataset", "my texts.jsonl"),
    ]


def test_options_win_over_the_recipe_and_dashes_lead_to_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    options = ["--script", str(script), "--accelerate", "cpu_2proc"]
    line = shlex.split(train("quickstart", "--steps", "3", *options, "--dry-run", "--", "--num_processes", "3").output)

    assert line[2:6] == ["--config_file", str(RECIPES.find("cpu_2proc")), "--num_processes", "3"]
    assert line[-3:] == [str(script), "--steps", "3"]


def test_launcher_is_the_one_of_this_python(launched: list[list[str]]) -> None:
    printed = train("quickstart", "--steps", "3").output
    (words,) = launched

    assert words[1:3] == ["-m", "accelerate.commands.launch"]
    assert shlex.split(printed) == ["accelerate", "launch", *words[3:]]


def test_launched_process_runs_the_script(launched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(run, "prepare_process", lambda recipe, role: seen.append(role))
    monkeypatch.setattr(run, "run_script", lambda script, rest: seen.extend([script, rest[-2:]]))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    ran = train("quickstart", "--steps", "3")

    assert ran.exit_code == 0, ran.output
    assert (seen, launched) == ([None, EXAMPLES.find("quickstart"), ["--steps", "3"]], [])
    assert line_of("quickstart")[:2] == ["accelerate", "launch"], "a dry run trains nowhere"


def test_number_of_a_node_is_no_rank(launched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train("quickstart")

    assert len(launched) == 1, "schedulers of clusters number nodes by these names"


@pytest.mark.parametrize(
    ("gpus", "launcher", "told"),
    [
        (8, [], ""),
        (9, [], ""),
        (4, [], "starts 8 processes on each machine, and this one has 4 GPUs; give -- --num_processes 4 at the end"),
        (0, [], "this one has 0 GPUs; give --accelerate cpu_2proc --use_cpu true"),
        (4, ["--", "--num_processes", "4"], ""),
    ],
)
def test_more_processes_than_gpus_are_refused(
    gpus: int, launcher: list[str], told: str, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ran = train("llama3_8b_128k", "--dataset", "texts.jsonl", *launcher)

    assert ran.exit_code == (2 if told else 0), ran.output
    assert len(launched) == (not told)
    assert told in ran.output


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"num_processes": None, "num_machines": None}, ""),
        ({"num_machines": 0}, "num_machines is 0; write a whole number, at least 1"),
        ({"num_processes": "all"}, "num_processes is 'all'; write a whole number, at least 1"),
    ],
)
def test_configuration_without_numbers_is_for_one_process(
    numbers: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    configuration = tmp_path / "accelerate.yaml"
    configuration.write_text(yaml.safe_dump(numbers))
    ran = train("quickstart", "--accelerate", str(configuration))

    assert ran.exit_code == (2 if told else 0), ran.output
    assert told in ran.output


@pytest.mark.parametrize(
    ("recipe", "options", "told"),
    [
        ({"script": {"a": 1}}, [], "names none in its section launch"),
        (
            {"launch": {"script": "lora"}},
            [],
            "no configuration of Accelerate; give one with --accelerate: accelerate/",
        ),
        ({"launch": {"script": "loora"}}, [], "'loora' is no file and no shipped example. Did you mean 'lora'?"),
        ({"launch": {"script": "lora", "accelerate": "cpu"}}, [], "'cpu' is no file and no shipped recipe"),
        ({"plugin": {"kernels": 1}}, [], "unknown setting 'kernels'. Did you mean 'kernel'?"),
        ({"num_processes": 2}, [], "is a configuration of Accelerate, no recipe"),
    ],
)
def test_incomplete_recipe_is_refused_in_one_line(
    recipe: dict[str, object], options: list[str], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    refused = train(str(path), *options)

    assert refused.exit_code == 2
    assert refused.output.startswith("distca: ")
    assert refused.output.count("\n") == 1
    assert told in refused.output
