"""Command lines of programs that measure: help that keeps its lines, options that several have, figures they write.

Imports neither torch nor Transformers. `lib/options.py` has the options of a training step.
"""

import argparse
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


HELP_COLUMNS = 118


def parser_of(description: str | None, modes: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Returns a parser whose help has the lines of a docstring as they are, and says at its end what each mode is."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=described(modes) if modes else None,
    )


def described(modes: Mapping[str, str]) -> str:
    """Returns the end of a help: a line, or several, for every mode."""
    width = max(map(len, modes)) + 6
    shown = [
        textwrap.fill(f"{f'  {name}':{width}}{words}", HELP_COLUMNS, subsequent_indent=" " * width)
        for name, words in modes.items()
    ]
    return "\n".join(["modes:", *shown])


def chosen_modes(parser: argparse.ArgumentParser, text: str | None, known: Collection[str]) -> list[str] | None:
    """Returns the modes of a text with commas; None if nothing was said. Ends with a message if one is not known."""
    names = text.split(",") if text else None
    unknown = [name for name in names or () if name not in known]
    if unknown:
        parser.error(f"mode {unknown[0]!r} is none of {', '.join(known)}")
    return names


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where ranks compute")


def add_out(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Adds `--out`; `when` says when it is written, if not at the end."""
    parser.add_argument("--out", type=Path, help=f"write all figures as JSON{when}")


def add_tokens_per_rank(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds `--tokens-per-rank`, by default so many."""
    parser.add_argument(
        "--tokens-per-rank", type=int, default=default, help="most tokens of a micro-batch on each rank"
    )


def add_ranks(parser: argparse.ArgumentParser, default: Sequence[int]) -> None:
    """Adds `--ranks`, by default these, of programs that plan without any rank."""
    parser.add_argument("--ranks", nargs="+", type=int, default=[*default], help="numbers of ranks to plan for")


def parse_tables(parser: argparse.ArgumentParser, known: Collection[str]) -> argparse.Namespace:
    """Parses with names of tables as arguments: `tables` are the chosen ones, all if none is named."""
    parser.add_argument("tables", nargs="*", default=[], help=f"any of {', '.join(known)}; without it, all")
    options = parser.parse_args()
    unknown = sorted({*options.tables} - {*known})
    if unknown:
        parser.error(f"no table is called {', '.join(unknown)}; there are {', '.join(known)}")
    options.tables = options.tables or [*known]
    return options


def write_figures(options: argparse.Namespace, **figures: Any) -> None:
    """Writes figures and all options as one JSON object to `--out`, if that is given."""
    if options.out:
        given = {name: str(value) for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"options": given, **figures}))
