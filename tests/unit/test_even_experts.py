"""Experts that tokens choose: in benchmarks of models with experts all modes have the same work of experts."""

import importlib
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from support.commands import REPOSITORY


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module("lib.divided")


def test_a_token_has_the_same_experts_anywhere_and_all_experts_as_many_tokens(program: ModuleType) -> None:
    config = Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=8, num_experts=8, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config)
    program.EvenExperts(model)
    seen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith(program.ROUTER)]
    for router in routers:
        router.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[2]))
    ids = torch.randperm(64)
    model(input_ids=ids[None])
    model(input_ids=ids.flip(0)[None])
    first, second, first_turned, second_turned = seen

    assert len(routers) == 2
    torch.testing.assert_close(first.flip(0), first_turned)
    torch.testing.assert_close(second.flip(0), second_turned)
    for experts in (first, second):
        assert all(len(set(of_token)) == 2 for of_token in experts.tolist())
        assert torch.bincount(experts.flatten(), minlength=8).tolist() == [16] * 8
    assert not torch.equal(first, second)


def test_a_model_without_experts_is_refused(program: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--even-experts: LlamaForCausalLM has no router of experts"):
        program.EvenExperts(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
