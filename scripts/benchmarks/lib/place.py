"""What all modes of a benchmark step are built with, and what a mode is."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self
from unittest import mock

import datasets
import torch
from transformers import PreTrainedConfig

import distca_hf
from distca_hf.config import KernelName
from distca_hf.integrations.models.distributed_check import follow_mesh
from distca_hf.integrations.models.hooks import BackboneCalls
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.integrations.models.structure import transformers_model
from lib.baselines.attention import register_ways
from lib.baselines.operators import Call, Work, whole_call
from lib.baselines.peers import MagiWork
from lib.divided import DividedBackbone, build_divided_model, is_divided
from lib.model import Backbone, LossModel, Shape, build_model, prepare, probe
from lib.trainer_batches import Batches
from lib.wires import WiredPlugin, Wires


@dataclass(frozen=True)
class Place:
    """This rank's wires and device, the kernel, and the model."""

    wires: Wires  # transports and exchanges that all modes share
    device: torch.device
    kernel: KernelName  # its name, as in settings
    dtype: torch.dtype  # dtype of attention
    model: LossModel  # model that runs, and for which plans are made
    shape: Shape  # work of the model
    # The program's option. It holds for all modes alike (`lib/model.py`), but only the product offloads.
    checkpointing: str = "none"
    # Number of ranks among which `ideal` divides the work in a single process; 0 for the ranks that there are.
    share_of: int = 0
    servers: int = 0  # ranks without tokens, over which `ideal` spreads attention, too
    shares: Sequence[int] = ()  # tokens of the ranks in packs, in proportion; none if they are equal
    plugins: Callable[..., WiredPlugin] = WiredPlugin  # makes the product's plugin

    @classmethod
    def open(
        cls, model: LossModel, shape: Shape, options: argparse.Namespace, device: torch.device, **more: Any
    ) -> Self:
        """Opens wires for a model, as the options of a program ask for. A collective call."""
        datasets.disable_progress_bars()
        register_ways()
        plugin = distca_hf.DistCAPlugin()
        follow_mesh(model, plugin)
        wires = Wires(plugin.transport(device), device)
        return cls(wires, device, options.kernel, options.dtype, model, shape, options.checkpointing, **more)

    @classmethod
    def build(cls, config: PreTrainedConfig, options: argparse.Namespace, device: torch.device, **more: Any) -> Self:
        """Opens wires for a new model: without a head, or with its own if the program has `--head`. A collective
        call."""
        if is_divided(options):
            model: LossModel = DividedBackbone(build_divided_model(config, options))
        else:
            model = (LossModel if "head" in options else Backbone)(build_model(config, options, device))
        return cls.open(model, probe(model), options, device, **more)

    def enable(self, tokens_per_rank: int, longest_tokens: int, options: argparse.Namespace) -> WiredPlugin:
        """Enables the model for ranks and documents of so many tokens, then checkpoints and shards it; returns the
        plugin."""
        plugin = self.plugin(tokens_per_rank)
        distca_hf.enable(self.model, plugin, longest_tokens)
        prepare(self.model, options, self.device)
        return plugin

    def plugin(self, tokens_per_rank: int) -> WiredPlugin:
        """Returns the product for ranks of so many tokens, with settings from the environment (`DISTCA_<FIELD>`)."""
        checkpointed = {"full": "recompute", "offloaded": "offload"}.get(self.checkpointing, "save")
        settings = {"kernel": self.kernel, "checkpointed_attention": checkpointed}
        return self.plugins(self.wires, tokens_per_rank=tokens_per_rank, **settings)

    def work(self, *calls: Call) -> Work:
        """Returns kernel calls of a micro-batch of this rank as work that operators find."""
        return Work(calls, self.wires, self.kernel)

    def whole_work(self, lengths: Sequence[int]) -> Work:
        """Returns the work of whole documents of so many tokens, one after the other."""
        return self.work(whole_call(lengths, self.device))

    @cached_property
    def carries_state(self) -> bool:
        """Returns whether layers of the model carry a state: only the product lets it travel between ranks."""
        return bool(mixers_of(transformers_model(self.model)))


@contextmanager
def without(owner: type, *names: str) -> Iterator[None]:
    """Replaces methods of a class of the product while the context is open: they only return None."""
    with mock.patch.multiple(owner, **{name: mock.Mock(return_value=None) for name in names}):
        yield


@dataclass(frozen=True)
class Mode:
    """One way to run a step."""

    name: str  # its name among the modes of the program
    implementation: str  # name of the attention function
    batches: Batches  # batches of a step, one for each micro-step
    watched: bool = False  # the model is called with the product's hooks around it, which do nothing otherwise
    exact: bool = True  # outputs are of attention on the documents; false only for `ideal`
    # Contexts in which this mode runs: made-up keys, or changes to the product.
    meanwhile: Sequence[Callable[[], AbstractContextManager[object]]] = ()
    planner: MagiWork | None = None  # MagiAttention's planner, which plans before steps

    @classmethod
    def of_product(cls, name: str, batches: Batches, *meanwhile: Callable[[], AbstractContextManager[object]]) -> Self:
        """Returns a mode in which the product runs as users have it, but for some contexts."""
        return cls(name, "distca", batches, watched=True, meanwhile=meanwhile)

    def renamed(self, name: str, *meanwhile: Callable[[], AbstractContextManager[object]]) -> Self:
        """Returns the same mode by another name, in these contexts, too."""
        return replace(self, name=name, meanwhile=[*self.meanwhile, *meanwhile])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the parts that only this mode's steps need, and lets go of them: other modes need the memory."""
        with ExitStack() as parts:
            for part in self.meanwhile:
                parts.enter_context(part())
            if not self.watched:
                parts.enter_context(without(BackboneCalls, "_open"))
            yield
