"""distca plan, groups: which documents of a file begin alike, how they are dealt, and what of them is shared."""

import json
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from typer.testing import CliRunner

from distca_hf.analysis.groups import Groups
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import SimulatedModel, preset
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.cli import app
from distca_hf.errors import PackingError
from distca_hf.prefixes import BLOCK_TOKENS, SharedPrefixes, hashes_of, num_hashes


pytestmark = pytest.mark.usefixtures("few_plans")

LENGTHS, NAMES, PREFIXES = [700, 500, 30, 650, 520], ["a", "b", None, "a", "b"], [600, 400, None, 600, 400]
ROWS = [
    {"length": length} | ({} if name is None else {"group": name, "prefix_tokens": prefix})
    for length, name, prefix in zip(LENGTHS, NAMES, PREFIXES, strict=True)
]
COLUMNS = {"length": LENGTHS, "group": NAMES, "prefix_tokens": PREFIXES}
# Rows 0 and 3 are branches of a tree.
PATHS = [("a", "x"), ("b",), (), ("a", "x"), ("b",)]
NESTED: list[tuple[int, ...]] = [(600, 640), (400,), (), (600, 640), (400,)]
NESTED_COLUMNS = {"length": LENGTHS, "group": [*map(list, PATHS)], "prefix_tokens": [*map(list, NESTED)]}
NESTED_ROWS = [
    {"length": length, "group": list(path) if path[1:] else path[0] if path else None}
    | {"prefix_tokens": list(prefix) if prefix[1:] else prefix[0] if prefix else None}
    for length, path, prefix in zip(LENGTHS, PATHS, NESTED, strict=True)
]
TOKENS = [[7] * length for length in LENGTHS]


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(path: Path) -> None:
    cells = [[str(value) if value is not None else "" for value in row] for row in zip(*COLUMNS.values(), strict=True)]
    path.write_text("\n".join([",".join(COLUMNS), *map(",".join, cells)]))


def shards(path: Path) -> None:
    path.mkdir()
    for shard, part in enumerate((ROWS[:3], ROWS[3:])):
        (path / f"rows-{shard}.jsonl").write_text(lines(part))


READABLE: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_text(lines(ROWS)),
    "rows-backwards.jsonl": lambda path: path.write_text(lines([ROWS[2], *ROWS[:2], *ROWS[3:]])),
    "table.csv": table,
    "rows.parquet": lambda path: pq.write_table(pa.table(COLUMNS), path),
    "tokens.parquet": lambda path: pq.write_table(pa.table(COLUMNS | {"input_ids": TOKENS}), path),
    "saved": lambda path: Dataset.from_dict(COLUMNS).save_to_disk(path),
    "saved tokens": lambda path: Dataset.from_dict(COLUMNS | {"input_ids": TOKENS}).save_to_disk(path),
    "shards": shards,
    "nested.jsonl": lambda path: path.write_text(lines(NESTED_ROWS)),
    "nested.parquet": lambda path: pq.write_table(pa.table(NESTED_COLUMNS), path),
    "nested saved": lambda path: Dataset.from_dict(NESTED_COLUMNS).save_to_disk(path),
}


@pytest.mark.parametrize("name", READABLE)
def test_groups_are_read_from_every_kind_of_table(name: str, tmp_path: Path) -> None:
    READABLE[name](tmp_path / name)
    read = read_lengths(tmp_path / name)

    assert read.groups is not None
    rows = list(zip(read.tokens.tolist(), read.groups.paths, read.groups.prefix_tokens, strict=True))
    paths, prefixes = PATHS, NESTED
    if "nested" not in name:
        paths, prefixes = [path[:1] for path in PATHS], [prefix[:1] for prefix in NESTED]
    assert sorted(rows) == sorted(zip(LENGTHS, paths, prefixes, strict=True))
    assert dict(read.groups.counts) == {"a": 2, "b": 2}


@pytest.mark.parametrize("empty", [None, float("nan"), ""])
def test_whole_numbers_may_have_become_floating_point_numbers(empty: object) -> None:
    """pandas makes these of a column with empty cells, also in a table of text."""
    prefixes = [600.0, "400.0", empty, 600, "400"]
    groups = Groups.of_columns(
        {"group": [4.0, "5.0", empty, 4, "5"], "prefix_tokens": prefixes}, np.array(LENGTHS), "file"
    )
    assert groups is not None
    assert groups.paths == [("4",), ("5",), (), ("4",), ("5",)]
    assert groups.prefix_tokens == [(600,), (400,), (), (600,), (400,)]


