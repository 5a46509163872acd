"""Pages in Markdown of which several scripts write a section each, and their options."""

import argparse
import importlib
import re
from pathlib import Path

import yaml


INTRODUCTIONS = yaml.safe_load(Path(__file__).with_name("introductions.yaml").read_text())


def file_to_write(text: str) -> Path:
    """Returns the path of a file in a folder that is there, as `type` of an option: nothing is tried in vain."""
    if Path(text).is_dir() or not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: it is a folder, or its folder is missing")
    return Path(text)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help has the lines of a docstring as they are."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_classes(parser: argparse.ArgumentParser) -> None:
    """Adds `--only` and `--out` of scripts that go through classes of models."""
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL_TYPE", help="these; no page without --out")
    page = "the page whose section is replaced, by default scripts/models/classes.md"
    parser.add_argument("--out", type=file_to_write, help=page)


def introduction(section: str, **figures: object) -> str:
    """Returns what a section begins with, up to its table, with versions of the installed packages and these
    figures."""
    versions = {name: importlib.import_module(name).__version__ for name in ("transformers", "torch", "distca_hf")}
    text: str = INTRODUCTIONS[section].format(**versions, **figures)
    return text


def write_section(page: Path, section: str) -> None:
    """Replaces the section with the same heading, which is the first line of `section`, or adds it at the end.

    A section ends where the next heading of level 1 or 2 begins; no line of code may look like one. A page that is not
    there is made.
    """
    text = page.read_text() if page.exists() else ""
    sections = re.split(r"^(?=##? )", text, flags=re.MULTILINE)
    heading = section.partition("\n")[0]
    found = [at for at, other in enumerate(sections) if other.partition("\n")[0] == heading]
    if len(found) > 1:
        raise ValueError(f"{page} has {len(found)} sections with the heading {heading!r}; keep one of them")
    at = found[0] if found else len(sections)
    sections[at : at + 1] = [section]
    page.write_text("\n\n".join(other.strip("\n") for other in sections if other.strip()) + "\n")
