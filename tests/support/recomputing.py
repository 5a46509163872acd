"""Layers whose attention is recomputed: what they give, and how often they exchange."""

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.planning.plan import Plan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.regions import retaining_contexts
from distca_hf.runtime.retention import HeldLayers
from support.parity import SPEC, live_plan


LAYERS = 3
CPU = torch.device("cpu")


class Layers:
    """Checkpointed layers of attention on this rank's rows.

    Args:
        widths: query heads, KV heads, head dimension.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        config: DistCAConfig,
        num_chunks: int = 1,
        widths: tuple[int, int, int] = (4, 2, 8),
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.live = live_plan(plan.layout, transport, config, device, plan, num_chunks)
        self.live.retention(SPEC).layers = HeldLayers(saved=0, recomputed=LAYERS, together=1)
        generator = torch.Generator().manual_seed(transport.rank)
        rows, (heads, kv_heads, dim) = int(plan.layout.rank_rows[transport.rank]), widths
        self.inputs = [
            torch.randn(rows, number, dim, generator=generator).to(device, dtype).requires_grad_()
            for number in (heads, kv_heads, kv_heads)
        ]

    def __call__(self) -> torch.Tensor:
        q, k, v = self.inputs
        contexts = retaining_contexts
        for _ in range(LAYERS):
            q = checkpoint(self._layer, q, k, v, use_reentrant=False, context_fn=contexts)
        return q

    def _layer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, *_ = flash_attn(q, torch.tanh(k), torch.tanh(v), SPEC, self.live.handle)
        return q + torch.tanh(out)


@dataclass(frozen=True)
class Trained:
    """Output and gradients of a rank, and exchanges of forward and of backward."""

    numbers: list[torch.Tensor]
    forward: int
    backward: int


def train(layers: Layers) -> Trained:
    """One step of this rank."""
    traffic = layers.live.transport.traffic
    before = traffic.exchanges
    out = layers()
    between = traffic.exchanges
    gradients = torch.autograd.grad(out.float().square().sum(), layers.inputs)
    numbers = [x.detach().cpu() for x in (out, *gradients)]
    return Trained(numbers, between - before, traffic.exchanges - between)


def expected_exchanges(plan: Plan, num_chunks: int, *, waits: bool, keeps: bool) -> tuple[int, int]:
    """Of forward, and of backward with its recomputation, in all layers.

    Args:
        waits: what came in forward is there when attention is recomputed.
        keeps: what came for that is there in backward.
    """
    moves = 1 if plan.moves_queries else 0  # there, and their results back
    forward = num_chunks * (1 + 2 * moves)
    recomputed = num_chunks * moves if waits else forward
    backward = 1 + 2 * moves + (0 if keeps else 1)
    return LAYERS * forward, LAYERS * (recomputed + backward)
