"""Parallel context: it holds settings and opens transports; the plugin is one, and a set of settings, for users."""

import dataclasses

import pytest
import torch

from distca_hf.comm.agreement import CheckedTransport
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.parallel_context import ParallelContext
from distca_hf.plugin import DistCAPlugin


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_context_holds_the_settings_it_was_given() -> None:
    config = DistCAConfig(tokens_per_rank=4096)
    context = ParallelContext(config)

    assert context.config is config
    assert not hasattr(context, "tokens_per_rank")


def test_plugin_shows_the_settings_that_its_parts_follow() -> None:
    plugin = DistCAPlugin(tokens_per_rank=4096, kernel="cpu")

    assert type(plugin.config) is DistCAConfig
    assert dataclasses.asdict(plugin.config) == dataclasses.asdict(plugin)
    assert (plugin.tokens_per_rank, plugin.config.kernel) == (4096, "cpu")


def test_replaced_plugin_has_connections_of_its_own() -> None:
    plugin = DistCAPlugin(tokens_per_rank=4096)
    other = dataclasses.replace(plugin, tokens_per_rank=64)

    assert (plugin.config.tokens_per_rank, other.config.tokens_per_rank) == (4096, 64)
    assert other.transport(CPU) is not plugin.transport(CPU)


def test_one_transport_is_opened_for_each_device() -> None:
    context = ParallelContext(DistCAConfig())
    transport = context.transport(CPU)

    assert isinstance(transport, LocalTransport)
    assert context.transport(torch.device("cpu:0")) is transport
    context.close()
    assert context.transport(CPU) is not transport


def test_exchanges_are_checked_if_that_is_asked_for() -> None:
    assert isinstance(ParallelContext(DistCAConfig(check_exchanges=True)).transport(CPU), CheckedTransport)


def test_one_process_is_one_rank() -> None:
    assert ParallelContext(DistCAConfig()).num_ranks == 1
