"""Placed: places the documents of micro-batches and plans them, using only lengths.

Training and `distca plan` both use it, so it does not import torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, TokenBytes
from distca_hf.data.accumulation import Divide, MicroStep, SteppedEpoch, group_documents
from distca_hf.data.epochs import Epoch, Fits
from distca_hf.errors import ConfigError
from distca_hf.flops import LLAMA_8B_COSTS, PassCosts, StepCost
from distca_hf.layout import Layout, Topology
from distca_hf.placement.by_kernel_time import KernelTimes, place_by_seconds
from distca_hf.placement.given import place_given
from distca_hf.placement.place import place
from distca_hf.placement.whole import fit_whole, place_whole
from distca_hf.planning.plan import ExtraRanks, Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.prefixes import SharedPrefixes


if TYPE_CHECKING:
    from distca_hf.comm.grid import Grid  # imports torch


class StepShape(ABC):
    """A way to divide optimizer steps' documents into micro-batches of equally many rows. See `distca_hf.Pipeline`."""

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, ...]:
        """Numbers that it depends on: ranks compare them, and saved positions include them."""

    @abstractmethod
    def check(self, micro_steps: int, num_layers: int | None = None) -> None:
        """Checks that optimizer steps of `micro_steps` micro-batches can be shaped.

        Args:
            num_layers: layers of the model, if known.

        Raises:
            ConfigError: they cannot.
        """

    @abstractmethod
    def check_grid(self, grid: "Grid") -> None:
        """Checks that the ranks are divided as this shape needs.

        Raises:
            ConfigError: they are not.
        """

    @abstractmethod
    def division(self, planner: "PlacedPlanner", micro_steps: int) -> Divide:
        """Returns what divides the documents of an optimizer step of `micro_steps` micro-batches."""


@dataclass(frozen=True)
class PlacedPlanner:
    """Plans the micro-batches of one training; every rank makes the same plans.

    Attributes:
        num_ranks: ranks that share each micro-batch.
        head_groups: groups into which plans may divide the model's heads.
        extra_ranks: ranks without tokens, numbered after these; None if there are none.
        token_bytes: bytes of one token in one layer; read only with extra ranks, or if documents stay whole.
        layer_masks: each mask of the model with the number of layers that have it.
        whole_documents: whether documents stay whole; then attention tasks move.
        halo_tokens: tokens before a part of a document that convolutions of layers with a state see; None if the model
            has no such layers, or documents stay whole.
        step_shape: divides the documents of optimizer steps; if None, long documents train together.
        costs: seconds of the model's layers, for the step shape.
    """

    config: DistCAConfig
    num_ranks: int
    head_groups: int = 1
    extra_ranks: ExtraRanks | None = None
    token_bytes: TokenBytes = TokenBytes()  # noqa: RUF009 (immutable)
    layer_masks: LayerMasks = CAUSAL_LAYERS
    whole_documents: bool = False
    halo_tokens: int | None = None
    step_shape: StepShape | None = None
    costs: PassCosts = LLAMA_8B_COSTS

    def __post_init__(self) -> None:
        self.config.check_places("plugin.dataloader")

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a document."""
        return self.config.tokens_per_rank if self.whole_documents else self.capacity_tokens

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of a micro-batch."""
        return self.num_ranks * self.config.tokens_per_rank

    @property
    def num_chunks(self) -> int:
        """Chunks of every exchange, at most."""
        trainers = self.config.topology(self.num_ranks)
        return self.config.num_chunks(trainers if self.extra_ranks is None else self.extra_ranks.topology(trainers))

    @cached_property
    def kernel_times(self) -> KernelTimes | None:
        """Measured times with which placement predicts seconds; None without a table.

        Raises:
            PackingError: the table cannot be read.
        """
        return KernelTimes.load(Path(self.config.kernel_times)) if self.config.kernel_times else None

    def check_kernel_times(self, longest_document_tokens: int) -> None:
        """Checks that a table of kernel times is not used with windows, which it does not cover, or with whole
        documents.

        Args:
            longest_document_tokens: a window as long as this document is full attention.

        Raises:
            ConfigError: names setting and window.
        """
        if not self.config.kernel_times:
            return
        if self.whole_documents:
            raise ConfigError(
                f"kernel_times={self.config.kernel_times!r} decides where documents are cut, and documents of this "
                "model stay whole, because layers carry a state from token to token; leave kernel_times out"
            )
        windows = [mask.window_tokens for mask, _ in self.layer_masks if mask.window_tokens is not None]
        shorter = [tokens for tokens in windows if tokens < longest_document_tokens]
        if shorter:
            raise ConfigError(
                f"kernel_times={self.config.kernel_times!r} has times of full attention, but layers of this model "
                f"have a window of {shorter[0]} tokens, and a document has {longest_document_tokens}; leave "
                "kernel_times out for this model"
            )

    def regroup(self, epoch: Epoch, document_tokens: IntArray, micro_steps: int, steps_from: int = 0) -> SteppedEpoch:
        """Returns the epoch with documents divided anew within every optimizer step: long ones together, or by the
        step shape.

        Args:
            document_tokens: `[documents]` lengths of all documents.
            micro_steps: micro-batches of an optimizer step; 1 leaves them as they are.
            steps_from: a micro-batch with which an optimizer step begins.
        """
        shape = self.step_shape
        divide = self._together if shape is None else shape.division(self, micro_steps)
        return SteppedEpoch(epoch, document_tokens, micro_steps, divide, steps_from)

    def _together(self, document_tokens: IntArray, as_packed: list[IntArray]) -> list[MicroStep]:
        return group_documents(
            *(document_tokens, len(as_packed), self.capacity_tokens, self.config.topology(self.num_ranks)),
            head_groups=self.head_groups,
            as_they_came=as_packed,
            layer_masks=self.layer_masks,
            whole_tokens=self.config.tokens_per_rank if self.whole_documents else None,
        )

    @property
    def fits(self) -> Fits | None:
        """Which documents of a micro-batch fit on the ranks; None if all do, because they may be cut."""
        if not self.whole_documents:
            return None
        return partial(fit_whole, num_ranks=self.num_ranks, tokens_per_rank=self.config.tokens_per_rank)

    def plan(self, document_tokens: IntArray, placed: Layout | None = None) -> Plan:
        """Plans a micro-batch with padded rows.

        Args:
            document_tokens: `[documents]` lengths.
            placed: their placement with equal work, if already made; a table of kernel times places them anew.

        Raises:
            PackingError: a length is out of range.
            ConfigError: see `check_kernel_times`.
        """
        return self.plan_layout(self.layout(document_tokens, placed))

    def layout(self, document_tokens: IntArray, placed: Layout | None = None) -> Layout:
        """Places a micro-batch on the ranks that hold tokens, and pads its rows; with a step shape to
        `tokens_per_rank`. Arguments and errors: see `plan`."""
        layout = self._place(document_tokens) if placed is None or self.kernel_times else placed
        tokens_per_rank = self.config.tokens_per_rank
        return layout.padded(
            self.config.pad_to_multiple_of if self.step_shape is None else tokens_per_rank, tokens_per_rank
        )

    def plan_layout(self, layout: Layout) -> Plan:
        """Plans a placed layout with padded rows."""
        topology = self.config.topology(self.num_ranks)
        if self.extra_ranks is not None:
            return self.extra_ranks.plan(layout, self.head_groups, topology=topology, token_bytes=self.token_bytes)
        if self.whole_documents:
            return plan_by_moving(layout, self.head_groups, topology=topology, token_bytes=self.token_bytes)
        return plan_in_place(layout, self.head_groups)

    def _place(self, document_tokens: IntArray) -> Layout:
        """Places documents so that all ranks have equal work, or equal seconds."""
        topology, times = self.config.topology(self.num_ranks), self.kernel_times
        self.check_kernel_times(int(np.max(document_tokens, initial=0)))
        if self.whole_documents:
            return place_whole(document_tokens, self.num_ranks, self.config.tokens_per_rank)
        if times is None:
            return place(
                document_tokens,
                self.num_ranks,
                topology=topology,
                head_groups=self.head_groups,
                layer_masks=self.layer_masks,
            )
        return place_by_seconds(
            document_tokens, self.num_ranks, times, topology=topology, head_groups=self.head_groups
        )


