"""Reported steps: which passes are traced, what their traces hold, and that no other pass pays for it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from distca_hf.batches.reported_steps import Predictable, ReportedSteps
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK, TokenBytes, causal_pairs
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.routing import rank_plan
from distca_hf.planning.transfers import bytes_between
from distca_hf.runtime.device_routing import on_device
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.pending_traces import UNTRACED, PassTrace
from distca_hf.testing import rows_of_rank, run_ranks
from distca_hf.trace_file import TraceFile, read_trace
from distca_hf.traces import RankTrace, Spent, file_name


SPEC = AttentionSpec(scale=0.25)
LAYERS = 2
MASKS = ((CAUSAL_MASK, LAYERS),)
TOKEN_BYTES = TokenBytes(query=64, output=64, key_value=32)
CUT = plan_in_place(Layout.from_segments([12, 5], [[(0, 0, 9)], [(0, 9, 12), (1, 0, 5)]]))
MOVED = plan_by_moving(Layout.from_packs([[400], [20, 20]]), head_groups=2, token_bytes=TOKEN_BYTES)


@dataclass
class Trained:
    """What one rank saw.

    Attributes:
        traced: whether each pass was.
        exchanges: of all passes.
    """

    traced: list[bool]
    exchanges: int


def train(transport: Transport, plan: Plan, folder: Path, every_steps: int, passes: int = 4) -> Trained:
    """Passes of two layers with their backward, each a step of its own."""
    steps = ReportedSteps(every_steps, TraceFile(str(folder)), TOKEN_BYTES, MASKS)
    traced = []
    for number in range(passes):
        live = live_plan(transport, plan, number)
        trace = steps.begin(live, True, Predictable)
        traced.append(trace is not UNTRACED)
        run_pass(live, plan, trace)
    steps.flush()
    return Trained(traced, transport.traffic.exchanges)


def live_plan(transport: Transport, plan: Plan, number: int) -> LivePlan:
    mine = rank_plan(plan, transport.rank)
    routings = {mine.mask: on_device(mine, torch.device("cpu"))}
    rows = plan.layout.segment_tokens[plan.layout.segments_of(transport.rank)]
    planned = Planned(lambda: routings, None, mine.facts, plan.fingerprint)
    return LivePlan(number, planned, transport, DistCAConfig(), document_tokens=rows)


def run_pass(live: LivePlan, plan: Plan, trace: PassTrace) -> None:
    num_tokens = len(rows_of_rank(plan.layout, live.transport.rank))
    live.begin_forward_pass(LAYERS, {}, trace=trace)
    x = torch.randn(num_tokens, 4, 16, dtype=torch.float64, requires_grad=True)
    for layer in range(LAYERS):
        out, *_ = flash_attn(x, x[:, :2].contiguous(), x[:, 2:].contiguous(), SPEC, live.handle, torch.tensor(layer))
        x = x + out
    live.end_forward_pass(trains=True)
    x.sum().backward()


def traces_of(folder: Path, rank: int) -> list[RankTrace]:
    lines = (folder / file_name(rank)).read_text().splitlines()
    return [read_trace(line, "here") for line in lines]


def pairs_of_tasks(trace: RankTrace, plan: Plan) -> float:
    (kind,) = trace.kinds
    assert kind.tasks
    pairs = [causal_pairs(before, before + queries) for queries, before, _ in kind.tasks]
    shares = [1 / plan.tasks.head_groups if group else 1.0 for *_, group in kind.tasks]
    return float(np.dot(pairs, shares))


def uses_of(call: object) -> list[Spent]:
    return [use for use, _ in call.spans]  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", [CUT, MOVED], ids=["keys travel", "queries travel"])
def test_every_second_step_is_traced_on_all_ranks(plan: Plan, tmp_path: Path) -> None:
    trained = run_ranks(2, lambda transport: train(transport, plan, tmp_path, every_steps=2))
    between = bytes_between(plan, TOKEN_BYTES)

    assert [rank.traced for rank in trained] == [[False, True, False, True]] * 2
    for rank in range(2):
        traces = traces_of(tmp_path, rank)
        assert [(trace.step, trace.micro_batch) for trace in traces] == [(2, 1), (4, 3)]
        for trace in traces:
            assert [(call.part.value, call.layer) for call in trace.calls] == [
                *[("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)],
            ]
            assert trace.is_complete
            assert trace.tokens == len(rows_of_rank(plan.layout, rank))
            assert pairs_of_tasks(trace, plan) == trace.work[rank]
            assert list(trace.work) == (plan.work / plan.tasks.head_groups).tolist()
            assert dict(trace.sent_bytes).get(1 - rank, 0) == between[rank, 1 - rank]
            assert dict(trace.received_bytes).get(1 - rank, 0) == between[1 - rank, rank]
            assert 0 < sum(call.us for call in trace.calls) / 1e6 <= trace.pass_seconds
            assert all(Spent.WAIT in uses_of(call) and Spent.LOCAL in uses_of(call) for call in trace.calls)
        assert traces[0].step_seconds is not None
        assert traces[0].step_seconds > traces[0].pass_seconds
        assert traces[1].step_seconds is None, "no pass followed"


def test_traces_add_no_exchange(tmp_path: Path) -> None:
    counted = [
        run_ranks(2, lambda transport, every=every: train(transport, CUT, tmp_path / f"{every}", every))
        for every in (0, 1)
    ]

    assert [rank.exchanges for rank in counted[0]] == [rank.exchanges for rank in counted[1]]
    assert not (tmp_path / "0").exists()
    assert len(traces_of(tmp_path / "1", 0)) == 4


def test_passes_that_do_not_train_are_not_traced(tmp_path: Path) -> None:
    def evaluate(transport: Transport) -> bool:
        steps = ReportedSteps(1, TraceFile(str(tmp_path)), TOKEN_BYTES, MASKS)
        return steps.begin(live_plan(transport, CUT, 0), False, Predictable) is UNTRACED

    assert run_ranks(2, evaluate) == [True, True]


def test_pass_without_backward_is_written_at_the_end_and_marked(tmp_path: Path) -> None:
    def leave(transport: Transport) -> None:
        steps = ReportedSteps(1, TraceFile(str(tmp_path)), TOKEN_BYTES, MASKS)
        live = live_plan(transport, CUT, 0)
        live.begin_forward_pass(LAYERS, {}, trace=steps.begin(live, True, Predictable))
        x = torch.randn(len(rows_of_rank(CUT.layout, transport.rank)), 4, 16, requires_grad=True)
        flash_attn(x, x[:, :2].contiguous(), x[:, 2:].contiguous(), SPEC, live.handle, torch.tensor(0))
        steps.flush()

    run_ranks(2, leave)

    assert [trace.is_complete for trace in traces_of(tmp_path, 0)] == [False]


def test_a_trainer_counts_its_own_steps(tmp_path: Path) -> None:
    """Two micro-batches of one step have traces of their own."""

    def accumulate(transport: Transport) -> list[bool]:
        file = TraceFile("")
        steps = ReportedSteps(2, file, TOKEN_BYTES, MASKS)
        traced = []
        for number, step in enumerate((1, 1, 2, 2)):
            file.follow_trainer(str(tmp_path), step)
            live = live_plan(transport, CUT, number)
            trace = steps.begin(live, True, Predictable)
            traced.append(trace is not UNTRACED)
            run_pass(live, CUT, trace)
        steps.flush()
        return traced

    assert run_ranks(2, accumulate) == [[False, False, True, True]] * 2
    assert [(trace.step, trace.micro_batch) for trace in traces_of(tmp_path / "distca_report", 1)] == [(2, 2), (2, 3)]


def test_recomputed_calls_are_told_from_first_ones(tmp_path: Path) -> None:
    def checkpointed(transport: Transport) -> None:
        steps = ReportedSteps(1, TraceFile(str(tmp_path)), TOKEN_BYTES, CAUSAL_LAYERS)
        live = live_plan(transport, CUT, 0)
        live.begin_forward_pass(1, {}, trace=steps.begin(live, True, Predictable))
        x = torch.randn(len(rows_of_rank(CUT.layout, transport.rank)), 4, 16, requires_grad=True)

        def attend(x: torch.Tensor) -> torch.Tensor:
            return flash_attn(x, x[:, :2].contiguous(), x[:, 2:].contiguous(), SPEC, live.handle)[0]

        out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
        live.end_forward_pass(trains=True)
        out.sum().backward()
        steps.flush()

    run_ranks(2, checkpointed)
    (trace,) = traces_of(tmp_path, 1)

    assert [call.part.value for call in trace.calls] == ["forward", "recomputed", "backward"]
    assert {call.layer for call in trace.calls} == {0}
