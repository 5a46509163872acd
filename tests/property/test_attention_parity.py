"""Core attention over random layouts, 1 to 8 ranks in one process, is exact: routing errors cannot hide in fp64."""

import random
from dataclasses import dataclass

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distca_hf.cost import Mask
from distca_hf.planning.plan import plan_in_place
from distca_hf.testing import LoopbackTransport, run_ranks
from support.layouts import random_layout, random_plan, striped_layout, with_mask
from support.parity import Case, Difference, compare


def check_exact(case: Case) -> None:
    """Outputs and gradients of all ranks are exact, and what was sent and computed is what the plan says."""
    for difference in run_ranks(case.layout.num_ranks, lambda transport: compare(case, transport)):
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_outputs_and_gradients_equal_unsplit_attention(seed: int, num_ranks: int) -> None:
    case = Case.draw(seed, random_layout(random.Random(seed), num_ranks))

    check_exact(case)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_queries_computed_anywhere_give_the_same(seed: int, num_ranks: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, num_ranks)
    case = Case.draw(seed, layout, random_plan(rng, layout))

    check_exact(case)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]),
    head_groups=st.sampled_from([2, 3, 4]),
)
def test_heads_computed_anywhere_give_the_same(seed: int, num_ranks: int, head_groups: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, num_ranks)
    case = Case.draw(seed, layout, random_plan(rng, layout, head_groups))

    check_exact(case)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]),
    head_groups=st.sampled_from([1, 1, 2, 4]),
    tokens=st.integers(1, 39),
    kind=st.sampled_from(["in place", "striped", "moved", "moved"]),
    is_window=st.booleans(),
)
def test_windows_and_chunks_of_documents_give_the_same(
    seed: int, num_ranks: int, head_groups: int, tokens: int, kind: str, is_window: bool
) -> None:
    """Wherever queries are computed, in one chunk of the exchange or several."""
    rng = random.Random(seed)
    layout = (striped_layout if kind == "striped" else random_layout)(rng, num_ranks)
    assume(layout.longest_document_tokens > 1)
    tokens = min(tokens, layout.longest_document_tokens - 1)  # as long as a document it is no window
    mask = Mask(tokens, chunked=not is_window)
    if kind == "moved":
        plan = with_mask(random_plan(rng, layout, head_groups), mask)
    else:
        plan = plan_in_place(layout, head_groups, mask)
    case = Case.draw(seed, layout, plan)

    check_exact(case)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]),
    head_groups=st.sampled_from([1, 2, 3, 4]),
)
def test_stripes_give_the_same(seed: int, num_ranks: int, head_groups: int) -> None:
    layout = striped_layout(random.Random(seed), num_ranks)
    plan = plan_in_place(layout, head_groups)
    plan.validate()
    case = Case.draw(seed, layout, plan)

    check_exact(case)


@dataclass(frozen=True)
class LocalHeads(Case):
    """A case of one of two tensor ranks: `heads` are its own, and `tensors` its part of those of all heads."""

    part: int = 0

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, *dims = self.heads
        whole = Case(self.layout, (2 * heads, 2 * kv_heads, dims[0], dims[1]), "auto", "auto", self.seed, self.plan)
        q, k, v, dout = (x.chunk(2, dim=1)[self.part].contiguous() for x in whole.tensors())
        return q, k, v, dout


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    head_groups=st.sampled_from([1, 2]),
    kind=st.sampled_from(["in place", "moved", "stripes"]),
)
def test_heads_of_tensor_ranks_give_the_same(seed: int, head_groups: int, kind: str) -> None:
    """Eight data ranks of two tensor ranks each, which divide the heads and have one plan: each attends as if the
    other part were not there, and sends its own rows alone."""
    rng = random.Random(seed)
    layout = striped_layout(rng, 8) if kind == "stripes" else random_layout(rng, 8)
    plan = random_plan(rng, layout, head_groups) if kind == "moved" else plan_in_place(layout, head_groups)
    case = Case.draw(seed, layout, plan)

    def run(transport: LoopbackTransport) -> Difference:
        part = transport.grid.rank % 2
        local = LocalHeads(layout, case.heads, case.kernel, case.kv_residency, seed, plan, case.num_chunks, part=part)
        return compare(local, transport)

    for difference in run_ranks(8, run, tensor_ranks=2):
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference
