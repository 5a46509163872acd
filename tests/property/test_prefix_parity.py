"""Attention of documents that share prefixes, each held once and anywhere, against exact attention of every whole
document in fp64."""

import itertools
import random
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf import prefixes
from distca_hf.arrays import IntArray
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PackingError, PlanError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.routing import rank_plan, route
from distca_hf.planning.row_moves import RowMoves
from distca_hf.prefixes import SharedPrefixes
from distca_hf.runtime.device_routing import on_device
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.row_moves import PassRows, PinnedRowMoves
from distca_hf.testing import LoopbackTransport, attend_documents, run_ranks
from support.layouts import padding_rows
from support.parity import HEADS, seen_apart


SCALE = 0.4


def drawn_documents(rng: random.Random, longest_tokens: int = 40) -> list[list[int]]:
    """Documents of few kinds of tokens, many of which begin like another one."""
    documents: list[list[int]] = []
    for _ in range(rng.randint(1, 9)):
        begin = rng.choice(documents) if documents and rng.random() < 0.8 else []
        begin = begin[: rng.randint(0, len(begin))]
        documents.append([*begin, *(rng.randint(0, 99) for _ in range(rng.randint(1, longest_tokens)))])
    rng.shuffle(documents)
    return documents


def found(documents: list[list[int]], least_tokens: int, block_tokens: int) -> SharedPrefixes | None:
    """What documents share, given tokens instead of hashes of them."""
    lengths = np.array([len(document) for document in documents])
    sums = [
        np.array([hash(tuple(document[:tokens])) or 1 for tokens in range(least_tokens, len(document), block_tokens)])
        for document in documents
    ]
    with patch.object(prefixes, "BLOCK_TOKENS", block_tokens):
        return SharedPrefixes.find(lengths, [one.astype(np.int64) for one in sums], least_tokens)


def scattered(rng: random.Random, documents: list[list[int]], shared: SharedPrefixes, num_ranks: int) -> Layout:
    """Own rows of documents, cut anywhere, on any rank in any order."""
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for document, first in enumerate(shared.first_own.tolist()):
        stop = len(documents[document])
        cuts = sorted(rng.sample(range(first + 1, stop), min(stop - first - 1, rng.choice([0, 0, 1, 2]))))
        for begin, end in zip([first, *cuts], [*cuts, stop], strict=True):
            held[rng.randrange(num_ranks)].append((document, begin, end))
    for segments in held:
        rng.shuffle(segments)
    rows = [sum(stop - start for _, start, stop in segments) for segments in held]
    flat = np.array([segment for segments in held for segment in segments], dtype=np.int64).reshape(-1, 3)
    return Layout(
        np.array([len(document) for document in documents]),
        *flat.T.copy(),
        np.cumsum([0, *map(len, held)]),
        np.array(rows) + rng.choice([0, 3]),
        shared=shared,
    )


def rows_of_documents(layout: Layout) -> list[IntArray]:
    """Numbers of the rows of each document among all rows of all documents, each row counted in the document that
    holds it."""
    first = np.cumsum([0, *layout.document_tokens])
    if layout.shared is None:
        return [np.arange(*bounds) for bounds in itertools.pairwise(first)]
    shared = layout.shared
    return [
        np.concatenate(
            [
                np.arange(
                    first[shared.holder[span]] + shared.start[span], first[shared.holder[span]] + shared.stop[span]
                )
                for span in range(*shared.document_spans[document : document + 2])
            ]
        )
        for document in range(layout.num_documents)
    ]


