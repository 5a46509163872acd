"""Trains three steps with programs of frameworks on two CPU processes, with their own sdpa and with distca.

    python scripts/frameworks/compare.py trl ms-swift llama-factory --environments FOLDER
    python3.12 scripts/frameworks/compare.py axolotl --environments FOLDER --out TABLE.md

Each framework gets an environment in FOLDER, in which it, this checkout and all that both need are installed; one that
is there is used again. The program is run as its users run it, and again with what balances it. If a loss differs by
more than 1e-5, or the busiest rank has more than 1.05 times the mean work, the script exits with 1.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Framework:
    """A framework and its programs, as `programs.yaml` explains them."""

    packages: list[str]
    programs: dict[str, dict[str, Any]]  # `module` and `settings` of each
    file: bool = False
    section: dict[str, object] = field(default_factory=dict)
    lowest_python: Sequence[int] = (3, 11)  # the lowest version that it can be installed with


SCRIPTS = Path(__file__).parent
PROGRAMS = yaml.safe_load((SCRIPTS / "programs.yaml").read_text())
FRAMEWORKS = {name: Framework(**facts) for name, facts in PROGRAMS["frameworks"].items()}
LARGEST_DIFFERENCE, LARGEST_IMBALANCE = 1e-5, 1.05
SHOWN = ("torch", "transformers", "accelerate")


def install(framework: Framework, environment: Path) -> None:
    """Makes the environment of a framework, unless it is there."""
    python = environment / "bin" / "python"
    if python.exists():
        return
    if sys.version_info < tuple(framework.lowest_python):
        lowest = ".".join(map(str, framework.lowest_python))
        raise SystemExit(f"{framework.packages[0]} needs Python {lowest}, and this is {sys.version.split()[0]}")
    print(f"installing {framework.packages[0]} into {environment}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    # Together: pip then says whether their versions agree.
    packages = [*framework.packages, str(SCRIPTS.parents[1])]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)


def versions(environment: Path) -> str:
    """Returns the versions of packages in an environment."""
    program = f"from importlib.metadata import version; print(*map(version, {SHOWN!r}))"
    found = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return ", ".join(f"{name} {one}" for name, one in zip(SHOWN, found.stdout.split(), strict=True))


def run(command: Sequence[str], log: Path, **more: str) -> None:
    """Runs a command in the folder of its log, which its output goes to, with more variables of the environment."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        environment = os.environ | PROGRAMS["environment"] | {"PYTHONPATH": str(SCRIPTS)} | more
        done = subprocess.run(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: see {log}")


def compare(framework: Framework, name: str, environment: Path) -> tuple[float, float]:
    """Trains a program with sdpa and with distca.

    Returns:
        The largest difference of a loss, and the largest imbalance of a step, as it is logged.
    """
    module, settings = framework.programs[name]["module"], framework.programs[name]["settings"]
    runs = []
    variable = {} if framework.section else {"DISTCA_ATTACH": "1"}
    for kind, variables, section in (("sdpa", {}, {}), ("distca", variable, framework.section)):
        output = environment / "runs" / f"{re.sub(r'[^a-z]+', '-', name.lower())}-{kind}"
        if output.exists():
            shutil.rmtree(output)
        output.mkdir(parents=True)
        places = {"material": environment / "material", "output": output, "scripts": SCRIPTS}
        if framework.file:
            file = output / "program.yaml"
            file.write_text(_filled(yaml.safe_dump(settings | section), places))
            words = [str(file)]
        else:
            options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
            words = [_filled(word, places) for word in options]
        launcher = [str(environment / "bin" / "torchrun"), "--nproc-per-node", "2"]
        run([*launcher, "-m", "on_cpus", module, *words], output / "log.txt", **variables)
        state = next(output.rglob("trainer_state.json"))
        runs.append([entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry])
    alone, balanced = runs
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(alone, balanced, strict=True))
    # Of a step's work, or of its attention if only that is known.
    work = (entry.get("distca/step_imbalance", entry.get("distca/imbalance")) for entry in balanced)
    return difference, max(work)


def _filled(text: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="+", choices=FRAMEWORKS)
    parser.add_argument("--environments", type=Path, required=True, help="folder for environments and what they train")
    parser.add_argument("--out", type=Path, help="file that the table is written to as well")
    options = parser.parse_args()
    lines = [
        "| framework | program | largest difference of a loss | busiest rank, work over the mean | with |",
        "|---|---|---|---|---|",
    ]
    worst = (0.0, 0.0)
    for name in options.frameworks:
        framework, environment = FRAMEWORKS[name], (options.environments / name).absolute()
        install(framework, environment)
        material = environment / "material"
        run([str(environment / "bin" / "python"), str(SCRIPTS / "material.py"), str(material)], material / "log.txt")
        for program in framework.programs:
            difference, imbalance = compare(framework, program, environment)
            worst = max(worst[0], difference), max(worst[1], imbalance)
            title = framework.packages[0].replace("==", " ")
            lines.append(f"| {title} | {program} | {difference:.1e} | {imbalance:.2f} | {versions(environment)} |")
            print(lines[-1], flush=True)
    table = "\n".join(lines) + f"\n\n{datetime.now(UTC):%Y-%m-%d}, two CPU processes over gloo\n"
    print(table)
    if options.out:
        options.out.write_text(table)
    if worst[0] > LARGEST_DIFFERENCE or worst[1] > LARGEST_IMBALANCE:
        raise SystemExit(f"losses differ by {worst[0]:.1e}, or the busiest rank has {worst[1]:.2f} times the mean")


if __name__ == "__main__":
    main()
