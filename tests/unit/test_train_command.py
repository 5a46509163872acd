"""`distca train`: the line it launches, what it refuses, and that it runs the script where a launcher called it."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from typer.testing import CliRunner, Result

from distca_hf import recipe, run
from distca_hf.cli import app
from distca_hf.recipe import EXAMPLES, RECIPES
from support.commands import HANG_SECONDS, REPOSITORY, SCRIPTS
from support.models import tiny_config
from support.texts import save_word_model, write_documents


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
        (0, [], "this one has 0 GPUs; give --accelerate cpu_2proc --use_cpu true --bf16 false"),
        (4, ["--", "--num_processes", "4"], ""),
        (4, ["--", "--num_processes", "5"], "starts 5 processes on each machine, and this one has 4 GPUs"),
        (4, ["--", "--num_machines", "2"], ""),
        (8, ["--", "--gpu_ids", "0,1,9"], "this one has 2 GPUs of gpu_ids 0,1,9; give -- --num_processes 2"),
        (4, ["--", "--num_processes", "0"], "accelerate launch: num_processes is 0; write a whole number, at least 1"),
        (4, ["--", "--num_proceses", "4"], "accelerate launch: unrecognized arguments"),
    ],
)
def test_more_processes_than_gpus_are_refused(
    gpus: int, launcher: list[str], told: str, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ran = train("llama3_8b_128k", "--script", "lora", *launcher)

    assert ran.exit_code == (2 if told else 0), ran.output
    assert len(launched) == (not told)
    assert told in ran.output


@pytest.mark.parametrize(
    ("configuration", "told"),
    [
        ({"distributed_type": "NO"}, ""),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 2}, ""),
        ({"distributed_type": "MULTI_GPU"}, "has no num_processes: add it, or give -- --num_processes N"),
        ({"distributed_type": "MULTI_GPU", "num_processes": None}, "has no num_processes: add it, or give"),
        ({"distributed_type": "NO", "num_machines": 0}, "num_machines is 0; write a whole number, at least 1"),
        ({"distributed_type": "NO", "num_processes": "all"}, "num_processes is 'all'; write a whole number"),
        ({"num_processes": 2}, "is not a configuration of Accelerate: A `distributed_type` must be specified"),
        ({"distributed_type": "NO", "processes": 2}, "is not a configuration of Accelerate: The config file at"),
        ({"zero_optimization": {"stage": 3}}, "is a configuration of DeepSpeed: give it to the script, --deepspeed"),
        ({"launch": {"script": "lora"}}, "is a recipe of distca train: give it as RECIPE"),
    ],
)
def test_configuration_is_read_as_accelerate_reads_it(
    configuration: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(configuration))
    ran = train("quickstart", "--script", "lora", "--accelerate", str(path))

    assert ran.exit_code == (2 if told else 0), ran.output
    assert told in ran.output


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"script": {"a": 1}}, "names none in its section launch"),
        ({"launch": {"script": "lora"}}, "no configuration of Accelerate; give one with --accelerate: accelerate/"),
        ({"launch": {"script": "loora"}}, "'loora' is neither a file nor a shipped example. Did you mean 'lora'?"),
    ],
)
def test_incomplete_recipe_is_refused_in_one_line(recipe: dict[str, object], told: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    refused = train(str(path))

    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
    assert refused.output.startswith("distca: ")
    assert told in refused.output


# What is given as recipe, and how the line names it.
FOREIGN: dict[str, tuple[dict[str, object], str]] = {
    "Accelerate": (
        {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16"},
        "a configuration of Accelerate: give it to distca train RECIPE --accelerate, or to accelerate launch "
        "--config_file (docs/trainer.md, FSDP)",
    ),
    "DeepSpeed": (
        {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "a configuration of DeepSpeed: give it to the script, --deepspeed FILE (docs/trainer.md, DeepSpeed ZeRO)",
    ),
    "axolotl": (
        {"base_model": "Qwen/Qwen3-8B", "datasets": [{"path": "texts.jsonl"}], "learning_rate": 1e-5},
        "a recipe of axolotl: write a recipe with its values (docs/quickstart.md, Recipes of other programs)",
    ),
    "LLaMA-Factory": (
        {"model_name_or_path": "Qwen/Qwen3-8B", "stage": "pt", "output_dir": "out"},
        "a recipe of LLaMA-Factory: write a recipe with its values (docs/quickstart.md, Recipes of other programs)",
    ),
    "TRL": (
        {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "texts", "output_dir": "out"},
        "a configuration of TRL: write a recipe with its values (docs/quickstart.md, Recipes of other programs)",
    ),
    "TrainingArguments": ({"output_dir": "out", "learning_rate": 1e-5}, "indent them in a section script"),
    "a model": (
        {"model_type": "llama", "hidden_size": 64},
        "is the configuration of a model: give its folder to --model",
    ),
    "one document": ({"text": "a text"}, "is a file of documents: give it to --dataset"),
}


@pytest.mark.parametrize("program", FOREIGN)
def test_file_of_another_program_is_named_with_the_page(
    program: str, tmp_path: Path, launched: list[list[str]]
) -> None:
    content, told = FOREIGN[program]
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "given.json").write_text(json.dumps(content))
    for file in ("given.yaml", "given.json"):
        refused = train(str(tmp_path / file))
        assert (refused.exit_code, refused.output.count("\n"), launched) == (2, 1, [])
        assert told in refused.output


def test_pages_that_messages_name_have_these_sections() -> None:
    named = re.findall(r"\(((?:docs/)?\w+\.md), ([^)]+)\)", " ".join(do for _, _, do in recipe.FOREIGN))

    assert len(named) >= 7
    for page, title in named:
        assert re.search(rf"^##+ {title}$", (REPOSITORY / page).read_text(), re.MULTILINE), (page, title)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a training needs, and some things that it cannot use."""
    folder = tmp_path_factory.mktemp("project")
    save_word_model(folder / "model")
    write_documents(folder / "texts.jsonl", [3, 40])
    sections = {
        "launch": {"script": "train_causal_lm", "accelerate": "cpu_2proc"},
        "plugin": {"tokens_per_rank": 64},
        "script": {"model": "model", "output_dir": "output", "use_cpu": True, "max_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    for name, changes in {
        "misspelt.yaml": {"script": {**sections["script"], "learning_rat": 1e-5}},
        "section.yaml": {"scripts": {}},
        "setting.yaml": {"script": {**sections["script"], "kernel": "cpu"}},
    }.items():
        (folder / name).write_text(yaml.safe_dump({**sections, **changes}))
    (folder / "empty.jsonl").write_text("")
    (folder / "prose.jsonl").write_text("not a line of JSON\n")
    (folder / "other.jsonl").write_text('{"content": "a"}\n')
    (folder / "null.jsonl").write_text('{"text": null}\n')
    (folder / "texts.docx").write_text("a text")
    (folder / "fails.py").write_text("def main(:\n")
    (folder / "lonely.py").write_text("import no_such_module\nARGUMENTS = ()\n")
    DatasetDict({part: Dataset.from_dict({"text": ["a"]}) for part in ("train", "test")}).save_to_disk(folder / "both")
    Dataset.from_dict({"input_ids": [[1, 2, 3]]}).save_to_disk(folder / "tokens")
    tiny_config("llama").save_pretrained(folder / "untrained")
    for name in ("no_config", "new_type", "no_tokenizer", "coded"):
        (folder / name).mkdir()
    (folder / "new_type" / "config.json").write_text('{"model_type": "llama9"}')
    (folder / "coded" / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}')
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder / "model" / file, folder / "no_tokenizer")
    return folder


