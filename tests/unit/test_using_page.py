"""`docs/using.md` says what the code says: settings, metrics, errors, examples."""

import ast
import dataclasses
import inspect
import re

import pytest

from distca_hf import errors
from distca_hf.config import DistCAConfig
from distca_hf.integrations import meter
from support.commands import REPOSITORY


PAGE = REPOSITORY / "docs" / "using.md"
TEXT = PAGE.read_text()


def section(title: str) -> str:
    (found,) = (part for part in TEXT.split("\n## ") if part.startswith(f"{title}\n"))
    return found


def table(title: str) -> list[list[str]]:
    """Cells of the rows of a section's table, without its head."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def test_every_setting_is_in_the_table_with_its_default() -> None:
    written = [(name, default) for name, default, _ in table("Settings")]

    assert written == [
        (f"`{setting.name}`", f"`{setting.metadata['default']}`") for setting in dataclasses.fields(DistCAConfig)
    ]


def test_choices_of_a_setting_are_named() -> None:
    meanings = {name.strip("`"): meaning for name, _, meaning in table("Settings")}
    for setting in dataclasses.fields(DistCAConfig):
        choices = getattr(setting.type, "__args__", ())
        missing = [choice for choice in choices if f"`{choice}`" not in meanings[setting.name] and choice != "auto"]
        assert not missing, setting.name


def test_every_metric_is_explained() -> None:
    logged = re.findall(r'"(distca/\w+)":', inspect.getsource(meter))

    assert [name.strip("`") for name, _ in table("Metrics")] == logged


def test_every_error_is_explained() -> None:
    raised = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind is not errors.DistCAError}

    assert {name.strip("`") for name, _ in table("Faults")} == raised


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL), ids=lambda code: code[:20])
def test_code_can_be_parsed(code: str) -> None:
    ast.parse(code)


def test_every_example_is_linked_and_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)

    assert [link for link in links if not (PAGE.parent / link).is_file()] == []
    examples = {path.name for path in (REPOSITORY / "examples").glob("*.py")} - {"python_sources.py"}
    assert {link.removeprefix("../examples/") for link in links if link.startswith("../examples/")} == examples


def test_readme_leads_here() -> None:
    assert "docs/using.md" in (REPOSITORY / "README.md").read_text()
