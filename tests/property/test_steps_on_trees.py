"""A training step on trees of documents, drawn by hypothesis: models of several kinds, on ranks that are threads, have
the losses and gradients of every row alone."""

import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

import distca_hf
from distca_hf.comm.groups import Members
from distca_hf.comm.transport import Transport
from distca_hf.integrations.models import sharing
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.parallel_context import ParallelContext
from distca_hf.planning import folds
from distca_hf.testing import run_ranks
from support.given_batches import Gradients, gradients_of, in_double, own_loss
from support.models import VOCABULARY, plain_attention, tiny_config
from support.rows_of_documents import Batch, packed, padded, prefixes_in_steps_of, words
from support.thorough import is_thorough
from support.versions import states_travel
from support.wide_models import FAMILIES, wide_model


LEAST_TOKENS, BLOCK_TOKENS, MOST_DEPTH = 4, 3, 3
HANG_SECONDS = 60.0


@dataclass
class Step:
    """A model, and batches of ranks.

    Attributes:
        window_tokens: of layers with a window, or with chunks.
        documents: of each rank.
        learnt_from: first token of each rank's documents that is a label.
        packs: whether each rank packs its documents; otherwise it pads them.
        reentrant: kind of activation checkpointing; None without.
        divides_heads: whether ranks divide the heads of states, whatever that costs.
    """

    kind: str
    kv_heads: int
    window_tokens: int
    documents: list[list[torch.Tensor]]
    learnt_from: list[int]
    packs: list[bool]
    reentrant: bool | None
    divides_heads: bool

    def model(self, implementation: str) -> PreTrainedModel:
        """Returns the model in float64; its weights are equal every time."""
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_key_value_heads": self.kv_heads}
        if self.kind in FAMILIES:
            return wide_model(self.kind, implementation, **sizes)
        if self.kind in ("gemma3", "gpt_oss"):
            sizes["sliding_window"] = self.window_tokens
        experts = {"experts_implementation": "eager"} if self.kind == "gpt_oss" else {}
        config = tiny_config(
            self.kind, num_hidden_layers=2, hidden_size=32, head_dim=8, initializer_range=0.2, **sizes
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, **experts)
        return model.to(torch.float64).train()

    def batch(self, rank: int) -> Batch:
        """Returns the batch of a rank."""
        return (packed if self.packs[rank] else padded)(self.documents[rank], learnt_from=self.learnt_from[rank])

    def any_begin_alike(self) -> bool:
        """Returns whether two documents may share a prefix: each has further tokens."""
        documents = [document.tolist() for of_rank in self.documents for document in of_rank]
        begin = [tuple(one[:LEAST_TOKENS]) for one in documents if len(one) > LEAST_TOKENS]
        return len(set(begin)) < len(begin)


@st.composite
def trees(draw: st.DrawFn) -> list[torch.Tensor]:
    """Documents, most of which branch off from another one, up to three times."""
    rows, depth = [words(draw(st.integers(8, 60)), 0)], [0]
    for row in range(1, draw(st.integers(2, 9))):
        parent = draw(st.sampled_from([other for other in range(row) if depth[other] < MOST_DEPTH]))
        shared = draw(st.integers(0, len(rows[parent])))
        own = draw(st.integers(0 if shared > 1 else 2, 30))
        rows.append(torch.cat([rows[parent][:shared], words(own, row)]))
        depth.append(depth[parent] + 1 if shared else 0)
    return draw(st.permutations(rows))


@st.composite
def steps(draw: st.DrawFn, kind: str) -> Step:
    """Steps of a kind of model on one to four ranks."""
    ranks = draw(st.sampled_from([2, 3, 4, 1]))
    rows, documents = draw(trees()), list[list[torch.Tensor]]()
    for rank in range(ranks):
        taken = draw(st.integers(0, len(rows))) if rank < ranks - 1 else len(rows)
        documents.append(rows[:taken] or [words(2, 100 + rank)])
        rows = rows[taken:]
    learnt_from = [draw(st.integers(1, max(map(len, of_rank)) - 1)) for of_rank in documents]
    return Step(
        kind,
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(2, 40)),
        documents,
        learnt_from,
        [draw(st.booleans()) for _ in range(ranks)],
        draw(st.sampled_from([None, False, True])),
        draw(st.booleans()),
    )


class OneOfSeveral(ParallelContext):
    """The context of a rank that is a thread."""

    given_transport: Transport

    @property
    def members(self) -> Members:
        grid = self.given_transport.grid
        return Members(grid.ranks, grid)

    def transport(self, device: torch.device) -> Transport:
        return self.given_transport


def on_ranks(step: Step) -> tuple[list[float], Gradients, int]:
    """Returns the loss of each rank, gradients summed over ranks, and shared tokens."""
    models = [step.model("distca") for _ in step.documents]
    if step.reentrant is not None:
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": step.reentrant})

    def run(transport: Transport) -> tuple[float, Gradients, int]:
        context = OneOfSeveral(shared_prefix_tokens=LEAST_TOKENS, ranks_per_node=len(models))
        context.given_transport = transport
        model = distca_hf.enable(models[transport.rank], context)
        loss = own_loss(model, step.batch(transport.rank))
        loss.backward()
        planner = watch_of(model).planner
        return loss.item(), gradients_of(model), planner.totals.shared_tokens if planner else 0

    losses, gradients, shared = zip(*run_ranks(len(models), run, HANG_SECONDS), strict=True)
    return list(losses), {name: sum(one[name] for one in gradients) for name in gradients[0]}, shared[0]


def alone(step: Step) -> tuple[list[float], Gradients]:
    """Returns the same of rows that are computed one by one."""
    model, losses = step.model(FAMILIES[step.kind].plain if step.kind in FAMILIES else plain_attention(step.kind)), []
    for of_rank, learnt_from in zip(step.documents, step.learnt_from, strict=True):
        labels = [document[learnt_from:] for document in of_rank]
        total = 0.0
        for row, learnt in zip(of_rank, labels, strict=True):
            logits = model(input_ids=row[None], use_cache=False).logits[0]
            of_row = functional.cross_entropy(logits[learnt_from - 1 : len(row) - 1], learnt, reduction="sum")
            loss = of_row / sum(map(len, labels))
            loss.backward()
            total += loss.item()
        losses.append(total)
    return losses, gradients_of(model)


def check(step: Step) -> None:
    with (
        in_double(),
        prefixes_in_steps_of(BLOCK_TOKENS),
        patch.object(sharing, "LEAST_SAVED", 0.0),
        patch.object(folds, "LEAST_SAVED_BYTES", -math.inf if step.divides_heads else folds.LEAST_SAVED_BYTES),
    ):
        losses, gradients, shared = on_ranks(step)
        expected_losses, expected = alone(step)
    assert (shared > 0) == step.any_begin_alike()
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-12 * max(gradient.abs().max().item(), 1e-6 * largest), name


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
@settings(max_examples=40 if is_thorough() else 5)
@given(data=st.data())
def test_gradients_are_those_of_every_row_alone(kind: str, data: st.DataObject) -> None:
    check(data.draw(steps(kind)))


@states_travel
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5"])
@settings(max_examples=40 if is_thorough() else 3)
@given(data=st.data())
def test_states_are_those_of_every_row_alone(kind: str, data: st.DataObject) -> None:
    check(data.draw(steps(kind)))
