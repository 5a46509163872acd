"""Core attention over a layout against exact attention of the whole documents, on one rank of any world."""

import random
from dataclasses import dataclass

import numpy as np
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig, KernelName, Residency
from distca_hf.cost import Mask
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.planning.transfers import key_transfers
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.device_routing import on_device
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import attend_documents, rows_of_rank
from support.counting import CountingKernel
from support.layouts import padding_rows


SCALE = 0.4
SPEC = AttentionSpec(SCALE)
# (query heads, KV heads, head dimension, value dimension): MHA, GQA, MQA, and unequal dimensions.
HEADS = ((4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 8, 8), (4, 2, 8, 4), (6, 3, 4, 4))


@dataclass(frozen=True)
class Case:
    """One random case, the same on every rank that draws it with the same seed. The last ranks are attention
    servers."""

    layout: Layout
    heads: tuple[int, int, int, int]
    kernel: KernelName
    kv_residency: Residency
    seed: int
    plan: Plan
    num_chunks: int = 1
    num_servers: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @classmethod
    def draw(cls, seed: int, layout: Layout, plan: Plan | None = None) -> "Case":
        rng = random.Random(seed)
        return cls(
            layout,
            rng.choice([heads for heads in HEADS if plan is None or heads[1] % plan.tasks.head_groups == 0]),
            rng.choice(["reference", "auto"]),
            rng.choice(["refetch", "keep", "auto"]),
            seed,
            plan_in_place(layout) if plan is None else plan,
            rng.choice([1, 1, 2, 3]),
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v and output gradient of all documents, one after the other, fp64."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = int(self.layout.document_tokens.sum())
        heads, groups, dim, value_dim = self.heads
        shapes = ((heads, dim), (groups, dim), (groups, value_dim), (heads, value_dim))
        q, k, v, dout = (torch.randn(tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes)
        return q, k, v, dout

    @property
    def spec(self) -> AttentionSpec:
        mask = self.plan.tasks.mask
        return SPEC._replace(softcap=self.softcap, window_tokens=mask.window_tokens or 0, chunked=mask.chunked)

    @property
    def sinks(self) -> torch.Tensor | None:
        """Scores of the heads' sinks, if there are any."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.heads[0], dtype=torch.float64, generator=generator) if self.has_sinks else None


@dataclass(frozen=True)
class Difference:
    """Largest differences of output and gradients, and what moved; the rank's part of the gradient of sinks, and the
    whole."""

    out: float
    dq: float
    dk: float
    dv: float
    exchanges: int
    exchanges_expected: int
    bytes_sent: int
    bytes_expected: int
    pairs: tuple[int, int]
    pairs_expected: int
    of_sinks: torch.Tensor | None = None
    of_sinks_expected: torch.Tensor | None = None

    @property
    def largest(self) -> float:
        return max(self.out, self.dq, self.dk, self.dv)

    @property
    def as_planned(self) -> bool:
        """Whether exchanges, bytes, and the work of kernels forward and backward are those of the plan."""
        done = self.exchanges, self.bytes_sent, *self.pairs
        return done == (self.exchanges_expected, self.bytes_expected, self.pairs_expected, self.pairs_expected)


def live_plan(
    layout: Layout,
    transport: Transport,
    config: DistCAConfig,
    device: torch.device | str = "cpu",
    plan: Plan | None = None,
    num_chunks: int = 1,
) -> LivePlan:
    """A live plan as the loader would make it, without an agreement; by default every query is computed at home."""
    plan = plan_in_place(layout) if plan is None else plan
    mine = rank_plan(plan, transport.rank, num_chunks)
    routings = {mine.mask: on_device(mine, torch.device(device))}
    return LivePlan(0, Planned(lambda: routings, None, mine.facts, plan.fingerprint), transport, config)


def by_operator(
    live: LivePlan, case: Case, q_k_v: list[torch.Tensor], dout: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Output and gradients as a model gets them."""
    sinks = None if case.sinks is None else case.sinks.requires_grad_()
    out, *_ = flash_attn(*q_k_v, case.spec, live.handle, sinks_N=sinks)
    return out, torch.autograd.grad(out, [*q_k_v, *([] if sinks is None else [sinks])], dout)


def without_autograd(
    live: LivePlan, case: Case, q_k_v: list[torch.Tensor], dout: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Output and gradients as an attention server computes them: both calls on their own, and no sinks."""
    with torch.no_grad():
        out, lse, kept = attend(*q_k_v, case.spec, live)
        attended = Attended(*q_k_v, out, lse)
        return out, attend_backward(dout, attended, kept, case.spec, live, case.has_sinks)


def seen_apart(lengths: list[int], mask: Mask) -> list[int]:
    """Lengths of the parts of documents that do not see each other."""
    apart = []
    for tokens in lengths:
        _, cuts = mask.cuts(np.array([0]), np.array([tokens]))
        apart += np.diff([0, *cuts.tolist(), tokens]).tolist()
    return apart


def compare(case: Case, transport: Transport) -> Difference:
    """Runs one layer forward and backward on this rank and compares its rows with exact attention."""
    q, k, v, dout = case.tensors()
    whole = [x.clone().requires_grad_() for x in (q, k, v, *([] if case.sinks is None else [case.sinks]))]
    lengths = seen_apart(case.layout.document_tokens.tolist(), case.plan.tasks.mask)
    sinks = whole[3] if case.has_sinks else None
    window_tokens = case.plan.tasks.mask.window_tokens
    expected = attend_documents(*whole[:3], lengths, SCALE, window_tokens, case.softcap, sinks)
    expected_gradients = torch.autograd.grad(expected, whole, dout)

    rank, layout = transport.rank, case.layout
    config = DistCAConfig(kernel=case.kernel, kv_residency=case.kv_residency)
    live = live_plan(layout, transport, config, plan=case.plan, num_chunks=case.num_chunks)
    rows = rows_of_rank(layout, rank)
    padding = int(padding_rows(layout)[rank])

    def held(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([x[rows], torch.full((padding, *x.shape[1:]), fill, dtype=x.dtype)])

    local = [held(x, 1e9).requires_grad_() for x in (q, k, v)]
    kernel = CountingKernel(live.lookup.kernel(*local, case.spec))
    live.lookup.kernel = lambda *given: kernel  # type: ignore[method-assign,assignment]
    before = (transport.traffic.exchanges, transport.traffic.bytes_sent)
    serves = rank >= layout.num_ranks - case.num_servers
    out, gradients = (without_autograd if serves else by_operator)(live, case, local, held(dout, 1e9))

    assert not out[len(rows) :].any(), "padding rows must be zero"
    assert not any(gradient[len(rows) :].any() for gradient in gradients[:3]), "padding rows must have no gradient"
    keeps = case.kv_residency != "refetch"  # the budget of auto is large enough
    fetches = 1 if keeps else 2
    sent = key_transfers(case.plan).rows_between(layout.num_ranks)
    heads, kv_heads, dim, value_dim = case.heads
    row_bytes = kv_heads // case.plan.tasks.head_groups * (dim + value_dim) * 8
    moved = case.plan.pieces.select(case.plan.pieces.moved)
    left, came = (int(moved.rows[by == rank].sum()) for by in (moved.owner, moved.computing_rank))
    # Queries, outputs, log-sum-exps; of those that are kept log-sum-exps with sinks.
    again = int(case.has_sinks) if keeps else dim + value_dim + 1
    query_bytes = left * (dim + value_dim + again) + came * (dim + value_dim + 1)
    return Difference(
        out=_largest(out[: len(rows)], expected[rows]),
        dq=_largest(gradients[0][: len(rows)], expected_gradients[0][rows]),
        dk=_largest(gradients[1][: len(rows)], expected_gradients[1][rows]),
        dv=_largest(gradients[2][: len(rows)], expected_gradients[2][rows]),
        exchanges=transport.traffic.exchanges - before[0],
        exchanges_expected=(case.num_chunks + fetches if sent.any() else 0)
        + (2 * case.num_chunks + 2 if len(moved.tokens) else 0),
        bytes_sent=transport.traffic.bytes_sent - before[1],
        bytes_expected=int(fetches * sent[rank].sum() + sent[:, rank].sum()) * row_bytes
        + 8 * heads // case.plan.tasks.head_groups * query_bytes,
        pairs=(kernel.forward_pairs, kernel.backward_pairs),
        pairs_expected=int(case.plan.work[rank]) * kv_heads // case.plan.tasks.head_groups,
        of_sinks=gradients[3] if len(gradients) > 3 else None,
        of_sinks_expected=expected_gradients[3] if case.has_sinks else None,
    )


def _largest(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).detach().abs().max()) if left.numel() else 0.0
