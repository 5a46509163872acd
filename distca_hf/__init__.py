"""Core attention disaggregation for Hugging Face: balanced training on packed documents of any length.

Importing the package registers the attention implementation "distca" with Transformers. The launcher and the command
line must run before torch and Transformers read the environment. So the registration waits until the module with the
registry is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
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
from distca_hf.launched import attaches_every_trainer
from distca_hf.version import __version__, check_versions


if TYPE_CHECKING:
    from distca_hf.batches.loader import PlacedLoader
    from distca_hf.batches.stream_loader import StreamLoader
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
    "StreamLoader",
    "Timeouts",
    "UnknownSettingError",
    "UnsupportedAttentionError",
    "VersionError",
    "__version__",
    "attach_every_trainer",
    "enable",
]

# Top-level folders of the repository that an installation puts into the package (setup.cfg).
_FOLDERS = frozenset({"distca_hf.examples", "distca_hf.patches", "distca_hf.recipes"})

# Loaded when first used, so that planning needs no torch and the launcher runs before anything reads the environment.
_LAZY = {
    "Debug": "distca_hf.config",
    "DistCACallback": "distca_hf.integrations.trainer.callback",
    "DistCAPlugin": "distca_hf.plugin",
    "Pipeline": "distca_hf.pipelines.pipeline",
    "PlacedLoader": "distca_hf.batches.loader",
    "StreamLoader": "distca_hf.batches.stream_loader",
    "Timeouts": "distca_hf.config",
    "enable": "distca_hf.integrations.models.forward_watch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls `action` once the module `name` has been imported: now, if it already is."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(name, action))


def attach_every_trainer() -> None:
    """Attaches every Trainer of this process for as long as it trains, as `python -m distca_hf.run --attach` and the
    variable DISTCA_ATTACH=1 do. For programs whose Trainer is out of reach: call it in a file that they import.

    Settings come from the recipe or from variables `DISTCA_<FIELD>`. Batches stay the program's, unless
    `tokens_per_rank` is set. Trainers that are already attached, or have a `DistCACallback` or an enabled model, stay
    as they are. When a training ends, the Trainer is detached. Its `train` raises what `DistCAPlugin.attach` raises,
    and ConfigError if its class replaces the loop of `Trainer.train`.
    """
    when_imported("transformers.trainer", lambda: _apply("every_trainer"))


class _OwnFolders(importlib.abc.MetaPathFinder):
    """A finder of folders that are inside the installed package, or next to it in a checkout.

    It comes first: an editable installation also has a finder, which would find the folders of its own checkout.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _FOLDERS:
            return None
        package = Path(__file__).parent
        spec = importlib.machinery.PathFinder.find_spec(fullname, [str(package), str(package.parent)], target)
        if spec is None:  # Transformers would hide a ModuleNotFoundError behind the name of a model's class
            folder = fullname.rpartition(".")[2]
            raise ImportError(
                f"{package} was copied without the folder {folder}/, which lies next to it in the repository: copy "
                "that as well, or run pip install in the repository",
                name=fullname,
            )
        return spec


class _Watch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of one module: asks the finders after it, and runs their loader, then an action.

    It stays installed until an import has succeeded, because `find_spec` is also called without an import.
    """

    _loader: importlib.abc.Loader  # of the module, once it was looked for

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:  # the action runs once
            sys.meta_path.remove(self)
            self._action()


def _apply(patch: str) -> None:
    getattr(importlib.import_module(f"distca_hf.patches.{patch}"), patch).apply()


check_versions()
if not any(isinstance(finder, _OwnFolders) for finder in sys.meta_path):
    sys.meta_path.insert(0, _OwnFolders())
when_imported("transformers.modeling_utils", lambda: _apply("attention"))
when_imported("transformers.masking_utils", lambda: _apply("packed_documents"))
when_imported("accelerate.data_loader", lambda: _apply("skip_batches"))
if attaches_every_trainer():
    attach_every_trainer()
