"""What `import distca_hf` imports, what it registers, and when."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distca_hf
from distca_hf import errors, when_imported
from support.forked import run_fresh


HEAVY = ("torch", "transformers", "accelerate", "datasets")
LIST_HEAVY = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def test_launcher_packing_and_planning_import_neither_torch_nor_transformers() -> None:
    """Nor does a plugin that refuses a setting import Transformers."""
    statements = (
        "import distca_hf",
        "from distca_hf import ConfigError, __version__",
        "import distca_hf.run, distca_hf.recipe",
        "import distca_hf.cli",
        "import distca_hf.placement.place, distca_hf.data.epochs, distca_hf.data.collate",
        "import distca_hf.planning.plan, distca_hf.planning.routing, distca_hf.layout",
        "import distca_hf.batches.placed, distca_hf.analysis.command",
    )
    program = "".join(f"{statement}\n{LIST_HEAVY}\n" for statement in statements)
    refused = (
        "try:\n    distca_hf.DistCAPlugin(tokens_per_rank=-1)\n"
        "except distca_hf.ConfigError:\n    print('transformers' in sys.modules)"
    )
    *imported, has_transformers = run_fresh(program + refused).splitlines()
    assert dict(zip(statements, imported, strict=True)) == dict.fromkeys(statements, "[]")
    assert has_transformers == "False"


@pytest.mark.parametrize("name", distca_hf.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(distca_hf, name) is not None
    assert name in dir(distca_hf)


def test_every_error_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}

    assert "NotFiniteError" in raised
    assert raised <= set(distca_hf.__all__)


def test_unknown_attribute_raises_attribute_error_with_its_name() -> None:
    with pytest.raises(AttributeError, match="module 'distca_hf' has no attribute 'Plugin'"):
        distca_hf.Plugin  # noqa: B018
    assert not hasattr(distca_hf, "Plugin")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a module that can be imported, and is not yet."""
    name = f"waited_for_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    meta_path = list(sys.meta_path)
    yield name
    sys.meta_path[:] = meta_path
    sys.modules.pop(name, None)


def test_action_runs_once_when_the_module_is_ready(module: str) -> None:
    seen: list[bool] = []
    when_imported(module, lambda: seen.append(sys.modules[module].ready))
    assert seen == []

    importlib.import_module(module)
    importlib.reload(sys.modules[module])

    assert seen == [True]


def test_action_runs_at_once_for_a_module_that_is_there(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    when_imported(module, lambda: seen.append(module))

    assert seen == [module]


def test_all_actions_for_one_module_run(module: str) -> None:
    seen: list[int] = []
    for number in (1, 2):
        when_imported(module, lambda number=number: seen.append(number))  # type: ignore[misc]
    importlib.import_module(module)

    assert sorted(seen) == [1, 2]


def test_looking_for_a_module_without_importing_it_does_not_use_the_action_up(module: str) -> None:
    """`importlib.util.find_spec` is how packages ask whether another one is there."""
    seen: list[str] = []
    when_imported(module, lambda: seen.append(module))
    assert importlib.util.find_spec(module) is not None
    importlib.import_module(module)

    assert seen == [module]


def test_action_waits_for_an_import_that_succeeds(module: str, tmp_path: Path) -> None:
    path = tmp_path / f"{module}.py"
    path.write_text("raise OSError('not yet')\n")
    seen: list[str] = []
    when_imported(module, lambda: seen.append(module))
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module(module)
    path.write_text("ready = 1  # now\n")
    importlib.invalidate_caches()
    importlib.import_module(module)

    assert seen == [module]
