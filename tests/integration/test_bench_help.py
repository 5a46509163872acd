"""What benchmark programs say of themselves: every mode has a line in `--help`, from the table that builds it."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("program", "table"),
    [
        ("attention_step", "lib.modes"),
        ("server_step", "lib.served"),
        ("model_step", "lib.whole_model.modes"),
        ("training_run", "lib.training.run"),
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

    assert named == list(script(table).MODES)


def test_a_mode_that_is_not_known_is_named(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["training_run.py", "--modes", "distca,moving"])
    with pytest.raises(SystemExit):
        script("training_run").parse()

    assert "mode 'moving' is none of distca, ulysses, packing, fixed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "foo"], "--documents 'foo': write tokens as 131072,96x4096, or one of A, B, C, D"),
        (["--documents", "A;;B"], "--documents 'A;;B': write"),
        (["--rounds", "0"], "argument --rounds: '0' is no whole number above 0"),
        (["--out", "missing/out.json"], "argument --out: missing/out.json cannot be written"),
        (["--config", "missing.json"], "argument --config: missing.json is no file"),
        (["--cluster", "nope"], "--cluster nope: choose one of h100, h200"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_measured(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["attention_step.py", *words])
    with pytest.raises(SystemExit) as ended:
        script("attention_step").parse()

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_sizes_of_weak_scaling_are_numbers(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weak_scaling.py", "--sizes", "2,x"])
    with pytest.raises(SystemExit):
        script("weak_scaling").main()

    assert "argument --sizes: 'x' is no whole number above 0" in capsys.readouterr().err
