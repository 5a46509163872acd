"""Core attention disaggregation for Hugging Face: balanced training on packed documents of any length.

Importing the package makes the attention implementation "distca" known to Transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distca_hf.errors import (
    CheckpointError,
    ConfigError,
    DistCAError,
    NotFiniteError,
    PackingError,
    PeerLostError,
    PlanError,
    PlanMismatchError,
    ReportError,
    ServerLostError,
    StepTimeoutError,
    StoreLostError,
    UnknownSettingError,
    UnsupportedAttentionError,
    VersionError,
)
from distca_hf.import_hooks import find_own_folders, when_imported
from distca_hf.version import __version__, check_versions


if TYPE_CHECKING:
    from distca_hf.batches.loader import PlacedLoader
    from distca_hf.config import Debug, Timeouts
    from distca_hf.integrations.models.forward_watch import enable
    from distca_hf.integrations.trainer.callback import DistCACallback
    from distca_hf.pipelines.pipeline import Pipeline
    from distca_hf.plugin import DistCAPlugin

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Debug",
    "DistCACallback",
    "DistCAError",
    "DistCAPlugin",
    "NotFiniteError",
    "PackingError",
    "PeerLostError",
    "Pipeline",
    "PlacedLoader",
    "PlanError",
    "PlanMismatchError",
    "ReportError",
    "ServerLostError",
    "StepTimeoutError",
    "StoreLostError",
    "Timeouts",
    "UnknownSettingError",
    "UnsupportedAttentionError",
    "VersionError",
    "__version__",
    "enable",
]

# Loaded when first used, so that planning needs no torch and the launcher runs before anything reads the environment.
_LAZY = {
    "Debug": "distca_hf.config",
    "DistCACallback": "distca_hf.integrations.trainer.callback",
    "DistCAPlugin": "distca_hf.plugin",
    "Pipeline": "distca_hf.pipelines.pipeline",
    "PlacedLoader": "distca_hf.batches.loader",
    "Timeouts": "distca_hf.config",
    "enable": "distca_hf.integrations.models.forward_watch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _apply(patch: str) -> None:
    getattr(importlib.import_module(f"distca_hf.patches.{patch}"), patch).apply()


check_versions()
find_own_folders()
when_imported("transformers.modeling_utils", lambda: _apply("attention"))
when_imported("accelerate.data_loader", lambda: _apply("skip_batches"))
