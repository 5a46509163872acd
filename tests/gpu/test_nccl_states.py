"""States of mixers over NCCL: in fp64, rows of cut documents, and of documents that share prefixes, have the outputs
and gradients of each document alone."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distca_hf.comm.groups import open_transport
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.carried_mixers import carried_forward, halo_tokens_of
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.layout import Layout
from distca_hf.planning import folds
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.prefixes import SharedPrefixes
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import rows_of_rank
from support.carried_steps import FOUR, LARGEST_DIFFERENCE, TWO, layout_of
from support.gpus import gpu_ranks
from support.ranks import run_ranks
from support.wide_models import SIZES, wide_model


# Transformers calls these packages if they are installed; its own functions compute in fp64.
IN_FP32 = [name for name in ("fla", "mamba_ssm", "causal_conv1d") if find_spec(name) is not None]

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(bool(IN_FP32), reason=f"kernels of {', '.join(IN_FP32)} do not compute in fp64"),
]


# Spans of documents that share prefixes, and how many documents each rank brings.
SPANS = [
    [(0, 0, 170)],
    *[[(0, 0, 80), (number, 80, 80 + 7 * number)] for number in range(1, 6)],
    [(0, 0, 80), (5, 80, 100), (6, 100, 161)],
    [(7, 0, 33)],
]


def _sharing() -> Layout:
    """Returns a layout of these documents on all ranks."""
    lengths = [spans[-1][2] for spans in SPANS]
    packs = [lengths[rank :: dist.get_world_size()] for rank in range(dist.get_world_size())]
    number = {document: at for at, document in enumerate(d for rank in range(len(packs)) for d in _of_rank(rank))}
    spans: list[list[tuple[int, int, int]]] = [[] for _ in SPANS]
    for document, of_document in enumerate(SPANS):
        spans[number[document]] = [(number[holder], start, stop) for holder, start, stop in of_document]
    return Layout.from_packs(packs).sharing(SharedPrefixes.of_spans(spans, [number[d] for d in range(len(SPANS))]))


def _of_rank(rank: int) -> range:
    return range(rank, len(SPANS), dist.get_world_size())


def _held(layout: Layout) -> torch.Tensor:
    """Returns `[tokens of all documents]` tokens that hold the rows of these."""
    first = [0, *layout.document_tokens.cumsum().tolist()]
    held = torch.arange(first[-1])
    if (shared := layout.shared) is not None:
        borders = shared.document_spans.tolist()
        for document in range(layout.num_documents):
            for at in range(borders[document], borders[document + 1]):
                holder, start, stop = (int(x[at]) for x in (shared.holder, shared.start, shared.stop))
                rows = slice(first[document] + start, first[document] + stop)
                held[rows] = torch.arange(first[holder] + start, first[holder] + stop)
    return held


def _differences(model_type: str, by_heads: bool, shares: bool) -> list[float]:
    """Largest differences of the output, of the input's gradient and of weights' gradients, relative to the largest
    number of each."""
    device = torch.device("cuda", torch.cuda.current_device())
    mixer = next(iter(mixers_of(wide_model(model_type, "eager")).values())).to(device)
    layout = _sharing() if shares else layout_of(FOUR if dist.get_world_size() == 4 else TWO)
    held, lengths = _held(layout).to(device), layout.document_tokens.tolist()
    transport = open_transport(device, 60.0)
    generator = torch.Generator(device).manual_seed(0)
    sizes = sum(lengths), SIZES["hidden_size"]
    x_TD, dout_TD = (torch.randn(sizes, generator=generator, device=device, dtype=torch.float64) for _ in range(2))

    dout_TD[held != torch.arange(len(held), device=device)] = 0  # gradients of these rows are the holder's
    alone_TD = x_TD.clone().requires_grad_()
    outputs = [mixer(x[None]) for x in alone_TD[held].split(lengths)]
    out_TD = torch.cat([(one[0] if isinstance(one, tuple) else one)[0] for one in outputs])
    weights = [*mixer.parameters()]
    expected = torch.autograd.grad(out_TD, [alone_TD, *weights], dout_TD)

    folds.LEAST_SAVED_BYTES = -math.inf if by_heads else math.inf
    kinds = PinnedKinds.prepare(RoutedKinds.of(plan_in_place(layout), transport.rank), True, halo_tokens_of(mixer))
    plan = LivePlan(0, kinds.planned(device, plan_in_place(layout).fingerprint), transport, DistCAConfig())
    carried = CarriedRows(plan)
    rows = rows_of_rank(layout, transport.rank).to(device)
    own_TD = x_TD[rows].requires_grad_()
    out = carried_forward(mixer, lambda: carried, "mixer")(own_TD[None])
    own_out_TD = (out[0] if isinstance(out, tuple) else out)[0]
    own = torch.autograd.grad(own_out_TD, [own_TD, *weights], dout_TD[rows])
    for gradient in own[1:]:
        dist.all_reduce(gradient)
    assert transport.traffic.exchanges == 2 * (
        (2 if model_type != "lfm2" else 1) + (by_heads and model_type != "lfm2")
    )
    pairs = [(own_out_TD, out_TD[rows]), (own[0], expected[0][rows]), *zip(own[1:], expected[1:], strict=True)]
    return [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]


@pytest.mark.parametrize("shares", [False, True], ids=["cut", "shared"])
@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_5", "kimi_linear", "nemotron_h", "jamba", "lfm2"])
def test_mixers_are_as_on_each_document_alone(model_type: str, by_heads: bool, shares: bool, tmp_path: Path) -> None:
    num_ranks = 4 if gpu_ranks() == 4 else 2
    for differences in run_ranks(num_ranks, _differences, tmp_path, model_type, by_heads, shares, backend="nccl"):
        assert max(differences) <= LARGEST_DIFFERENCE
