"""Programs of `scripts` that are no benchmarks, and an example: what they cannot take is one line before all else."""

import ast
import importlib
import sys

import pytest

from support.commands import REPOSITORY


def test_no_option_takes_any_whole_number() -> None:
    """Counts of 0 or below would fail late, or measure nothing: types of options refuse them."""
    files = [path for folder in ("scripts", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
    options = [
        (path.name, node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
    ]
    types = [(name, ast.unparse(key.value)) for name, node in options for key in node.keywords if key.arg == "type"]

    assert len(types) > 50
    assert [one for one in types if one[1] == "int"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("faults/kill_trainers --kills 0", "argument --kills: '0' is not a whole number above 0"),
        ("faults/lose_servers --losses 0", "argument --losses: '0' is not a whole number above 0"),
        ("faults/lose_servers --trainers -1", "argument --trainers: '-1' is not a whole number above 0"),
        ("faults/lose_servers --seed x", "argument --seed: 'x' is not a whole number from 0 on"),
        ("models/sweep --only nope", "--only: not in the mappings of Transformers: nope"),
        ("models/sweep --out missing/page.md", "argument --out: missing/page.md cannot be written"),
        ("models/divided --only nope", "--only: not in the mappings of Transformers: nope"),
        ("models/families --out missing/page.md", "argument --out: missing/page.md cannot be written"),
        ("models/upstream_tests --transformers . --page missing/page.md", "missing/page.md cannot be written"),
        ("../examples/pipeline --steps 0", "argument --steps: '0' is not a whole number above 0"),
        ("../examples/pipeline --stages -2", "argument --stages: '-2' is not a whole number above 0"),
        ("pictures/draw_report --browser nope", "--browser nope: there is no such program"),
    ],
)
def test_what_a_program_cannot_take_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    program, *words = line.split()
    folder, _, name = program.rpartition("/")
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    shown = capsys.readouterr()

    assert ended.value.code == 2
    assert said in shown.err.splitlines()[-1]
    assert shown.out == ""
