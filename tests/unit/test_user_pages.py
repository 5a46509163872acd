"""Pages for users say what the code says: settings, metrics, errors, messages, examples."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import yaml

from distca_hf import errors
from distca_hf.analysis.memory import estimate_memory
from distca_hf.analysis.models import preset
from distca_hf.analysis.training_setup import TrainingSetup
from distca_hf.batches import meter
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.distributed_check import LOWEST_EXPERTS, LOWEST_TENSOR, LOWEST_WHOLE_EXPERTS
from distca_hf.integrations.models.weights_check import LOWEST_DIVIDES_AGAIN
from distca_hf.planning.transfers import received_bytes
from distca_hf.servers import annex
from distca_hf.settings import fields_of
from support.commands import REPOSITORY


DOCS = REPOSITORY / "docs"
USING = "\n".join((DOCS / f"{name}.md").read_text() for name in ("quickstart", "trainer", "loops", "models", "nodes"))
ERRORS = (DOCS / "troubleshooting.md").read_text()
SECTIONS = "\n".join((DOCS / f"{name}.md").read_text() for name in ("settings", "log", "troubleshooting")).split(
    "\n## "
)
FIRST_CELLS = re.compile(r"^\| (.+?) \| ", re.MULTILINE)


def section(title: str) -> str:
    (found,) = (part for part in SECTIONS if part.startswith(f"{title}\n"))
    return found


def table(title: str) -> list[list[str]]:
    """Cells of the rows of a section's table, without its head."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def test_every_setting_is_in_the_table_with_its_default() -> None:
    written = [(name, default) for name, default, _ in table("All settings")]

    assert written == [
        (f"`{name}`", f"`{setting.metadata['default']}`") for name, setting in fields_of(DistCAConfig).items()
    ]


def test_choices_of_a_setting_are_named() -> None:
    meanings = {name.strip("`"): meaning for name, _, meaning in table("All settings")}
    for name, setting in fields_of(DistCAConfig).items():
        choices = getattr(setting.type, "__args__", ())
        missing = [choice for choice in choices if f"`{choice}`" not in meanings[name] and choice != "auto"]
        assert not missing, name


def test_every_metric_is_explained() -> None:
    logged = [name for part in (meter, annex) for name in re.findall(r'"(distca/\w+)":', inspect.getsource(part))]

    explained = [name.strip("` ") for names, _ in table("Metrics") for name in names.split(",")]
    assert sorted(explained) == sorted(logged)


def test_every_error_is_explained() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    raised = {
        name for name, kind in classes if issubclass(kind, errors.DistCAError) and kind is not errors.DistCAError
    }

    assert {name.strip("`") for name, _ in table("By class")} == raised


