"""The house: layers, sizes and habits that a program can check."""

import ast
import configparser
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distca_hf"
LARGEST_FILE_LINES = 400

# What each part may import, besides itself. docs/design.md draws the same layers.
BASE = {
    "arrays",
    "errors",
    "config",
    "cost",
    "flops",
    "launched",
    "layout",
    "prefixes",
    "recipe",
    "settings",
    "telemetry",
    "torch_private",
    "trace_file",
    "traces",
    "version",
    "whole_file",
}
LAYERS: list[set[str]] = [
    BASE,
    {"placement"},
    {"data", "planning"},
    {"comm", "kernels"},
    {"parallel_context", "runtime", "testing"},
    {"batches"},
    {"integrations", "patches"},
    {"pipelines", "servers"},
    {"analysis", "plugin"},
    {"__init__", "__main__", "axolotl", "cli", "launch_check", "run"},
]
# Parts that know nothing of each other; and training never needs analysis.
STRANGERS = [
    {"data", "planning"},
    {"placement", "planning"},
    {"comm", "kernels"},
    {"parallel_context", "runtime"},
    {"analysis", "plugin"},
    {"pipelines", "servers"},
    {"pipelines", "plugin"},
]
# Rooms that training does not need, and never imports.
ANNEXES = {"analysis", "pipelines", "servers"}
KNOW_ALL = {"__init__", "cli", "plugin", "run"}
# Files of core with names of annexes: settings, launching, the grid, public exports, fields of traces and positions.
# It may only become shorter: elsewhere core has general names for what an annex needs.
OF_ANNEXES = re.compile("server|pipeline|stage|analysis", re.IGNORECASE)
NAME_ANNEXES = {
    "__init__.py",
    "batches/reported_steps.py",
    "cli.py",
    "comm/grid.py",
    "comm/groups.py",
    "comm/rollcall.py",
    "config.py",
    "data/positions.py",
    "errors.py",
    "integrations/models/distributed.py",
    "integrations/models/distributed_check.py",
    "integrations/models/planner.py",
    "launched.py",
    "parallel_context.py",
    "plugin.py",
    "recipe.py",
    "run.py",
    "testing/__init__.py",
    "torch_private.py",
    "trace_file.py",
    "traces.py",
}
# Below the integrations there is no Transformers; planning knows no torch; only comm knows process groups.
FORBIDDEN = {
    "data": {"torch", "transformers", "accelerate", "deepspeed"},
    "placement": {"torch", "transformers", "accelerate", "datasets", "deepspeed"},
    "planning": {"torch", "transformers", "accelerate", "datasets", "deepspeed"},
    "kernels": {"torch.distributed", "transformers", "accelerate", "datasets"},
    "comm": {"transformers", "accelerate", "datasets"},
    "runtime": {"torch.distributed", "transformers", "accelerate", "datasets"},
    "batches": {"transformers", "accelerate", "datasets", "deepspeed"},
}


def _sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "patches").glob("*.py")])


