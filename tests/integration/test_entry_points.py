"""The entry points as users call them: launchers, examples, recipes and scripts."""

import importlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer, HfArgumentParser
from typer.testing import CliRunner

from distca_hf import run
from distca_hf.cli import app
from distca_hf.recipe import Recipe
from support.commands import REPOSITORY, SCRIPTS, run_command
from support.data import random_dataset
from support.models import tiny_config
from support.scripts import run_script


RECIPES = sorted(REPOSITORY.glob("recipes/*/*.yaml"))
ACCELERATE_RECIPES = sorted(REPOSITORY.glob("recipes/accelerate/*.yaml"))
EXAMPLES = sorted(REPOSITORY.glob("examples/*.py"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe's script on two processes, by `distca train` and as torchrun starts it; the folders it wrote to.

    Torchrun itself launches a training in `test_server_launch.py`.
    """
    folder = tmp_path_factory.mktemp("train")
    random_dataset(60).save_to_disk(str(folder / "dataset"))
    tiny_config("llama").save_pretrained(folder / "model")
    folders = {}
    for name in ("distca", "torchrun"):
        output = folders[name] = folder / name
        recipe = folder / f"{output.name}.yaml"
        sections = {
            "launch": {"script": "train_causal_lm"},
            "environment": {"ACCELERATE_USE_CPU": True, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1},
            "plugin": {"tokens_per_rank": 96, "metrics": "all", "report_every_steps": 2},
            "script": {
                "model": str(folder / "model"),
                "from_scratch": True,
                "output_dir": str(output),
                "use_cpu": True,
                "max_steps": 9,
                "learning_rate": 1.0e-3,
                "logging_steps": 1,
                "save_steps": 3,
                "report_to": ["none"],
                "per_device_train_batch_size": 1,
            },
        }
        recipe.write_text(yaml.safe_dump(sections))
        arguments = recipe, "--dataset", folder / "dataset", "--max_steps", "3"
        if name == "distca":
            run_command([SCRIPTS / "distca", "train", "--accelerate", "cpu_2proc", *arguments])
        else:
            run_script(2, folder, ["-m", "distca_hf.run", "--recipe", *arguments])
    return folders


def logs_of(folder: Path) -> list[dict[str, Any]]:
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    return [log for log in state["log_history"] if "loss" in log]


def test_both_launchers_train_on_two_ranks_and_lose_the_same(trained: dict[str, Path]) -> None:
    logs = {name: logs_of(folder) for name, folder in trained.items()}

    for by_step in logs.values():
        assert [log["step"] for log in by_step] == [1, 2, 3]
        assert all(log["distca/imbalance"] < 1.02 < log["distca/imbalance_before"] for log in by_step), by_step
    left, right = ([log["loss"] for log in by_step] for by_step in logs.values())
    assert left == pytest.approx(right, rel=1e-6)
    assert len(set(left)) == 3


def test_command_line_wins_over_the_recipe_and_the_model_is_saved(trained: dict[str, Path]) -> None:
    weights = []
    for folder in trained.values():
        assert not (folder / "checkpoint-6").exists()
        arguments = torch.load(folder / "training_args.bin", weights_only=False)
        assert (arguments.max_steps, arguments.learning_rate) == (3, 1.0e-3)
        weights.append(load_file(folder / "model.safetensors"))

    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-6) for name in weights[0])


def test_reported_step_becomes_a_page(trained: dict[str, Path], tmp_path: Path) -> None:
    for number, folder in enumerate(trained.values()):
        options = ["--json", "--output", str(tmp_path / f"{number}.html"), *(["--cluster", "h200"] if number else [])]
        done = CliRunner().invoke(app, ["report", str(folder), *options])
        assert done.exit_code == 0, done.output
        (step,) = json.loads(done.stdout)["steps"]
        (log,) = (log for log in logs_of(folder) if log["step"] == 2)
        assert step["label"] == "step 2, micro-batch 1"
        assert step["imbalance"] == pytest.approx(log["distca/imbalance"], rel=1e-3)
        assert step["imbalance_before"] == pytest.approx(log["distca/imbalance_before"], rel=1e-3)
        assert (step["missing"], len(step["tokens"]), len(step["memory"])) == ([], 2, 2)
        assert {(part["part"], len(part["ranks"])) for part in step["calls"]} == {("forward", 2), ("backward", 2)}
        assert all(seconds > 0 for name in ("attention", "rest", "step") for seconds in step["seconds"][name])
        predicted = [step["seconds"][name] for name in ("predicted_attention", "predicted_rest")]
        assert [len(seconds) for seconds in predicted] == ([2, 2] if number else [0, 0]), "no profile is of a CPU"
        assert all(one > 0 for seconds in predicted for one in seconds)
        assert (tmp_path / f"{number}.html").read_text().startswith("<!doctype html>")


def test_accelerate_loop_prints_the_same_losses_on_one_and_two_processes(tmp_path: Path) -> None:
    printed = [run_script(ranks, tmp_path / f"{ranks}", ["examples/accelerate_loop.py"]) for ranks in (1, 2)]
    steps = [re.findall(r"step (\d+): loss ([\d.]+), max/mean work ([\d., ]+)", text) for text in printed]
    one, two = ([float(loss) for _, loss, _ in by_step] for by_step in steps)

    assert [int(step) for step, _, _ in steps[1]] == list(range(5))
    assert one == pytest.approx(two, abs=2e-5)
    assert {balance for _, _, balance in steps[0]} == {"1.000, 1.000, 1.000"}
    assert all(float(share) < 1.02 for _, _, balance in steps[1] for share in balance.split(", "))


def test_quickstart_compares_two_trainings_and_writes_picture_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents are made here, so that no source is read."""
    lengths = (10, 30, 200, 700, 1500, 3000, 4000)
    rows = [[(at * at + length) % 4096 for at in range(length)] for length in lengths for _ in range(2)]
    Dataset.from_dict({"input_ids": rows}).save_to_disk(str(tmp_path / "data" / "dataset"))
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    importlib.import_module("python_sources").train_tokenizer(["x = 1"]).save(
        str(tmp_path / "data" / "tokenizer.json")
    )
    script = ["-m", "distca_hf.run", "--recipe", "recipes/train/quickstart.yaml", "examples/quickstart.py"]
    printed = run_script(2, tmp_path, [*script, "--output_dir", tmp_path, "--steps", "2"])
    told = " ".join(printed.split())
    steps = json.loads((tmp_path / "steps.json").read_text())

    assert "The same batches, trained twice" in printed
    for number, step in enumerate(steps, 1):
        assert step["losses"][0] == pytest.approx(step["losses"][1], abs=1e-4)
        assert step["gradient_norms"][0] == pytest.approx(step["gradient_norms"][1], rel=1e-4)
        figures = [f"{loss:.6f}" for loss in step["losses"]] + [f"{norm:.4f}" for norm in step["gradient_norms"]]
        assert " ".join([str(number), *figures]) in told
        assert step["imbalance_placed"] < 1.02 < step["imbalance_in_order"]
        assert step["bytes_sent"] > 0
    assert len(steps) == 2
    assert re.search(r"distca: step 2 of 2, .* sdpa +: step 2 of 2, ", told), "where there is no terminal"
    assert "Documents of 10 to 4,000 tokens" in told
    assert "Next steps" in told
    own = [line for line in printed.splitlines() if not re.search(r"^distca_hf \[|^\[|distca plan", line)]
    assert max(map(len, own)) <= 100
    assert "'loss':" not in printed
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")
    assert load_file(tmp_path / "model" / "model.safetensors")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([0]) == "<|endoffile|>"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["data", "model", "ranks"]


PROCESSES = {
    "cpu_2proc": (2, 1, DistributedType.MULTI_GPU),
    "cpu_3proc": (3, 1, DistributedType.MULTI_GPU),
    "gpu_1": (1, 1, DistributedType.NO),
    "multi_8gpu": (8, 1, DistributedType.MULTI_GPU),
    "fsdp2_4gpu": (4, 1, DistributedType.FSDP),
    "fsdp2_8gpu": (8, 1, DistributedType.FSDP),
    "fsdp2_2node_16gpu": (16, 2, DistributedType.FSDP),
}


def test_every_accelerate_recipe_is_in_the_table() -> None:
    assert {path.stem for path in ACCELERATE_RECIPES} == set(PROCESSES)


@pytest.mark.parametrize("path", ACCELERATE_RECIPES, ids=lambda path: path.stem)
def test_accelerate_reads_its_recipe_as_it_is_meant(path: Path) -> None:
    config = load_config_from_file(str(path))

    assert (config.num_processes, config.num_machines, config.distributed_type) == PROCESSES[path.stem]
    if config.distributed_type == DistributedType.FSDP:
        assert config.fsdp_config["fsdp_version"] == 2
    assert config.use_cpu == path.stem.startswith("cpu")


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("recipes/train/*.yaml")), ids=lambda path: path.stem)
def test_train_recipe_can_be_read_and_its_script_takes_its_arguments(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = Recipe.read(path)
    name, script, rest = run.parse_names(launch_command_of(path).training_script_args)
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    module = importlib.import_module(run.find_script(recipe, script, name).stem)
    if module.__name__ == "train_causal_lm":
        rest += ["--use_cpu", "True", "--output_dir", str(tmp_path)]
    HfArgumentParser(module.ARGUMENTS, allow_abbrev=False).parse_args_into_dataclasses([*recipe.script, *rest])

    assert recipe.plugin["tokens_per_rank"] > 0


@pytest.mark.parametrize(("name", "trainers", "servers"), [("servers_cpu", 2, 1), ("servers_8gpu", 7, 1)])
def test_recipe_with_servers_divides_the_processes_of_its_configuration(
    name: str, trainers: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = launch_command_of(REPOSITORY / "recipes" / "train" / f"{name}.yaml")
    processes = load_config_from_file(command.config_file).num_processes
    recipe = Recipe.read(Path(run.parse_names(command.training_script_args)[0]))
    numbers = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": True}
    found = []
    for rank in range(processes):
        for variable, number in (numbers | {"RANK": rank, "LOCAL_RANK": rank}).items():
            monkeypatch.setenv(variable, str(number))
        role = recipe.role()
        assert role is not None
        found.append((role.is_server, role.number, role.num_trainers, role.num_servers))

    assert found == [(False, number, trainers, servers) for number in range(trainers)] + [(True, 0, trainers, servers)]


def launch_line(path: Path) -> str:
    """The launch command in the first line of a recipe's comment."""
    return path.read_text().splitlines()[0].removeprefix("# ")


def launch_command_of(path: Path) -> Any:
    """The line that a recipe's launch line becomes, as Accelerate's own command line reads it; variables of the shell
    count as 0."""
    words = shlex.split(re.sub(r"\$\w+", "0", launch_line(path)))
    assert words[:2] == ["distca", "train"]
    dashes = words.index("--") if "--" in words else len(words)
    shown = CliRunner().invoke(app, [*words[1:dashes], "--dry-run", *words[dashes:]])
    assert shown.exit_code == 0, shown.output
    became = shlex.split(shown.output)
    assert became[:2] == ["accelerate", "launch"]
    return launch_command_parser().parse_args(became[2:])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_first_comment_of_a_recipe_is_its_launch_line(path: Path) -> None:
    command = launch_command_of(path)
    recipe, script, _ = run.parse_names(command.training_script_args)

    assert command.module
    assert command.training_script == "distca_hf.run"
    assert Path(str(script)).is_file()
    assert path in (Path(command.config_file), Path(recipe)), "the line must use the recipe"


PROGRAMS = [path for ending in ("py", "sh", "md") for path in sorted(REPOSITORY.glob(f"scripts/**/*.{ending}"))]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


def test_files_that_are_named_are_there() -> None:
    for path in (*RECIPES, *EXAMPLES, *PROGRAMS, *PAGES):
        named = re.findall(r"(?:recipes|examples|scripts|docs)/[\w/]+\.(?:yaml|py|sh|sbatch|md)", path.read_text())
        assert [name for name in named if not (REPOSITORY / name).is_file()] == [], path


SHELL_SCRIPTS = [
    *sorted(REPOSITORY.glob("scripts/**/*.s*")),
    *sorted(REPOSITORY.glob("recipes/slurm/*")),
    REPOSITORY / ".ci" / "run",
]


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_script_is_executable_and_has_no_syntax_error(path: Path) -> None:
    text = path.read_text()

    assert text.startswith("#!/usr/bin/env bash\n")
    assert path.suffix == ".sbatch" or os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert re.search(r"^set -euo pipefail$", text, re.MULTILINE) or text.splitlines()[-1].startswith("exec ")
