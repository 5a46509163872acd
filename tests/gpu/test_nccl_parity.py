"""Core attention over NCCL: documents that span GPUs, bf16, no more than twice the error of bf16 PyTorch; in the
deterministic mode the same bits every time."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from distca_hf.comm.groups import open_transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.kernels.varlen import TorchVarlenKernel
from distca_hf.layout import Layout, Stripe
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import attend_documents, rows_of_rank
from support.gpus import gpu_ranks
from support.layouts import random_plan
from support.parity import live_plan
from support.ranks import run_ranks
from support.recomputing import Layers, Trained, expected_exchanges, train
from support.repeats import equal_repeats


pytestmark = pytest.mark.multigpu

HEADS, GROUPS, DIM, SCALE = 8, 2, 128, 0.09
SPEC = AttentionSpec(SCALE)
REPEATS = 50


def _plan(num_ranks: int, kind: str) -> Plan:
    """The plan of a placed layout; or one whose queries, or single heads of them, are cut and computed anywhere; or
    one with a document whose heads all ranks divide."""
    if kind == "striped":
        tokens = 3000
        cuts = [tokens * rank // num_ranks for rank in range(num_ranks + 1)]
        held = [[(0, start, stop), (1 + rank, 0, 200)] for rank, (start, stop) in enumerate(pairwise(cuts))]
        stripe = Stripe(0, 0, tokens, 0, num_ranks)
        return plan_in_place(Layout.from_segments([tokens, *[200] * num_ranks], held, None, [stripe]), GROUPS)
    layout = place([3000, 900, 411, 1, 1, 77, 1500, 260], num_ranks)
    if kind == "placed":
        return plan_in_place(layout)
    return random_plan(random.Random(0), layout, GROUPS if kind == "moved heads" else 1)


def _errors(num_ranks: int, kv_residency: Residency, num_chunks: int, kind: str) -> dict[str, tuple[float, float]]:
    """Error of this rank's rows and what is allowed, for output and gradients."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = _plan(num_ranks, kind)
    layout = plan.layout
    generator = torch.Generator(device).manual_seed(0)
    tokens = int(layout.document_tokens.sum())
    shapes = ((tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM), (tokens, HEADS, DIM))
    whole = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]

    def attend(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in whole[:3])
        out = attend_documents(q, k, v, layout.document_tokens.tolist(), SCALE)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].to(dtype))]

    exact, rounded = attend(torch.float32), attend(torch.bfloat16)
    transport = open_transport(device, 60.0)
    live = live_plan(layout, transport, DistCAConfig(kv_residency=kv_residency), device, plan, num_chunks)
    rows = rows_of_rank(layout, transport.rank).to(device)
    q, k, v, dout = (x[rows].requires_grad_() for x in whole)
    moves = 2 if plan.moves_queries else 0  # there and back
    out, *_ = flash_attn(q, k, v, SPEC, live.handle)
    forward = num_chunks * (1 + moves)
    assert transport.traffic.exchanges == forward
    results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]
    fetched = 1 if kv_residency == "refetch" else 0  # the budget of auto is large enough
    assert transport.traffic.exchanges == forward + fetched + 1 + moves

    errors = {}
    for name, result, truth, bf16 in zip(("out", "dq", "dk", "dv"), results, exact, rounded, strict=True):
        allowed = 2 * (bf16.float() - truth).abs().max() + 2 * (truth.bfloat16().float() - truth).abs().max()
        errors[name] = ((result.float() - truth[rows]).abs().max().item(), allowed.item())
    return errors


@pytest.mark.parametrize("kind", ["placed", "moved", "moved heads", "striped"])
@pytest.mark.parametrize(("kv_residency", "num_chunks"), [("refetch", 1), ("keep", 1), ("auto", 3)])
def test_error_is_at_most_twice_that_of_bf16_pytorch(
    kv_residency: Residency, num_chunks: int, kind: str, tmp_path: Path
) -> None:
    num_ranks = gpu_ranks()
    by_rank = run_ranks(num_ranks, _errors, tmp_path, num_ranks, kv_residency, num_chunks, kind, backend="nccl")

    for errors in by_rank:
        for name, (error, allowed) in errors.items():
            assert error <= allowed, name


def _equal_repeats(num_ranks: int, kv_residency: Residency, num_chunks: int, kind: str) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    plan, config = _plan(num_ranks, kind), DistCAConfig(kv_residency=kv_residency, deterministic=True)
    transport = open_transport(device, 60.0)
    return equal_repeats(transport, plan.layout, plan, config, num_chunks, (HEADS, GROUPS, DIM), REPEATS, device)


@pytest.mark.parametrize("kind", ["placed", "moved heads", "striped"])
@pytest.mark.parametrize(("kv_residency", "num_chunks"), [("refetch", 1), ("keep", 3)])
def test_fifty_repeats_are_bit_equal(kv_residency: Residency, num_chunks: int, kind: str, tmp_path: Path) -> None:
    num_ranks = gpu_ranks()
    arguments = num_ranks, kv_residency, num_chunks, kind

    equal = run_ranks(num_ranks, _equal_repeats, tmp_path, *arguments, backend="nccl")

    assert equal == [REPEATS] * num_ranks


def _recomputed(num_ranks: int, num_chunks: int, kind: str) -> list[Trained]:
    device = torch.device("cuda", torch.cuda.current_device())
    plan, transport = _plan(num_ranks, kind), open_transport(device, 60.0)
    residencies: tuple[Residency, ...] = ("keep", "refetch")
    return [
        train(Layers(plan, transport, config, num_chunks, (HEADS, GROUPS, DIM), device, torch.bfloat16))
        for config in (DistCAConfig(kv_residency=each, deterministic=True) for each in residencies)
    ]


@pytest.mark.parametrize("kind", ["placed", "moved heads"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_recomputed_attention_is_the_same_from_what_came_before(num_chunks: int, kind: str, tmp_path: Path) -> None:
    """With FlashAttention 4 bit by bit. Own calls have other numbers of heads where nothing comes, and torch's kernel
    sums in another order then: not far apart."""
    num_ranks = gpu_ranks()
    plan = _plan(num_ranks, kind)
    kernel = choose_kernel(
        "auto", Operands("cuda", torch.cuda.get_device_capability()[0], torch.bfloat16, HEADS, GROUPS, DIM, DIM), SPEC
    )
    rounding = torch.finfo(torch.bfloat16).eps if isinstance(kernel, TorchVarlenKernel) else 0.0
    by_rank = run_ranks(num_ranks, _recomputed, tmp_path, num_ranks, num_chunks, kind, backend="nccl")

    for kept, fetched in by_rank:
        for now, before in zip(kept.numbers, fetched.numbers, strict=True):
            assert (now - before).abs().max() <= rounding * before.abs().max()
        assert (kept.forward, kept.backward) == expected_exchanges(plan, num_chunks, waits=True, keeps=True)
        assert (fetched.forward, fetched.backward) == expected_exchanges(plan, num_chunks, waits=False, keeps=False)