def _part(path: Path) -> str:
    """Top-level part of the package that a file belongs to."""
    if path.is_relative_to(ROOT / "patches"):
        return "patches"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _layer(part: str) -> int:
    return next(level for level, parts in enumerate(LAYERS) if part in parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Every module a file imports, at the top or inside a function."""
    names: list[str] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def _own_imports(path: Path) -> set[str]:
    """Parts of the package that a file imports."""
    names = (name.split(".") for name in _imports(path) if name.split(".")[0] == "distca_hf")
    known = set().union(*LAYERS)
    return {parts[1] if len(parts) > 1 and parts[1] in known else "__init__" for parts in names}


def test_imports_go_down_the_layers() -> None:
    for path in (p for p in _sources() if _part(p) != "testing"):
        part = _part(path)
        for imported in _own_imports(path) - {part}:
            words = f"{path}: {part} (layer {_layer(part)}) imports {imported} (layer {_layer(imported)})"
            assert _layer(imported) <= _layer(part), words
            assert not any({part, imported} <= pair for pair in STRANGERS), words


def test_core_never_imports_annexes() -> None:
    importers = {_part(path) for path in _sources() if ANNEXES & (_own_imports(path) - {_part(path)})}

    assert importers - ANNEXES == KNOW_ALL


def _identifiers(path: Path) -> set[str]:
    """Names, attributes, arguments, and names of functions, classes and imports."""
    fields = ("id", "attr", "arg", "name", "asname")
    found = (getattr(node, field, None) for node in ast.walk(_tree(path)) for field in fields)
    return {name for name in found if isinstance(name, str)}


def test_core_does_not_name_annexes() -> None:
    core = [path for path in PACKAGE.rglob("*.py") if _part(path) not in ANNEXES]
    named = {str(path.relative_to(PACKAGE)) for path in core if any(map(OF_ANNEXES.search, _identifiers(path)))}

    assert named == NAME_ANNEXES


@pytest.mark.parametrize("part", FORBIDDEN)
def test_lower_layers_do_not_know_upper_libraries(part: str) -> None:
    for path in (PACKAGE / part).rglob("*.py"):
        for name in _imports(path):
            # Refusing an IterableDataset needs the class, inside the function that refuses it.
            assert not any(name == banned or name.startswith(f"{banned}.") for banned in FORBIDDEN[part]), (path, name)


def test_the_plugin_is_for_users_alone() -> None:
    importers = {path.name for path in _sources() if "plugin" in _own_imports(path) - {_part(path)}}

    assert importers == {"__init__.py"}


# Besides the wires themselves. Wrappers, tensors and checkpoints are told apart from process groups.
KNOW_PROCESS_GROUPS = {"comm", "parallel_context", "servers", "torch_private"}
MEASURE_LINKS = "measure_links.py"
NO_PROCESS_GROUPS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")


def test_the_parallel_context_alone_knows_who_trains_together() -> None:
    for path in _sources():
        for name in _imports(path):
            if name.startswith("torch.distributed") and not name.startswith(NO_PROCESS_GROUPS):
                # For users the plugin says which types its group may have.
                assert _part(path) in KNOW_PROCESS_GROUPS | {"plugin"} or path.name == MEASURE_LINKS, (path, name)
            if name.startswith("distca_hf.comm.groups"):
                assert _part(path) in {"comm", "parallel_context", "servers"} or path.name == MEASURE_LINKS, path
            if name == "distca_hf.telemetry.this_rank":  # of a line of the log
                assert _part(path) == "comm", path
            if name == "distca_hf.launched.launched_ranks_per_node":
                assert _part(path) == "parallel_context", path


def test_there_are_no_import_cycles() -> None:
    modules = {f"distca_hf.{'.'.join(p.relative_to(PACKAGE).with_suffix('').parts)}": p for p in PACKAGE.rglob("*.py")}
    modules |= {f"distca_hf.patches.{p.stem}": p for p in (ROOT / "patches").glob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = {candidate for full in _imports(path) for candidate in (full, full.rpartition(".")[0])}
        graph[name] = {target for target in imported if target in modules and target != name}

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        return seen

    assert [name for name in graph if name in reach(name)] == []


def _bad_habits(path: Path) -> Iterator[str]:
    text, tree = path.read_text(), _tree(path)
    nodes = list(ast.walk(tree))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    rules = {
        f"at most {LARGEST_FILE_LINES} lines": len(text.splitlines()) <= LARGEST_FILE_LINES,
        "a file begins with what it is for": ast.get_docstring(tree),
        "no globals": not any(isinstance(node, ast.Global) for node in nodes),
        "use logging": not any(isinstance(call, ast.Name) and call.id == "print" for call in calls),
        "no pickle": not any(name.split(".")[0] == "pickle" for name in _imports(path))
        # Checkpoints are those of torch.distributed.checkpoint, which pickles.
        and (path.name == "training_state.py" or not re.search(r"torch\.(load|save)\b", text)),
        "no object collectives": not re.search(r"all_gather_object|broadcast_object_list|gather_object", text),
        "settings are read in config.py, a launcher's numbers in launched.py, torch's own in torch_private.py": (
            path.name in ("config.py", "launched.py", "recipe.py", "torch_private.py") or "os.environ" not in text
        ),
    }
    yield from (rule for rule, is_kept in rules.items() if not is_kept)


def test_files_are_small_and_free_of_bad_habits() -> None:
    assert {str(path): found for path in _sources() if (found := list(_bad_habits(path)))} == {}


def _private_names_of_torch(path: Path) -> Iterator[str]:
    """Names with a leading underscore that are imported from torch, or reached from a name that is. Operators in
    `torch.ops` are told apart from names: a kernel's docstring says which ones it calls."""
    tree = _tree(path)
    of_torch = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "torch"
    }
    reached = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names = [name for name in _imports(path) if name.split(".")[0] == "torch"]
    names += [name for name in reached if re.fullmatch(r"[\w.]+", name) and name.split(".")[0] in of_torch]
    for name in names:
        if not name.startswith("torch.ops.") and any(re.match(r"_(?!_)", part) for part in name.split(".")):
            yield name


def test_private_names_of_torch_are_in_one_place() -> None:
    """What a newer torch may rename is looked for in one file; in each kernel, for the package that it is made for."""
    elsewhere = (path for path in _sources() if path.name != "torch_private.py")
    assert {str(path): found for path in elsewhere if (found := list(_private_names_of_torch(path)))} == {}


# What Transformers keeps about how it divided a model, private or younger than most of its releases.
DIVIDED_BY_TRANSFORMERS = re.compile(
    r"_mesh_manager|_dense_mesh|_device_mesh\b|\._tp_size|\.tp_plan|is_distributed_loading_by_transformers"
    r"|config\.distributed_config|\"distributed_config\""
)


def test_one_file_reads_how_transformers_divided_a_model() -> None:
    """`tests/unit/integrations/test_distributed_models.py` compares what it reads with real models, in every version
    that tests run with."""
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if DIVIDED_BY_TRANSFORMERS.search(line.replace("init_device_mesh", ""))
    }
    assert readers == {"integrations/models/distributed.py"}


def test_every_package_is_listed_in_setup_cfg() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    expected = {".".join(("distca_hf", *folder.relative_to(PACKAGE).parts)) for folder in folders}
    of_files = {
        f"distca_hf.{kind}.{folder.name}"
        for kind in ("examples", "recipes")
        for folder in (ROOT / kind).iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    of_folders = {"distca_hf.examples", "distca_hf.patches", "distca_hf.recipes", "distca_startup"}
    assert listed == expected | of_files | of_folders


def test_public_functions_and_classes_are_documented() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in _sources()
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name are one module, so that processes cannot be given functions of the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]

    assert sorted(names) == sorted(set(names))
