"""Command lines of programs that measure: help that keeps its lines, options that several have, figures they write.

Imports neither Transformers, nor torch until it is asked for a GPU. `lib/options.py` has the options of a training
step.
"""

import argparse
import json
import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.request import MAX_MICRO_STEPS, MAX_RANKS
from distca_hf.errors import ConfigError, PackingError


HELP_COLUMNS = 118
Name = TypeVar("Name")
# Most of a whole number in options, as `distca plan` takes tokens; and digits with which it is looked at.
MOST, DIGITS = 2**31 - 1, 20
MOST_FEW, MOST_WORDS = 1024, 10_000_000


def parser_of(description: str | None, modes: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Returns a parser whose help has the lines of a docstring as they are, and says at its end what each mode is."""
    shown, width = ["modes:"], max(map(len, modes or [""])) + 6
    for name, words in (modes or {}).items():
        shown.append(textwrap.fill(f"{f'  {name}':{width}}{words}", HELP_COLUMNS, subsequent_indent=" " * width))
    end, lines = "\n".join(shown) if modes else None, argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=lines, epilog=end)


def names(known: Collection[str], kind: str = "mode") -> Callable[[str], list[str]]:
    """Returns a `type` of options: known names with commas between them, each of which a message calls a `kind`."""

    def chosen(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{kind} {unknown[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return chosen


def _whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Returns a `type` of options: whole numbers from the least to the most."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text[:DIGITS]) >= least):
            words = f"above {least - 1}" if least else "from 0 on"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {words}")
        if len(text) > DIGITS or int(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return int(text)

    return number


whole, count, at_least_two = _whole(0), _whole(1), _whole(2)
ranks, micro_steps = _whole(1, MAX_RANKS), _whole(1, MAX_MICRO_STEPS)
few, words = _whole(1, MOST_FEW), _whole(1, MOST_WORDS)  # of layers, heads, threads; of a vocabulary


def _finite(is_right: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """Returns a `type` of options: finite numbers for which a condition holds."""

    def number(text: str) -> float:
        with suppress(ValueError):
            if math.isfinite(float(text)) and is_right(float(text)):
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number {words}")

    return number


above_zero, not_negative = _finite(lambda value: value > 0, "above 0"), _finite(lambda value: value >= 0, "from 0 on")


def counts(text: str) -> list[int]:
    """Returns whole numbers above 0, as `type` of an option with commas between them."""
    return [count(part) for part in text.split(",")]


def magi_settings(text: str) -> list[str]:
    """Returns settings as 512:1, as `type` of an option with commas between them."""
    for part in text.split(","):
        chunk, _, stages = part.partition(":")
        whole(chunk), whole(stages)
    return text.split(",")


def file_to_read(text: str) -> Path:
    """Returns the path of a file that is there, as `type` of an option."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return Path(text)


def file_to_write(text: str) -> Path:
    """Returns the path of a file in a folder that is there, as `type` of an option: nothing is measured in vain."""
    if Path(text).is_dir() or not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: it is a folder, or its folder is missing")
    return Path(text)


def _readable(read: Callable[[Any], object], named: Callable[[str], Name]) -> Callable[[str], Name]:
    """Returns a `type` of options: names of what can be read."""

    def checked(text: str) -> Name:
        try:
            read(named(text))
        except (ConfigError, PackingError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return named(text)

    return checked


# Of shipped lengths and profiles, or of files.
lengths_file, profile_name = _readable(read_lengths, Path), _readable(find_profile, str)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`."""
    parser.add_argument("--device", type=_device, choices=["cuda", "cpu"], default="cuda", help="where ranks compute")


def _device(text: str) -> str:
    """Returns the type of a device, which a default is, too: without a GPU no program begins on one."""
    if text == "cuda":
        from torch.cuda import is_available

        if not is_available():
            raise argparse.ArgumentTypeError("this host has no GPU for cuda: give --device cpu")
    return text


def add_out(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Adds `--out`; `when` says when it is written, if not at the end."""
    parser.add_argument("--out", type=file_to_write, help=f"write all figures as JSON{when}")


def add_tokens_per_rank(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds `--tokens-per-rank`, by default so many."""
    words = "most tokens of a micro-batch on each rank"
    parser.add_argument("--tokens-per-rank", type=count, default=default, help=words)


def add_ranks(parser: argparse.ArgumentParser, default: Sequence[int]) -> None:
    """Adds `--ranks`, by default these, of programs that plan without any rank."""
    parser.add_argument("--ranks", nargs="+", type=ranks, default=[*default], help="numbers of ranks to plan for")


def parse_plans(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses `--ranks` and `--tokens-per-rank`, for which documents are drawn: their product is bounded."""
    options = parser.parse_args()
    num_ranks, tokens = max(options.ranks), max(options.ranks) * options.tokens_per_rank
    if tokens > MOST:
        parser.error(f"{num_ranks} ranks of {options.tokens_per_rank} tokens hold {tokens} together, more than {MOST}")
    return options


def write_figures(options: argparse.Namespace, **figures: Any) -> None:
    """Writes figures and all options as one JSON object to `--out`, if that is given."""
    if options.out:
        given = {name: str(value) for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"options": given, **figures}))
