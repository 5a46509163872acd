"""Documents that share a prefix are placed together: hardly any keys of prefixes travel, and work stays even."""

import random
from unittest.mock import patch

import numpy as np
import pytest

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL, imbalance
from distca_hf.layout import Layout, Topology
from distca_hf.placement import place as placement
from distca_hf.placement.place import place
from distca_hf.placement.predicted import moved_rows
from distca_hf.placement.trees import Trees
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import keys_between
from distca_hf.prefixes import SharedPrefixes


def groups(rng: np.random.Generator, number: int, prompt: int, answer: int) -> tuple[IntArray, SharedPrefixes]:
    """Groups of eight answers to a prompt, and some documents that share nothing, in any order."""
    answers = rng.lognormal(np.log(answer), 0.6, 8 * number).clip(16, 4 * answer).astype(np.int64)
    lengths = np.append(prompt + answers, [9, answer, 2 * prompt])
    name = rng.permutation(len(lengths))  # of a document
    spans: list[list[tuple[int, int, int]]] = [[] for _ in lengths]
    for at, length in enumerate(lengths.tolist()):
        root = name[at - at % 8] if at < len(answers) else name[at]
        shared = [] if root == name[at] else [(root, 0, prompt)]
        spans[name[at]] = [*shared, (name[at], prompt if shared else 0, length)]
    named = np.empty_like(lengths)
    named[name] = lengths
    return named, SharedPrefixes.of_spans(spans, name)


@pytest.mark.parametrize("prompt", [2048, 16384])
@pytest.mark.parametrize("answer", [200, 1000])
@pytest.mark.parametrize(("ranks", "per_node", "number"), [(2, 2, 8), (4, 4, 16), (8, 8, 8), (8, 4, 32), (16, 8, 64)])
def test_keys_of_few_prefixes_travel(ranks: int, per_node: int, number: int, answer: int, prompt: int) -> None:
    """About as many as there are cuts between ranks; placed one by one, documents need nearly all prefixes on all
    ranks."""
    lengths, shared = groups(np.random.default_rng([ranks, number, answer, prompt]), number, prompt, answer)
    topology = Topology(ranks, per_node)
    layout = place(lengths, ranks, topology=topology, shared=shared)
    with patch.object(placement._Documents, "placed_with_trees", lambda documents, _: documents.placed()):
        apart = place(lengths, ranks, topology=topology, shared=shared)

    layout.validate()
    assert np.ptp(layout.rank_tokens) <= 1
    assert imbalance(layout.rank_work) < 1.0025
    travels, one_by_one = (int(keys_between(plan_in_place(one)).sum()) for one in (layout, apart))
    assert travels <= 2 * (ranks - 1) * (prompt + answer)
    assert 2 * travels < one_by_one


def drawn_tree(rng: random.Random) -> tuple[IntArray, SharedPrefixes]:
    """Documents, each of which may continue an earlier one anywhere, in the order in which hashes put them."""
    spans, lengths, order = list[list[tuple[int, int, int]]](), list[int](), list[int]()
    for document in range(rng.randint(1, 8)):
        before: list[tuple[int, int, int]] = []
        if document and rng.random() < 0.8:
            parent = rng.randrange(document)
            leaves = rng.randint(1, lengths[parent] - 1) if lengths[parent] > 1 else 0
            before = [(of, start, min(stop, leaves)) for of, start, stop in spans[parent] if start < leaves]
        begin = before[-1][2] if before else 0
        lengths.append(begin + rng.randint(1, 30))
        spans.append([*before, (document, begin, lengths[-1])])

    def put(document: int, level: int) -> None:  # later branches of a document leave it earlier
        order.append(document)
        children = [one for one, of in enumerate(spans) if len(of) > level + 1 and of[level][0] == document]
        children = [one for one in children if len(spans[one]) == level + 2]
        for child in sorted(children, key=lambda one: -spans[one][level][2]):
            put(child, level + 1)

    for document, of_document in enumerate(spans):
        if len(of_document) == 1:
            put(document, 0)
    return np.array(lengths), SharedPrefixes.of_spans(spans, order)


@pytest.mark.parametrize("seed", range(60))
def test_work_and_keys_of_parts_are_those_of_their_documents(seed: int) -> None:
    rng = random.Random(seed)
    lengths, shared = drawn_tree(rng)
    trees = Trees.of(lengths, shared, CAUSAL)
    pool, shares = trees.pool, [[], []]
    assert sum(pool.piece(index)[3] for index in pool.indices) == int((lengths - shared.first_own).sum())
    for index in pool.indices:
        _, tree, _, stop, work = pool.piece(index)
        cut = rng.randint(0, stop)
        parts = [(0.0, tree, *part, pool.work(tree, *part)) for part in ((0, cut), (cut, stop)) if part[0] < part[1]]
        assert sum(part[4] for part in parts) == work
        for rank, part in zip(rng.sample([0, 1], 2), parts, strict=False):
            shares[rank].append(part)
    numbers = np.array([[*part[1:4], rank] for rank in (0, 1) for part in shares[rank]], dtype=np.int64)
    document, start, stop, rank = trees.of_documents(*numbers.T)
    layout = Layout(
        *(lengths, document, start, stop, np.searchsorted(rank, [0, 1, 2])),
        np.bincount(rank, stop - start, 2).astype(np.int64),
        shared=shared,
    )
    layout.validate()

    assert layout.rank_work.tolist() == [sum(part[4] for part in of_rank) for of_rank in shares]
    assert trees.key_tokens(shares) == int(keys_between(plan_in_place(layout)).sum()) == moved_rows(layout)


def test_documents_are_placed_one_by_one_where_together_they_would_be_less_even() -> None:
    """A tree ends with short documents, whose tokens cost little: where its end is taken, the cost falls."""
    uneven = 0
    for seed in range(60):
        lengths, shared = drawn_tree(random.Random(seed))
        layouts = []
        for way in (lambda documents, _: documents.placed(), placement._Documents.placed_with_trees):
            with patch.object(placement._Documents, "placed_with_trees", way):
                layouts.append(place(lengths, 3, shared=shared))
        apart, chosen = (imbalance(layout.rank_work) for layout in layouts)
        assert chosen <= max(apart, 1 + placement.RANKS_OFF)
        with patch.object(placement, "RANKS_OFF", 100.0):  # trees are taken however uneven they are
            together = imbalance(place(lengths, 3, shared=shared).rank_work)
        uneven += together > max(apart, 1 + placement.RANKS_OFF)
    assert uneven
