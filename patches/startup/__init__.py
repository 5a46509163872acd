"""Imports distca_hf together with `transformers.trainer`, in processes that do not import it themselves.

Python runs `distca_startup.pth` when a process starts, and imports this package if DISTCA_ATTACH is set. It imports
nothing else at that time, so distca_hf finds no half-imported module. It is a package outside distca_hf because
importing that checks versions, which must not end processes that never train, such as pip.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _WithTrainer(MetaPathFinder):
    """A finder that imports distca_hf when `transformers.trainer` is searched. Other finders find the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers.trainer" or "distca_hf" in sys.modules:
            return None
        import distca_hf  # noqa: F401  # reads DISTCA_ATTACH; if it raises, no Trainer is imported

        sys.meta_path.remove(self)
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)


sys.meta_path.insert(0, _WithTrainer())
