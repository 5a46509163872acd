"""Weights that FSDP2 has left whole behind a forward pass, and the optimizer that is made then.

One process passes for a rank of two.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.weights_check import check_optimizer, divide_again
from support.fake_job import fake_job
from support.models import tiny_model


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model that FSDP2 divides as Transformers does, and that was evaluated."""
    with fake_job(2):
        model = tiny_model(implementation="sdpa", num_hidden_layers=1)
        fully_shard(model.model.layers[0])
        fully_shard(model, reshard_after_forward=False)
        with torch.no_grad():
            model(torch.arange(3, 9)[None])
        yield model


def test_optimizer_of_whole_weights_is_refused(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())

    with pytest.raises(ConfigError) as refused:
        check_optimizer(model, optimizer)
    assert str(refused.value).startswith(
        "3 of 12 weights of the optimizer, the first of shape (128, 64), are none that"
    )
    assert "plugin.attach(trainer)" in str(refused.value)


def test_weights_are_divided_again(model: nn.Module) -> None:
    assert divide_again(model)
    check_optimizer(model, torch.optim.SGD(model.parameters()))


def test_models_that_nobody_divides_pass() -> None:
    model = tiny_model(implementation="sdpa", num_hidden_layers=1)

    assert not divide_again(model)
    check_optimizer(model, torch.optim.SGD(tiny_model(num_hidden_layers=1).parameters()))
