"""Hybrids, whose layers mix tokens by other means than attention too: a step on ranks has the loss and gradients of
every document alone."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import distca_hf
from distca_hf.analysis.check.trial import gradients_of, loader_of
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.read_documents import DocumentReader
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.integrations.finding import stated_lengths
from distca_hf.planning.plan import PlanFacts
from distca_hf.testing import run_ranks
from support.sweeping import config_class_of


# Model types of `...ForCausalLM`, and of `...ForConditionalGeneration`.
MODEL_TYPES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
)
MULTIMODAL = ("qwen3_5", "qwen3_5_moe")
# Packs of ranks, as numbers of documents from the shortest on. The longest is against all others: unequal work.
PACKS = ([[6, 0, 3, 1, 5, 2, 4]], [[6], [0, 3, 1, 5, 2, 4]], [[6], [3, 5], [0, 1, 4, 2]])


def pack(documents: list[Any]) -> dict[str, Any]:
    """Returns one row of documents as DataCollatorWithFlattening makes it."""
    lengths = [len(document.input_ids) for document in documents]
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return {
        "input_ids": torch.from_numpy(np.concatenate([document.input_ids for document in documents]))[None],
        "labels": torch.from_numpy(np.concatenate([document.labels for document in documents]))[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.from_numpy(numbers).to(torch.int32)[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths)),
    }


def step_on_packs(sweep: ModuleType, config_class: type, kind: Any, packs: list[list[int]]) -> tuple[Any, PlanFacts]:
    """Runs a step on packs that stay; returns its mean over ranks, and facts of the plan."""
    documents = loader_of(LocalTransport()).documents(epoch=0, micro_batch=0)
    documents.sort(key=lambda document: len(document.input_ids))
    labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
    models = [sweep.tiny_model(config_class, kind).build("distca") for _ in packs]

    def step(transport: Transport) -> tuple[Any, PlanFacts]:
        model = models[transport.rank]
        distca_hf.enable(model, distca_hf.DistCAPlugin(), sweep.LONGEST_TOKENS)
        batch = pack([documents[number] for number in packs[transport.rank]])
        plan = GivenPlanner(DistCAConfig(), transport, read=DocumentReader(stated_lengths).read).plan(batch)
        assert plan is not None
        loss = model(**batch, distca_plan=plan, num_items_in_batch=torch.tensor(labels / len(packs))).loss
        loss.backward()
        return sweep.trial.Step(loss.item(), gradients_of(model)), plan.facts

    steps, facts = zip(*run_ranks(len(packs), step, timeout_seconds=30.0), strict=True)
    gradients = torch.stack([step.gradients for step in steps]).mean(0)
    return sweep.trial.Step(sum(step.loss for step in steps) / len(packs), gradients), facts[0]


def check_steps(sweep: ModuleType, kind: Any, model_type: str) -> None:
    """Asserts that steps on packs, and on whole documents that are placed, have the numbers of documents alone."""
    config_class = config_class_of(kind, model_type)
    expected = sweep.step_alone(sweep.tiny_model(config_class, kind).build_plain())
    for packs in PACKS:
        step, facts = step_on_packs(sweep, config_class, kind, packs)

        assert step.difference(expected) <= 1e-5
        assert len(packs) == 1 or sum(facts.query_rows_sent) > 0, "attention tasks move"
    tiny = sweep.tiny_model(config_class, kind)
    for num_ranks in sweep.RANKS:
        assert sweep.trial.step_placed(tiny, num_ranks).difference(expected) <= 1e-5, "whole documents, placed"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    check_steps(sweep, sweep.TEXT, model_type)


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_step_of_a_multimodal_hybrid_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    check_steps(sweep, sweep.IMAGES, model_type)
