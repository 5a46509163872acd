"""Runs Transformers' own model and attention tests, or TRL's tests of its trainers, with distca and with sdpa.

    python scripts/models/upstream_tests.py --transformers CHECKOUT [--families llama qwen3 ...]
        [--page scripts/models/classes.md]
    python scripts/models/upstream_tests.py --trl CHECKOUT [--families sft dpo ...] [...]

CHECKOUT is a source tree of the version that is installed or of one near it; nothing is fetched, and no GPU is needed.
If a tree lacks files, the option is given again: later trees fill what earlier ones lack. What tests import and the
installed version no longer has comes from the tree (`upstream/plugin.py`). Transformers' own test requirements
(`parameterized`, `httpx`) must be there.

Each family's test file runs with distca in each of its suites (`upstream/plugin.py`), and what did not pass once more
with sdpa, every time in another process. For TRL models and datasets of the Hub are made here with TRL's own scripts
(`upstream/hub.py`).

Exit status 1: a test fails only with distca, neither refused by name nor because it asserts that sdpa is the default.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import NamedTuple

from page_sections import file_to_write, parser_of, write_section
from upstream.outcomes import DISTCA, OTHER, PASSED, SDPA, Outcome, Outcomes, Run, section


ATTENTION_TESTS = (
    "flash_attn_2 or flash_attention_2 or matches_sdpa or matches_fa2 or sdpa_padding or compile_for_training"
)


class Project(NamedTuple):
    """Whose tests run: families, the path of their test files, and which tests belong to each suite (`-k`)."""

    package: str
    families: tuple[str, ...]
    test_file: str
    suites: dict[str, str]
    parts_of_a_tree: tuple[str, str]


TRANSFORMERS = Project(
    "transformers",
    (
        *("llama", "qwen3", "gemma", "mixtral", "phi3", "smollm3", "mistral", "olmo2", "cohere", "deepseek_v3"),
        *("gpt_neox", "starcoder2"),
    ),
    "tests/models/{0}/test_modeling_{0}.py",
    {"models": f"not ({ATTENTION_TESTS})", "attention": ATTENTION_TESTS},
    ("tests", "utils"),
)
TRL = Project(
    "trl",
    ("sft", "dpo", "grpo", "reward", "kto", "rloo"),
    "tests/test_{0}_trainer.py",
    {"trainers": ""},
    ("tests", "scripts"),
)
# The plugin does not reach processes that a test starts.
ONE_PROCESS = "not (is_fsdp_test or is_tensor_parallel_test or is_expert_parallel_test)"
PYTEST_SETTINGS = """[pytest]
addopts = -p upstream.plugin -p pytest_timeout -p no:cacheprovider -W ignore
timeout = 600
timeout_method = signal
"""
FEW_FILES = 3
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> None:
    options = parse()
    project, trees = (TRL, options.trl) if options.trl else (TRANSFORMERS, options.transformers)
    of_run = options.families or project.families
    families: dict[str, dict[str, dict[str, Outcomes]]] = {}
    with tempfile.TemporaryDirectory(prefix="upstream_tests_") as folder:
        workplace = Path(folder)
        copied = assemble(project, trees, workplace)
        missing = [file for file in map(project.test_file.format, of_run) if not (workplace / file).is_file()]
        if missing:
            raise SystemExit(f"no tree holds {', '.join(missing)}; give one that does with --{project.package}")
        versions = {
            name: version(name) for name in dict.fromkeys((project.package, "transformers", "torch", "distca_hf"))
        }
        run = Run(date.today().isoformat(), versions, copied, families)
        for tree in copied:
            print(f"tests: {tree}; {project.package} {versions[project.package]} is installed", flush=True)
        if project is TRL:
            hub = environment() | {"TQDM_DISABLE": "1"}
            subprocess.run([sys.executable, "-m", "upstream.hub", "."], cwd=workplace, env=hub, check=True)
        for family in of_run:
            families[family] = {suite: run_both(project, workplace, family, suite) for suite in project.suites}
    if options.page:
        write_section(options.page, section(run, tuple(project.suites)))
    faults = [failure for failure in run.failures() if failure.meaning == OTHER]
    for fault in faults:
        ended = fault.distca.error or fault.distca.result
        print(f"FAILS WITH DISTCA ALONE {fault.family}, {fault.suite}: {fault.test}: {ended}")
    sys.exit(1 if faults else 0)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    sources = parser.add_mutually_exclusive_group(required=True)
    for option, name in (("--transformers", "Transformers"), ("--trl", "TRL")):
        tree = f"source tree of {name} with its tests; given again, a tree with files that the first lacks"
        sources.add_argument(option, type=Path, action="append", metavar="PATH", help=tree)
    parser.add_argument("--families", nargs="+", metavar="FAMILY", help="models or trainers to test; all by default")
    page = "the Markdown page whose section about these tests is replaced"
    parser.add_argument("--page", type=file_to_write, help=page)
    return parser.parse_args()


def assemble(project: Project, trees: list[Path], workplace: Path) -> list[str]:
    """Copies the tests of all trees into one, next to the installed package; returns the number of files from each
    tree, or their names if they are few, and its version."""
    (workplace / "pytest.ini").write_text(PYTEST_SETTINGS)
    for folder in ("src", "sources"):
        (workplace / folder).mkdir()
    installed = importlib.util.find_spec(project.package)
    assert installed is not None
    (workplace / "src" / project.package).symlink_to(Path(str(installed.origin)).parent)
    copied: list[str] = []
    for tree in trees:
        files = [path for part in project.parts_of_a_tree for path in (tree / part).rglob("*") if path.is_file()]
        lacked = [path for path in files if not (workplace / path.relative_to(tree)).exists()]
        sources = next(filter(Path.is_dir, (tree / "src" / project.package, tree / project.package)), None)
        if sources is not None:
            (workplace / "sources" / str(len(copied))).symlink_to(sources.resolve())
        for path in lacked:
            target = workplace / path.relative_to(tree)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        names = [str(path.relative_to(tree)) for path in lacked]
        copied.append(
            f"{', '.join(names) if len(names) <= FEW_FILES else f'{len(names)} files'} of {version_of(tree)}"
        )
    return copied


def version_of(tree: Path) -> str:
    """Reads the version of a source tree."""
    if (tree / "VERSION").is_file():
        return (tree / "VERSION").read_text().strip()
    package = tree / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', package.read_text(), re.MULTILINE) if package.is_file() else None
    return found[1] if found else "an unknown version"


def environment() -> dict[str, str]:
    """Returns the environment of processes that find this program's parts and nothing on the Hub."""
    python_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | ENVIRONMENT | {"PYTHONPATH": python_path}


