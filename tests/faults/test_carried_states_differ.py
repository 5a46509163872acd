"""A rank whose mixers differ from those of other ranks, or that is lost among their exchanges: it is named before data
mix."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from distca_hf.comm.transport import Transport
from distca_hf.errors import PlanError, PlanMismatchError
from distca_hf.testing import Fault, FaultTransport, fail
from support.carried_steps import THREE, step_on_ranks
from support.versions import states_travel
from support.wide_models import wide_model


pytestmark = [pytest.mark.usefixtures("one_core"), states_travel]
DIFFERENT = 1
BUILD = partial(wide_model, "bamba", "distca")


def compute_in_fp32(model: Any, layer: int) -> None:
    """Lets a mixer compute in another dtype; its parameters keep theirs."""
    mixer = model.model.layers[layer].mamba
    forward = mixer.forward

    def compute(hidden_states: torch.Tensor, **keywords: object) -> torch.Tensor:
        mixer.float()
        try:
            return forward(hidden_states.float(), **keywords).double()
        finally:
            mixer.double()

    mixer.forward = compute


def skip(model: Any, layer: int) -> None:
    """Leaves a layer with a mixer out."""
    skipped = nn.Module()
    skipped.forward = lambda hidden_states, **_: (hidden_states, None)
    model.model.layers[layer] = skipped


def on_one_rank(what: Callable[[Any, int], None], layer: int, at: int) -> Callable[[Any, int, int], None]:
    """Returns a change of one rank's model before a pass."""

    def change(model: Any, rank: int, number: int) -> None:
        if (rank, number) == (DIFFERENT, at):
            what(model, layer)

    return change


@pytest.mark.parametrize(("what", "layer"), [(compute_in_fp32, 2), (skip, 0)])
def test_another_mixer_in_the_first_pass_is_named_with_its_rank(what: Callable[..., None], layer: int) -> None:
    with pytest.raises(PlanMismatchError, match="nothing was sent") as caught:
        step_on_ranks(BUILD, THREE, change=on_one_rank(what, layer, at=0))

    message = str(caught.value)
    assert "on ranks 0 and 2" in message
    assert "on rank 1" in message
    if what is compute_in_fp32:
        assert f"model.layers.{layer}.mamba, halos torch.float64 [88] on ranks 0 and 2" in message
        assert f"model.layers.{layer}.mamba, halos torch.float32 [88] on rank 1" in message


def test_another_dtype_in_a_later_pass_is_named_before_anything_is_sent() -> None:
    layer = 2
    with pytest.raises((PlanError, PlanMismatchError), match="nothing was sent") as caught:
        step_on_ranks(BUILD, THREE, change=on_one_rank(compute_in_fp32, layer, at=1), passes=2)

    assert f"model.layers.{layer}.mamba, halos torch.float32 [88]" in str(caught.value)
    assert f"model.layers.{layer}.mamba, halos torch.float64 [88]" in str(caught.value)


def test_all_ranks_may_compute_in_another_dtype_in_a_later_pass() -> None:
    """As under another autocast: in evaluation, say."""

    def change(model: Any, rank: int, number: int) -> None:
        if number == 1:
            compute_in_fp32(model, 0)

    step_on_ranks(BUILD, THREE, change=change, passes=3)


@pytest.mark.parametrize(("layer", "attention"), [(0, 1), (2, 1), (1, 2)])
def test_a_mixer_left_out_in_a_later_pass_is_noticed(layer: int, attention: int) -> None:
    build = partial(BUILD, num_hidden_layers=4, attn_layer_indices=[attention])
    with pytest.raises((PlanError, PlanMismatchError), match=r"nothing was sent|no step was taken"):
        step_on_ranks(build, THREE, change=on_one_rank(skip, layer, at=1), passes=2)


def detach(model: Any, layer: int) -> None:
    """Cuts gradients off before a mixer."""
    model.model.layers[layer].mamba.register_forward_pre_hook(
        lambda module, args, keywords: (args, keywords | {"hidden_states": keywords["hidden_states"].detach()}),
        with_kwargs=True,
    )


def freeze(model: Any, layer: int) -> None:
    """Freezes the mixer and cuts gradients off before it."""
    model.model.layers[layer].mamba.requires_grad_(False)
    detach(model, layer)


def test_states_without_gradients_on_one_rank_are_named() -> None:
    with pytest.raises(PlanMismatchError, match=r"exchanges of states with gradients|parameters") as caught:
        step_on_ranks(BUILD, THREE, change=on_one_rank(freeze, 0, at=1), passes=2)

    assert "rank 1" in str(caught.value)


def test_a_rank_that_fails_in_an_exchange_of_states_stops_the_others() -> None:
    error = ValueError("this rank is bad")

    def around(transport: Transport) -> Transport:
        return FaultTransport(transport, [Fault(1, fail(error))]) if transport.rank == DIFFERENT else transport

    with pytest.raises(ValueError, match="this rank is bad"):  # others raise PeerLostError, which only echoes it
        step_on_ranks(BUILD, THREE, around=around)
