"""Command lines, which the programs of this folder share."""

import argparse


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help has the lines of a docstring as they are."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def whole(text: str) -> int:
    """Returns a whole number, 0 among them, as `type` of an option."""
    return _whole(text, 0)


def count(text: str) -> int:
    """Returns a whole number above 0, as `type` of an option: with none of them nothing would be tried."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {'above 0' if least else 'from 0 on'}")
    return int(text)
