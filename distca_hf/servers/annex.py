"""Annex: what attention servers add to a training that was launched with some: see `ParallelContext.annex`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch

from distca_hf.comm.averaging import named_ranks
from distca_hf.comm.grid import Grid
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError
from distca_hf.launched import launched_servers
from distca_hf.parallel_context import Annex, ParallelContext, numbered
from distca_hf.servers.posted_plans import TrainerTransport
from distca_hf.servers.served_plans import Servers
from distca_hf.settings import values_of


if TYPE_CHECKING:
    from transformers import Trainer

    from distca_hf.integrations.trainer.attachment import Attachment

# Relative speed of an attention server until it is measured: that of a trainer.
UNMEASURED_SPEED = 1.0


class ServersAnnex(Annex):
    """Attention servers of this job.

    Args:
        context: of the ranks that train.

    Raises:
        ConfigError: a setting does not work with servers.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._served: dict[torch.device, TrainerTransport] = {}
        if context.debug.check_exchanges:
            raise ConfigError(
                "debug.check_exchanges compares only exchanges of trainers, and attention servers take part in them; "
                "leave one of the two out"
            )
        if context.deterministic and not context.server_speed:
            raise ConfigError(
                "deterministic=True asks for the same gradients in all runs, and server_speed=0 measures speeds, "
                "which differ from run to run and divide attention between trainers and servers: give a server_speed"
            )
        if not context.members.are_the_job:
            raise ConfigError(
                f"attention servers serve all ranks of a job, and the group of the plugin is "
                f"{named_ranks(context.members.group)}; leave group out"
            )

    @property
    def extra_ranks(self) -> Servers:
        """The servers that were launched."""
        per_node = launched_servers()
        # Trainers' nodes come first, as in their topology. A node that only serves has more servers than these.
        in_order = sorted(range(len(per_node)), key=lambda node: per_node[node] > min(per_node))
        nodes = tuple(in_order.index(node) for node, count in enumerate(per_node) for _ in range(count))
        speeds = (self._context.server_speed or UNMEASURED_SPEED,) * len(nodes)
        return Servers(speeds, self._context.trainers_attend, nodes)

    def check_grid(self, grid: Grid) -> None:
        raise ConfigError(
            f"attention servers serve ranks that differ only in data, and these are {grid.in_words()}; leave the "
            "servers out, or train without tensor and pipeline parallelism"
        )

    def transport(self, device: torch.device) -> TrainerTransport:
        """Returns the transport that reaches servers, opened when first asked for (a collective call)."""
        among_trainers, device, timeouts = self._context.transport(device), numbered(device), self._context.timeouts
        served = self._served.get(device)
        if served is None or served.among_trainers is not among_trainers:
            served = self._served[device] = TrainerTransport(
                among_trainers,
                device,
                self.extra_ranks,
                values_of(self._context, DistCAConfig),
                timeouts.exchange_seconds,
                timeouts.agreement_seconds,
                timeouts.heartbeat_limit_seconds,
            )
        return served

    def cannot_attach(self, trainer: "Trainer") -> Iterable[str]:
        from distca_hf.servers.redone_steps import cannot_redo

        return cannot_redo(trainer)

    def attach(self, trainer: "Trainer", attachment: "Attachment") -> None:
        from distca_hf.servers.redone_steps import RedoneSteps

        RedoneSteps(trainer, self._context).install(attachment)

    def attempts(
        self, model: torch.nn.Module, batches: Sequence[Mapping[str, Any]]
    ) -> Iterator[AbstractContextManager[object]]:
        from distca_hf.servers.redo import attempts

        return attempts(model, batches, self._context)

    def close(self) -> None:
        with ExitStack() as ends:
            for transport in self._served.values():
                ends.callback(transport.close)
            self._served.clear()
