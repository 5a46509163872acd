"""Core attention over random layouts, 1 to 8 ranks in one process, is exact: routing errors cannot hide in fp64."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distca_hf.cost import Mask
from distca_hf.planning.plan import plan_in_place
from distca_hf.testing import LoopbackTransport, run_ranks
from support.layouts import plan_of_kind, with_mask
from support.parity import Case, Difference, compare
from support.thorough import is_thorough


def check_exact(case: Case) -> None:
    """Outputs and gradients of all ranks are exact, and what was sent and computed is what the plan says."""
    for difference in run_ranks(case.layout.num_ranks, lambda transport: compare(case, transport)):
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference


SEEDS, RANKS = st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 5, 8])


@pytest.mark.parametrize("kind", ["in place", "moved", "striped"])
@settings(max_examples=300 if is_thorough() else 35)
@given(seed=SEEDS, num_ranks=RANKS, head_groups=st.sampled_from([1, 1, 2, 3, 4]))
def test_outputs_and_gradients_equal_unsplit_attention(kind: str, seed: int, num_ranks: int, head_groups: int) -> None:
    """Wherever queries and heads are computed."""
    plan = plan_of_kind(kind, random.Random(seed), num_ranks, head_groups)
    plan.validate()

    check_exact(Case.draw(seed, plan.layout, plan))


@settings(max_examples=300 if is_thorough() else 30)
@given(
    seed=SEEDS,
    num_ranks=RANKS,
    head_groups=st.sampled_from([1, 1, 2, 4]),
    tokens=st.integers(1, 39),
    kind=st.sampled_from(["in place", "striped", "moved", "moved"]),
    is_window=st.booleans(),
)
def test_windows_and_chunks_of_documents_give_the_same(
    seed: int, num_ranks: int, head_groups: int, tokens: int, kind: str, is_window: bool
) -> None:
    """Wherever queries are computed, in one chunk of the exchange or several."""
    plan = plan_of_kind(kind, random.Random(seed), num_ranks, head_groups)
    layout = plan.layout
    assume(layout.longest_document_tokens > 1)
    tokens = min(tokens, layout.longest_document_tokens - 1)  # as long as a document it is no window
    mask = Mask(tokens, chunked=not is_window)
    plan = with_mask(plan, mask) if kind == "moved" else plan_in_place(layout, head_groups, mask)

    check_exact(Case.draw(seed, layout, plan))


@dataclass(frozen=True)
class LocalHeads(Case):
    """A case of one of two tensor ranks: `heads` are its own, and `tensors` its part of those of all heads."""

    part: int = 0

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, *dims = self.heads
        whole = Case(self.layout, (2 * heads, 2 * kv_heads, dims[0], dims[1]), "auto", "auto", self.seed, self.plan)
        q, k, v, dout = (x.chunk(2, dim=1)[self.part].contiguous() for x in whole.tensors())
        return q, k, v, dout


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    head_groups=st.sampled_from([1, 2]),
    kind=st.sampled_from(["in place", "moved", "striped"]),
)
def test_heads_of_tensor_ranks_give_the_same(seed: int, head_groups: int, kind: str) -> None:
    """Eight data ranks of two tensor ranks each, which divide the heads and have one plan: each attends as if the
    other part were not there, and sends its own rows alone."""
    plan = plan_of_kind(kind, random.Random(seed), 8, head_groups)
    layout = plan.layout
    case = Case.draw(seed, layout, plan)

    def run(transport: LoopbackTransport) -> Difference:
        part = transport.grid.rank % 2
        local = LocalHeads(layout, case.heads, case.kernel, case.kv_residency, seed, plan, case.num_chunks, part=part)
        return compare(local, transport)

    for difference in run_ranks(8, run, tensor_ranks=2):
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference
