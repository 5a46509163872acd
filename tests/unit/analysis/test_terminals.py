"""distca plan on narrow terminals, without colours, without a terminal, and on very few or many documents."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from distca_hf.analysis.lengths import read_lengths
from distca_hf.cli import app
from support.commands import SCRIPTS


# What a terminal is told in between: bold and the like, and where the next character goes.
CONTROL = re.compile(r"\x1b\[[0-9;?]*([A-Za-z])")
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(np.random.RandomState(0).randint(1, 5000, 400).tolist()))
    return path


def shown(columns: int, *arguments: str | Path) -> tuple[str, str]:
    """Returns the command's stdout and stderr in a terminal of this width."""
    texts = []
    ends = [pty.openpty() for _ in range(2)]
    for _, ours in ends:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    width = ("COLUMNS", "LINES")  # pytest's workers have them, and they count more than the terminal
    environment = {name: value for name, value in os.environ.items() if name not in width}
    environment |= {"TERM": "xterm", "NO_COLOR": "1"}
    command = [SCRIPTS / "distca", "plan", *arguments, "--gpus", "4", "--tokens-per-rank", "8192"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=ends[0][1], stderr=ends[1][1], env=environment
    )
    for theirs, ours in ends:
        os.close(ours)
        written = b""
        while True:
            try:
                part = os.read(theirs, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written += part
        os.close(theirs)
        texts.append(written.decode())
    assert process.wait() == 0, texts
    return texts[0], texts[1]


def test_a_narrow_terminal_without_colours(lengths: Path) -> None:
    columns = 40
    printed, progress = shown(columns, lengths, "--compare")
    assert not COLOUR.search(printed + progress)
    assert max(len(CONTROL.sub("", line).rstrip("\r")) for line in printed.split("\n")) <= columns
    assert "…" not in printed
    assert "In short:" in printed
    assert "planning an epoch" in progress  # a bar, which is gone when everything is done


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 1), (1, 64), (70, 8)])
def test_one_row(tokens: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(f"[{tokens}]")
    arguments = ["plan", str(tmp_path / "one.json"), "--gpus", str(ranks), "--tokens-per-rank", "8192", "--compare"]
    text = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert f"1 document, {tokens} token" in text
    assert "1 micro-batch in" in text
    assert "with plain packing" in text
    said = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert said["whole_epoch"]["micro_batches"] == said["whole_epoch"]["planned_micro_batches"] == 1


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt"])
def test_rows_do_not_stay_in_memory(name: str, tmp_path: Path) -> None:
    """Eight bytes per length: five million take 40 MB, where objects would take gigabytes."""
    rows = 30_000
    line = {"rows.jsonl": '{"id": %d, "length": 7}\n', "rows.csv": "%d,7\n", "rows.txt": "%d\n"}[name]
    header = "id,length\n" if name == "rows.csv" else ""
    (tmp_path / name).write_text(header + "".join(line % (row + 1) for row in range(rows)))
    read_lengths(tmp_path / name)  # imports
    tracemalloc.start()
    assert len(read_lengths(tmp_path / name).tokens) == rows
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40 * rows


def test_pipelines_in_a_narrow_terminal(lengths: Path) -> None:
    columns = 40
    printed, progress = shown(columns, lengths, "--pipeline", "2", "--chunks", "4", "--micro-steps", "4")
    assert max(len(CONTROL.sub("", line).rstrip("\r")) for line in printed.split("\n")) <= columns
    assert "…" not in printed
    assert "without a pipeline, on" in " ".join(printed.split())
    assert "simulating the pipeline" in progress
