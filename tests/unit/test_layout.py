"""Layout: what it accepts, what it says when it refuses, and exact numbers at any length."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from distca_hf.arrays import as_int_array
from distca_hf.batches.batch_documents import check_cu_seqlens
from distca_hf.cost import causal_pairs, causal_pairs_of, imbalance
from distca_hf.errors import PackingError
from distca_hf.layout import MAX_DOCUMENT_TOKENS, Layout, Stripe, check_document_tokens
from distca_hf.placement.place import place
from support.layouts import padding_rows, random_layout


def refusal(function: Any, *arguments: Any) -> str:
    """Message of the PackingError that the call raises."""
    with pytest.raises(PackingError) as refused:
        function(*arguments)
    return str(refused.value)


def example() -> Layout:
    """The layout drawn at the top of `layout.py`, with one row of padding on rank 0."""
    return Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], [6, 7])


# --- document lengths


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], dtype=np.int32),
        np.array([3, 1, 2], dtype=np.uint8),
        np.array([3, 9, 1, 9, 2])[::2],
    ],
    ids=["list", "tuple", "int32", "uint8", "strided"],
)
def test_lengths_of_any_integer_type_become_int64(values: Any) -> None:
    for lengths, expected in ((check_document_tokens(values), [3, 1, 2]), (check_document_tokens(values[:0]), [])):
        assert lengths.dtype == np.int64
        assert lengths.tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([MAX_DOCUMENT_TOKENS, 0, 5], ["document 1 has 0 tokens; a document has ", "1 to 2147483647", "filter"]),
        ([3, 4, -7, 0], ["document 2 has -7 tokens", "1 more", "1 to 2147483647"]),
        ([2**31], ["document 0 has 2147483648 tokens", "1 to 2147483647"]),
        ([5, 2**40], ["document 1 has 1099511627776 tokens"]),
        (np.array([5, 2**31], dtype=np.uint32), ["document 1 has 2147483648 tokens"]),
        (np.array([5, 2**63], dtype=np.uint64), ["entry 1 is 9223372036854775808"]),
    ],
    ids=["zero", "negative", "one too long", "far too long", "uint32", "uint64"],
)
def test_length_out_of_range_names_document_and_length(lengths: Any, parts: list[str]) -> None:
    message = refusal(check_document_tokens, lengths, "the dataset")

    for part in ["the dataset", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([1.0, 2.0], "float64"),
        ([True, False], "bool"),
        ([1, None], "object"),
        ([2**70], "object"),
        ([[1, 2], [3, 4]], "shape (2, 2)"),
        (5, "shape ()"),
        ([[1], [2, 3]], "lengths"),
    ],
    ids=str,
)
def test_what_is_no_list_of_integers_is_refused_by_type_and_shape(values: Any, part: str) -> None:
    message = refusal(as_int_array, values, "lengths")

    assert "lengths must be a list of integers" in message
    assert part in message


# --- cumulative sequence lengths


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "lengths"),
    [
        ([0], 0, []),
        (np.array([0, 3, 9], dtype=np.int32), 9, [3, 6]),
        (np.array([0, 200, 255], dtype=np.uint8), 255, [200, 55]),
        ([0, 2**31 - 1, 2**32], 2**32, [2**31 - 1, 2**31 + 1]),
    ],
    ids=["nothing", "int32", "uint8", "beyond int32"],
)
def test_lengths_from_valid_cu_seqlens(cu_seqlens: Any, num_tokens: int, lengths: list[int]) -> None:
    checked = check_cu_seqlens(cu_seqlens, num_tokens)

    assert checked.dtype == np.int64
    assert checked.tolist() == lengths


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "parts"),
    [
        ([], 4, ["begin with 0", "nothing"]),
        ([1, 4], 4, ["begin with 0", "1"]),
        ([0, 3], 4, ["ends at 3", "4 tokens"]),
        ([0, 3, 2, 4], 4, ["decreases at index 2", "3 is followed by 2"]),
        ([0, -2, 4], 4, ["decreases at index 1", "0 is followed by -2"]),
        (np.array([0, 200, 100], dtype=np.uint8), 100, ["decreases at index 2", "200 is followed by 100"]),
        ([0.0, 4.0], 4, ["list of integers", "float64"]),
    ],
    ids=str,
)
def test_wrong_cu_seqlens_are_refused_by_position_and_values(
    cu_seqlens: Any, num_tokens: int, parts: list[str]
) -> None:
    message = refusal(check_cu_seqlens, cu_seqlens, num_tokens)

    assert "cu_seqlens" in message
    for part in parts:
        assert part in message


# --- layouts that are refused


@pytest.mark.parametrize(
    ("documents", "segments", "rows", "parts"),
    [
        ([5], [[(0, 0, 2)], [(0, 3, 5)]], None, ["document 0", "[3, 5)", "[2, ...)"]),
        ([5], [[(0, 0, 3)], [(0, 2, 5)]], None, ["document 0", "[2, 5)", "[3, ...)"]),
        ([2, 5], [[(0, 0, 2), (1, 1, 5)]], None, ["document 1", "[1, 5)", "[0, ...)"]),
        ([5], [[(0, 0, 2), (0, 2, 2), (0, 2, 5)]], None, ["document 0", "[2, 2)"]),
        ([5], [[(0, 0, 4)]], None, ["document 0 has 5 tokens", "cover 4"]),
        ([5, 2], [[(0, 0, 5)]], None, ["document 1 has 2 tokens", "cover 0"]),
        ([5], [[(0, 0, 5)], [(1, 0, 2)]], None, ["segment 1", "document 1", "there are 1"]),
        ([5], [[(0, 0, 5)]], [4], ["rank 0 has 4 rows for 5 tokens"]),
        ([5], [[(0, 0, 5)]], [5.0], ["rank_rows", "integers", "float64"]),
        ([5.0], [[(0, 0, 5)]], None, ["document_tokens", "integers", "float64"]),
        ([2], [[(0, 0, 2.9)]], None, ["segments", "integers", "float64"]),
        ([2**32], [[(0, 0, 2**31)], [(0, 2**31, 2**32)]], None, ["document 0", str(2**32), str(2**31 - 1)]),
    ],
    ids=[
        "gap",
        "overlap",
        "beginning missing",
        "empty segment",
        "end missing",
        "document missing",
        "unknown document",
        "too few rows",
        "float rows",
        "float document",
        "float segment",
        "document beyond 31 bits",
    ],
)
def test_wrong_layout_is_refused_with_document_or_rank_and_both_numbers(
    documents: Any, segments: Any, rows: Any, parts: list[str]
) -> None:
    message = refusal(Layout.from_segments, documents, segments, rows)

    for part in parts:
        assert part in message


@pytest.mark.parametrize("rows", [[], [9], [5, 3, 0]], ids=["none", "one", "three"])
def test_row_counts_of_another_number_of_ranks_are_refused(rows: list[int]) -> None:
    refusal(Layout.from_segments, [5, 3], [[(0, 0, 5)], [(1, 0, 3)]], rows)


@pytest.mark.parametrize(
    "rank_segments",
    [[0, 2, 3], [1, 2, 4], [0, 5, 4], [0, 2, 5], [0, 4], [0, 1, 2, 4]],
    ids=["last left out", "first left out", "decreasing", "beyond the end", "a rank less", "a rank more"],
)
def test_segments_that_are_not_divided_among_the_ranks_are_refused(rank_segments: list[int]) -> None:
    layout = dataclasses.replace(example(), rank_segments=np.array(rank_segments), rank_rows=np.array([99, 99]))

    refusal(layout.validate)


# --- derived numbers


def test_derived_numbers_equal_counting_token_by_token() -> None:
    for seed in range(60):
        layout = random_layout(random.Random(seed), num_ranks=1 + seed % 6)
        at = 0
        for rank in range(layout.num_ranks):
            row = work = 0
            held = layout.segments_of(rank)
            assert held.start == at
            for segment in range(held.start, held.stop):
                start, stop = int(layout.segment_start[segment]), int(layout.segment_stop[segment])
                assert layout.segment_row[segment] == row
                assert layout.segment_rank[segment] == rank
                row += stop - start
                work += sum(position + 1 for position in range(start, stop))
            at = held.stop
            assert layout.rank_tokens[rank] == row
            assert padding_rows(layout)[rank] == layout.rank_rows[rank] - row
            assert layout.rank_work[rank] == work
        assert at == len(layout.segment_document)


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_layout_without_documents(ranks: int) -> None:
    layout = Layout.from_segments([], [[] for _ in range(ranks)])

    assert layout.longest_document_tokens == 0
    assert layout.rank_tokens.tolist() == layout.rank_work.tolist() == [0] * ranks


@pytest.mark.parametrize("tokens", [2**20, 2**31 - 1])
def test_numbers_of_long_documents_are_exact_integers(tokens: int) -> None:
    half = tokens // 2
    documents = np.array([tokens, tokens, tokens], dtype=np.int32)
    layout = Layout.from_segments(documents, [[(0, 0, half), (1, 0, tokens)], [(2, 0, tokens), (0, half, tokens)]])
    triangle, small = tokens * (tokens + 1) // 2, half * (half + 1) // 2

    assert layout.rank_tokens.tolist() == [half + tokens, tokens + tokens - half]
    assert layout.segment_row.tolist() == [0, half, 0, tokens]
    assert layout.rank_work.tolist() == [small + triangle, 2 * triangle - small]


# --- cost


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 1), (0, 7), (3, 3), (3, 9), (0, 2**20), (2**30, 2**31 - 1), (0, 2**31 - 1)]
)
def test_causal_pairs_are_exact(start: int, stop: int) -> None:
    expected = (stop - start) * (start + 1 + stop) // 2

    assert causal_pairs(start, stop) == expected
    assert causal_pairs_of(np.array([start]), np.array([stop])).tolist() == [expected]


@pytest.mark.parametrize(
    ("work", "speeds", "expected"),
    [
        *((work, [], 1.0) for work in ([4, 4], [0, 0], [5], [], [2**61] * 5)),
        ([6, 2], [], 1.5),
        ([3, 0, 0], [], 3.0),
        ([4, 4, 2], [1.0, 1.0, 0.5], 1.0),
        ([4, 4, 2], [1.0, 1.0, 0.25], 1.8),
        ([0, 0, 6], [0.0, 0.0, 1.0], 1.0),
        ([0, 0, 0], [1.0, 1.0, 0.5], 1.0),
    ],
)
def test_imbalance_is_the_longest_time_over_that_of_all_ranks_together(
    work: list[int], speeds: list[float], expected: float
) -> None:
    for given in (work, np.array(work, dtype=np.int64)):
        assert imbalance(given, *([speeds] if speeds else [])) == pytest.approx(expected)


# --- stripes


@pytest.mark.parametrize(
    ("stripe", "message"),
    [
        (Stripe(0, 2, 8, 0, 3), "ranks that do not exist; there are 2"),
        (Stripe(0, 2, 8, 1, 1), "ranks that do not exist"),
        (Stripe(7, 0, 8, 0, 2), "a document that does not exist; there are 3"),
        (Stripe(0, 0, 8, 1, 2), "rank 0 holds tokens of it"),
        (Stripe(0, 1, 8, 0, 2), "its borders are not borders of segments"),
        (Stripe(0, 2, 7, 1, 2), "its borders are not borders of segments"),
    ],
)
def test_wrong_stripes_are_refused(stripe: Stripe, message: str) -> None:
    held = [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]]
    with pytest.raises(PackingError, match=message):
        Layout.from_segments([8, 3, 1], held, stripes=[stripe])


def test_stripes_are_kept() -> None:
    stripes = (Stripe(0, 0, 8, 0, 2), Stripe(2, 0, 1, 1, 2))
    layout = Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], stripes=stripes)

    assert layout.stripes == stripes
    assert layout.padded(16, 100).stripes == stripes


@pytest.mark.parametrize(
    ("tokens", "multiple", "most_rows", "rows"),
    [
        ([5, 7], 4, 100, 8),
        ([9, 1], 4, 100, 12),
        ([5, 7], 1, 100, 7),
        ([5, 7], 128, 10, 10),
        ([5, 7], 4, 7, 7),
        ([12, 3], 4, 10, 12),
        ([0, 0], 4, 100, 1),
        ([8192], 128, 8192, 8192),
    ],
)
def test_all_ranks_are_padded_to_a_multiple_but_not_beyond_the_most(
    tokens: list[int], multiple: int, most_rows: int, rows: int
) -> None:
    lengths = [count for count in tokens if count]
    documents = iter(range(len(lengths)))
    layout = Layout.from_segments(lengths, [[(next(documents), 0, count)] if count else [] for count in tokens])
    padded = layout.padded(multiple, most_rows)

    padded.validate()
    assert padded.rank_rows.tolist() == [rows] * len(tokens)
    assert padding_rows(padded).tolist() == [rows - count for count in tokens]
    assert padded.rank_rows.dtype == np.int64


def test_padding_changes_nothing_else() -> None:
    layout = place([500, 20, 3000, 1, 77], 3)
    padded = layout.padded(128, 4096)

    for name in ("document_tokens", "segment_document", "segment_start", "segment_stop", "rank_segments"):
        assert np.array_equal(getattr(padded, name), getattr(layout, name))
    assert not padding_rows(layout).any()


def test_padding_that_is_there_is_not_kept() -> None:
    layout = Layout.from_segments([5, 7], [[(0, 0, 5)], [(1, 0, 7)]], [60, 7])

    assert layout.padded(4, 100).rank_rows.tolist() == [8, 8]