@dataclass(frozen=True)
class GivenPlans:
    """Places and plans given batches of one model; pure.

    most models                 rows are placed inside the model, unless batches are even; ranks compute what they hold
    states that cannot travel   tokens stay, attention tasks move
    ranks without tokens        rows are placed among the others, tasks move to them

    Attributes:
        topology: nodes of the ranks that hold tokens.
        head_groups: groups into which heads can be divided.
        token_bytes: bytes of a token in one layer.
        layer_masks: masks that the model's layers attend with, each with the number of its layers.
        places_rows: whether the model moves rows, and tokens may be placed; otherwise attention tasks move.
        cost: seconds of the model's layers, which tell whether batches are even.
    """

    topology: Topology
    head_groups: int = 1
    token_bytes: TokenBytes = TokenBytes()  # noqa: RUF009 (immutable)
    layer_masks: LayerMasks = CAUSAL_LAYERS
    places_rows: bool = True
    cost: StepCost = LLAMA_8B_COSTS.both

    def layout(self, home: Layout, hashes: Sequence[IntArray] = (), least_tokens: int = 0) -> Layout:
        """Returns the layout that layers compute.

        Args:
            home: whole documents, in the order of the batches.
            hashes, least_tokens: see `SharedPrefixes.find`; no hashes if no two documents begin alike.
        """
        if not self.places_rows:
            return home
        if hashes and (shared := SharedPrefixes.find(home.document_tokens, hashes, least_tokens)) is not None:
            home = home.sharing(shared)
        return place_given(home, self.topology, self.head_groups, self.layer_masks, self.cost)

    def plan(self, layout: Layout, extra_ranks: ExtraRanks | None = None) -> Plan:
        """Returns the plan of a layout that `layout` returned; extra ranks are numbered after its ranks."""
        if extra_ranks is not None:
            return extra_ranks.plan(layout, self.head_groups, topology=self.topology, token_bytes=self.token_bytes)
        if self.places_rows:
            return plan_in_place(layout, self.head_groups)
        return plan_by_moving(layout, self.head_groups, topology=self.topology, token_bytes=self.token_bytes)
