"""What a layer's attention runs while exchanges are under way, for random plans of every kind: equal results and equal
exchanges do not show it. `tests/unit/analysis/test_explain.py` has recorded orders of small plans."""

import random
import re

import pytest

from distca_hf.analysis.explain import explain_plan
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.routing import Routing, rank_plan
from distca_hf.servers.served_plans import Servers
from support.layouts import packed_layout, plan_of_kind, random_layout


HEADS = 8
# Local calls, any number of them.
EARLY, LATE = "(?P<early>(local;)*)", "(?P<late>(local;)*)"


def drawn(kind: str, rng: random.Random) -> Plan:
    num_ranks, head_groups = rng.randint(1, 4), rng.choice([1, 2, 4])
    if kind == "packs":
        return plan_by_moving(packed_layout(rng, num_ranks), head_groups)
    if kind == "served":
        return Servers((rng.uniform(0.2, 1),), rng.random() < 1 / 2).plan(random_layout(rng, num_ranks), head_groups)
    return plan_of_kind(kind, rng, num_ranks, head_groups)


def forward_of(routing: Routing) -> tuple[str, float]:
    """Order of forward, and the share of local work that is left for after the remote calls."""
    some, moves, chunks = routing.exchanges, routing.queries is not None, len(routing.prefix_of_chunk)
    order = chunks * ("send keys;" * some + "send queries;" * moves) + EARLY
    for prefix, remote in zip(routing.prefix_of_chunk, routing.remote_queries_of_chunk, strict=True):
        order += "wait keys;" * some + "remote;" * len(prefix)
        order += ("wait queries;" + "remote;" * len(remote) + "remote results;") * moves
    return order + LATE * moves + "wait results;" * (moves * chunks), routing.late_share / 2 * moves


def backward_of(routing: Routing, refetches: bool) -> tuple[str, float]:
    """The same of backward. If nothing comes during early calls, no half of the late ones is early."""
    some, moves = routing.exchanges, routing.queries is not None
    comes = some and refetches
    [prefix], [remote] = routing.prefix_of_chunk, routing.remote_queries_of_chunk
    order = "send keys;" * comes + "send queries;" * moves + EARLY + "wait keys;" * comes + "remote;" * len(prefix)
    order += (
        ("wait queries;" + "remote;" * len(remote)) * moves + "send key gradients;" * some + "send results;" * moves
    )
    order += LATE * some + "wait key gradients;" * some + "wait results;" * moves
    return order, routing.late_share * some / (2 if comes or moves else 1)


def check(lines: list[str], order: str, share: float) -> float:
    """Compares what was done with an order; returns the work of late calls."""
    words = [line.split(maxsplit=1) for line in lines]
    done = [use if what.endswith(" pairs") else f"{use} {what.partition(':')[0]}" for use, what in words]
    found = re.fullmatch(order, "".join(f"{one};" for one in done))
    assert found is not None, (order, done)
    of_head, work = [], []
    for line in lines:
        if line.startswith("local "):
            first, stop = map(int, (re.findall(r"heads \[(\d+):(\d+)\]", line) or [(0, HEADS)])[0])
            of_head.append(int(line.split()[-2].replace(",", "")))
            work.append(of_head[-1] * (stop - first))
    late = sum(work[found["early"].count(";") :])
    assert abs(late - share * sum(work)) <= max(of_head, default=0) / 2 + 1e-6 * sum(work)
    return late


@pytest.mark.parametrize("kind", ["in place", "moved", "striped", "packs", "served"])
def test_calls_and_exchanges_come_in_the_order_of_the_page(kind: str) -> None:
    """Of `docs/design.md`: rows leave first, nothing is awaited before it is read, and a share of the local calls runs
    while results leave."""
    late_forward = late_backward = 0.0
    for seed in range(24):
        rng = random.Random(seed)
        plan, num_chunks, refetches = drawn(kind, rng), (1, 3)[seed % 2], seed // 2 % 2 == 1
        mask = Mask(rng.randint(2, 12)) if kind != "served" and seed % 3 == 2 else CAUSAL_MASK
        mask = mask.within(plan.layout.longest_document_tokens)
        for rank, one in enumerate(explain_plan(plan, mask, HEADS, num_chunks, refetches)):
            full = mask == CAUSAL_MASK
            routed = rank_plan(plan, rank, num_chunks) if full else rank_plan(plan.of_window(mask), rank)
            late_forward += check(one.forward, *forward_of(routed.forward))
            late_backward += check(one.backward, *backward_of(routed.backward, refetches))

    assert late_backward > 0
    assert (late_forward > 0) == (kind != "in place")
