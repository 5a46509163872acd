"""Programs of `scripts` that are no benchmarks: what they cannot take is one line before anything begins."""

import importlib
import sys

import pytest

from support.commands import REPOSITORY


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("faults/kill_trainers --kills 0", "--kills 0 is no whole number above 0"),
        ("faults/lose_servers --losses 0", "--losses 0 is below 1"),
        ("faults/lose_servers --trainers -1", "--trainers -1 is below 1"),
        ("models/sweep --only nope", "--only: not in the mappings of Transformers: nope"),
        ("models/sweep --out missing/page.md", "argument --out: missing/page.md cannot be written"),
        ("models/divided --only nope", "--only: not in the mappings of Transformers: nope"),
        ("models/check_classes --only nope", "--only: not in the mappings of Transformers: nope"),
        ("models/families --out missing/page.md", "argument --out: missing/page.md cannot be written"),
        ("models/upstream_tests --transformers . --compare missing.json", "missing.json holds no outcomes"),
        ("pictures/draw_report --browser nope", "--browser nope: there is no such program"),
    ],
)
def test_what_a_program_cannot_take_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    program, *words = line.split()
    folder, name = program.split("/")
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    shown = capsys.readouterr()

    assert ended.value.code == 2
    assert said in shown.err.splitlines()[-1]
    assert shown.out == ""