def differences(layout: Layout, mask: Mask, num_chunks: int, seed: int) -> list[float]:
    """Largest difference of output and gradients on each rank."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    mask = mask.within(layout.longest_document_tokens)
    heads, groups, dim, value_dim = rng.choice(HEADS)
    rows = [torch.from_numpy(of_document) for of_document in rows_of_documents(layout)]
    shapes = ((heads, dim), (groups, dim), (groups, value_dim), (heads, value_dim))
    tokens = int(layout.document_tokens.sum())
    q, k, v, dout = (torch.randn(tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes)

    # Every document by itself; only outputs of its own rows are read.
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = seen_apart(layout.document_tokens.tolist(), mask)
    of_all = [x[torch.cat(rows)] for x in inputs]
    out_of_all = attend_documents(*of_all, lengths, SCALE, mask.window_tokens)
    expected = torch.zeros(tokens, heads, value_dim, dtype=torch.float64)
    is_own = torch.cat(rows) == torch.arange(tokens)
    expected[is_own] = out_of_all[is_own].detach()
    gradients = torch.autograd.grad(out_of_all, inputs, dout * is_own[:, None, None])
    spec = AttentionSpec(SCALE, window_tokens=mask.window_tokens or 0, chunked=mask.chunked)
    plan = plan_in_place(layout) if mask == CAUSAL_MASK else plan_in_place(layout).of_window(mask)
    plan.validate()

    def run(transport: Transport) -> float:
        mine = rank_plan(plan, transport.rank, num_chunks)
        assert mine.forward.pairs == plan.work[transport.rank]
        routings = {mine.mask: on_device(mine, torch.device("cpu"))}
        planned = Planned(lambda: routings, None, mine.facts, plan.fingerprint)
        live = LivePlan(0, planned, transport, DistCAConfig(kernel="reference"))
        first = np.cumsum([0, *layout.document_tokens])
        held = [np.arange(first[d] + start, first[d] + stop) for d, start, stop in layout.held_by(transport.rank)]
        here = torch.from_numpy(np.concatenate([*held, np.zeros(0, dtype=np.int64)]))
        padding = int(padding_rows(layout)[transport.rank])
        local = [
            torch.cat([x[here], torch.full((padding, *x.shape[1:]), 1e9, dtype=x.dtype)]) for x in (q, k, v, dout)
        ]
        of_rank = [x.requires_grad_() for x in local[:3]]
        out, *_ = flash_attn(*of_rank, spec, live.handle)
        got = [out, *torch.autograd.grad(out, of_rank, local[3])]
        wanted = [expected, *gradients]
        pairs = zip(got, wanted, strict=True)
        return max([0.0, *(float((x[: len(here)] - y[here]).detach().abs().max()) for x, y in pairs if len(here))])

    return run_ranks(layout.num_ranks, run)


MASKS = st.one_of(
    st.just(CAUSAL_MASK), st.builds(Mask, st.integers(1, 50)), st.builds(Mask, st.integers(1, 50), st.just(True))
)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    least_tokens=st.sampled_from([1, 2, 5]),
    mask=MASKS,
    num_chunks=st.sampled_from([1, 3]),
)
def test_attention_is_that_of_whole_documents(
    seed: int, num_ranks: int, least_tokens: int, mask: Mask, num_chunks: int
) -> None:
    rng = random.Random(seed)
    documents = drawn_documents(rng)
    shared = found(documents, least_tokens, rng.choice([1, 3]))
    if shared is None:
        return
    layout = scattered(rng, documents, shared, num_ranks)
    layout.validate()
    assert max(differences(layout, mask, num_chunks, seed)) < 1e-12


@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([1, 2, 3, 4]), window=st.sampled_from([None, 7, 30]))
def test_placed_documents_are_even_and_computed_once(seed: int, num_ranks: int, window: int | None) -> None:
    rng = random.Random(seed)
    documents = drawn_documents(rng, 60)
    lengths, shared = np.array([len(document) for document in documents]), found(documents, 3, 1)
    layers = ((CAUSAL_MASK, 1), (Mask(window), 2)) if window else ((CAUSAL_MASK, 1),)
    layout = place(lengths, num_ranks, layer_masks=layers, shared=shared, head_groups=2)

    assert layout.rank_tokens.max() - layout.rank_tokens.min() <= 1
    assert int(layout.rank_tokens.sum()) == int(lengths.sum()) - layout.shared_tokens
    assert layout.rank_work.max() - layout.rank_work.mean() <= max(lengths) + 0.005 * layout.rank_work.mean()
    assert max(differences(layout, CAUSAL_MASK, 1, seed)) < 1e-12


def test_levels_of_a_tree_hold_each_token_once() -> None:
    prompt, answer = list(range(100)), list(range(200, 260))
    documents = [
        [*prompt, *answer, 1],
        [7, 8, 9],
        [*prompt, 2],
        [*prompt, *answer, 3, 4],
        [*prompt, *answer, 5],
        [*prompt[:9], 6, 6, 6],
    ]
    shared = found(documents, 10, 10)
    assert shared is not None

    spans = [
        [tuple(int(x[at]) for x in (shared.holder, shared.start, shared.stop)) for at in range(*bounds)]
        for bounds in zip(shared.document_spans[:-1], shared.document_spans[1:], strict=True)
    ]

    [root] = [document for document in (0, 2, 3, 4) if len(spans[document]) == 1]
    assert spans[1] == [(1, 0, 3)]
    assert spans[5] == [(5, 0, 12)]
    assert all(spans[document][0] == (root, 0, 100) for document in (0, 2, 3, 4) if document != root)
    held = sum(len(document) for document in documents) - int(shared.first_own.sum())
    assert held == 100 + 60 + 5 + 3 + 12


def test_continuations_on_a_rank_read_their_prefix_once_in_one_rectangle() -> None:
    prompt = list(range(50))
    documents = [[*prompt, 100 + number, *range(number)] for number in range(6)]
    shared = found(documents, 50, 50)
    assert shared is not None
    layout = Layout.from_packs([[len(document) for document in documents[:3]], [len(d) for d in documents[3:]]])
    layout = layout.sharing(shared)
    plan = plan_in_place(layout)
    holder = int(shared.holder[0])

    for rank in range(2):
        [call] = route(plan, rank).prefix
        assert len(call.cu_seqlens_q) == 2
        assert call.cu_seqlens_k.tolist() == [0, 50]
        own = layout.rank_tokens[rank] - (len(documents[holder]) if layout.segment_rank[holder] == rank else 0)
        assert call.cu_seqlens_q.tolist() == [0, own]
    assert int(rank_plan(plan, 0).facts.key_rows_sent[layout.segment_rank[holder]]) == 50


def branches(tokens_of_turn: int, of_last: int) -> Layout:
    """Three levels of documents on two ranks. All but the root are on rank 1: two end with the last turn, and three
    branch off from it."""
    prompt, turn = list(range(60)), list(range(100, 100 + tokens_of_turn))
    documents = [[*prompt, 1], [*prompt, *turn, 2], *([*prompt, *turn, 3, *range(4, 4 + n)] for n in (of_last, 9))]
    lengths = np.array([len(document) for document in documents])
    spans = [[(0, 0, 61)], [(0, 0, 60), (1, 60, lengths[1])]]
    spans += [[(0, 0, 60), (1, 60, 60 + len(turn)), (at, 60 + len(turn), lengths[at])] for at in (2, 3)]
    shared = SharedPrefixes.of_spans(spans, range(4))
    held = [[(0, 0, 61)], [(at, int(shared.first_own[at]), int(lengths[at])) for at in (1, 2, 3)]]
    flat = np.array([segment for segments in held for segment in segments]).T
    rows = [sum(stop - start for _, start, stop in segments) for segments in held]
    layout = Layout(lengths, *flat.copy(), np.array([0, 1, 4]), np.array(rows), shared=shared)
    layout.validate()
    return layout


def rectangles(layout: Layout, rank: int) -> list[tuple[int, int, int, int]]:
    """First query row, queries, first key row and keys of each rectangle of a rank's prefix calls."""
    return [
        (call.query_start + int(query), int(queries), call.key_start + int(key), int(keys))
        for call in route(plan_in_place(layout), rank).prefix
        for query, queries, key, keys in zip(
            call.cu_seqlens_q[:-1],
            np.diff(call.cu_seqlens_q),
            call.cu_seqlens_k[:-1],
            np.diff(call.cu_seqlens_k),
            strict=True,
        )
    ]


