"""Modes of a step with attention servers (`MODES`): the product with them, and without them on the same trainers.

Settings of the product come from its environment variables. Without DISTCA_SERVER_SPEED the plan takes servers to be
as fast as trainers, as in the first steps of a training; that of a second set of documents takes the speeds measured
by then. While kernels are compiled a server is silent: set DISTCA_TIMEOUTS_HEARTBEAT_LIMIT_SECONDS=60 in a first run.
"""

from dataclasses import replace
from typing import Any

import torch

from distca_hf.parallel_context import Annex
from distca_hf.servers.served_transport import ServedTransport
from lib.documents import Documents
from lib.modes import build_mode
from lib.place import Mode, Place
from lib.rounds import Runner
from lib.wires import WiredPlugin, Wires


MODES = {
    "served": "the product with attention servers: placed batches, in plugin.attempts; only if some were launched",
    "alone": "the product on the same trainers, without the servers: placed batches; only if some were launched",
}


def plugin_without_servers(wires: Wires, **settings: Any) -> WiredPlugin:
    """Returns the product's plugin over given wires, which makes no use of the attention servers that were
    launched."""
    plugin = WiredPlugin(wires, **settings)
    plugin.annex = Annex(plugin)
    return plugin


class Connection:
    """The one connection to attention servers that all plugins of a benchmark share."""

    def __init__(self) -> None:
        self._owner: WiredPlugin | None = None

    def plugin(self, wires: Wires, **settings: Any) -> WiredPlugin:
        """Returns the product's plugin with servers, over the connection of the first such plugin."""
        plugin: Any = WiredPlugin(wires, **settings)
        self._owner = self._owner or plugin
        plugin.training_transport = self._owner.training_transport
        return plugin

    def check_servers(self, device: torch.device) -> None:
        """Exits if a server was lost."""
        found = None if self._owner is None else self._owner.training_transport(device)
        if isinstance(found, ServedTransport) and found.servers_lost:
            raise SystemExit(f"{found.servers_lost} servers were lost: times are not of all servers")

    def close(self) -> None:
        """Ends the connection."""
        if self._owner is not None:
            self._owner.close()

    def build(self, name: str, place: Place, documents: Documents) -> Mode:
        """Returns the mode of this name, as `modes.build_mode` does, in a place whose plugins are those of this
        connection. A collective call."""
        if name == "served":
            return build_mode("placed", place, documents).renamed(name)
        if name == "alone":
            return build_mode("placed", replace(place, plugins=plugin_without_servers), documents).renamed(name)
        return build_mode(name, place, documents)


class ServedRunner(Runner):
    """Runs steps of trainers; with servers as loops do, so that a lost server costs no step. The model is enabled with
    the plugin."""

    def __init__(self, place: Place, plugin: WiredPlugin) -> None:
        super().__init__(place)
        self._plugin = plugin

    def step(self, mode: Mode) -> torch.Tensor:
        """Runs a step again if a server was lost in it; returns the loss of this rank's tokens, a scalar."""
        if mode.name != "served":
            return super().step(mode)
        losses = []
        for attempt in self._plugin.attempts(self._model, [*mode.batches]):
            with attempt:
                losses.append(super().step(mode))
        return losses[-1]


def plan_in_words(mode: Mode) -> str:
    """Returns a line about the plan of `served` as it is at the end."""
    [batch] = mode.batches
    facts = batch["distca_plan"].facts
    speeds = ", ".join(f"{speed:.2f}" for speed in facts.speeds)
    work = ", ".join(f"{work / sum(facts.work):.3f}" for work in facts.work)
    balance = f"longest planned time {facts.imbalance:.4f} x an even split"
    return f"parts of attention, those of servers last: {work}; speeds {speeds}; {balance}"
