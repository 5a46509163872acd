"""Whatever is corrupted in valid cu_seqlens or a valid layout is found."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.batches.batch_documents import check_cu_seqlens
from distca_hf.errors import PackingError
from distca_hf.layout import Layout
from support.layouts import random_layout


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def is_refused(layout: Layout) -> bool:
    try:
        layout.validate()
    except PackingError:
        return True
    return False


def is_sound(layout: Layout) -> bool:
    """Validity by definition: token by token."""
    borders = layout.rank_segments.tolist()
    num_segments = len(layout.segment_document)
    if len(borders) != len(layout.rank_rows) + 1 or borders != sorted(borders):
        return False
    if (borders[0], borders[-1]) != (0, num_segments):
        return False
    held = [(document, token) for document, tokens in enumerate(layout.document_tokens) for token in range(tokens)]
    found = []
    for rank, rows in enumerate(layout.rank_rows.tolist()):
        tokens = 0
        for segment in range(borders[rank], borders[rank + 1]):
            start, stop = int(layout.segment_start[segment]), int(layout.segment_stop[segment])
            if stop <= start:
                return False
            found += [(int(layout.segment_document[segment]), token) for token in range(start, stop)]
            tokens += stop - start
        if tokens > rows:
            return False
    return bool((layout.document_tokens >= 0).all()) and sorted(found) == held


@given(lengths=LENGTHS)
def test_valid_cu_seqlens_give_their_lengths(lengths: list[int]) -> None:
    assert check_cu_seqlens(np.cumsum([0, *lengths]), sum(lengths)).tolist() == lengths


@given(lengths=LENGTHS, data=st.data())
def test_corrupted_cu_seqlens_are_refused(lengths: list[int], data: st.DataObject) -> None:
    num_tokens = sum(lengths)
    offsets = np.cumsum([0, *lengths])
    last = len(offsets) - 1
    amount = data.draw(st.integers(1, 2**40), label="amount")
    kind = data.draw(
        st.sampled_from(["first", "last", "above next", "below previous", "float", "nested", "cut", "longer"])
    )
    if kind == "first":
        offsets[0] += data.draw(st.sampled_from([amount, -amount]))
    elif kind == "last":
        offsets[last] += data.draw(st.sampled_from([amount, -amount]))
    elif kind == "above next":
        at = data.draw(st.integers(0, last - 1))
        offsets[at] = offsets[at + 1] + amount
    elif kind == "below previous":
        at = data.draw(st.integers(1, last))
        offsets[at] = offsets[at - 1] - amount
    elif kind == "float":
        offsets = offsets.astype(data.draw(st.sampled_from([np.float16, np.float32, np.float64])))
    elif kind == "nested":
        offsets = offsets.reshape(data.draw(st.sampled_from([(1, -1), (-1, 1), (1, 1, -1)])))
    elif kind == "cut":
        lengths = [*lengths[:-1], lengths[-1] + 1]
        num_tokens, offsets = sum(lengths), np.cumsum([0, *lengths])[:-1]
    else:
        offsets = np.append(offsets, num_tokens + amount)

    with pytest.raises(PackingError):
        check_cu_seqlens(offsets, num_tokens)


@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 5))
def test_valid_layout_is_accepted(seed: int, num_ranks: int) -> None:
    layout = random_layout(random.Random(seed), num_ranks)

    layout.validate()
    assert is_sound(layout)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 5),
    name=st.sampled_from(["document_tokens", "segment_document", "segment_start", "segment_stop", "rank_rows"]),
    change=st.sampled_from([-1000, -2, -1, 1, 2, 1000]),
    at=st.integers(0, 1000),
)
def test_layout_with_one_number_changed_is_refused_unless_it_is_another_sound_one(
    seed: int, num_ranks: int, name: str, change: int, at: int
) -> None:
    layout = random_layout(random.Random(seed), num_ranks)
    array = getattr(layout, name).copy()
    array[at % len(array)] += change
    corrupted = dataclasses.replace(layout, **{name: array})

    assert is_refused(corrupted) == (not is_sound(corrupted))
