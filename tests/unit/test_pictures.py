"""Pictures in the documentation: figures are those of their pages; there are files for light and dark, and words."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.cli import app
from distca_hf.errors import ConfigError
from support.commands import REPOSITORY


PICTURES = REPOSITORY / "docs" / "pictures"
BENCHMARKS = REPOSITORY / "docs" / "benchmarks"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
STEPS = json.loads((BENCHMARKS / "steps.json").read_text())
ROWS = [(table["page"], row) for table in STEPS.values() for row in table["rows"]]


HTML = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)"(?: width="\d+")? alt="(?P<words>[^"]+)">\s*</picture>'
)
MARKDOWN = re.compile(
    r"!\[(?P<words>[^]]+)\]\((?P<light>[^)#]+)#gh-light-mode-only\)\s*"
    r"!\[[^]]+\]\((?P<dark>[^)#]+)#gh-dark-mode-only\)"
)


def pictures_of(page: Path) -> list[re.Match[str]]:
    """Pictures of a page, as `dark`, `light` and `words`: HTML on the front page, Markdown on pages of the site."""
    return list((HTML if page.parent == REPOSITORY else MARKDOWN).finditer(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pictures_are_there_for_light_and_dark_pages_and_in_words(page: Path) -> None:
    pictures = pictures_of(page)

    assert len(re.findall(r"-light\.(?:svg|png)", page.read_text())) == len(pictures), "pictures of another form"
    for picture in pictures:
        assert picture["light"].replace("-light.", "-dark.") == picture["dark"]
        assert (page.parent / picture["light"]).is_file()
        assert (page.parent / picture["dark"]).is_file()
        assert len(picture["words"]) > 80


def test_every_picture_is_shown() -> None:
    found = [picture for page in PAGES for picture in pictures_of(page)]
    shown = {Path(picture[style]).name for picture in found for style in ("light", "dark")}

    assert shown == {path.name for path in PICTURES.iterdir()}


@pytest.mark.parametrize(("page", "row"), ROWS, ids=lambda part: part if isinstance(part, str) else part["row"])
def test_figures_of_steps_are_those_of_their_page(page: str, row: dict[str, Any]) -> None:
    def has_them(line: str) -> bool:
        numbers = re.findall(r"\d+", line)
        return row["row"] in line and all(str(ms) in numbers for ms in row["ms"].values())

    lines = [line for line in (BENCHMARKS / page).read_text().splitlines() if has_them(line)]

    assert len(lines) == 1
    assert row["links"] in lines[0] or "(NVLink)" in lines[0] or row["row"].startswith("³")


def numbers_of(svg: Path) -> set[str]:
    """Numbers in texts of a picture, which are outlines with the text in a comment."""
    return {
        number for text in re.findall(r"<!-- (.*?) -->", svg.read_text()) for number in re.findall(r"[\d.,]+", text)
    }


@pytest.mark.parametrize(
    ("name", "table", "unit"), [("steps-four-gpus", "four_gpus", "ideal"), ("steps-two-gpus", "two_gpus", "distca")]
)
def test_bars_show_these_figures(name: str, table: str, unit: str) -> None:
    for style in ("light", "dark"):
        numbers = numbers_of(PICTURES / f"{name}-{style}.svg")
        for row in STEPS[table]["rows"]:
            assert {f"{ms:,}" for ms in row["ms"].values()} <= numbers
            assert {f"{ms / row['ms'][unit]:.2f}" for ms in row["ms"].values()} <= numbers


def test_waiting_shows_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "pictures")
    words = importlib.import_module("draw_plans").waiting_in_words()

    for style in ("light", "dark"):
        assert words in (PICTURES / f"waiting-{style}.svg").read_text(), "run scripts/pictures/draw_plans.py again"
    shares = re.findall(r"\d\.\d\d", words)
    assert f"{max(map(float, shares)):.2f} times the mean" in " ".join(PAGES[0].read_text().split())


def test_first_table_of_the_readme_divides_figures_of_the_pages_it_links() -> None:
    text = PAGES[0].read_text()
    rows = re.findall(r"\[(\d+)\]\((docs/benchmarks/\S+\.md)\) → (\d+) ms \| \*\*([\d.]+)\*\* \| ([\d.]+) \|", text)

    assert len(rows) == len(re.findall(r"→ \d+ ms", text)) > 3
    for today, page, ours, ratio, like_for_like in rows:
        lines = [re.findall(r"\d+", line) for line in (REPOSITORY / page).read_text().splitlines()]
        assert {today, ours} <= {number for line in lines for number in line}
        assert f"{int(today) / int(ours):.{len(ratio.split('.')[1])}f}" == ratio
        assert any(
            f"{int(today) / int(number):.{len(like_for_like.split('.')[1])}f}" == like_for_like
            for line in lines
            if today in line
            for number in line
            if int(number)
        )
    assert float(rows[-1][3]) < 1, "the last row is the one in which there is nothing to win"


def test_losses_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "pictures")
    drawing = importlib.import_module("draw_measured")

    assert max(map(abs, drawing.DIFFERENCES)) < 1e-5
    for style in ("light", "dark"):
        assert drawing.losses_in_words() in (PICTURES / f"losses-{style}.svg").read_text(), (
            "run scripts/pictures/draw_measured.py again"
        )


def test_simulated_steps_are_those_of_the_shipped_profile_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "pictures")
    drawing = importlib.import_module("draw_simulated")
    stored, again = json.loads(drawing.STORED.read_text()), "run scripts/pictures/draw_simulated.py again"

    made, page = find_profile(drawing.PROFILE).made, drawing.PAGE.read_text()
    assert stored["profile"] == {"date": made.date, "remarks": made.remarks}, again
    assert stored["command"] == drawing.COMMAND, again
    assert drawing.with_figures(page, stored) == page, again
    assert [(panel["mix"], panel["gpus"]) for panel in stored["panels"]] == [
        (mix, gpus) for mix in drawing.MIXES for gpus in drawing.GPUS
    ]
    shown = [bar for panel in stored["panels"] for bar in panel["ways"].values() if bar["fits"]]
    for style in ("light", "dark"):
        picture = PICTURES / f"simulated-{style}.svg"
        assert drawing.described(stored["panels"]) in picture.read_text(), again
        assert {f"{bar['times_as_fast']:.2f}" for bar in shown} <= numbers_of(picture)


def test_the_command_of_the_page_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options and defaults are the request of the script, for every number of GPUs."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "pictures")
    drawing, asked = importlib.import_module("draw_simulated"), []

    def note(request: SimulationRequest, *_: Any, **__: Any) -> Any:
        asked.append(request)
        raise ConfigError("noted")

    for module in (drawing, importlib.import_module("distca_hf.analysis.simulate.command")):
        monkeypatch.setattr(module, "simulate", note)
    for gpus in drawing.GPUS:
        words = drawing.COMMAND.replace(",".join(map(str, drawing.GPUS)), str(gpus)).split()[1:]
        assert CliRunner().invoke(app, words).stderr == "distca: noted\n"
        with pytest.raises(ConfigError, match="noted"):
            drawing.result_of(drawing.QUOTED_MIX, gpus)
    assert asked[::2] == asked[1::2]
