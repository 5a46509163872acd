"""What is no number in one document stays there: other documents do not change by a bit."""

import math
import random

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.planning.plan import Plan
from distca_hf.planning.planner import plan_in_place
from distca_hf.runtime.op import flash_attn
from distca_hf.testing.loopback import run_ranks
from distca_hf.testing.reference import rows_of_rank
from support.layouts import random_layout, random_plan
from support.parity import SCALE, Case, live_plan


NUM_RANKS = 3


def results_of(case: Case, plan: Plan, spoilt: int | None, which: int, value: float) -> list[torch.Tensor]:
    """Output and gradients of q, k and v of all documents; `value` stands in the middle of one document's tensor."""
    tensors = case.tensors()
    if spoilt is not None:
        lengths = plan.layout.document_tokens.tolist()
        tensors[which][sum(lengths[:spoilt]) + lengths[spoilt] // 2] = value

    def run(transport: Transport) -> list[torch.Tensor]:
        live = live_plan(plan.layout, transport, DistCAConfig(kernel=case.kernel), plan=plan)
        rows = rows_of_rank(plan.layout, transport.rank)
        padding = int(plan.layout.padding_rows[transport.rank])
        q, k, v, dout = (torch.cat([x[rows], torch.zeros(padding, *x.shape[1:], dtype=x.dtype)]) for x in tensors)
        held = [x.requires_grad_() for x in (q, k, v)]
        out, _, _ = flash_attn(*held, SCALE, live.handle, False)
        results = [out.detach(), *torch.autograd.grad(out, held, dout)]
        whole = [torch.zeros(len(tensors[0]), *x.shape[1:], dtype=x.dtype) for x in results]
        for everything, part in zip(whole, results, strict=True):
            everything[rows] = part[: len(rows)]
        return whole

    by_rank = run_ranks(NUM_RANKS, run)
    return [torch.stack(parts).sum(0) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["queries", "keys", "values"])
@pytest.mark.parametrize("moves", [False, True], ids=["placed", "moved"])
@pytest.mark.parametrize("seed", range(3))
def test_other_documents_are_bit_equal(seed: int, moves: bool, which: int, value: float) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, NUM_RANKS)
    plan = random_plan(rng, layout) if moves else plan_in_place(layout)
    case = Case.draw(seed, layout, plan)
    lengths = layout.document_tokens.tolist()
    spoilt = lengths.index(max(lengths))
    first = sum(lengths[:spoilt])
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[first : first + lengths[spoilt]] = False

    clean, dirty = (results_of(case, plan, document, which, value) for document in (None, spoilt))
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[others], after[others])
    assert not torch.stack([after[~others].isfinite().all() for after in dirty]).all()
