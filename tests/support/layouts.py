"""Layouts for tests: random, and as adversarial as a layout may be."""

import random
from itertools import pairwise

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import Mask
from distca_hf.layout import Layout, Stripe
from distca_hf.planning.pieces import ALL_HEADS, Tasks
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import Routing, route


# Rank 1 lacks the beginning of d0 and nothing else: what it receives is its remote KV.
SHARED = Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]])
# Rank 0 reads the beginning of d0 twice: two of its tokens before d0[2:4], and those and five more before d0[7:9].
SCATTERED = Layout.from_segments([9, 5], [[(0, 2, 4), (0, 7, 9), (1, 3, 5)], [(0, 0, 2), (0, 4, 7), (1, 0, 3)]])

# Rank 0 reads the beginning of d0 three times.
THRICE = Layout.from_segments([12], [[(0, 2, 4), (0, 6, 8), (0, 10, 12)], [(0, 0, 2), (0, 4, 6), (0, 8, 10)]])


def random_layout(rng: random.Random, num_ranks: int, longest_tokens: int = 40) -> Layout:
    """Documents cut anywhere, segments on any rank in any order, some ranks empty, some padded."""
    lengths = [rng.choice([1, 1, 2, 3, rng.randint(1, longest_tokens)]) for _ in range(rng.randint(1, 8))]
    holders = range(num_ranks - rng.choice([0, 0, 1]) or 1)
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for document, length in enumerate(lengths):
        cuts = sorted(rng.sample(range(1, length), min(length - 1, rng.choice([0, 0, 1, 2, 3]))))
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            segments[rng.choice(holders)].append((document, start, stop))
    for held in segments:
        rng.shuffle(held)
    rows = [sum(stop - start for _, start, stop in held) + rng.choice([0, 0, 3]) for held in segments]
    return Layout.from_segments(lengths, segments, rows)


def reads_rows_in_order(layout: Layout) -> bool:
    """Whether every rank of a layout without stripes has at most one local call, of all its tokens in their order, and
    its prefix calls follow each other on its last tokens."""
    plan = plan_in_place(layout)
    return all(_in_order(route(plan, rank)) for rank in range(layout.num_ranks))


def _in_order(routing: Routing) -> bool:
    own = [(call.query_start, call.query_stop) for call in routing.local]
    begins, ends = ([getattr(call, name) for call in routing.prefix] for name in ("query_start", "query_stop"))
    return (
        own == [(0, routing.num_tokens)] * min(1, routing.num_tokens)
        and routing.remote_queries == ()
        and [*begins, routing.num_tokens][1:] == ends
    )


def plan_of_kind(kind: str, rng: random.Random, num_ranks: int, head_groups: int = 1) -> Plan:
    """A plan "in place", with queries "moved" anywhere, or "striped"."""
    if kind == "striped":
        return plan_in_place(striped_layout(rng, num_ranks), head_groups)
    layout = random_layout(rng, num_ranks)
    return random_plan(rng, layout, head_groups) if kind == "moved" else plan_in_place(layout, head_groups)


def packed_layout(rng: random.Random, num_ranks: int, longest_tokens: int = 3000) -> Layout:
    """Whole documents on each rank, as somebody else packs them: uneven token counts, long tails, empty ranks."""

    def pack() -> list[int]:
        return [
            rng.choice([1, 2, rng.randint(1, 50), rng.randint(1, longest_tokens)])
            for _ in range(rng.choice([0, 1, 3, 9]))
        ]

    return Layout.from_packs([pack() for _ in range(num_ranks)])


def random_plan(rng: random.Random, layout: Layout, head_groups: int = 1) -> Plan:
    """Tasks cut anywhere, without regard to segments, on any rank; heads of about half of the documents divided."""
    tasks = []
    ranks = rng.sample(range(layout.num_ranks), rng.randint(1, layout.num_ranks))
    for document, length in enumerate(layout.document_tokens.tolist()):
        for head in range(head_groups) if head_groups > 1 and rng.random() < 0.5 else [ALL_HEADS]:
            cuts = sorted(rng.sample(range(1, length), min(length - 1, rng.choice([0, 1, 2, 4]))))
            for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
                tasks.append((document, start, stop, rng.choice(ranks), head))
    document, start, stop, rank, head = np.array(tasks, dtype=np.int64).T.copy()
    plan = Plan(layout, Tasks.sort(document, start, stop, rank, head, head_groups))
    plan.validate()
    return plan


def with_mask(plan: Plan, mask: Mask) -> Plan:
    """The same tasks under another mask."""
    tasks = plan.tasks
    columns = tasks.document, tasks.start, tasks.stop, tasks.rank, tasks.head
    return Plan(plan.layout, Tasks.sort(*columns, tasks.head_groups, mask), plan.speeds)


def striped_layout(rng: random.Random, num_ranks: int, longest_tokens: int = 40) -> Layout:
    """Documents of which some are striped over ranks next to each other, entirely or from the middle on."""
    lengths = [rng.randint(1, longest_tokens) for _ in range(rng.randint(1, 5))]
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    stripes = []
    for document, length in enumerate(lengths):
        start = rng.choice([0, 0, length // 2])
        first, last = sorted(rng.choices(range(num_ranks), k=2))
        cuts = [start + (length - start) * part // (last - first + 1) for part in range(last - first + 2)]
        for rank, (begin, end) in enumerate(pairwise(cuts), first):
            segments[rank] += [(document, begin, end)] if begin < end else []
        if start:
            segments[rng.randrange(num_ranks)].append((document, 0, start))
        if rng.random() < 0.8:
            stripes.append(Stripe(document, start, length, first, last + 1))
    for held in segments:
        rng.shuffle(held)
    rows = [sum(stop - start for _, start, stop in held) + rng.choice([0, 0, 3]) for held in segments]
    return Layout.from_segments(lengths, segments, rows, stripes)


def padding_rows(layout: Layout) -> IntArray:
    """`[ranks]` padding rows of each rank."""
    return layout.rank_rows - layout.rank_tokens
