"""Scripts that compare what distca plan says with what was measured, and with the log of a training."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from support.scripts import run_script


PLAN_LOG = "scripts/benchmarks/plan_log.py"


def test_a_log_is_compared_with_the_plan(tmp_path: Path) -> None:
    """On two ranks, and the two agree: one epoch, every micro-batch planned."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps(np.random.RandomState(0).randint(4, 400, 120).tolist()))
    printed = run_script(2, tmp_path, [PLAN_LOG, str(lengths), "--shorter", "4", "--tokens-per-rank", "256"])
    steps = re.search(r"lengths.json: (\d+) logged steps, (\d+) planned micro-batches", printed)
    assert steps is not None, printed
    assert int(steps[1]) == int(steps[2]) > 5
    for figure in ("imbalance_before", "imbalance"):
        compared = re.search(rf"{figure}: logged ([\d.]+), said ([\d.]+), ([+-][\d.]+)%", printed)
        assert compared is not None, printed
        assert abs(float(compared[3])) < 0.1


def test_documents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[100, 4000]")
    with pytest.raises(
        AssertionError, match=r"SystemExit: .* 1000 tokens, all data ranks together hold 512"
    ) as refused:
        run_script(2, tmp_path, [PLAN_LOG, str(lengths), "--shorter", "4", "--tokens-per-rank", "256"])

    assert "or give a larger --shorter" in str(refused.value)


def test_rows_are_printed_for_the_page(tmp_path: Path) -> None:
    printed = run_script(1, tmp_path, ["scripts/benchmarks/plan_estimates.py"])
    assert "| steps | 4, NVLink | 131072,96x4096 |  | 2.02 | 2.03 | +0.5% |" in printed
    assert "speed-up, off by at most: NVLink 7.8%, 30 GB/s 9.9%" in printed
    assert "peak memory, off by at most: local 3.6%, placed 5.4%, fixed 6.1%, whole 0.1%" in printed
