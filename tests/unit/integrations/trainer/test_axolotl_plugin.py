"""The plugin of axolotl, with a stand-in for axolotl's base class: it is inert without its section."""

import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from transformers import Trainer

from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.attachment import Attachment
from support.commands import REPOSITORY
from support.models import tiny_model


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that the entry point names, as axolotl loads it."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["axolotl.plugins"]
    module, _, name = points["distca"].partition(":")
    loaded = importlib.import_module(module)
    assert hasattr(loaded, name)
    yield loaded
    sys.modules.pop(module)


def configuration(axolotl: ModuleType, **section: Any) -> Any:
    """What axolotl makes of a YAML file: its class inherits from those of plugins."""
    module, _, name = axolotl.BalancedTraining().get_input_args().rpartition(".")
    own = type("AxolotlInputConfigBase", (BaseModel,), {})
    merged = type("AxolotlInputConfig", (own, getattr(importlib.import_module(module), name)), {})
    return SimpleNamespace(**{"distca": None} | merged(**section).model_dump(exclude_none=True))


@pytest.mark.parametrize("section", [{}, {"distca": None}, {"distca": False}])
def test_without_its_section_nothing_is_attached(section: dict[str, Any], axolotl: ModuleType) -> None:
    trainer = SimpleNamespace()
    axolotl.BalancedTraining().post_trainer_create(configuration(axolotl, **section), trainer)

    assert vars(trainer) == {}


@pytest.mark.parametrize(
    ("section", "tokens_per_rank", "checks"),
    [(True, 0, False), ({}, 0, False), ({"tokens_per_rank": 192, "debug": {"check_finite": True}}, 192, True)],
)
def test_the_section_attaches_with_its_settings(
    section: Any, tokens_per_rank: int, checks: bool, axolotl: ModuleType, make: Callable[..., Trainer]
) -> None:
    trainer = make(model=tiny_model(num_hidden_layers=1, implementation="sdpa"))
    axolotl.BalancedTraining().post_trainer_create(configuration(axolotl, distca=section), trainer)

    assert Attachment.of(trainer) is not None
    context = watch_of(trainer.model).context
    assert (context.tokens_per_rank, context.debug.check_finite) == (tokens_per_rank, checks)
    assert trainer.model.config._attn_implementation == "distca"


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"tokens_per_ranks": 64}, "distca: unknown setting 'tokens_per_ranks'. Did you mean 'tokens_per_rank'"),
        ({"debug": {"check_finit": True}}, "check_finit"),
        ({"tokens_per_rank": "many"}, "tokens_per_rank"),
        ({"tokens_per_rank": -1}, "tokens_per_rank"),
        ([1], "must be a mapping, not list"),
        ("yes", "must be a mapping, not str"),
    ],
)
def test_a_wrong_section_is_refused_in_one_line(section: Any, told: str, axolotl: ModuleType) -> None:
    with pytest.raises(ValidationError) as refused:
        configuration(axolotl, distca=section)

    (error,) = refused.value.errors()
    assert error["loc"] == ("distca",)
    assert "\n" not in error["msg"]

    assert re.search(told, error["msg"], re.IGNORECASE), error["msg"]
