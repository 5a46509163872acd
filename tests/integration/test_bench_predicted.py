"""Predicted steps beside measured ones: the script that writes the tables of docs/simulation.md."""

import re
from pathlib import Path

from support.scripts import run_script


# Largest error of a predicted ratio, in percent.
BOUNDS = {
    "local / ours": 8.0,
    "ours / ideal": 5.0,
    "packs kept / ideal": 6.0,
    "Ulysses / ideal": 5.0,
    "ring / ours": 5.0,
    "gathered / ideal": 8.0,
    "saved / recomputed": 5.0,
    "trainer and server / alone, forward": 5.0,
    "trainer and server / alone, backward": 5.0,
}


def test_predicted_ratios_are_those_that_were_measured(tmp_path: Path) -> None:
    printed = run_script(1, tmp_path, ["scripts/benchmarks/predicted_steps.py"])
    rows = re.findall(r"^\| ([\w, ]+ / [\w, ]+) \| (\d+) \| [+-][\d.]+% \| ([+-][\d.]+)% \|$", printed, re.MULTILINE)

    assert {name for name, _, _ in rows} == BOUNDS.keys()
    assert sum(int(number) for _, number, _ in rows) > 85
    for name, _, worst in rows:
        assert abs(float(worst)) <= BOUNDS[name], name
