"""States of mixers over NCCL: in fp64, rows of cut documents have the outputs and gradients of each document alone."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distca_hf.comm.groups import open_transport
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.carried_mixers import carried_forward, halo_tokens_of
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.planning import folds
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import rows_of_rank
from support.carried_steps import FOUR, LARGEST_DIFFERENCE, LENGTHS, TWO, layout_of
from support.ranks import run_ranks
from support.wide_models import SIZES, wide_model


pytestmark = pytest.mark.multigpu


def _differences(model_type: str, by_heads: bool) -> list[float]:
    """Largest differences of the output, of the input's gradient and of weights' gradients, relative to the largest
    number of each."""
    device = torch.device("cuda", torch.cuda.current_device())
    mixer = next(iter(mixers_of(wide_model(model_type, "eager")).values())).to(device)
    layout = layout_of(FOUR if dist.get_world_size() == 4 else TWO)
    transport = open_transport(device, 60.0)
    generator = torch.Generator(device).manual_seed(0)
    sizes = sum(LENGTHS), SIZES["hidden_size"]
    x_TD, dout_TD = (torch.randn(sizes, generator=generator, device=device, dtype=torch.float64) for _ in range(2))

    alone_TD = x_TD.clone().requires_grad_()
    outputs = [mixer(x[None]) for x in alone_TD.split(LENGTHS)]
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


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_5", "kimi_linear", "nemotron_h", "jamba", "lfm2"])
def test_mixers_on_cut_documents_are_as_on_each_alone(model_type: str, by_heads: bool, tmp_path: Path) -> None:
    num_ranks = 4 if torch.cuda.device_count() >= 4 else 2
    for differences in run_ranks(num_ranks, _differences, tmp_path, model_type, by_heads, backend="nccl"):
        assert max(differences) <= LARGEST_DIFFERENCE
