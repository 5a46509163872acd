"""The sweep over all models: what it says of some, that it notices faults, and that its page is whole."""

import math
import re
import sys
from collections import Counter
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from distca_hf.integrations import attention
from distca_hf.kernels.interface import AttentionSpec
from support.commands import REPOSITORY
from support.scripts import run_script
from support.versions import classes_of_today


PAGE = REPOSITORY / "scripts" / "models" / "classes.md"
# Outcome, and what the reason says.
SOME = {
    "llama": ("works", ""),
    "gpt2": ("works", ""),
    "deepseek_v3": ("works", ""),  # keys and values of different widths
    "gpt_oss": ("works", ""),  # sinks
    "zaya": ("refused", "layers [0, 1] are of type 'hybrid'"),  # a convolution inside of its attention
    "stablelm": ("refused", "0 of its 2 attention layers came through distca in the first forward pass"),
    "falcon": ("refused", "by Transformers: KeyError: 'distca'"),
    "musicgen": ("not built", ""),
}


# Headings of the page's lists.
TEXT, IMAGES = "All classes", "Image-text-to-text classes"
FEWEST_WITH_IMAGES = 40


def section_of(page: str, heading: str) -> str:
    return page.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(page: str, heading: str = TEXT) -> dict[str, tuple[str, str]]:
    """Outcome and what is told, by model type, in the order of one of the page's lists."""
    section = section_of(page, heading)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {
        model_type: (verdict, told.removeprefix("up to "))
        for verdict, told, model_types in cells[2:]
        for model_type in model_types.split(", ")
    }


@classes_of_today
def test_sweep_tells_what_works_how_exactly_and_why_the_others_do_not(tmp_path: Path) -> None:
    out = tmp_path / "models.md"
    run_script(1, tmp_path, ["scripts/models/sweep.py", "--kind", "text", "--only", *SOME, "--out", out])
    page = out.read_text()
    found = rows(page)

    assert {model_type: verdict for model_type, (verdict, _) in found.items()} == {
        model_type: verdict for model_type, (verdict, _) in SOME.items()
    }
    assert [name for name, (_, told) in SOME.items() if told not in found[name][1]] == []
    assert all(0 <= float(told) <= 1e-5 for verdict, told in found.values() if verdict == "works")
    assert "8 classes: 4 works, 3 refused, 1 not built." in page
    assert list(found)[:2] == ["deepseek_v3", "gpt2"], "what works comes first, by name"


def test_attention_that_is_a_little_wrong_is_noticed(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.flash_attn

    def wrong(q: Any, k: Any, v: Any, spec: AttentionSpec, *others: Any) -> Any:
        return right(q, k, v, spec._replace(scale=1.001 * spec.scale), *others)

    monkeypatch.setattr(attention, "flash_attn", wrong)
    (llama,) = sweep.TEXT.config_classes(["llama"])

    assert sweep.examine(llama).verdict == "WRONG"


def test_gradient_that_is_not_a_number_is_noticed(sweep: ModuleType) -> None:
    right = sweep.trial.Step(1.0, torch.ones(2))

    assert right.difference(right) == 0
    assert math.isnan(sweep.trial.Step(1.0, torch.tensor([1.0, math.nan])).difference(right))


@pytest.mark.parametrize("name", ["check_model", "trial.step_placed"])
def test_error_that_is_no_refusal_is_noticed(name: str, sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("something else")

    part, _, function = name.rpartition(".")
    monkeypatch.setattr(attrgetter(part)(sweep) if part else sweep, function, fail)
    (llama,) = sweep.TEXT.config_classes(["llama"])
    outcome = sweep.examine(llama)

    assert (outcome.verdict, outcome.detail) == ("CRASH", "RuntimeError: something else")


def test_faults_make_the_command_fail(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep, "examine", lambda config_class, kind: sweep.Outcome("A", "a", sweep.WRONG, "0.1"))
    monkeypatch.setattr(sweep, "be_quiet", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--kind", "text", "--only", "llama", "--out", f"{tmp_path}/page.md"])
    with pytest.raises(SystemExit) as ended:
        sweep.main()

    assert ended.value.code == 1
    assert rows((tmp_path / "page.md").read_text()) == {"a": ("WRONG", "0.1")}


def version_of_the_page() -> str:
    """The Transformers that the page was made with."""
    made_with = re.search(r"with Transformers (\S+),", section_of(PAGE.read_text(), TEXT))
    assert made_with is not None
    return made_with[1]


@pytest.mark.parametrize("heading", [TEXT, IMAGES])
def test_page_tells_of_no_fault_and_counts_what_it_lists(heading: str) -> None:
    page = section_of(PAGE.read_text(), heading)
    found = rows(PAGE.read_text(), heading)
    counts = Counter(verdict for verdict, _ in found.values())
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("works", "refused", "not built"))

    assert set(counts) == {"works", "refused", "not built"}
    assert f"\n{len(found)} classes: {summary}.\n" in page
    assert all(0 <= float(told) <= 1e-5 for verdict, told in found.values() if verdict == "works")
    assert heading == TEXT or counts["works"] >= FEWEST_WITH_IMAGES


@pytest.mark.skipif(
    version_of_the_page() != transformers.__version__,
    reason=f"made with Transformers {version_of_the_page()}; {transformers.__version__} is here",
)
def test_page_lists_every_class_of_the_transformers_that_it_was_made_with(sweep: ModuleType) -> None:
    for kind, heading in ((sweep.TEXT, TEXT), (sweep.IMAGES, IMAGES)):
        found = rows(PAGE.read_text(), heading)
        assert sorted(found) == sorted(config_class.model_type for config_class in kind.config_classes())
