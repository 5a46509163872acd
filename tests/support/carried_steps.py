"""Training steps of hybrids on documents that are cut by hand, on ranks that are threads, and on documents alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional

import distca_hf
from distca_hf.arrays import IntArray
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.integrations.models.mixers import halo_tokens_for
from distca_hf.layout import Layout
from distca_hf.parallel_context import ParallelContext
from distca_hf.testing import NotedTransport, run_ranks
from support.wide_models import VOCABULARY


# Tokens of documents a, b, ..., h, and where some of them are cut: A0 is a[0:40], A1 is a[40:41], ...
LENGTHS = (170, 61, 9, 1, 33, 2, 20, 75)
CUTS = {"A": (0, 40, 41, 43, 90, 120, 170), "B": (0, 30, 61), "H": (0, 1, 40, 75)}
# Documents and fragments of each rank, in row order. Fragments are out of order, some of one document are on one rank,
# and some are shorter than what a convolution sees.
TWO = ("A1 c A4 B1 d A2 H1 f", "A5 e A0 H2 B0 A3 g H0")
THREE = ("A4 c A1 B1 d H1 e", "A0 H2 A3 f", "A5 B0 A2 g H0")
ONE_WITHOUT = ("A4 A1 B1 A3 H1", "c e g d f", "A5 B0 A2 H0 A0 H2")  # the second rank has no fragment
FOUR = ("H2 A1 A3 e", "A5 B1 d H0", "B0 c f g", "A0 A4 A2 H1")
EIGHT = ("A5", "B1 A1", "c e g", "A0 H0", "H2 A2", "A4 f", "B0 d", "A3 H1")
UNCUT = ("a", "h b", "c d e f g")
# Largest relative difference that is rounding in fp64.
LARGEST_DIFFERENCE = 1e-12
HANG_SECONDS = 20.0


def layout_of(ranks: tuple[str, ...]) -> Layout:
    """Returns the layout of such ranks, without padding."""
    return Layout.from_segments(LENGTHS, [[_segment(name) for name in rank.split()] for rank in ranks])


def _segment(name: str) -> tuple[int, int, int]:
    document = ord(name[0].lower()) - ord("a")
    if len(name) == 1:
        return document, 0, LENGTHS[document]
    borders, number = CUTS[name[0]], int(name[1])
    return document, borders[number], borders[number + 1]


@dataclass(frozen=True)
class ByHand(PlacedPlanner):
    """Places documents as they were placed by hand, with padding."""

    ranks: tuple[str, ...] = ()

    def layout(self, document_tokens: IntArray, placed: Layout | None = None) -> Layout:
        """See `PlacedPlanner`. Loaders number documents in their own order; all lengths are different."""
        layout = layout_of(self.ranks)
        number_of = {tokens: number for number, tokens in enumerate(document_tokens.tolist())}
        numbers = np.array([number_of[tokens] for tokens in LENGTHS])
        held = [
            [(int(numbers[one]), start, stop) for one, start, stop in layout.held_by(rank)]
            for rank in range(len(self.ranks))
        ]
        rows = max(map(int, layout.rank_tokens))
        return Layout.from_segments(document_tokens, held, [rows + 3] * len(self.ranks))


def documents() -> list[list[int]]:
    """Returns random tokens of all documents."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, tokens).tolist() for tokens in LENGTHS]


@dataclass
class Step:
    """What a step made.

    Attributes:
        gradients: of each parameter that is trained; zeros if it has none. Sums over ranks.
        forward, backward: places of exchanges of states while forward and backward ran; the same on all ranks.
    """

    gradients: dict[str, torch.Tensor]
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)

    def difference(self, other: "Step") -> float:
        """Returns the largest difference of a gradient, relative to the other one; infinity if only that one is 0."""
        assert self.gradients.keys() == other.gradients.keys()
        return max(_relative(one, other.gradients[name]) for name, one in self.gradients.items())


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    difference, size = float((one - other).norm()), float(other.norm())
    return difference / size if size else float("inf") if difference else 0.0


def step_on_ranks(
    build: Callable[[], Any],
    ranks: tuple[str, ...],
    checkpointing: str = "none",
    autocast: bool = False,
    around: Callable[[Transport], Transport] = lambda transport: transport,
    change: Callable[[Any, int, int], None] = lambda model, rank, number: None,
    passes: int = 1,
    also: tuple[tuple[str, ...], ...] = (),
) -> Step:
    """Runs a step on cut documents.

    Args:
        build: makes the model, with equal weights every time; called once for each rank.
        checkpointing: "none", "non-reentrant", "reentrant", or "attending again": non-reentrant, without saved outputs
            of attention.
        autocast: whether forward runs under autocast to bf16.
        around: puts something around the transport of a rank.
        change: called with a rank's enabled model, the rank and the number of the pass, before each one.
        passes: number of steps; the latest one counts.
        also: further layouts of the documents. Each step has a pass on each of them, too, before its backward.
    """
    models = [build() for _ in ranks]
    attends_again: dict[str, Any] = (
        {"checkpointed_attention": "recompute"} if checkpointing == "attending again" else {}
    )
    context = ParallelContext(tokens_per_rank=sum(LENGTHS), ranks_per_node=len(ranks), **attends_again)
    halo_tokens = halo_tokens_for(models[0])
    planners = [ByHand(context, len(ranks), halo_tokens=halo_tokens, ranks=layout) for layout in (ranks, *also)]

    def body(given: Transport) -> Step:
        model, phase = models[given.rank], list[str]()

        def note(asked: AllToAll) -> None:
            if any(kind in asked.where for kind in ("halos", "summaries", "states")):
                phase.append(asked.where.partition(", ")[2])

        transport = NotedTransport(around(given), note, lambda _: None)
        if checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            model.enable_input_require_grads()
        distca_hf.enable(model, context, max(LENGTHS))
        dataset = Dataset.from_dict({"input_ids": documents()})
        loaders = [PlacedLoader(dataset, planner, transport, torch.device("cpu")) for planner in planners]
        for number in range(passes):
            change(model, given.rank, number)
            model.zero_grad()
            phase.clear()
            losses = []
            for loader in loaders:
                (batch,) = loader
                labels = batch.pop("shift_labels")
                batch.pop("labels")
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(**batch, use_cache=False).logits
                losses.append(_loss(logits, labels))
            forward = [*phase]
            phase.clear()
            torch.stack(losses).sum().backward()
        return Step(_gradients(model), forward, phase)

    steps = run_ranks(len(ranks), body, timeout_seconds=HANG_SECONDS)
    total = {name: torch.stack([step.gradients[name] for step in steps]).sum(0) for name in steps[0].gradients}
    for step in steps:
        assert (step.forward, step.backward) == (steps[0].forward, steps[0].backward)
    return Step(total, steps[0].forward, steps[0].backward)


def step_alone(model: Any) -> Step:
    """Runs a step on every document alone."""
    for ids in documents():
        row = torch.tensor([ids])
        labels = functional.pad(row[:, 1:], (0, 1), value=-100)
        _loss(model(input_ids=row, use_cache=False).logits, labels).backward()
    return Step(_gradients(model))


def _loss(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum over labels: those of all ranks add up to those of all documents."""
    return functional.cross_entropy(logits[0].double(), shift_labels[0], ignore_index=-100, reduction="sum")


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
        if one.requires_grad
    }
