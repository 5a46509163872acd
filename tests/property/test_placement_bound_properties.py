"""The counting bound: never above the bytes of any layout, and close to those of placement where it can be."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.placement.place import fill_in_order, place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import key_transfers
from lib.planning.bounds import key_value_bytes_bound


SEEDS = st.integers(0, 2**32 - 1)


def drawn_lengths(rng: random.Random, num_ranks: int) -> list[int]:
    kind = rng.choice(["few", "many", "giant", "equal"])
    if kind == "equal":
        return [rng.randint(1, 3000)] * rng.randint(1, 4 * num_ranks)
    lengths = [
        max(1, int(rng.lognormvariate(6, 1.5))) for _ in range(rng.choice([2, 8, 100]) if kind == "few" else 200)
    ]
    return [*lengths, *([sum(lengths) * rng.randint(1, 5)] if kind == "giant" else [])]


def token_by_token(layout: Layout) -> int:
    """Tokens of keys and values that ranks need and do not hold, one by one."""
    held: list[set[tuple[int, int]]] = [set() for _ in range(layout.num_ranks)]
    needed: list[set[tuple[int, int]]] = [set() for _ in range(layout.num_ranks)]
    for rank in range(layout.num_ranks):
        for document, start, stop in layout.held_by(rank):
            held[rank] |= {(document, token) for token in range(start, stop)}
            needed[rank] |= {(document, token) for token in range(stop)}
    return sum(len(need - have) for need, have in zip(needed, held, strict=True))


def moved_tokens(layout: Layout) -> int:
    return int(key_transfers(plan_in_place(layout)).tokens.sum())


def zigzag(lengths: list[int], num_ranks: int) -> Layout:
    """Every document in 2 x ranks parts, the n-th from the front and from the back on one rank."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for document, tokens in enumerate(lengths):
        cuts = [tokens * part // (2 * num_ranks) for part in range(2 * num_ranks + 1)]
        for part in range(2 * num_ranks):
            if cuts[part] < cuts[part + 1]:
                ranks[min(part, 2 * num_ranks - 1 - part)].append((document, cuts[part], cuts[part + 1]))
    return Layout.from_segments(lengths, ranks)


def random_sharding(lengths: list[int], num_ranks: int, rng: random.Random) -> Layout:
    """Documents cut anywhere, pieces anywhere."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for document, tokens in enumerate(lengths):
        cuts = sorted({0, tokens, *(rng.randint(0, tokens) for _ in range(rng.choice([0, 0, 1, 3])))})
        for start, stop in pairwise(cuts):
            ranks[rng.randrange(num_ranks)].append((document, start, stop))
    return Layout.from_segments(lengths, ranks)


@given(seed=SEEDS, num_ranks=st.sampled_from([1, 2, 3, 5, 8, 16]))
def test_bound_is_never_above_the_bytes_of_any_layout(seed: int, num_ranks: int) -> None:
    rng = random.Random(seed)
    lengths = drawn_lengths(rng, num_ranks)
    for layout in (
        place(lengths, num_ranks),
        fill_in_order(lengths, num_ranks),
        zigzag(lengths, num_ranks),
        random_sharding(lengths, num_ranks, rng),
    ):
        assert key_value_bytes_bound(layout, TokenBytes(key_value=1)) <= moved_tokens(layout)


@settings(max_examples=40)
@given(seed=SEEDS, num_ranks=st.sampled_from([1, 2, 3, 5, 8]))
def test_bytes_are_those_counted_token_by_token(seed: int, num_ranks: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 12))]
    for layout in (place(lengths, num_ranks), zigzag(lengths, num_ranks), random_sharding(lengths, num_ranks, rng)):
        assert moved_tokens(layout) == token_by_token(layout)


@given(num_ranks=st.integers(2, 16), tiles=st.integers(40, 400))
def test_one_document_costs_what_the_bound_says(num_ranks: int, tiles: int) -> None:
    layout = place([num_ranks * tiles * 128], num_ranks)
    bound = key_value_bytes_bound(layout, TokenBytes(key_value=1))

    assert 0 < bound <= moved_tokens(layout) <= 1.2 * bound + 1024 * num_ranks


@given(per_rank=st.integers(1, 8), num_ranks=st.integers(1, 16), tokens=st.integers(1, 5000))
def test_documents_that_divide_evenly_cost_nothing(per_rank: int, num_ranks: int, tokens: int) -> None:
    layout = place([tokens] * (per_rank * num_ranks), num_ranks)

    assert moved_tokens(layout) == 0
    assert key_value_bytes_bound(layout) == 0
