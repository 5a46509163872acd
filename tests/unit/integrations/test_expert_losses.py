"""Mixtures of experts: rows of padding count in no load-balancing loss."""

import itertools
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import distca_hf
from distca_hf.batches.read_documents import fill_empty
from support.data import random_documents
from support.models import SIZES


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DOCUMENTS = random_documents(3, lengths=(30, 41, 29))
DATASET = Dataset.from_dict({"input_ids": DOCUMENTS})


def expert_model(attention: str = "distca") -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, initializer_range=0.2, output_router_logits=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    return model.double().train()


def router_gradient(model: Any, aux_loss: torch.Tensor) -> torch.Tensor:
    aux_loss.backward()
    return torch.cat([p.grad.flatten() for name, p in model.named_parameters() if "gate.weight" in name])


@pytest.mark.parametrize("multiple", [1, 128, 512])
def test_padding_of_placed_batches_is_not_balanced(multiple: int) -> None:
    expected_model = expert_model("sdpa")
    tokens = torch.tensor([*itertools.chain(*DOCUMENTS)])[None]
    positions = torch.cat([torch.arange(len(row)) for row in DOCUMENTS])[None]
    expected = expected_model(input_ids=tokens, position_ids=positions, use_cache=False).aux_loss

    model, plugin = expert_model(), distca_hf.DistCAPlugin(tokens_per_rank=512, pad_to_multiple_of=multiple)
    distca_hf.enable(model, plugin)
    batch = next(iter(plugin.dataloader(DATASET, shuffle=False)))
    output = model(**batch)

    assert output.logits.shape[1] == -(-tokens.numel() // multiple) * multiple
    torch.testing.assert_close(output.aux_loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        router_gradient(model, output.aux_loss), router_gradient(expected_model, expected), rtol=1e-8, atol=1e-12
    )


def test_rank_without_tokens_has_a_finite_loss() -> None:
    model, plugin = expert_model(), distca_hf.DistCAPlugin(tokens_per_rank=512)
    distca_hf.enable(model, plugin)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    batch = {"input_ids": nothing, "attention_mask": nothing, "labels": nothing}

    assert torch.isfinite(model(**batch | fill_empty(batch)).loss)
