"""The part of `upstream_tests.py` that pytest loads: another default attention, and a line for every test's outcome.

    pytest -p upstream.plugin --attention distca --suite attention --outcomes FILE ...

In the suite "models" a model whose attention nobody names gets `--attention`; with distca it is also enabled when it
is told to train. In the suite "attention" models that ask for sdpa or FlashAttention 2 get `--attention` as well, and
tests that Transformers keeps for GPUs or for RUN_SLOW run here. In the suite "trainers" distca is the default, and
attached to every trainer that trains; with sdpa nothing changes.
The first line of FILE holds all tests that will run, each other one a test and its outcome, in JSON.
"""

import ast
import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

import pytest

from distca_hf import DistCAPlugin, when_imported
from distca_hf.errors import DistCAError
from upstream.outcomes import DISTCA, FAILED, IMPLEMENTATIONS, PASSED, SKIPPED, Outcome


def provide_missing_names(files: Iterable[Path], package: str, sources: list[Path]) -> list[str]:
    """Adds to the installed package's modules what these files import from them and they lack; returns the names
    added, with their modules. A name comes from the first folder of the package in source trees that has it."""
    added = []
    for module, name in sorted({found for file in files for found in imported(file, package)}):
        try:
            installed = importlib.import_module(module)
        except ImportError:
            continue
        try:
            getattr(installed, name)
        except AttributeError:
            setattr(installed, name, from_sources(module, name, package, sources))
            added.append(f"{module}.{name}")
        except ImportError:
            continue  # of something that is not installed here
    return added


def imported(file: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yields modules of the package and the names that a file imports from them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(f"{package}."):
            yield from ((str(node.module), alias.name) for alias in node.names)


def from_sources(module: str, name: str, package: str, sources: list[Path]) -> Any:
    """Takes a name from a module of source trees, which imports all else from the installed package."""
    why = "no source tree has it"
    for folder in sources:
        path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(f"{module}_of_tests", path) if path.is_file() else None
        if spec is None or spec.loader is None:
            continue
        older: ModuleType = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(older)
            return getattr(older, name)
        except (ImportError, AttributeError) as error:
            why = str(error)

    def gone(*_: Any, **__: Any) -> None:
        raise ImportError(f"the installed {package} has no {module}.{name}, and that of the tests fails: {why}")

    return gone


# Implementations that become another one when a model asks for them; None: nothing was said.
REPLACED = {"models": (None,), "attention": (None, "sdpa", "flash_attention_2"), "trainers": (None,)}
LIFTED_REQUIREMENTS = ("require_flash_attn", "require_torch_accelerator", "slow")
WORST_FIRST = (FAILED, PASSED, SKIPPED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attention", choices=IMPLEMENTATIONS, required=True)
    parser.addoption("--suite", choices=list(REPLACED), required=True)
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    attention, suite = config.getoption("attention"), config.getoption("suite")
    config.pluginmanager.register(Recorder(config.getoption("outcomes")))

    def set_attention() -> None:
        from transformers import PreTrainedModel

        replace_attention(PreTrainedModel, REPLACED[suite], attention)

    if suite != "trainers" or attention == DISTCA:
        when_imported("transformers.modeling_utils", set_attention)
    if suite == "models" and attention == DISTCA:
        when_imported("transformers.modeling_utils", enable_all)
    if suite == "trainers" and attention == DISTCA:
        when_imported("transformers.trainer", attach_to_all)
    if suite == "attention":
        when_imported("transformers.testing_utils", lift_requirements)
    # In the folder of the tests. The command line names some of them; all share what lies above them.
    named = {Path(test.partition("::")[0]) for test in config.args}
    files = [*named, *Path("tests").glob("*.py"), *Path("tests/generation").glob("test_utils.py")]
    for package in Path("src").iterdir():
        provide_missing_names(files, package.name, sorted(Path("sources").iterdir()))


def replace_attention(models: Any, replaced: tuple[str | None, ...], attention: str) -> None:
    """Makes models with FlashAttention's interface choose `attention` if they are asked for a replaced one. The method
    of `transformers.PreTrainedModel` that is changed is not public, but all choices pass through it."""
    choose: Callable[..., str] = models._check_and_adjust_attn_implementation

    @functools.wraps(choose)
    def choose_replaced(model: Any, asked_for: str | None, *arguments: Any, **keywords: Any) -> str:
        replace = asked_for in replaced and model._supports_flash_attn
        return choose(model, attention if replace else asked_for, *arguments, **keywords)

    models._check_and_adjust_attn_implementation = choose_replaced


def lift_requirements() -> None:
    """Makes decorators that would skip a test leave it as it is; distca needs no GPU."""
    from transformers import testing_utils

    for name in LIFTED_REQUIREMENTS:
        setattr(testing_utils, name, lambda test: test)


def enable_all() -> None:
    """Makes every model that is told to train an enabled one; those inside it follow it."""
    from torch import nn
    from transformers import PreTrainedModel

    from distca_hf.integrations.models.forward_watch import enable, watch_of

    inside = False

    def enable_and_train(model: Any, mode: bool = True) -> Any:
        nonlocal inside
        if mode and not inside and model.config._attn_implementation == DISTCA and watch_of(model) is None:
            enable(model, DistCAPlugin())
        outermost, inside = not inside, True
        try:
            return nn.Module.train(model, mode)
        finally:
            inside = not outermost

    PreTrainedModel.train = enable_and_train


def attach_to_all() -> None:
    """Makes every trainer attach distca before it trains for the first time."""
    from transformers import Trainer

    attached: WeakSet[Trainer] = WeakSet()
    train: Callable[..., Any] = Trainer.train

    @functools.wraps(train)
    def attach_and_train(trainer: Trainer, *arguments: Any, **keywords: Any) -> Any:
        if trainer not in attached:
            DistCAPlugin().attach(trainer)
            attached.add(trainer)
        return train(trainer, *arguments, **keywords)

    Trainer.train = attach_and_train


class Recorder:
    """Writes a line for every test as soon as it has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reported: list[Outcome] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._path.write_text(json.dumps([short(item.nodeid) for item in session.items]) + "\n")

    def pytest_runtest_logstart(self) -> None:
        self._reported = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            self._reported.append(failure(call.excinfo.value))
        elif not report.failed and (report.skipped or report.when == "call"):
            self._reported.append(Outcome(SKIPPED if report.skipped else PASSED))
        return report

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        line = {"test": short(nodeid), **asdict(worst(self._reported))}
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def failure(error: BaseException) -> Outcome:
    """Makes the outcome of a test that this error ended."""
    lines = str(error).strip().splitlines() or [""]
    return Outcome(FAILED, f"{type(error).__name__}: {lines[0]}", isinstance(error, DistCAError))


def worst(reported: list[Outcome]) -> Outcome:
    """Chooses a failure if there is one, of set-up, a subtest or tear-down; rather one that is not a refusal."""
    return min(reported, key=lambda outcome: (WORST_FIRST.index(outcome.result), outcome.refused))


def short(nodeid: str) -> str:
    """Cuts the file from a test's name."""
    return nodeid.partition("::")[2]
