"""Runs lines of `distca` commands, as documentation has them, in the process of the tests."""

import shlex

from typer.testing import CliRunner

from distca_hf.cli import app


def run_line(line: str) -> str:
    """What a line of `distca` commands prints, of which each reads what the one before printed."""
    printed = ""
    for command in line.split("|"):
        name, *words = shlex.split(command)
        assert name == "distca", command
        ran = CliRunner().invoke(app, words, input=printed)
        assert ran.exit_code == 0, ran.output
        printed = ran.stdout
    return printed
