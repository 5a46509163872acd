"""What benchmark programs say of themselves: every mode has a line in `--help`, from the table that builds it."""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from types import ModuleType
from typing import NoReturn
from unittest import mock

import pytest
import torch

from support.commands import REPOSITORY


PROGRAMS = REPOSITORY / "scripts" / "benchmarks"
# Functions of all_gpus.sh, and the program that each launches.
LAUNCHING = {
    **dict.fromkeys(("layers", "step", "grid"), "attention_step"),
    **{"model": "model_step", "search": "longest_context"},
}


def commands() -> Iterator[tuple[str, str]]:
    """Programs that pages and all_gpus.sh start, and the words of a line after each."""
    for page in [*(REPOSITORY / "docs").rglob("*.md"), PROGRAMS / "README.md", PROGRAMS / "all_gpus.sh"]:
        text = page.read_text().replace("\\\n", " ")
        for function, program in LAUNCHING.items() if page.suffix == ".sh" else ():
            text = re.sub(rf"^( +(?:[\w-]+\) )?){function} ", rf"\1{program}.py ", text, flags=re.MULTILINE)
        text = re.sub(r"\bmeasure (\w+) ", r"\1.py ", text)
        for name, command in re.findall(r'^(\w+)="(.* scripts/benchmarks/.*)"$', text, re.MULTILINE):
            text = text.replace(f"${name} ", f"{command} ")
        if page.suffix == ".md":
            text = re.sub(r"`[^`]+`", lambda span: f"{span[0].replace(chr(10), ' ')}\n", re.sub("```", "", text))
        for line in text.splitlines():
            for program, words in re.findall(r"\b(\w+)\.py((?:(?!\.py| # ).)*)", line):
                if (PROGRAMS / f"{program}.py").is_file():
                    yield program, words


class Asked(Exception):
    """A program asks for its options."""


def parser_of(script: Callable[[str], ModuleType], program: str) -> argparse.ArgumentParser:
    """The parser of a program, which goes no further."""
    asked: list[argparse.ArgumentParser] = []

    def parse_args(parser: argparse.ArgumentParser) -> NoReturn:
        asked.append(parser)
        raise Asked

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args), pytest.raises(Asked):
        script(program).main()
    return asked[0]


def test_options_and_modes_on_pages_are_there(script: Callable[[str], ModuleType]) -> None:
    lines = defaultdict(list)
    for program, words in commands():
        if "--" in words:
            lines[program].append(words)

    assert len(lines) > 10
    assert len([*chain(*lines.values())]) > 40
    for program, of_program in lines.items():
        parser = parser_of(script, program)
        known = re.findall(r"^  ([\w-]+)", parser.format_help().partition("\nmodes:\n")[2], re.MULTILINE)
        for words in of_program:
            assert {*re.findall(r"--[a-z][a-z-]*", words)} <= parser._option_string_actions.keys(), (program, words)
            for modes in re.findall(r"--modes \"?([\w,-]+)", words):
                assert {*modes.split(",")} <= {*known}, (program, words)


@pytest.mark.parametrize(
    ("program", "table"),
    [
        ("attention_step", "lib.modes"),
        ("model_step", "lib.whole_model"),
        ("training_run", "lib.training.run"),
        ("shared_prefixes", "shared_prefixes"),
        ("image_towers", "image_towers"),
    ],
)
def test_help_says_what_every_mode_is(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    table: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--help"])
    with pytest.raises(SystemExit):
        script(program).parse()
    _, _, shown = capsys.readouterr().out.partition("\nmodes:\n")
    named = [line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line[2] != " "]

    with_servers = script("lib.served").MODES if program == "attention_step" else ()
    assert named == [*script(table).MODES, *with_servers]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *(
            (f"attention_step --device cpu --documents {wrong}", f"--documents '{wrong}': write")
            for wrong in ("foo", "A;;B", "0", "9000000000x5", "A:0")
        ),
        ("attention_step --out missing/out.json", "argument --out: missing/out.json cannot be written"),
        ("attention_step --config missing.json", "argument --config: missing.json is not a file"),
        ("attention_step --cluster nope", "--cluster nope: choose one of h100, h200"),
        (
            "training_run --device cpu --modes distca,moving",
            "mode 'moving' is none of distca, ulysses, packing, given",
        ),
        ("planning placed nope", "argument tables: no table is called nope; there are placed, fixed"),
        ("planning --ranks 0", "argument --ranks: '0' is not a whole number above 0"),
        ("planning --ranks 8 9999", "argument --ranks: 9999 is more than 8192"),
        ("windows --ranks 8000 --tokens-per-rank 2000000000", "hold 16000000000000 together, more than"),
        ("predicted_steps --published -1", "argument --published: '-1' is not a whole number from 0 on"),
        ("plan_estimates nope", "unrecognized arguments: nope"),
        ("pipeline_step --chunks 1,0", "argument --chunks: '0' is not a whole number above 0"),
        ("training_run --learning-rate -1", "argument --learning-rate: '-1' is not a finite number from 0 on"),
        ("longest_context --minutes inf", "argument --minutes: 'inf' is not a finite number above 0"),
        ("host_time --device cpu --heads 3 --kv-heads 2", "--kv-heads 2 do not divide --heads 3"),
        ("host_time --kernel nope", "argument --kernel: invalid choice: 'nope'"),
        ("memory --mix nope", "argument --mix: invalid choice: 'nope'"),
        ("attention_step --layers 2000000000", "argument --layers: 2000000000 is more than 1024"),
    ],
)
def test_numbers_and_names_that_no_program_can_take_are_one_line(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    said: str,
) -> None:
    program, *words = line.split()
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *words])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        script(program).main()
    shown = capsys.readouterr()

    assert ended.value.code == 2
    assert said in shown.err.splitlines()[-1]
    assert shown.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="of hosts without a GPU")
@pytest.mark.parametrize("program", ["attention_step", "host_time", "training_run"])
def test_without_a_gpu_the_default_device_is_refused(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{program}.py"])
    with pytest.raises(SystemExit) as ended:
        script(program).main()

    assert ended.value.code == 2
    assert "this host has no GPU for cuda: give --device cpu" in capsys.readouterr().err
