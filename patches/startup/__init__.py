"""Imports distca_hf together with `transformers.trainer`, in processes that import nothing of it themselves.

Python runs `distca_startup.pth` as every process starts, and imports this package if DISTCA_ATTACH is set. Nothing
else is imported then, so that distca_hf finds no module half imported. It is a package outside distca_hf because
importing that checks versions, which must not end processes that never train, such as pip.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _WithTrainer(MetaPathFinder):
    """A finder that imports distca_hf when `transformers.trainer` is looked for. Other finders find the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers.trainer" or "distca_hf" in sys.modules:
            return None
        import distca_hf  # noqa: F401  # reads DISTCA_ATTACH; where it raises, no Trainer is imported

        sys.meta_path.remove(self)
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)


sys.meta_path.insert(0, _WithTrainer())
