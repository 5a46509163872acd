"""The data of the quickstart: a few long documents and many short ones, made once, also after a first run that was
interrupted."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset

from support.commands import REPOSITORY


MODULE = "def answer():\n    return 42\n\n\n" * 320
TEXTS = ["import os\n", MODULE, "x = 1\n" * 50, MODULE + "class Last:\n    pass\n" + "# the end\n" * 400]


class Interrupted(Exception):
    """The process ends here."""


@pytest.fixture
def python_sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a few short sources."""
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    module = importlib.import_module("python_sources")
    monkeypatch.setattr(module, "read_sources", lambda: TEXTS)
    return module


def test_dataset_is_made_once(python_sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = python_sources.load(tmp_path)
    monkeypatch.delattr(python_sources, "read_sources")
    again = python_sources.load(tmp_path)

    assert again["input_ids"] == made["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "tokenizer.json"]


def test_documents_are_a_few_modules_and_as_much_text_in_functions(python_sources: ModuleType) -> None:
    documents = python_sources.choose_documents(TEXTS)
    modules = [text for text in documents if text in TEXTS]
    functions = documents[len(modules) :]

    assert modules == [MODULE]
    assert {text.split("(")[0] for text in functions} == {"def answer"}
    assert 0.8 < sum(map(len, functions)) / len(MODULE) < 2


def test_tokenizer_of_the_dataset_is_one_of_transformers(python_sources: ModuleType, tmp_path: Path) -> None:
    dataset = python_sources.load(tmp_path)
    tokenizer = python_sources.load_tokenizer(tmp_path)

    assert {ids[-1] for ids in dataset["input_ids"]} == {tokenizer.eos_token_id} == {0}
    assert tokenizer.decode(dataset[0]["input_ids"]).startswith("def answer():\n    return 42")


save_to_disk = Dataset.save_to_disk


def save_in_part(dataset: Dataset, folder: str) -> None:
    """Leaves other files than the whole dataset has, without the one that is written last."""
    save_to_disk(Dataset.from_dict({"input_ids": [[1, 2, 3]] * 10}), folder, num_shards=3)
    (Path(folder) / "state.json").unlink()
    raise Interrupted


def do_not_rename(path: Path, target: Path) -> None:
    raise Interrupted


@pytest.mark.parametrize(
    "interruption",
    [(Dataset, "save_to_disk", save_in_part), (Path, "rename", do_not_rename)],
    ids=["while saving", "before renaming"],
)
def test_interrupted_first_run_does_not_break_the_next(
    interruption: tuple[type, str, Any], python_sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = python_sources.load(tmp_path / "whole")
    with monkeypatch.context() as patches:
        patches.setattr(*interruption)
        with pytest.raises(Interrupted):
            python_sources.load(tmp_path / "cache")
    assert list((tmp_path / "cache").glob("unfinished-*"))
    assert not (tmp_path / "cache" / "dataset").exists()

    assert python_sources.load(tmp_path / "cache")["input_ids"] == whole["input_ids"]
    assert python_sources.load(tmp_path / "cache")["input_ids"] == whole["input_ids"]
