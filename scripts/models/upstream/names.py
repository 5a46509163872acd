"""Names that tests of another version import and the installed package lacks.

They come from the sources of the tests' own version. A test whose name cannot be had from there fails where it uses
it, with distca and with sdpa, and does not keep the others of its file from running.
"""

import ast
import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def provide_missing_names(files: Iterable[Path], package: str, sources: list[Path]) -> list[str]:
    """Adds to the installed package's modules what these files import from them and they lack.

    Args:
        sources: folders of the package in source trees; the first one that has a name gives it.

    Returns:
        The names added, with their modules.
    """
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
