"""Hybrids, whose layers mix tokens by other means than attention too: a step on ranks has the loss and gradients of
every document alone. Documents are cut, unless a state cannot travel."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import distca_hf
from distca_hf.analysis.check.trial import Step, documents_dataset, gradients_of, loader_of, planner_of
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.testing import run_ranks
from support.sweeping import config_class_of
from support.thorough import is_thorough
from support.versions import states_travel


# Model types of `...ForCausalLM`, and of `...ForConditionalGeneration`.
MODEL_TYPES = ("bailing_hybrid", "bamba", "jamba", "lfm2", "minimax", "qwen3_next", "recurrent_gemma")
MULTIMODAL = ("qwen3_5_moe",)
if is_thorough():  # families whose steps on cut documents are tested in float64 elsewhere
    MODEL_TYPES += ("falcon_h1", "granitemoehybrid", "kimi_linear", "nemotron_h", "olmo_hybrid", "zamba2")
    MULTIMODAL += ("qwen3_5",)
# Those whose states cannot travel.
WHOLE = ("minimax", "recurrent_gemma")
# Packs of ranks, as numbers of documents from the shortest on. The longest is against all others: unequal work.
PACKS = ([[6, 0, 3, 1, 5, 2, 4]], [[6], [3, 5], [0, 1, 4, 2]])


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


def step_on_pack(model: Any, packs: list[list[int]], transport: Transport, longest_tokens: int) -> Any:
    """Runs a step of a rank on its own pack; returns it, and facts of the plan unless there is one rank."""
    documents = loader_of(LocalTransport()).documents(epoch=0, micro_batch=0)
    documents.sort(key=lambda document: len(document.input_ids))
    labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
    plugin = distca_hf.DistCAPlugin()
    plugin.use_grid(transport.grid)
    plugin.training_transport = lambda device: transport  # type: ignore[method-assign]
    distca_hf.enable(model, plugin, longest_tokens)
    batch = pack([documents[number] for number in packs[transport.rank]])
    loss = model(**batch, num_items_in_batch=torch.tensor(labels / len(packs)), use_cache=False).loss
    loss.backward()
    planner = watch_of(model).planner
    return Step(loss.item(), gradients_of(model)), None if planner is None else planner.history[-1]


def check_steps(sweep: ModuleType, kind_name: str, model_type: str) -> None:
    """Asserts that steps on packs, and on documents that are placed, have the numbers of documents alone."""
    kind, is_whole = sweep.KINDS[kind_name], model_type in WHOLE
    tiny = sweep.tiny_model(config_class_of(kind, model_type), kind)
    expected = sweep.step_alone(tiny.build_plain())
    for packs in PACKS:
        models, longest_tokens = [tiny.build("distca") for _ in packs], sweep.LONGEST_TOKENS
        if len(packs) == 1:
            step, _ = step_on_pack(models[0], packs, LocalTransport(), longest_tokens)
        else:

            def run(
                transport: Transport, models: Any = models, packs: Any = packs, longest: int = longest_tokens
            ) -> Any:
                return step_on_pack(models[transport.rank], packs, transport, longest)

            num_ranks = len(packs)
            steps, (facts, *_) = zip(*run_ranks(num_ranks, run), strict=True)
            gradients = torch.stack([of_rank.gradients for of_rank in steps]).mean(0)
            step = Step(sum(of_rank.loss for of_rank in steps) / num_ranks, gradients)
            assert (facts.cut_documents > 0) is not is_whole
            assert (facts.tokens == facts.tokens_before) is is_whole, "rows are placed inside the model, or stay"
        assert step.difference(expected) <= 1e-5

    lengths = np.array([len(ids) for ids in documents_dataset()["input_ids"]])
    (num_ranks,) = sweep.RANKS
    layout = planner_of(tiny.build("distca"), num_ranks).layout(lengths)
    assert (layout.cut_documents > 0) is not is_whole
    assert sweep.trial.step_placed(tiny, num_ranks).difference(expected) <= 1e-5, "placed"


@states_travel
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    check_steps(sweep, "text", model_type)


@states_travel
@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_step_of_a_multimodal_hybrid_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    check_steps(sweep, "images", model_type)
