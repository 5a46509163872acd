"""Attention servers on a GPU: ranks without tokens, in threads of one process, bf16; no more than twice the error of
bf16 PyTorch."""

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.servers.served_plans import Servers
from distca_hf.servers.speeds import Stopwatch
from distca_hf.testing import attend_documents, rows_of_rank, run_ranks
from support.parity import live_plan


pytestmark = pytest.mark.gpu

HEADS, GROUPS, DIM, SCALE = 8, 2, 128, 0.09
SPEC = AttentionSpec(SCALE)
LENGTHS = [3000, 900, 411, 1, 77, 1500, 260]


@pytest.mark.parametrize("trainers_attend", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 1), (1, 3)])
def test_error_is_at_most_twice_that_of_bf16_pytorch(
    trainers: int, servers: int, num_chunks: int, trainers_attend: bool
) -> None:
    layout: Layout = place(LENGTHS, trainers)
    plan = Servers((0.7,) * servers, trainers_attend).plan(layout, GROUPS)
    tokens = sum(LENGTHS)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM), (tokens, HEADS, DIM))
    whole = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def expected(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in whole[:3])
        out = attend_documents(q, k, v, LENGTHS, SCALE)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].to(dtype))]

    def run(transport: Transport) -> list[torch.Tensor]:
        # Some kernels are compiled when first called, which two threads of a process cannot do at once.
        live = live_plan(plan.layout, transport, DistCAConfig(kernel="torch_varlen"), "cuda", plan, num_chunks)
        rows = rows_of_rank(plan.layout, transport.rank).cuda()
        q, k, v, dout = (x[rows] for x in whole)
        with torch.no_grad():
            out, lse, kept = attend(q, k, v, SPEC, live)
            return [out, *attend_backward(dout, Attended(q, k, v, out, lse), kept, SPEC, live)]

    exact, rounded, by_rank = expected(torch.float32), expected(torch.bfloat16), run_ranks(trainers + servers, run)
    assert all(len(result) == 0 for results in by_rank[trainers:] for result in results)
    assert plan.work[trainers:].min() > 0
    for rank, results in enumerate(by_rank[:trainers]):
        rows = rows_of_rank(plan.layout, rank).cuda()
        for result, truth, bf16 in zip(results, exact, rounded, strict=True):
            allowed = 2 * (bf16.float() - truth).abs().max() + 2 * (truth.bfloat16().float() - truth).abs().max()
            assert (result.float() - truth[rows]).abs().max() <= allowed


def test_kernels_are_timed_by_events_that_nobody_waits_for() -> None:
    stopwatch = Stopwatch(torch.device("cuda", 0))
    torch.cuda.synchronize()
    for flops, cycles in ((1, 10**7), (10, 10**9)):
        stopwatch.begin_call(flops)
        with stopwatch.kernel():
            torch.cuda._sleep(cycles)

    assert stopwatch.read().flops < 11  # the GPU still sleeps
    torch.cuda.synchronize()
    both = stopwatch.read()
    assert both.flops == 11
    stopwatch.begin_call(100)
    with stopwatch.kernel():
        torch.cuda._sleep(10**7)
    torch.cuda.synchronize()
    third = stopwatch.read().since(both)
    assert third.flops == 100
    assert 0 < 10 * third.kernel_nanoseconds < both.kernel_nanoseconds < both.nanoseconds
