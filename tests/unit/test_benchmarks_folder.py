"""Programs that measure stand apart from what they share, and a page lists them."""

import ast
import re
from pathlib import Path

from support.commands import REPOSITORY


FOLDER = REPOSITORY / "scripts" / "benchmarks"


def imported(path: Path) -> set[str]:
    """First names of what a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_page_lists_all_programs() -> None:
    listed = re.findall(r"^\| \[([^]]+)\]\(\1\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    programs = [path.name for ending in ("py", "sh") for path in FOLDER.glob(f"*.{ending}")]

    assert sorted(name for name in listed if not (FOLDER / name).is_dir()) == sorted(programs)


def test_examples_for_cpus_need_no_file() -> None:
    """A model comes from a preset, so that a line can be pasted."""
    docstrings = {path.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in FOLDER.glob("*.py")}
    of_models = [name for name, words in docstrings.items() if "--device cpu --preset tiny" in words]

    assert [name for name, words in docstrings.items() if "--config" in words] == []
    assert len(of_models) > 3


def test_programs_can_be_run_and_are_not_imported() -> None:
    programs = {path.stem: path for path in FOLDER.glob("*.py")}

    assert len(programs) > 5
    assert [name for name, path in programs.items() if 'if __name__ == "__main__":' not in path.read_text()] == []
    assert [path.name for path in FOLDER.rglob("*.py") if imported(path) & programs.keys()] == []
