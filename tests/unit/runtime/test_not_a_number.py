"""What is no number in one document stays there: other documents do not change by a bit."""

import math
import random

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import Debug, DistCAConfig
from distca_hf.errors import NotFiniteError, PlanError
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime.attention import attend
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import rows_of_rank, run_ranks
from support.layouts import padding_rows, random_layout, random_plan
from support.parity import SPEC, Case, live_plan
from support.thorough import is_thorough


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
        padding = int(padding_rows(plan.layout)[transport.rank])
        q, k, v, dout = (torch.cat([x[rows], torch.zeros(padding, *x.shape[1:], dtype=x.dtype)]) for x in tensors)
        held = [x.requires_grad_() for x in (q, k, v)]
        out, *_ = flash_attn(*held, SPEC, live.handle)
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
@pytest.mark.parametrize("seed", range(3) if is_thorough() else [1])
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


@pytest.mark.parametrize(("which", "name"), [(0, "query"), (1, "key"), (2, "value"), (3, "output_gradient")])
@pytest.mark.parametrize("checked", [False, True])
def test_setting_names_layer_and_document(which: int, name: str, checked: bool) -> None:
    layout = Layout.from_segments([5, 9], [[(1, 6, 9), (0, 0, 5), (1, 0, 6)]], [16])
    case = Case.draw(0, layout)
    tensors = [torch.cat([x, torch.zeros(2, *x.shape[1:], dtype=x.dtype)]) for x in case.tensors()]
    tensors[which][1] = math.nan  # the first segment's second row

    def run(transport: Transport) -> None:
        live = live_plan(layout, transport, DistCAConfig(kernel="reference", debug=Debug(check_finite=checked)))
        q, k, v, dout = tensors
        held = [x.requires_grad_() for x in (q, k, v)]
        out, *_ = flash_attn(*held, SPEC, live.handle)
        torch.autograd.grad(out, held, dout)

    if not checked:
        run_ranks(1, run)
        return
    expected = (
        rf"layer 0, (for|back)ward: {name} is not finite in row 1, document 1 of the micro-batch, token 7; 1 of 16"
    )
    with pytest.raises(NotFiniteError, match=expected):
        run_ranks(1, run)


def test_padding_is_no_document() -> None:
    layout = Layout.from_segments([5, 3], [[(0, 0, 5), (1, 0, 3)]], [16])

    def run(transport: Transport) -> None:
        live = live_plan(layout, transport, DistCAConfig(kernel="reference", debug=Debug(check_finite=True)))
        q, k, v = (torch.zeros(16, 2, 4) for _ in range(3))
        k[12] = math.nan
        flash_attn(q, k, v, SPEC, live.handle)

    with pytest.raises(NotFiniteError, match="key is not finite in row 12, padding; 1 of 16"):
        run_ranks(1, run)


def test_tensors_on_another_device_than_the_plan_are_refused() -> None:
    layout = Layout.from_segments([5], [[(0, 0, 5)]])

    def run(transport: Transport) -> None:
        live = live_plan(layout, transport, DistCAConfig(kernel="reference"))
        attend(*(torch.zeros(5, 2, 4, device="meta") for _ in range(3)), SPEC, live)

    with pytest.raises(PlanError, match="tensors on meta, the plan of this batch is on cpu"):
        run_ranks(1, run)