@pytest.mark.parametrize(
    "row", [{"length": 5}, {"length": 5, "group": "some column"}, {"length": 5, "group": [1], "prefix_tokens": []}]
)
def test_without_prefixes_there_are_no_groups(row: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines([row, row]))
    assert read_lengths(tmp_path / "rows.jsonl").groups is None


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"length": 500, "group": "a", "prefix_tokens": 600},
            "of group a has prefix_tokens 600, and its document 500",
        ),
        ({"length": 900, "group": "a", "prefix_tokens": 599}, "of group a .* 599, and row 0 of the same group 600"),
        ({"length": 900, "group": "c"}, "of group c has 1 names in group and 0 numbers in prefix_tokens; each group"),
        (
            {"length": 900, "group": "c", "prefix_tokens": 0},
            "of group c has prefix_tokens 0, and its document 900 tokens",
        ),
        ({"length": 900, "group": "c", "prefix_tokens": -3}, "of group c has prefix_tokens -3, and its document 900"),
        (
            {"length": 900, "group": ["a", "x"], "prefix_tokens": 600},
            "of group a > x has 2 names in group and 1 numbers",
        ),
        (
            {"length": 900, "group": ["c", "x"], "prefix_tokens": [3, 901]},
            "of group c > x has prefix_tokens 3 > 901, and its",
        ),
        (
            {"length": 900, "group": ["c", "x"], "prefix_tokens": [30, 30]},
            "of group c > x has prefix_tokens 30 in a group of 30",
        ),
        (
            {"length": 900, "group": ["a", "x"], "prefix_tokens": [599, 700]},
            "of group a has prefix_tokens 599, and row 0 of the same group 600",
        ),
        ({"length": 900, "prefix_tokens": 600}, "has prefix_tokens 600 and no group: name its group"),
        ({"length": 900, "group": "a", "prefix_tokens": 6.5}, "has prefix_tokens 6.5, not a whole number"),
        ({"length": 900, "group": "a", "prefix_tokens": True}, "has prefix_tokens True, not a whole number"),
        ({"length": 900, "group": "a", "prefix_tokens": "some"}, "has prefix_tokens 'some', not a whole number"),
        ({"length": 900, "group": [[1]], "prefix_tokens": 600}, r"has group \[1\], neither a text nor a whole number"),
    ],
)
def test_wrong_groups_are_refused_by_row(row: dict[str, object], says: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines([*ROWS, row]))
    with pytest.raises(PackingError, match=f"rows.jsonl: row 5 {says}"):
        read_lengths(tmp_path / "rows.jsonl")


def test_a_row_without_a_group_may_have_a_prefix_of_no_tokens() -> None:
    columns = {"group": ["a", "", None], "prefix_tokens": [3, 0, "0"]}
    groups = Groups.of_columns(columns, np.array([5, 5, 5]), "file")
    assert groups is not None
    assert (groups.paths, groups.prefix_tokens) == ([("a",), (), ()], [(3,), (), ()])


def test_files_of_a_folder_must_all_have_the_columns(tmp_path: Path) -> None:
    for shard, columns in enumerate((COLUMNS, {"length": LENGTHS})):
        pq.write_table(pa.table(columns), tmp_path / f"rows-{shard}.parquet")
    with pytest.raises(PackingError, match="only some of the files have a column prefix_tokens"):
        read_lengths(tmp_path)


def test_prefixes_of_rows_with_several_documents_are_refused(tmp_path: Path) -> None:
    packed = {"input_ids": TOKENS, "seq_lengths": [[length] for length in LENGTHS]}
    Dataset.from_dict(COLUMNS | packed).save_to_disk(tmp_path / "packed")
    with pytest.raises(PackingError, match="has columns prefix_tokens and seq_lengths: rows hold several documents"):
        read_lengths(tmp_path / "packed")


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, Groups]:
    """Groups of some rows, up to two of them nested, and rows without a group, in any order."""
    paths, prefixes, lengths = list[tuple[str, ...]](), list[tuple[int, ...]](), list[int]()

    def number() -> int:
        return int(rng.integers(1, 800)) if rng.random() < 0.5 else 64 * int(rng.integers(1, 12))

    for group in range(rng.integers(1, 6)):
        tree = np.cumsum([number() for _ in range(3)]).tolist()
        for _ in range(rng.integers(1, 5)):
            path = (f"g{group}", *map(str, rng.integers(0, 2, rng.integers(0, 3)))) if group else ()
            paths.append(path)
            prefixes.append(tuple(tree[: len(path)]))
            lengths.append(tree[max(len(path) - 1, 0)] + int(rng.integers(0, 200) or rng.integers(0, 2)))
    order = rng.permutation(len(paths))
    return np.array(lengths)[order], Groups([paths[at] for at in order], [prefixes[at] for at in order])