TEXTS = ("--dataset", "texts.jsonl")
# The words after `distca train`, and what the line must say.
MISTAKES: dict[str, tuple[Sequence[str], str]] = {
    "no dataset": (["recipe.yaml"], "the following arguments are required: --dataset"),
    "misspelt dataset": (
        ["recipe.yaml", "--dataset", "text.jsonl"],
        "there is no dataset text.jsonl: no such file or folder. Did you mean texts.jsonl?",
    ),
    "dataset in no folder": (["recipe.yaml", "--dataset", "/nowhere/texts"], "there is no dataset /nowhere/texts"),
    "dataset of another format": (["recipe.yaml", "--dataset", "texts.docx"], "texts.docx must end in .jsonl, .json,"),
    "dataset of other content": (["recipe.yaml", "--dataset", "prose.jsonl"], "prose.jsonl cannot be read as .jsonl"),
    "empty dataset": (["recipe.yaml", "--dataset", "empty.jsonl"], "empty.jsonl is empty: it has no row"),
    "dataset without texts": (
        ["recipe.yaml", "--dataset", "other.jsonl"],
        "other.jsonl has neither a column 'text' nor 'input_ids'; it has content",
    ),
    "dataset of nulls": (["recipe.yaml", "--dataset", "null.jsonl"], "holds a NoneType in row 0, not a text"),
    "several datasets": (
        ["recipe.yaml", "--dataset", "both"],
        "both holds several datasets; give both/train or both/test",
    ),
    "a folder of something else": (
        ["recipe.yaml", "--dataset", "model"],
        "model was not written by Dataset.save_to_disk",
    ),
    "no recipe": (TEXTS, "expected a recipe before --dataset: distca train RECIPE --dataset ..."),
    "dataset in place of a recipe": (
        ["texts.jsonl"],
        "texts.jsonl is not a recipe, but a file of documents: give it to --dataset",
    ),
    "script in place of a recipe": (
        ["fails.py", *TEXTS],
        "fails.py is not a recipe, but a script: give it to --script",
    ),
    "misspelt model": (
        ["recipe.yaml", *TEXTS, "--model", "./modle"],
        "no model ./modle: no such file or folder. Did you mean model?",
    ),
    "model without configuration": (["recipe.yaml", *TEXTS, "--model", "no_config"], "no_config cannot be loaded: "),
    "model that is not known": (["recipe.yaml", *TEXTS, "--model", "new_type"], "new_type cannot be loaded: "),
    "model with code of its own": (["recipe.yaml", *TEXTS, "--model", "coded"], "custom code which must be executed"),
    "model without weights": (
        ["recipe.yaml", *TEXTS, "--model", "untrained"],
        "untrained holds a configuration and no weights; --from_scratch true",
    ),
    "texts without a tokenizer": (
        ["recipe.yaml", *TEXTS, "--model", "no_tokenizer"],
        "texts.jsonl holds texts, and no_tokenizer has no tokenizer for them",
    ),
    "unknown recipe": (["recip.yaml", *TEXTS], "'recip.yaml' is neither a file nor a shipped recipe"),
    "unknown section": (["section.yaml", *TEXTS], "unknown section 'scripts'. Did you mean 'script'?"),
    "prefix in the recipe": (
        ["misspelt.yaml", *TEXTS],
        "has no argument --learning_rat, which section script of the recipe gives. Did you mean 'learning_rate'?",
    ),
    "prefix on the line": (
        ["recipe.yaml", *TEXTS, "--learning_rat", "1e-5"],
        "has no argument --learning_rat, which the line gives. Did you mean 'learning_rate'?",
    ),
    "option of another command": (
        ["recipe.yaml", *TEXTS, "--tokens-per-rank", "64"],
        "has no argument --tokens-per-rank, which the line gives. It is a setting: write it into section plugin of "
        "the recipe\n",
    ),
    "setting in section script": (
        ["setting.yaml", *TEXTS],
        "gives. It is a setting: write it into section plugin of the recipe, or set DISTCA_KERNEL",
    ),
    "option of the launcher": (
        ["recipe.yaml", *TEXTS, "--num_processes", "2"],
        "--num_processes, which the line gives. It is an option of accelerate launch: write it after --",
    ),
    "a word too many": (
        ["recipe.yaml", *TEXTS, "--use_cpu", "true", "more.jsonl"],
        "'more.jsonl' belongs to no argument",
    ),
    "value of another type": (
        ["recipe.yaml", *TEXTS, "--max_steps", "many"],
        "argument --max_steps/--max-steps: invalid int value: 'many'",
    ),
    "no step": (["quickstart", "--steps", "0"], "--steps 0: the two trainings need at least 1"),
    "unknown choice": (
        ["recipe.yaml", *TEXTS, "--save_strategy", "step"],
        "argument --save_strategy/--save-strategy: invalid choice: 'step' (choose from 'no', 'steps',",
    ),
    "unknown dtype": (["recipe.yaml", *TEXTS, "--dtype", "bf16"], "--dtype bf16 is not a dtype of torch"),
    "checkpoint that is not there": (
        ["recipe.yaml", *TEXTS, "--resume_from_checkpoint", "output/checkpoint-9"],
        "--resume_from_checkpoint output/checkpoint-9: no such file or folder",
    ),
    "output that is a file": (
        ["recipe.yaml", *TEXTS, "--output_dir", "texts.jsonl"],
        "--output_dir texts.jsonl cannot be written to: File exists",
    ),
    "output that cannot be written": (
        ["recipe.yaml", *TEXTS, "--output_dir", "/proc/output"],
        "--output_dir /proc/output cannot be written to: No such file or directory",
    ),
    "servers and no trainer": (
        ["recipe.yaml", *TEXTS, "--attention-servers", "2"],
        "attention_servers=2 leaves no process to train (2 - 2 = 0 on node 0)",
    ),
    "unknown configuration": (
        ["recipe.yaml", *TEXTS, "--accelerate", "cpu"],
        "'cpu' is neither a file nor a shipped recipe",
    ),
    "script with a mistake": (["recipe.yaml", *TEXTS, "--script", "fails.py"], "fails.py is not a Python script: "),
    "script without its modules": (
        ["recipe.yaml", *TEXTS, "--script", "lonely.py"],
        "lonely.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_and_status_2_before_a_process_starts(
    mistake: str, project: Path, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words, told = MISTAKES[mistake]
    refused = train(*words)

    assert (refused.exit_code, launched) == (2, [])
    assert refused.output.startswith("distca: ")
    assert refused.output.count("\n") == 1
    assert told in refused.output


@pytest.mark.parametrize(
    "words",
    [
        TEXTS,
        ("--dataset", "tokens", "--model", "untrained", "--from_scratch", "true"),
        ("--dataset", "both/train"),
        ("--dataset", "owner/texts", "--model", "owner/model"),
    ],
    ids=" ".join,
)
def test_line_without_a_mistake_is_launched_and_names_of_a_hub_are_not_looked_up(
    words: Sequence[str], project: Path, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.chdir(project)
    monkeypatch.setattr(socket.socket, "connect", ask)
    before = dict(os.environ)
    started = train("recipe.yaml", *words)

    assert (started.exit_code, len(launched)) == (0, 1), started.output
    assert os.environ == before, "the launcher starts as without the check"
    assert "use_cpu" in (project / "recipe.yaml").read_text()


OWN_SCRIPT = """
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

@dataclass
class Arguments:
    output_dir: Path
    sizes: list[int] = field(default_factory=list)

ARGUMENTS: tuple[type, ...] = (Arguments,)

def check(arguments: Arguments) -> None:
    if 0 in arguments.sizes:
        raise SystemExit("a size of 0")

if __name__ == "__main__":
    raise AssertionError("not before it is launched")
"""


@pytest.mark.parametrize("name", ["mine.py", "json.py", "mine"])
def test_script_of_ones_own_takes_part_by_two_names(name: str, tmp_path: Path, launched: list[list[str]]) -> None:
    """Whatever it is called; arguments may be in a file next to it, as for HfArgumentParser."""
    (tmp_path / name).write_text(OWN_SCRIPT)
    (tmp_path / name).with_suffix(".args").write_text(f"--output_dir {tmp_path / 'out'}")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"launch": {"accelerate": "cpu_2proc"}}))
    line = [str(tmp_path / "recipe.yaml"), "--script", str(tmp_path / name), "--sizes", "1"]
    refused, misspelt, started = train(*line, "0"), train(*line, "--size", "1"), train(*line, "2")

    assert (refused.exit_code, refused.output) == (2, "distca: a size of 0\n")
    assert (misspelt.exit_code, "Did you mean 'sizes'?" in misspelt.output) == (2, True)
    assert (started.exit_code, len(launched)) == (0, 1), started.output
    assert (tmp_path / "out").is_dir()


def test_nothing_but_the_line_is_written(project: Path) -> None:
    """Also not what libraries say when they are imported, and when they cannot read a file."""
    words = ["train", "recipe.yaml", "--dataset", "prose.jsonl"]
    done = subprocess.run(
        [SCRIPTS / "distca", *words], cwd=project, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("distca: prose.jsonl cannot be read as .jsonl: ")
    assert done.stderr.count("\n") == 1
