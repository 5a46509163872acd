"""Models that people ask for: the page says what the check of models says."""

import importlib
from types import ModuleType

import pytest
import transformers

from distca_hf.errors import UnsupportedAttentionError
from support.commands import REPOSITORY


PAGE = (REPOSITORY / "docs" / "models.md").read_text().partition("\n## ")[0]


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "models")
    return importlib.import_module("families")


@pytest.mark.skipif(
    f"with Transformers {transformers.__version__} and" not in PAGE,
    reason="the page was made with another Transformers",
)
def test_page_says_what_the_check_says(families: ModuleType) -> None:
    rows = families.rows(families.FAMILIES)

    assert PAGE.rstrip().endswith(f"|\n{rows.rstrip()}")


def test_what_works_is_trained_in_the_list_of_all_classes(families: ModuleType) -> None:
    lines = (REPOSITORY / "scripts" / "models" / "classes.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| works |")]
    trained = {model_type for _, _, model_types in cells for model_type in model_types.split(", ")}
    working = [family for family in families.FAMILIES if family.name in PAGE and not family.sign]

    assert len(working) > 10
    for family in working:
        assert set(family.model_types) <= trained


def test_refusal_for_another_reason_is_noticed(families: ModuleType) -> None:
    model = families.build("mamba", {})

    assert families.longest_accepted_tokens(model, "ignore attn_implementation") == 0
    with pytest.raises(UnsupportedAttentionError, match="ignore attn_implementation"):
        families.longest_accepted_tokens(model, "sliding window")