def test_the_keys_before_a_document_are_one_rectangle() -> None:
    """Document 1 has 41 rows after the root's 60, of which documents 2 and 3 continue 40."""
    layout = branches(40, 30)
    assert rectangles(layout, 0) == []
    assert rectangles(layout, 1) == [(0, 41, 0, 60), (41, 41, 0, 100)]
    assert route(plan_in_place(layout), 1).remote_kv_rows == 100


def test_few_queries_read_the_same_keys_together_with_their_neighbours() -> None:
    """Documents 2 and 3 have 12 rows: too few for 60 keys to be read once more."""
    layout = branches(12, 1)
    assert rectangles(layout, 1) == [(0, 25, 0, 60), (13, 12, 60, 12)]


def test_layouts_that_hold_a_prefix_twice_are_refused() -> None:
    shared = found([[1, 2, 3, 4], [1, 2, 3, 5, 6]], 3, 1)
    assert shared is not None
    layout = Layout.from_packs([[4], [5]])

    with pytest.raises(PackingError, match=r"document \d: segment \[0, \d\) where \[3, \.\.\.\) is next"):
        Layout(**(vars(layout) | {"shared": shared})).validate()
    plan, sharing = plan_in_place(layout), layout.sharing(shared)
    sharing.validate()
    with pytest.raises(PlanError, match=r"document \d: task \[0, \d\) where 3 is next"):
        plan.tasks.validate(sharing)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    tensor_ranks=st.sampled_from([1, 2]),
    shares=st.booleans(),
)
def test_results_return_to_every_row_and_their_gradients_are_summed(
    seed: int, num_ranks: int, tensor_ranks: int, shares: bool
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    documents = drawn_documents(rng)
    shared = found(documents, 2 if shares else 1000, 1)
    lengths, cuts = [*map(len, documents)], sorted(rng.choices(range(len(documents) + 1), k=num_ranks - 1))
    home = Layout.from_packs([lengths[start:stop] for start, stop in pairwise([0, *cuts, len(documents)])])
    own = SharedPrefixes.of_spans([[(at, 0, length)] for at, length in enumerate(lengths)], range(len(lengths)))
    layout = scattered(rng, documents, own if shared is None else shared, num_ranks)
    if shared is None:
        layout = replace(layout, shared=None)
    rows, first = rows_of_documents(layout), np.cumsum([0, *lengths])
    values = torch.randn(int(first[-1]), 3, dtype=torch.float64, generator=generator)
    places = [np.array(sorted(rng.sample(range(tokens + 4), tokens)), dtype=np.int64) for tokens in home.rank_tokens]
    of_home = [
        torch.from_numpy(np.concatenate([*(rows[d] for d, _, _ in home.held_by(rank)), first[:0]]))
        for rank in range(num_ranks)
    ]
    upstream = [torch.randn(len(at) + 4, 3, dtype=torch.float64, generator=generator) for at in places]
    expected = torch.zeros_like(values)
    for at, ids, gradient in zip(places, of_home, upstream, strict=True):
        expected.index_add_(0, ids, gradient[torch.from_numpy(at)])

    def run(transport: LoopbackTransport) -> None:
        rank = transport.rank
        at, ids = torch.from_numpy(places[rank]), of_home[rank]
        moves = RowMoves.of(home, layout, rank, places[rank], len(at) + 4)
        pass_rows = PassRows(PinnedRowMoves.prepare(moves, False).to(at.device), transport, (1, len(at) + 4), "", int)
        held = [np.arange(first[d] + start, first[d] + stop) for d, start, stop in layout.held_by(rank)]
        here = torch.from_numpy(np.concatenate([*held, first[:0]]))
        given = torch.zeros(len(at) + 4, 3, dtype=torch.float64)
        given[at] = values[ids]
        given.requires_grad_()

        [placed] = pass_rows.move_in([given], differentiate=True)
        assert torch.equal(placed[: len(here)], values[here])
        assert not placed[len(here) :].any()
        result = (2 * placed).detach().requires_grad_()
        numbers = torch.arange(len(result))[:, None]
        [home_rows, home_numbers] = pass_rows.move_home([result[None], numbers])
        assert torch.equal(home_rows[0, at], 2 * values[ids])
        assert home_rows[0].count_nonzero() == 3 * len(at)
        assert home_numbers.shape == (len(at) + 4, 1)
        [summed] = torch.autograd.grad(home_rows, result, upstream[rank][None])
        torch.testing.assert_close(summed[: len(here)], expected[here], rtol=0, atol=1e-13)
        assert not summed[len(here) :].any()

        weights = torch.ones_like(placed).cumsum(0)
        [of_given] = torch.autograd.grad(placed, given, weights)
        assert int(of_given.count_nonzero()) == 3 * sum(len(moved) for moved in [moves.sent])

    run_ranks(num_ranks, run, tensor_ranks=tensor_ranks)
