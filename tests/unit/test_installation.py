"""Lines of the documentation that install something, and what the package asks for."""

import re
import tomllib
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Import torch while they are built, which a build in isolation (what pip does with an extra) does not have.
BUILT_AGAINST_TORCH = {"flash-attn", "apex", "transformer-engine", "causal-conv1d", "mamba-ssm"}


def name_of(requirement: str) -> str:
    """The package a requirement such as `torch>=2.11` is about."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_without_torch_in_the_build(extra: str) -> None:
    assert BUILT_AGAINST_TORCH.isdisjoint(map(name_of, EXTRAS[extra]))


def test_extras_that_pages_name_are_there() -> None:
    named = {
        (page.name, extra)
        for page in PAGES
        for extras in re.findall(r"(?:\.|distca_hf)\[([a-z0-9,]+)\]", page.read_text())
        for extra in extras.split(",")
    }

    assert ("README.md", "flash4") in named
    assert {extra for _, extra in named} <= set(EXTRAS)


def test_flash_attention_2_is_installed_after_torch_and_without_isolation() -> None:
    lines = [
        line for page in PAGES for line in page.read_text().splitlines() if re.search(r"install flash-attn\b", line)
    ]

    assert lines
    assert all("flash-attn --no-build-isolation" in line for line in lines)