def messages() -> Iterator[str]:
    """All texts in the code, with … where a value is filled in."""
    for path in (REPOSITORY / "distca_hf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
                yield re.sub(r"%[sd]|\{\}", "…", text)


def test_quoted_messages_are_those_of_the_code() -> None:
    ours = ERRORS.partition("\n## Loading")[2].partition("\n## By class")[0]
    said = "\n".join(messages())

    quoted = re.findall(r"`([^`]+)`", "\n".join(FIRST_CELLS.findall(ours)))
    assert len(quoted) > 80
    assert [part for part in quoted if part not in said] == []


def test_line_of_what_balance_brings_is_that_of_the_code() -> None:
    shown = " ".join(section("One log, line by line").split())
    (line,) = re.findall(r"\[rank 0\] (attention work of the busiest rank [^(]*) \(means over", shown)
    said = "\n".join(messages())

    parts = [re.sub(r"[\d.]+%?", "…", part) for part in line.split("; ")]
    assert len(parts) == 3
    assert [part for part in parts if part not in said] == []


def test_memory_on_the_page_of_sizes_is_estimated() -> None:
    """Keys of other ranks depend on documents, and are left out here: at most `kv_budget_gib` and those of a layer."""
    head, *rows = [row for row in (DOCS / "sizes.md").read_text().splitlines() if re.match(r"\| (T|[\d,]+) \|", row)]
    ranks = [int(cell) for cell in re.findall(r"(\d+) GPUs", head)]
    llama, compared = preset("llama3-8b"), 0
    for row in rows:
        tokens, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for num_ranks, gib in zip(ranks, cells, strict=False):
            if gib:
                setup = TrainingSetup(num_ranks, liger=True)
                memory = estimate_memory(llama.size.decoder(llama.heads), setup, int(tokens.replace(",", "")))
                assert 0 <= float(gib) + 0.5 - memory.total / 2**30 <= 5, row
                compared += 1
    assert compared == 20


def test_memory_of_long_contexts_is_estimated() -> None:
    """Keys of other ranks are those of one document over all of them."""
    llama, compared = preset("llama3-8b"), 0
    for row in re.findall(r"\| \d+[KM] \| .*", (DOCS / "long-context.md").read_text()):
        sizes, *cells = (cell.strip() for cell in row.strip("| ").split("|")[1:])
        ranks, tokens = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", sizes))
        plan = PlacedPlanner(DistCAConfig(tokens_per_rank=tokens), ranks, llama.heads.groups).plan(
            np.array([ranks * tokens])
        )
        received = int(received_bytes(plan, llama.token_bytes).max())
        for on_host, gib in zip((False, True), (cells[:2], cells[2:]), strict=True):
            setup = TrainingSetup(ranks, "fsdp2", "offloaded", True, mlp_tokens=16_384, state_on_host=on_host)
            of_heads = [
                estimate_memory(
                    llama.size.decoder(llama.heads), replace(setup, attention_kv_heads=heads), tokens, received
                )
                for heads in (0, 2)
            ]
            gpu = ", ".join(f"{memory.total / 2**30:.0f}" for memory in of_heads)
            assert [gib, gib] == [[gpu, f"{ranks * memory.host / 2**30:.0f}"] for memory in of_heads], row
            compared += 1
    assert compared == 8


def test_versions_that_divide_models_are_those_of_the_refusals() -> None:
    rows = {
        row[0]: row[1]
        for line in USING.splitlines()
        if line.startswith("| `") and len(row := [cell.strip() for cell in line.strip("|").split(" | ")]) == 4
    }
    (experts,) = (versions for sizes, versions in rows.items() if "expert parallelism" in sizes)
    (tensor,) = (versions for sizes, versions in rows.items() if "tensor parallelism" in sizes)

    assert tensor == LOWEST_TENSOR
    assert re.findall(r"5\.\d+", experts) == [LOWEST_WHOLE_EXPERTS, LOWEST_EXPERTS, LOWEST_TENSOR]
    for recipe, lowest in (("tensor", LOWEST_TENSOR), ("experts", LOWEST_WHOLE_EXPERTS)):
        assert f"Transformers {lowest} or newer" in (REPOSITORY / "recipes" / "train" / f"{recipe}.yaml").read_text()
    assert f"Trainer before {LOWEST_DIVIDES_AGAIN} makes its optimizer" in USING


def test_every_example_is_linked() -> None:
    examples = {path.name for path in (REPOSITORY / "examples").glob("*.py")} - {
        "python_sources.py",
        "quickstart_report.py",
    }

    of_pages = USING + (DOCS / "frameworks.md").read_text()
    assert set(re.findall(r"\]\(\.\./examples/([^)#]+)\)", of_pages)) == examples


def test_readme_leads_to_all_pages_for_users() -> None:
    """All in the first part of the navigation, except the front page of the site."""
    users, _ = (next(iter(part.values())) for part in yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    pages = [next(iter(entry.values())) for entry in users]
    readme = (REPOSITORY / "README.md").read_text()

    assert len(pages) <= 14
    assert [page for page in pages[1:] if f"](docs/{page})" not in readme] == []


def test_front_page_is_short() -> None:
    words = len((REPOSITORY / "README.md").read_text().split())

    assert words <= 1400
