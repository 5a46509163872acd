"""The program that compares what distca plan says with what was measured."""

from pathlib import Path

from support.scripts import run_script


def test_rows_are_printed_for_the_page(tmp_path: Path) -> None:
    printed = run_script(1, tmp_path, ["scripts/benchmarks/plan_estimates.py"])
    assert "| 4 | 131072,96x4096 | 4 layers, local, attention recomputed | 40.1 | 41.0 | +2.3% |" in printed
    assert "peak memory, off by at most: local 3.6%, placed 5.4%, fixed 6.1%, whole 0.1%" in printed
