"""Pages in Markdown: links lead somewhere, pictures have alternatives, code can be parsed, the site builds."""

import ast
import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commands import REPOSITORY, SCRIPTS, run_command


DOCS = REPOSITORY / "docs"
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"), *REPOSITORY.glob("scripts/**/*.md")])
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)\s]+)\)")
HTML_PICTURE = re.compile(r"<img\b[^>]*>")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(REPOSITORY)) for page in pages]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them; a heading that comes again is numbered."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def broken(page: Path, link: str) -> bool:
    """Whether a relative link leads to no file, or to no heading of it."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(REPOSITORY):
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    links = LINK.findall(prose(page)) + [path for _, path in PICTURE.findall(prose(page))]
    relative = [link for link in links if not re.match(r"https?://|mailto:", link)]

    assert [link for link in relative if broken(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_pictures_have_alternatives(page: Path) -> None:
    assert [path for alternative, path in PICTURE.findall(prose(page)) if len(alternative) < 10] == []
    assert [tag for tag in HTML_PICTURE.findall(prose(page)) if not re.search(r'alt="[^"]{10,}"', tag)] == []


def test_checks_of_pages_notice_faults() -> None:
    page = DOCS / "trainer.md"

    assert broken(page, "nowhere.md")
    assert broken(page, "#no-such-heading")
    assert broken(page, "../../outside.md")
    assert not broken(page, "../README.md#install")
    assert LINK.findall("![a](b.svg) [c](d.md)") == ["d.md"]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks_of_code_can_be_parsed(page: Path) -> None:
    parsers: dict[str, Any] = {"python": ast.parse, "json": json.loads, "yaml": yaml.safe_load}
    for language, code in FENCE.findall(page.read_text()):
        assert language in {*parsers, "", "bash", "text", "bibtex"}, language
        if language in parsers:
            parsers[language](textwrap.dedent(code))


def test_every_page_is_in_the_navigation() -> None:
    def paths(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [path for part in (entry.values() if isinstance(entry, dict) else entry) for path in paths(part)]

    listed = paths(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])

    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS))


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    run_command([SCRIPTS / "mkdocs", "build", "--site-dir", tmp_path / "site"], NO_MKDOCS_2_WARNING="1")
    api = (tmp_path / "site" / "settings" / "index.html").read_text()
    example = (tmp_path / "site" / "files" / "examples" / "lora.py" / "index.html").read_text()

    assert "Balances a Trainer" in api, "docstrings are read from the sources"
    assert "get_peft_model" in example, "files that pages link to are part of the site"
    assert "../files/examples/lora.py/" in (tmp_path / "site" / "trainer" / "index.html").read_text()