@pytest.mark.parametrize("has_one_label", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_hashes_share_as_many_tokens_as_hashes_of_tokens_do(seed: int, has_one_label: bool) -> None:
    rng = np.random.default_rng(seed)
    lengths, groups = drawn(rng)
    documents = [rng.integers(0, 2**60, length) for length in lengths]
    for document, path, prefix in zip(documents, groups.paths, groups.prefix_tokens, strict=True):
        for depth, (start, stop) in enumerate(pairwise([0, *prefix]), start=1):
            of_group = np.random.default_rng([int(name.removeprefix("g")) for name in path[:depth]])
            document[start:stop] = of_group.integers(0, 2**60, stop - start)
    counts = num_hashes(lengths, 64)
    real = np.split(hashes_of(np.concatenate(documents), lengths, 64), np.cumsum(counts)[:-1])
    if has_one_label:  # a row without a group has no prefix, and all of its tokens are learnt
        real = [
            np.where(64 + BLOCK_TOKENS * np.arange(len(one)) < max(prefix, default=0), one, 0)
            for one, prefix in zip(real, groups.prefix_tokens, strict=True)
        ]
    begins = [int(one[0]) if len(one) else 0 for one in real]  # documents like no other tell ranks no hashes
    real = [one if at and begins.count(at) > 1 else one[:0] for at, one in zip(begins, real, strict=True)]
    expected = SharedPrefixes.find(lengths, real, 64)
    hashes = groups.hashes(lengths, 2, 64, has_one_label)
    found = SharedPrefixes.find(lengths, hashes, 64) if hashes else None

    assert (found is None) == (expected is None)
    assert not hashes or [len(one) for one in hashes] == [len(one) for one in real]
    # Which row of a tree holds a prefix depends on the order of hashes; how much any two rows share does not.
    assert not hashes or _equal_hashes(hashes) == _equal_hashes(real)


def _equal_hashes(hashes: Sequence[np.ndarray]) -> list[int]:
    """How many first hashes of any two documents are equal and not 0."""
    return [
        next(
            (at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y or not x),
            min(map(len, (one, other))),
        )
        for one, other in combinations([each.tolist() for each in hashes], 2)
    ]


def test_groups_are_dealt_as_grpo_deals_them() -> None:
    """In a step, a rank gets consecutive rows in the order of groups, and shuffles them into its micro-batches."""
    names = [name for group in range(9) for name in [f"g{group}"] * 4]
    paths: list[tuple[str, ...]] = [(name, "branch")[: 1 + row % 2] for row, name in enumerate(names)]
    groups, ranks, micro_steps, batch_size = Groups(paths, [(300, 400)[: len(path)] for path in paths]), 3, 2, 2
    rows = groups.dealt(np.random.default_rng(0), ranks, micro_steps, batch_size)

    assert sorted(rows.tolist()) == list(range(36))
    of_steps = rows.reshape(3, micro_steps, ranks, batch_size).swapaxes(1, 2).reshape(9, 4)
    assert all(len({names[row] for row in of_rank}) == 1 for of_rank in of_steps.tolist())
    assert any(of_rank != sorted(of_rank) for of_rank in of_steps.tolist())
    assert [names[of_rank[0]] for of_rank in of_steps.tolist()] != sorted(set(names))
    on_two = groups.dealt(np.random.default_rng(0), 2, 1, 6)  # a group and a half each
    assert [len({names[row] for row in of_rank}) for of_rank in on_two.reshape(-1, 6).tolist()] == [2] * 6


def test_rows_without_groups_are_dealt_as_before() -> None:
    request = SimulationRequest(SimulatedModel.of(preset("llama3-8b")), 2, 1, None, 2, seed=4, batch_size=3, batches=2)
    lengths = np.arange(1, 26)
    order = np.random.default_rng([4, 0]).permutation(25)

    assert [np.concatenate(step).tolist() for step in request.steps(lengths)] == [
        (1 + order[:12]).tolist(),
        (1 + order[12:24]).tolist(),
    ]


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("plan", "--gpus 2 --tokens-per-rank 1000", "placed batches compute every prefix again"),
        ("simulate", "--gpus 2 --tokens-per-rank 1000 --batches 1", "placed batches compute every prefix again"),
        ("plan", "--gpus 2 --batch-size 1", "4 rows in 2 groups begin alike."),
        (
            "simulate",
            "--gpus 2 --batch-size 1 --batches 1",
            "begin alike; distca's ways compute their prefixes once (placed loss: if these have no labels",
        ),
    ],
)
def test_commands_say_whether_prefixes_are_shared(command: str, options: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(lines([row for row in ROWS if "group" in row]))
    done = CliRunner().invoke(app, [command, str(file), *options.split()])

    assert done.exit_code == 0, done.output
    assert says in " ".join(done.output.split())
    if command == "plan":
        answered = json.loads(CliRunner().invoke(app, [command, str(file), *options.split(), "--json"]).stdout)
        shared = answered["shared_prefixes"]
        assert (shared["groups"], shared["documents"]) == (2, 4)
        assert bool(shared["unshared"]) == ("placed" in says)
        assert "placed" in says or shared["computed_tokens"] < shared["tokens"]


def test_nothing_is_shared_if_the_setting_is_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_SHARED_PREFIX_TOKENS", "0")
    file = tmp_path / "rows.jsonl"
    file.write_text(lines(ROWS))
    done = CliRunner().invoke(app, ["plan", str(file), "--gpus", "2", "--batch-size", "2", "--json"])
    shared = json.loads(done.stdout)["shared_prefixes"]

    assert (shared["unshared"], shared["saved_share"]) == ("shared_prefix_tokens is 0", 0.0)
