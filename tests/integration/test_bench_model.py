"""The benchmark of whole training steps runs on two CPU processes; its heads make the loss of the model's own."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from support.scripts import run_script, small_llama


RANKS, ROUNDS, LONGEST = 2, 2, 256
CONFIG = small_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=9, num_attention_heads=4)


def test_both_modes_train_on_the_same_tokens(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    model = ["--device", "cpu", "--config", str(config), "--layers", "2", "--head", "none"]
    documents = ["--documents", f"{LONGEST},4x64", "--rounds", str(ROUNDS), "--warmup", "1"]
    printed = run_script(RANKS, tmp_path, ["scripts/benchmarks/model_step.py", *model, *documents, "--out", out])
    modes = json.loads(out.read_text())["modes"]

    assert [line.split()[1] for line in printed.splitlines() if line.startswith("| ")] == ["mode", "local", "placed"]
    assert (
        f"{LONGEST} tokens per rank and step; checkpointing saved, FSDP2, gradients summed in float32; head" in printed
    )
    assert modes["placed"]["loss"] == pytest.approx(modes["local"]["loss"], rel=1e-5)
    assert modes["local"]["imbalance"] == pytest.approx(2 / (1 + 4 * 64 * 65 / (LONGEST * (LONGEST + 1))))
    assert modes["placed"]["imbalance"] < 1.01
    assert modes["local"]["exchanged_bytes"] == 0 < modes["placed"]["exchanged_bytes"]
    for mode in modes.values():
        assert len(mode["seconds"]) == ROUNDS
        assert mode["longest_document_tokens"] == LONGEST


def test_local_is_left_out_if_a_document_does_not_fit_a_rank(script: Callable[[str], ModuleType]) -> None:
    modes = script("lib.whole_model")
    assert modes.fitting_modes([256, 64, 64, 64, 64], RANKS) == ["local", "placed"]
    assert modes.fitting_modes([257, 64, 64, 64, 63], RANKS) == ["placed"]


def test_a_head_with_another_loss_is_refused(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = script("lib.whole_model")

    def use_mean(causal_lm: PreTrainedModel) -> None:
        own = causal_lm.loss_function
        causal_lm.loss_function = lambda num_items_in_batch, **batch: own(**batch)

    monkeypatch.setitem(heads.HEADS, "liger", use_mean)
    with pytest.raises(SystemExit, match="--head liger: the loss of 64 tokens is "):
        heads.use_head(_small_model(script), "liger")


def _small_model(script: Callable[[str], ModuleType]) -> nn.Module:
    models = script("lib.model")
    torch.manual_seed(0)
    sizes = {name: value for name, value in CONFIG.items() if name != "model_type"} | {"num_hidden_layers": 2}
    config = LlamaConfig(**sizes, use_cache=False, attn_implementation="distca")
    return models.LossModel(LlamaForCausalLM(config).train())
