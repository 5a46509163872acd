"""The benchmark of memory runs on two CPU processes, where there is nothing to count."""

from pathlib import Path

from support.scripts import run_script


def test_every_way_runs_all_its_steps(tmp_path: Path) -> None:
    steps = ["--tokens-per-rank", "256", "--longest", "400", "--steps", "2", "--parts", "2"]
    printed = run_script(2, tmp_path, ["scripts/benchmarks/memory.py", "--device", "cpu", "--preset", "tiny", *steps])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]

    expected = [[way, part] for way in ("constant", "placed") for part in ("1 to 1", "2 to 2")]
    assert [row[:2] for row in rows[2:]] == expected
    assert all(row[2:] == ["0.00", "0.00", "-", "0", "0"] for row in rows[2:])
    assert "documents prolong_up, longest 400; 256 tokens per rank and step" in printed