def run_both(project: Project, workplace: Path, family: str, suite: str) -> dict[str, Outcomes]:
    """Runs one suite of a family with distca, and with sdpa the tests that did not pass."""
    file = project.test_file.format(family)
    ours = run_suite(project, workplace, family, suite, DISTCA, [file])
    rest = [f"{file}::{test}" for test, outcome in ours.items() if outcome.result != PASSED]
    return {DISTCA: ours, SDPA: run_suite(project, workplace, family, suite, SDPA, rest) if rest else {}}


def run_suite(
    project: Project, workplace: Path, family: str, suite: str, implementation: str, tests_of: list[str]
) -> Outcomes:
    """Runs one suite of a family, or some of its tests, in a new process. Exits with the end of its output if not all
    of its tests came to an end."""
    began = time.perf_counter()
    lines = workplace / "outcomes.jsonl"
    lines.unlink(missing_ok=True)
    plugin = ["--attention", implementation, "--suite", suite, "--outcomes", str(lines)]
    command = [sys.executable, "-m", "pytest", *plugin, "-k", project.suites[suite], "-m", ONE_PROCESS]
    process = subprocess.run(
        [*command, *tests_of], cwd=workplace, env=environment(), text=True, stdout=PIPE, stderr=STDOUT
    )
    tests, *ended = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [[]]
    outcomes = {line.pop("test"): Outcome(**line) for line in ended}
    if not tests or tests != list(outcomes):
        unfinished = next((test for test in tests if test not in outcomes), "collecting tests")
        fault = f"{family}, {suite}, {implementation}: pytest ended with {process.returncode} in {unfinished}"
        raise SystemExit(f"{fault}\n{process.stdout[-6000:]}")
    counts = Counter(outcome.result for outcome in outcomes.values())
    seconds = f"{time.perf_counter() - began:.0f} s"
    print(f"{family}, {suite}, {implementation}: {dict(counts)} ({seconds})", flush=True)
    return outcomes


if __name__ == "__main__":
    main()
