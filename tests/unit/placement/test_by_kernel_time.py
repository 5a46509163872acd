"""Placement by measured kernel times, with tables of which the answer is known."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from distca_hf.cost import causal_pairs
from distca_hf.errors import PackingError
from distca_hf.layout import Topology
from distca_hf.placement.by_kernel_time import KernelTimes, place_by_seconds, rank_seconds
from distca_hf.placement.place import place


GRID = [2**power for power in range(5, 20)]


def rate(query: float, key: float) -> float:
    """Pairs per second: short queries keep few units busy, also beside long keys."""
    return 1e12 * query / (query + 600) * (1 - 0.1 * query / key)


def table() -> KernelTimes:
    seconds = [
        [causal_pairs(key - query, key) / rate(query, key) if query <= key else np.nan for key in GRID]
        for query in GRID
    ]
    return KernelTimes(np.array(GRID), np.array(GRID), np.array(seconds))


def documents(seed: int, tokens: int) -> list[int]:
    """A few long documents, and many short ones, which are slow for their work: some ranks have no others."""
    rng = random.Random(seed)
    lengths = [rng.randint(8_000, 14_000) for _ in range(tokens // 100_000)]
    tokens -= sum(lengths)
    while tokens > 0:
        lengths.append(min(tokens, rng.choice([300, 700, 1500, 3000])))
        tokens -= lengths[-1]
    return lengths


@pytest.mark.parametrize("query", [32, 50, 128, 1000, 4096, 100_000])
@pytest.mark.parametrize("more", [0, 1, 777, 200_000])
def test_times_between_measurements_are_close_to_the_truth(query: int, more: int) -> None:
    key = query + more
    predicted = table().of(np.array([key - query]), np.array([key]))[0]

    assert predicted == pytest.approx(causal_pairs(key - query, key) / rate(query, key), rel=0.06)


def test_measured_times_are_returned_as_they_are() -> None:
    starts = np.array([key - query for query in GRID for key in GRID if query <= key])
    stops = np.array([key for query in GRID for key in GRID if query <= key])
    measured = table()

    assert measured.of(starts, stops) == pytest.approx(measured.seconds[~np.isnan(measured.seconds)])


def test_beyond_the_table_the_rate_stays() -> None:
    measured = table()
    short, long = measured.of(np.array([0, 0]), np.array([4, 2**21]))

    assert short == pytest.approx(causal_pairs(0, 4) / rate(32, 32))
    assert long == pytest.approx(causal_pairs(0, 2**21) / rate(GRID[-1], GRID[-1]))


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 8), (8, 8), (16, 8)])
@pytest.mark.parametrize("seed", range(2))
def test_seconds_are_equal_where_equal_work_is_not(num_ranks: int, ranks_per_node: int, seed: int) -> None:
    times, lengths = table(), documents(seed, num_ranks * 32_768)
    topology = Topology(num_ranks, ranks_per_node)
    by_work = rank_seconds(place(lengths, num_ranks, topology=topology, head_groups=8), times)
    layout = place_by_seconds(lengths, num_ranks, times, topology=topology, head_groups=8)
    by_seconds = rank_seconds(layout, times)

    assert by_work.max() / by_work.mean() > 1.02
    assert by_seconds.max() / by_seconds.mean() <= 1.02
    assert layout.rank_tokens.max() - layout.rank_tokens.min() <= 1


def test_seconds_of_a_stripe_are_divided_among_its_ranks() -> None:
    layout = place([8 * 32_768], 8, head_groups=8)
    assert len(layout.stripes) == 1

    seconds = rank_seconds(layout, table())
    assert seconds == pytest.approx(table().of(np.array([0]), np.array([8 * 32_768]))[0] / 8)


@pytest.mark.parametrize(("lengths", "num_ranks"), [([], 4), ([1], 4), ([5, 5], 1)])
def test_batches_with_idle_ranks_are_placed(lengths: list[int], num_ranks: int) -> None:
    place_by_seconds(lengths, num_ranks, table()).validate()


def test_documents_whose_weighted_pairs_are_beyond_int64_are_refused() -> None:
    assert place_by_seconds([2**27, 1], 2, table()).rank_tokens.tolist() == [2**26, 2**26 + 1]
    with pytest.raises(
        PackingError, match=r"a document of 1073741824 tokens costs \d{20,}, more than 9223372036854775807"
    ):
        place_by_seconds([5, 2**30, 1], 2, table())


def test_table_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"query_tokens": [128, 256], "key_tokens": [128, 256], "seconds": [[1e-5, 2e-5], [null, 4e-5]]}')
    times = KernelTimes.load(path)

    assert times.of(np.array([0, 0]), np.array([128, 256])) == pytest.approx([1e-5, 4e-5])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"query_tokens": [128]}, "shape (2, 2) for 1 query lengths"),
        ({"key_tokens": [256, 128]}, "key_tokens of kernel times must rise"),
        ({"seconds": [[0, 1], [None, 1]]}, "128 queries and 128 keys took 0.0 s"),
        ({"seconds": [[None, 1], [None, 1]]}, "128 queries and 128 keys took nan s"),
        ({"seconds": [[float("inf"), 1], [None, 1]]}, "128 queries and 128 keys took inf s"),
        ({"query_tokens": [128, 512]}, "at least as long"),
        ({"query_tokens": [128, 256.5]}, "query_tokens must be a list of integers, not an array of float64"),
        ({"key_tokens": [128, 2**63]}, "key_tokens must be a list of integers"),
        ({"seconds": "fast"}, "not a table of kernel times"),
        ({"seconds": [[1, 2], [3]]}, "not a table of kernel times"),
    ],
    ids=str,
)
def test_bad_tables_are_refused(tmp_path: Path, change: dict[str, object], part: str) -> None:
    good = {"query_tokens": [128, 256], "key_tokens": [128, 256], "seconds": [[1e-5, 2e-5], [None, 4e-5]]}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(PackingError) as refused:
        KernelTimes.load(path)

    assert part in str(refused.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PackingError, match=r"missing\.json is not a table of kernel times"):
        KernelTimes.load(tmp_path / "missing.json")
