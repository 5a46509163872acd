"""Parallel context: the settings of a training, and the ranks that follow them together.

All that trains together is given the same context: models, loaders and callbacks open no groups of their own.
"""

import torch

from distca_hf.comm.agreement import CheckedTransport
from distca_hf.comm.groups import default_device, open_transport, world_size
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError


class ParallelContext:
    """Settings, and the transports between the ranks that follow them: one for each device.

    Attributes:
        config: settings.
    """

    def __init__(self, config: DistCAConfig) -> None:
        self.config = config
        self._transports: dict[torch.device, Transport] = {}

    @property
    def num_ranks(self) -> int:
        """Ranks that train together."""
        return world_size()

    @property
    def device(self) -> torch.device:
        """Device that training runs on, as far as the process groups and CUDA say."""
        return default_device()

    def transport(self, device: torch.device) -> Transport:
        """Returns the transport for tensors on `device`, opened when first asked for (a collective call)."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        elif device.type == "cpu":
            device = torch.device("cpu")  # "cpu:0" is the same
        if device not in self._transports:
            config = self.config
            opened = open_transport(device, config.exchange_timeout_seconds, config.agreement_timeout_seconds)
            _check_accelerate(opened)
            self._transports[device] = opened if not config.check_exchanges else CheckedTransport(opened)
        return self._transports[device]

    def close(self) -> None:
        """Ends the process groups that were opened here; models and loaders that follow it cannot run any more.

        Not needed in a script: groups are ended with the process. Of use in a program that goes on afterwards.
        """
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()


def _check_accelerate(transport: Transport) -> None:
    """Refuses to share documents between ranks that Accelerate does not train together.

    Raises:
        ConfigError: Accelerate runs one process alone, though several were launched.
    """
    from accelerate import PartialState

    if not PartialState._shared_state:  # without Accelerate, the maker of the process group synchronises gradients
        return
    processes = PartialState().num_processes
    if processes != transport.world_size:
        raise ConfigError(
            f"{transport.world_size} processes are in the process group, but Accelerate trains {processes} together: "
            "gradients would not be synchronised. On CPUs set use_cpu=True (TrainingArguments), Accelerator(cpu=True) "
            "or ACCELERATE_USE_CPU=true"
        )
