"""Scripts on pages, run as they are printed there, on two CPU processes."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from distca_hf.cli import app
from distca_hf.recipe import EXAMPLES, RECIPES
from support.commands import REPOSITORY, SCRIPTS, run_command
from support.lines import run_line
from support.scripts import run_script
from support.texts import END, save_word_model, write_documents


TEXT = (REPOSITORY / "docs" / "quickstart.md").read_text()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_word_model(tmp_path / "model")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Sixty documents, one of them longer than all others together."""
    return write_documents(tmp_path / "documents.jsonl", [*(3 + number % 12 for number in range(59)), 700])


def script() -> str:
    (code,) = re.findall(r"```python\n(\"\"\"train\.py .*?)```", TEXT, re.DOTALL)
    return str(code)


def without_distca() -> str:
    """The script without its new lines."""
    return "\n".join(line for line in script().splitlines() if "#!" not in line)


def losses_of(printed: str) -> list[str]:
    """Losses of all steps and of the evaluation, as they are printed."""
    return re.findall(r"'loss': '([\d.]+)'", printed) + re.findall(r"eval_loss += +([\d.]+)", printed)


def test_script_trains_evaluates_and_saves(model: Path, documents: Path, tmp_path: Path) -> None:
    printed = []
    for name, code in {"plain": without_distca(), "train": script()}.items():
        (folder := tmp_path / name).mkdir()
        (folder / "train.py").write_text(code)
        printed.append(run_script(2, folder, [folder / "train.py", model, documents]))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "train" / "output")
    before = AutoModelForCausalLM.from_pretrained(model)

    imbalances = [float(number) for number in re.findall(r"'distca': 'imbalance ([\d.]+), ", printed[1])]
    assert len(imbalances) == 12, "three epochs of four steps"
    assert max(imbalances) < 1.05
    assert losses_of(printed[0]) == losses_of(printed[1])
    assert len(losses_of(printed[1])) == 13
    assert AutoTokenizer.from_pretrained(tmp_path / "train" / "output").eos_token == END
    assert any(not torch.equal(*pair) for pair in zip(saved.parameters(), before.parameters(), strict=True))


def test_new_lines_of_the_script_are_marked() -> None:
    marked = [line for line in script().splitlines() if "#!" in line]

    assert len(marked) == 2
    assert all("distca" in line for line in marked)
    assert sum("distca" in line for line in script().splitlines()) == 2


def test_script_comes_with_the_package() -> None:
    assert EXAMPLES.find("train").read_text() == script()


def test_launch_lines_are_those_of_the_script() -> None:
    lines = [line for line in TEXT.splitlines() if line.endswith("MODEL DOCUMENTS") or "MODEL DOCUMENTS  " in line]

    assert len(lines) == 2
    assert all(shlex.split(line, comments=True)[-3:] == ["train.py", "MODEL", "DOCUMENTS"] for line in lines)


def test_files_that_commands_name_come_with_the_package() -> None:
    named = re.findall(r"\$\(distca (\w+) (\w+)\)", TEXT)

    assert {kind for kind, _ in named} == {"recipes", "examples"}
    assert all((RECIPES if kind == "recipes" else EXAMPLES).find(name).is_file() for kind, name in named)


def test_lines_that_train_from_a_recipe_can_be_launched() -> None:
    lines = [shlex.split(line, comments=True)[1:] for line in TEXT.splitlines() if line.startswith("distca train")]

    assert len(lines) == 4
    for words in lines:
        shown = CliRunner().invoke(app, [*words, "--dry-run"])
        assert (shown.exit_code, shown.output.split()[:2]) == (0, ["accelerate", "launch"]), shown.output


def test_line_that_collects_documents_makes_a_long_and_many_short_ones(tmp_path: Path) -> None:
    (program,) = re.findall(r"^(python -c '.*?' > documents\.jsonl)$", TEXT, re.MULTILINE | re.DOTALL)
    run_command(["bash", "-c", program], cwd=tmp_path, PATH=f"{SCRIPTS}:{os.environ['PATH']}")
    lengths = [len(json.loads(line)["text"]) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]

    assert len(lengths) > 15
    assert max(lengths) > 3 * sum(lengths) / len(lengths)


def first_block(page: str) -> tuple[str, str]:
    """Language and text of a page's first block of code."""
    found = re.search(
        r"^```(\w*)\n(.*?)^```$", (REPOSITORY / "docs" / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found
    return found[1], found[2]


def test_first_script_on_the_page_of_trainer_is_balanced(tmp_path: Path) -> None:
    language, code = first_block("trainer")
    (tmp_path / "train.py").write_text(code)
    printed = run_script(2, tmp_path, [tmp_path / "train.py"])

    assert language == "python"
    imbalances = [float(number) for number in re.findall(r"'distca': 'imbalance ([\d.]+), ", printed)]
    assert len(imbalances) == 4
    assert max(imbalances) < 1.05
    assert re.search(r"work of the busiest rank in a step 1\.\d\d -> 1\.0\d times the mean", printed)


@pytest.mark.parametrize("page", ["will-it-help", "sizes", "log", "nodes", "models", "troubleshooting"])
def test_first_commands_of_a_page_run_in_an_empty_folder(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, code = first_block(page)
    for line in code.splitlines():
        assert run_line(line).strip()


def test_first_script_on_the_page_of_settings_runs() -> None:
    language, code = first_block("settings")
    exec(code, made := {"__name__": "__main__"})

    assert (language, made["plugin"].tokens_per_rank) == ("python", 16384)


def test_first_command_on_the_page_of_planning_is_that_of_will_it_help() -> None:
    assert first_block("planning") == first_block("will-it-help")


def test_first_block_of_the_page_of_loops_is_its_example() -> None:
    _, command = first_block("loops")

    assert '"$(distca recipes cpu_2proc)" "$(distca examples accelerate_loop)"' in command
