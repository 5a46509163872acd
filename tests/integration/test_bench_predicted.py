"""Predicted steps beside measured ones: the script that writes the tables of docs/simulation.md."""

import re
from pathlib import Path

from support.scripts import run_script


# Largest error of a predicted ratio, in percent.
BOUNDS = {
    ("H200", "local / ours"): 5.0,
    ("H200", "ours / ideal"): 5.0,
    ("H200", "tasks moved / ideal"): 5.0,
    ("H200", "local / tasks moved"): 5.0,
    ("H200", "given / ideal"): 5.0,
    ("H200", "Ulysses / ideal"): 5.0,
    ("H200", "ring / ours"): 5.0,
    ("H200", "gathered / ideal"): 5.0,
    ("H200", "saved / recomputed"): 5.0,
    ("H200", "with servers / even"): 5.0,
    ("H200", "alone / with servers"): 5.0,
    ("H200", "trainer and server / alone, forward"): 5.0,
    ("H200", "trainer and server / alone, backward"): 5.0,
    ("H100", "local / ours"): 5.0,
    ("H100", "ours / ideal"): 5.0,
    ("H100", "tasks moved / ideal"): 5.0,
    ("H100", "local / tasks moved"): 5.0,
    ("H100", "Ulysses / ideal"): 5.0,
    ("H100", "gathered / ideal"): 5.0,
}


def test_predicted_ratios_are_those_that_were_measured(tmp_path: Path) -> None:
    printed = run_script(1, tmp_path, ["scripts/benchmarks/predicted_steps.py"])
    line = r"^\| (\w+) \| ([\w, ]+ / [\w, ]+) \| (\d+) \| [+-][\d.]+% \| ([+-][\d.]+)% \|$"
    rows = re.findall(line, printed, re.MULTILINE)

    assert {(gpu, ratio) for gpu, ratio, _, _ in rows} == BOUNDS.keys()
    assert sum(int(number) for _, _, number, _ in rows) > 210
    for gpu, ratio, _, worst in rows:
        assert abs(float(worst)) <= BOUNDS[gpu, ratio], (gpu, ratio)
