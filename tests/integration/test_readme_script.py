"""The script in README, run as it is printed there, on two CPU processes with a small model and tokenizer."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from distca_hf.shipped import RECIPES
from support.commands import REPOSITORY
from support.scripts import run_script
from support.texts import END, WORDS, save_word_model, write_documents


TEXT = (REPOSITORY / "README.md").read_text()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_word_model(tmp_path / "model")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Sixty documents of other lengths, one of them longer than all others together."""
    return write_documents(tmp_path / "documents.jsonl", [*range(3, 62), 2500])


def script() -> str:
    (code,) = re.findall(r"```python\n(# train\.py .*?)```", TEXT, re.DOTALL)
    return str(code)


def evaluate_alone(model: torch.nn.Module, documents: Path) -> float:
    """The loss over the script's evaluation documents, each with its end, one after the other."""
    ids = [
        [2 + WORDS.index(word) for word in json.loads(line)["text"].split()] + [0]
        for line in documents.read_text().splitlines()
    ]
    test = Dataset.from_dict({"input_ids": ids}).train_test_split(test_size=0.05, seed=0)["test"]
    loss_sum = 0.0
    for document in test["input_ids"]:
        tokens = torch.tensor([document])
        with torch.no_grad():
            loss_sum += model(input_ids=tokens, labels=tokens).loss.item() * (len(document) - 1)
    return loss_sum / sum(len(document) - 1 for document in test["input_ids"])


def test_script_trains_evaluates_and_saves(model: Path, documents: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script())
    printed = run_script(2, tmp_path, [tmp_path / "train.py", model, documents])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "output", attn_implementation="sdpa")
    before = AutoModelForCausalLM.from_pretrained(model)

    imbalances = [float(number) for number in re.findall(r"'distca': 'imbalance ([\d.]+), ", printed)]
    (evaluated,) = (float(number) for number in re.findall(r"eval_loss += +([\d.]+)", printed))
    assert imbalances == pytest.approx([1.0] * 3, abs=0.01), "three epochs of one step"
    assert evaluated == pytest.approx(evaluate_alone(saved, documents), abs=2e-3), "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "output").eos_token == END
    assert any(not torch.equal(*pair) for pair in zip(saved.parameters(), before.parameters(), strict=True))


def test_new_lines_of_the_script_are_marked() -> None:
    marked = [line for line in script().splitlines() if "#!" in line]

    assert len(marked) == 3
    assert all("distca" in line for line in marked)
    assert sum("distca" in line for line in script().splitlines()) == 3


def test_launch_lines_name_a_shipped_recipe_and_the_script() -> None:
    lines = [line for line in TEXT.splitlines() if "train.py MODEL DOCUMENTS" in line and not line.startswith("#")]
    (recipe,) = re.findall(r"\$\(distca recipes (\w+)\)", lines[0])

    assert len(lines) == 2
    assert f"accelerate/{recipe}" in RECIPES.files()
    assert all(shlex.split(line, comments=True)[-3:] == ["train.py", "MODEL", "DOCUMENTS"] for line in lines)
