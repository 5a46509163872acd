"""Classes that Transformers divides between ranks: what the script says of some, and that its list is whole."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from support.commands import REPOSITORY
from support.scripts import run_script


PAGE = REPOSITORY / "scripts" / "models" / "classes.md"
SCRIPTS = REPOSITORY / "scripts" / "models"
HEADING = "Tensor and expert plans"
NUMBER = re.compile(r"\d\.\de-\d\d")


def rows(page: str, heading: str = HEADING) -> dict[str, list[str]]:
    """Cells of a list of the page, by model type."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {
        model_type: [cell.removeprefix("up to ") for cell in rest]
        for *rest, model_types in cells[2:]
        for model_type in model_types.split(", ")
    }


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    import divided

    return divided


@pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23), reason="Transformers divides experts rightly since 5.23"
)
def test_script_tells_how_exactly_classes_train_on_tensor_and_expert_ranks(tmp_path: Path) -> None:
    out = tmp_path / "models.md"
    run_script(1, tmp_path, ["scripts/models/divided.py", "--only", "qwen3_moe", "apertus", "--out", out])
    found = rows(out.read_text())

    assert {model_type: heads for model_type, (heads, _, _) in found.items()} == {
        "apertus": "by heads",
        "qwen3_moe": "by heads",
    }
    assert all(float(number) < 1e-5 for number in found["qwen3_moe"][1:])
    assert found["apertus"][2] == "no plan"
    # Gradients of the parameters of its activation are not summed over tensor ranks.
    assert re.fullmatch(r"Transformers: \S+ without distca, \S+ with it", found["apertus"][1])


def test_class_that_differs_with_distca_alone_makes_the_command_fail(
    divided: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = divided.Trial("WRONG 0.1", heads_divided=True, is_wrong=True)
    monkeypatch.setattr(divided, "examine", lambda config_class: divided.Outcome("a", wrong, divided.NO_PLAN))
    monkeypatch.setattr(divided.sweep, "be_quiet", lambda: None)
    monkeypatch.setattr(sys, "argv", ["divided.py", "--only", "llama", "--out", f"{tmp_path}/page.md"])
    with pytest.raises(SystemExit) as ended:
        divided.main()

    assert ended.value.code == 1
    assert rows((tmp_path / "page.md").read_text()) == {"a": ["by heads", "WRONG 0.1", "no plan"]}


def test_page_tells_of_no_fault() -> None:
    found = rows(PAGE.read_text())
    numbers = [cell for cells in found.values() for cell in cells[1:] if NUMBER.fullmatch(cell)]

    assert len(numbers) > 60
    assert all(float(number) <= 1e-5 for number in numbers)
    assert "WRONG" not in str(found)


def version_of_the_page() -> str | None:
    made_with = re.search(r"divided\.py` with Transformers (\S+),", PAGE.read_text())
    return made_with and made_with[1]


@pytest.mark.skipif(
    version_of_the_page() != transformers.__version__,
    reason=f"made with Transformers {version_of_the_page()}; {transformers.__version__} is here",
)
def test_page_lists_every_class_with_a_plan_that_works() -> None:
    working = {
        model_type for model_type, cells in rows(PAGE.read_text(), "All classes").items() if cells[0] == "works"
    }
    plans = {
        model_type
        for model_type in working & set(CONFIG_MAPPING)
        if CONFIG_MAPPING[model_type].base_model_tp_plan or CONFIG_MAPPING[model_type].base_model_ep_plan
    }

    assert len(plans) > 50
    assert plans - set(rows(PAGE.read_text())) == set()
