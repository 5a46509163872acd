"""The data of the examples is made once, also after a first run that was interrupted."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset

from support.commands import REPOSITORY


TEXTS = ["import os\n", "def answer():\n    return 42\n" * 3, "x = 1\n" * 50]


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

    assert [len(ids) > 0 for ids in made["input_ids"]] == [True] * len(TEXTS)
    assert again["input_ids"] == made["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "tokenizer.json"]


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
    assert (tmp_path / "cache" / "unfinished").is_dir()
    assert not (tmp_path / "cache" / "dataset").exists()

    assert python_sources.load(tmp_path / "cache")["input_ids"] == whole["input_ids"]
    assert python_sources.load(tmp_path / "cache")["input_ids"] == whole["input_ids"]
