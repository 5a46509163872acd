"""Programs that measure pipelines: the simulation against torch's schedules, and the tables."""

import re
from pathlib import Path

from support.scripts import run_script


def test_torchs_schedules_run_what_is_simulated(tmp_path: Path) -> None:
    """Two stages that hardly sleep: every row is there, and no step is shorter than its sleeps."""
    program = "scripts/benchmarks/pipeline_runtime.py"
    printed = run_script(2, tmp_path, [program, "--step-seconds", "0.2", "--rounds", "1", "--chunks", "2"])
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\w ]+) \| ([\d.]+) \| ([\d.]+) \|", printed, re.MULTILINE)

    expected = [
        (mix, schedule, division)
        for schedule in ("1F1B", "interleaved")
        for mix in ("pretrain", "prolong")
        for division in ("as packed", "shaped")
    ]
    assert [row[:3] for row in rows] == [tuple(row) for row in expected]
    for _, _, division, simulated, measured in rows:
        assert float(measured) >= 0.99 * float(simulated)
        assert float(simulated) == 0.2 if division == "as packed" else float(simulated) <= 0.2


def test_a_table_of_pipelines(tmp_path: Path) -> None:
    printed = run_script(1, tmp_path, ["scripts/benchmarks/pipelines.py", "wires", "--steps", "1"])
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]

    assert len(rows) == 2 + 2 * 2 * 2 * 4
    assert {len(cells) for cells in rows} == {8}
    assert all(0 < float(cell) <= 1 for cells in rows[2:] for cell in cells[4:])
