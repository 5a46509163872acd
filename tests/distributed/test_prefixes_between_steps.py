"""What changes between steps that share prefixes: batches, trained parameters, checkpointing, evaluation, one rank's
dropout. Losses and gradients of every step stay those of every row by itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shared_prefixes import GROUP, LEAST_TOKENS, PAIR, Case
from torch import nn
from transformers import PreTrainedModel

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.given_batches import Batch, Gradients, gradients_of, in_double, own_loss
from support.models import plain_attention
from support.ranks import run_ranks
from support.rows_of_documents import packed, padded, words
from support.thorough import is_thorough


WITHOUT = padded([words(40, 9), words(50, 19)])
PAIRS, ANSWERS = padded(PAIR), packed(GROUP)
Change = Callable[[PreTrainedModel], object]


def trained(*parts: str) -> Change:
    """Trains parameters whose names have none of these parts."""

    def change(model: PreTrainedModel) -> None:
        for name, weight in model.named_parameters():
            weight.requires_grad_(not any(part in name for part in parts))

    return change


def evaluate(model: PreTrainedModel) -> None:
    model.eval()
    with torch.no_grad():
        own_loss(model, PAIRS)
    model.train()


def generate(model: PreTrainedModel) -> None:
    model.eval().generate(PAIRS["input_ids"][:, :30], max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.train()


def drop_on_the_second_rank(model: PreTrainedModel) -> None:
    if dist.get_rank() == 1:
        model.get_submodule("model.layers.0.mlp").add_module("later", nn.Dropout(0.5))  # is not called


def nothing(model: PreTrainedModel) -> None:
    pass


# Tokens that are not computed twice, with a prompt of 144. If both ranks have answers to it, two of these begin alike,
# too. If they have the same answers, each of the two is like one of the other rank's.
OF_BOTH, OF_EQUAL = 5 * 144 + 32, 144 + 160 + 176
# Of every step: what changes before it, and the batches of both ranks; then tokens that are not computed twice.
STEPS: Sequence[tuple[Change, Sequence[Batch], int]] = [
    (nothing, (WITHOUT, padded([words(30, 29)])), 0),
    (nothing, (PAIRS, WITHOUT), 144),
    (nothing, (WITHOUT, ANSWERS), 3 * 144),
    (nothing, (padded([words(70, 39)]), WITHOUT), 0),
    (trained("mlp", "sinks"), (PAIRS, ANSWERS), OF_BOTH),
    (trained("embed_tokens"), (ANSWERS, PAIRS), OF_BOTH),
    (trained(), (PAIRS, ANSWERS), OF_BOTH),
    (evaluate, (ANSWERS, PAIRS), OF_BOTH),
    (generate, (PAIRS, PAIRS), OF_EQUAL),
    (lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}), (PAIRS, ANSWERS), OF_BOTH),
    (lambda model: model.gradient_checkpointing_disable(), (ANSWERS, PAIRS), OF_BOTH),
    (drop_on_the_second_rank, (PAIRS, ANSWERS), 144),
]
Step = tuple[float, Gradients, int]


def _steps(kind: str, implementation: str, evaluates: str) -> list[Step]:
    """Loss of this rank, gradients summed over ranks, and tokens that were not computed twice."""
    model, rank, steps = Case([], 0, kind).model(implementation), dist.get_rank(), list[Step]()
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS, evaluate=evaluates)
    if implementation == "distca":
        distca_hf.enable(model, plugin)
    for change, batches, _ in STEPS:
        if implementation == "distca" or change is not drop_on_the_second_rank:
            change(model)
        batch: dict[str, Any] = dict(batches[rank])
        if implementation != "distca" and "attention_mask" not in batch:  # a pack: sdpa knows no documents
            batch = padded(GROUP)
        with in_double():
            loss = own_loss(model, batch)
            loss.backward()
        gradients = gradients_of(model)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        shared = watch_of(model).planner.history[-1].shared_tokens if implementation == "distca" else 0
        steps.append((loss.item(), gradients, shared))
        model.zero_grad()
        with torch.no_grad():
            for name, gradient in gradients.items():
                model.get_parameter(name).sub_(0.01 * gradient)
    plugin.close()
    return steps


@pytest.mark.parametrize(
    ("kind", "evaluates"), [("llama", "distca"), *([("gpt_oss", "local")] if is_thorough() else [])]
)
def test_steps_stay_exact_while_things_change(kind: str, evaluates: str, tmp_path: Path) -> None:
    of_sdpa = run_ranks(2, _steps, tmp_path / "alone", kind, plain_attention(kind), "local")
    for rank, steps in enumerate(run_ranks(2, _steps, tmp_path / "ranks", kind, "distca", evaluates)):
        for number, ((loss, gradients, shared), of_alone, step) in enumerate(
            zip(steps, of_sdpa[rank], STEPS, strict=True)
        ):
            assert shared == step[2], number
            assert loss == pytest.approx(of_alone[0], rel=1e-12), number
            assert gradients.keys() == of_alone[1].keys()
            largest = max(gradient.abs().max().item() for gradient in of_alone[1].values())
            for name, gradient in of_alone[1].items():
                torch.testing.assert_close(
                    gradients[name], gradient, rtol=0, atol=1e-12 * largest, msg=f"{number}: {name}"
                )
