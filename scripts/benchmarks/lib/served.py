"""Modes of a step with attention servers (`MODES`): the product with them, and without them on the same trainers."""

from dataclasses import replace
from typing import Any

import torch

from distca_hf.comm.transport import Transport
from distca_hf.parallel_context import Annex
from distca_hf.servers.served_transport import ServedTransport
from lib.model import LossModel
from lib.modes import Mode, Place, StepTokens, build_mode
from lib.rates import largest
from lib.rounds import Runner
from lib.wires import WiredPlugin, Wires


MODES = {
    "ideal": "the trainers' linear work, and of attention the share of one of all processes, without any transfer",
    "served": "the product with servers: placed batches, in plugin.attempts",
    "alone": "the product on the same trainers, without servers: placed batches",
}


class ServedPlugin(WiredPlugin):
    """The product's plugin over given wires, with the attention servers that were launched, over the owner's
    connection to them; None: its own."""

    def __init__(self, owner: "ServedPlugin | None", wires: Wires, **settings: Any) -> None:
        super().__init__(wires, **settings)
        self._owner = owner or self

    def training_transport(self, device: torch.device) -> Transport:
        """Returns the transport of a training, over the one connection to servers."""
        return super().training_transport(device) if self._owner is self else self._owner.training_transport(device)


class AlonePlugin(WiredPlugin):
    """The product's plugin over given wires, which makes no use of the attention servers that were launched."""

    def __init__(self, wires: Wires, **settings: Any) -> None:
        super().__init__(wires, **settings)
        self.annex = Annex(self)


class Connection:
    """The one connection to attention servers that all plugins of a benchmark share."""

    def __init__(self) -> None:
        self._owner: ServedPlugin | None = None

    def plugin(self, wires: Wires, **settings: Any) -> ServedPlugin:
        """Returns the product's plugin with servers."""
        plugin = ServedPlugin(self._owner, wires, **settings)
        self._owner = self._owner or plugin
        return plugin

    def transport(self, device: torch.device) -> ServedTransport | None:
        """Returns the connection; None if no plugin has it."""
        found = None if self._owner is None else self._owner.training_transport(device)
        return found if isinstance(found, ServedTransport) else None

    def close(self) -> None:
        """Ends the connection."""
        if self._owner is not None:
            self._owner.close()

    def build(self, name: str, place: Place, step: StepTokens) -> Mode:
        """Returns the mode of this name, as `modes.build_mode` does. A collective call."""
        if name == "served":
            return replace(build_mode("placed", replace(place, plugins=self.plugin), step), name=name)
        if name == "alone":
            return replace(build_mode("placed", replace(place, plugins=AlonePlugin), step), name=name)
        return build_mode(name, place, step)


class ServedRunner(Runner):
    """Runs steps of trainers; with servers as loops do, so that a lost server costs no step. The model is enabled with
    the plugin."""

    def __init__(self, model: LossModel, plugin: WiredPlugin, wires: Wires, device: torch.device) -> None:
        super().__init__(model, wires, device)
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

    def sent_bytes(self, mode: Mode) -> int:
        """Returns the bytes that a trainer sends in a step, the most of all. A collective call."""
        with self.ready(mode) as step:
            before = self._wires.traffic.bytes_sent
            step()
            [sent] = largest([self._wires.traffic.bytes_sent - before], self._device)
        return int(sent)
