"""Weights that differ between ranks are found at the next check; equal ones raise no alarm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf import testing
from distca_hf.comm.transport import LocalTransport
from distca_hf.errors import PlanMismatchError
from distca_hf.integrations.models.weights_check import CHUNK, WeightsCheck, bits_checksums
from distca_hf.testing import LoopbackTransport
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks
from support.training import quiet_arguments


EVERY = 5
STEPS = 10
FLIPPED = "model.layers.0.mlp.up_proj.weight"


class FlipABit(TrainerCallback):
    """The lowest bit of one weight, after a step, on rank 1."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self._step and torch.distributed.get_rank() == 1:
            model.get_parameter(FLIPPED).data.view(torch.int32)[3, 5] ^= 1


def _train(folder: Path, flip_at: int) -> int:
    args = TrainingArguments(
        **quiet_arguments(
            folder,
            max_steps=STEPS,
            learning_rate=0.0,  # other gradients of one rank would be averaged into all weights of both
            use_cpu=True,
        )
    )
    trainer = Trainer(model=tiny_model(num_hidden_layers=1), args=args, train_dataset=random_dataset())
    distca_hf.DistCAPlugin(tokens_per_rank=96, debug=distca_hf.Debug(check_weights_every_steps=EVERY)).attach(trainer)
    trainer.add_callback(FlipABit(flip_at))
    trainer.train()
    return trainer.state.global_step


def test_flipped_bit_is_found_at_the_next_check_by_rank_and_name(tmp_path: Path) -> None:
    outcomes = start_ranks(2, _train, tmp_path, tmp_path / "run", 2 * EVERY - 1)  # passes 8 and 16 compare, too

    for outcome in outcomes:
        assert outcome.exit_code == 1
        where = f"rank {outcome.rank}, step {2 * EVERY}"
        assert f"{where}: weights or buffers differ between ranks: 1 of 14, " in outcome.output
        assert f"first {FLIPPED}, whose checksum is" in outcome.output
        assert "on rank 0, " in outcome.output
        assert "on rank 1. " in outcome.output


def test_no_alarm_without_a_difference(tmp_path: Path) -> None:
    assert run_ranks(2, _train, tmp_path, tmp_path / "run", STEPS + 1) == [STEPS, STEPS]


class Watched(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.arange(21, dtype=torch.bfloat16).view(7, 3))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.bytes = nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False)
        self.long = nn.Parameter(torch.arange(5, dtype=torch.float64).expand(3, 5))
        self.register_buffer("frequencies", torch.arange(6.0).to(torch.complex64), persistent=False)
        self.register_buffer("of_rank", torch.zeros(2))
        self._ddp_params_and_buffers_to_ignore = ["of_rank"]
        self.norm = nn.BatchNorm1d(3)


@pytest.mark.parametrize("name", ["short", "scalar", "bytes", "long", "frequencies"])
def test_every_kind_of_tensor_counts(name: str) -> None:
    def body(transport: LoopbackTransport) -> str:
        model, check = Watched(), WeightsCheck(transport)
        check.compare(model, 1)
        model.of_rank += transport.rank
        model.norm.running_mean += transport.rank
        if transport.rank == 2:
            parameter = getattr(model, name)
            parameter.data = parameter.detach().clone()
            parameter.data.view(-1).view(torch.uint8)[-1] ^= 1
        with pytest.raises(PlanMismatchError) as caught:
            check.compare(model, 2)
        return str(caught.value)

    for message in testing.run_ranks(3, body):
        assert f"first {name}, whose checksum is" in message
        assert "on ranks 0 and 1, " in message
        assert "on rank 2. " in message


@pytest.mark.parametrize("changed", [0, CHUNK - 1, CHUNK, CHUNK + 4])
def test_one_element_changes_the_checksum_wherever_it_is(changed: int) -> None:
    weights = torch.ones(CHUNK + 5, dtype=torch.float64)
    before = bits_checksums([weights])
    weights[changed] = -1

    assert bits_checksums([weights]) != before


def test_order_of_elements_changes_the_checksum() -> None:
    weights = torch.randn(2 * CHUNK, dtype=torch.float64)

    halves = weights.view(torch.bfloat16)
    assert bits_checksums([weights]) == bits_checksums([weights.clone()])
    assert bits_checksums([halves[1:]]) == bits_checksums([halves[1:].clone()]) != bits_checksums([halves[:-1]])
    assert bits_checksums([weights]) != bits_checksums([weights.flip(0)])
    assert bits_checksums([weights]) != bits_checksums([weights.roll(CHUNK)])


def test_checksums_of_several_tensors_are_their_own() -> None:
    tensors = [torch.randn(CHUNK + 3), torch.empty(0), torch.arange(5), torch.tensor(1.5), torch.ones(7).bfloat16()]
    alone = [checksum for tensor in tensors for checksum in bits_checksums([tensor])]

    assert bits_checksums(tensors) == alone
    assert len(set(alone)) == len(tensors)
    assert bits_checksums([]) == []


def _compare_sharded() -> None:
    """Layers are divided, what is around them is not; then something around them differs."""
    rank = torch.distributed.get_rank()
    model = tiny_model(num_hidden_layers=1)
    fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (2,)))
    check = WeightsCheck(distca_hf.DistCAPlugin().transport(torch.device("cpu")))
    for step in (1, 2):
        check.compare(model, step)
    model.lm_head.weight.data[0, 0] += rank
    check.compare(model, 3)


def test_sharded_parameters_are_left_out_and_that_is_said_once(tmp_path: Path) -> None:
    outcomes = start_ranks(2, _compare_sharded, tmp_path)
    # A warning that is the same on all ranks is said by the first.
    assert [outcome.output.count("9 of 12 parameters are sharded (FSDP, ZeRO-3)") for outcome in outcomes] == [1, 0]
    for outcome in outcomes:
        assert "step 3: weights or buffers differ between ranks: 1 of 5, first lm_head.weight" in outcome.output


def test_parameters_that_zero_3_divides_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = Watched()
    model.short.ds_id = 0
    WeightsCheck(LocalTransport()).compare(model, 1)

    assert "1 of 7 parameters are sharded" in caplog.text
