"""Classes of the sweep over all models, one by one."""

from types import ModuleType
from typing import Any, cast

import pytest
from transformers import PreTrainedConfig


def config_class_of(kind: Any, model_type: str) -> type[PreTrainedConfig]:
    """Returns the configuration class; skips the test, by name, if the installed Transformers has none."""
    if model_type not in {config_class.model_type for config_class in kind.mapping}:
        pytest.skip(f"this Transformers has no class of type {model_type} in {kind.auto_class.__name__}")
    (config_class,) = kind.config_classes([model_type])
    return cast(type[PreTrainedConfig], config_class)


def assert_works(sweep: ModuleType, kind: Any, model_type: str, largest_difference: float = 1e-5) -> None:
    """Asserts that a step on ranks has the loss and gradients of every document by itself."""
    outcome = sweep.examine(config_class_of(kind, model_type), kind)

    assert outcome.verdict == sweep.WORKS, f"{outcome.model_class}: {outcome.verdict}: {outcome.detail}"
    assert float(outcome.detail) <= largest_difference, outcome.model_class
