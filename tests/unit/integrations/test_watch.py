"""Models that are enabled again, copied, wrapped, or leave distca after they were enabled."""

import copy
import gc
import io
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import distca_hf
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.structure import attention_layers
from support.data import random_dataset
from support.models import VOCABULARY, tiny_model


def plugin_of(**settings: Any) -> distca_hf.DistCAPlugin:
    return distca_hf.DistCAPlugin(**{"tokens_per_rank": 192} | settings)


def batch_of(plugin: distca_hf.DistCAPlugin, **dataset: Any) -> dict[str, Any]:
    return next(iter(plugin.dataloader(random_dataset(20, **dataset))))


def num_hooks(model: torch.nn.Module) -> tuple[int, int]:
    return len(model._forward_pre_hooks), len(model._forward_hooks)


# --- enabled again


def test_model_enabled_again_follows_the_new_plugin_alone() -> None:
    model, first, second = tiny_model(), plugin_of(), plugin_of()
    for plugin in (first, first, second, second):
        assert distca_hf.enable(model, plugin) is model

    assert watch_of(model).context is second
    assert num_hooks(model) == (1, 1)
    batch = batch_of(second)
    assert torch.isfinite(model(**batch).loss)
    assert batch["distca_plan"].forward_pass.calls == 3


def test_model_enabled_again_with_the_same_plugin_may_have_other_windows(caplog: pytest.LogCaptureFixture) -> None:
    model, plugin = tiny_model("gemma3"), plugin_of()
    distca_hf.enable(model, plugin)
    model(**batch_of(plugin))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 8
    with pytest.raises(PlanError, match="cannot change after the first pass: enable the model again"):
        model(**batch_of(plugin))

    distca_hf.enable(model, plugin)
    assert torch.isfinite(model(**batch_of(plugin)).loss)
    assert not [record for record in caplog.records if "when the model was enabled" in record.getMessage()]
    masks = [mask for mask, _ in watch_of(model)._layer_masks]
    assert [mask.window_tokens for mask in masks] == [None, 8], "packs and metrics count windows as they are now"


def test_windows_that_placement_did_not_know_are_told_after_the_first_pass(caplog: pytest.LogCaptureFixture) -> None:
    model, plugin = tiny_model("gemma3"), plugin_of()
    distca_hf.enable(model, plugin)
    name, layer = next(iter(attention_layers(model).items()))
    layer.sliding_window = 8
    for _, batch in zip(range(2), plugin.dataloader(random_dataset(20)), strict=False):
        model(**batch)

    told = [record.getMessage() for record in caplog.records if "when the model was enabled" in record.getMessage()]
    assert len(told) == 1
    assert (
        f"{name} attends with a window of 8 tokens, and had a window of 16 tokens when the model was enabled; 1 of 3"
        in told[0]
    )


def test_adapters_take_the_watch_over() -> None:
    from peft import LoraConfig, get_peft_model

    plugin, inner = plugin_of(), tiny_model()
    distca_hf.enable(inner, plugin)
    model = get_peft_model(inner, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    distca_hf.enable(model, plugin)

    assert num_hooks(inner) == (0, 0)
    assert num_hooks(model) == (1, 1)
    assert watch_of(inner) is watch_of(model)
    batch = batch_of(plugin)
    model(**batch).loss.backward()
    assert batch["distca_plan"].forward_pass.backward_calls == 3


def test_batches_of_another_plugin_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = distca_hf.enable(tiny_model(), plugin_of())
    other = plugin_of(kv_residency="refetch")
    for _, batch in zip(range(2), other.dataloader(random_dataset(20)), strict=False):
        model(**batch)

    told = [record for record in caplog.records if "was enabled with another" in record.getMessage()]
    assert len(told) == 1
    assert "kv_residency" in told[0].getMessage()


# --- copies


def test_copy_of_an_enabled_model_evaluates_and_does_not_train() -> None:
    plugin = plugin_of()
    model = distca_hf.enable(tiny_model(), plugin)
    twin = copy.deepcopy(model)
    ids = torch.arange(3, 20)[None]

    assert torch.equal(twin.eval()(ids).logits, model.eval()(ids).logits)
    with pytest.raises(PlanError, match=r"copy of a model that was enabled; call distca_hf.enable\(copy"):
        twin.train()(**batch_of(plugin))


def test_enabled_copy_trains_beside_the_original() -> None:
    plugin = plugin_of()
    model = distca_hf.enable(tiny_model(), plugin)
    twin = distca_hf.enable(copy.deepcopy(model), plugin)

    assert watch_of(twin) is not watch_of(model)
    assert num_hooks(twin) == num_hooks(model) == (1, 1)
    batch = batch_of(plugin)
    assert torch.equal(twin(**batch).loss, model(**batch).loss)


# --- leaving distca


def _train_once(model: torch.nn.Module, plugin: distca_hf.DistCAPlugin) -> None:
    model(**batch_of(plugin)).loss.backward()


def test_model_that_is_switched_to_another_implementation_does_not_train() -> None:
    plugin = plugin_of()
    model = distca_hf.enable(tiny_model(), plugin).train()
    _train_once(model, plugin)
    model.set_attn_implementation("sdpa")
    with pytest.raises(PlanError, match="its config now says attn_implementation='sdpa'"):
        _train_once(model, plugin)

    model.set_attn_implementation("distca")
    _train_once(model, plugin)


def _train_on_a_pack(model: torch.nn.Module) -> None:
    ids = torch.arange(3, 23)[None]
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    model(input_ids=ids, position_ids=positions, labels=ids.clone()).loss.backward()


def test_packs_of_one_rank_do_not_train_on_another_implementation() -> None:
    """Sdpa with a cache, as models have it by default, lets documents of a pack see each other."""
    model = distca_hf.enable(tiny_model(), plugin_of()).train()
    _train_on_a_pack(model)
    AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")
    with pytest.raises(PlanError, match=r"documents of a packed row could see each other.*deepcopy\(model\.config\)"):
        _train_on_a_pack(model)

    model.set_attn_implementation("distca")
    _train_on_a_pack(model)


def test_switched_model_evaluates_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = distca_hf.enable(tiny_model(), plugin_of()).eval()
    model.set_attn_implementation("sdpa")
    for _ in range(2):
        assert torch.isfinite(model(torch.arange(3, 20)[None]).logits).all()

    warned = [record for record in caplog.records if "its config now says" in record.getMessage()]
    assert [record.levelname for record in warned] == ["WARNING"]


def test_layer_that_attends_otherwise_later_is_noticed_in_that_pass() -> None:
    plugin = plugin_of()
    model = distca_hf.enable(tiny_model(), plugin).train()
    _train_once(model, plugin)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, *given, **keywords: (hidden_states, None)
    with pytest.raises(PlanError, match="2 attention calls of LlamaForCausalLM came through distca, and 3 did"):
        _train_once(model, plugin)


# --- parts of a model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_model_inside_is_not_called_with_a_plan(adapters: bool, checkpointing: bool) -> None:
    """Neither before the enabled model nor after it; backward may compute layers again."""
    from peft import LoraConfig, get_peft_model

    plugin, inner = plugin_of(checkpointed_attention="recompute"), tiny_model()
    model = get_peft_model(inner, LoraConfig(target_modules=["q_proj"])) if adapters else inner
    distca_hf.enable(model, plugin).train()
    if checkpointing:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    batch, backbone = batch_of(plugin), inner.model
    parts = [backbone, inner.forward, *([inner] if adapters else [])]
    for when in ("before", "behind"):
        for part in parts:
            with pytest.raises(PlanError, match=r"rank 0, micro-batch 0: .* call the model that was enabled"):
                part(**batch)
        if when == "before":
            model(**batch).loss.backward()


@pytest.mark.parametrize(
    ("column", "words"),
    [("position_ids", "has no position_ids"), ("shift_labels", "has labels, but no shift_labels")],
)
def test_columns_that_the_model_would_make_itself_are_refused(column: str, words: str) -> None:
    """It would count positions from the first token of the rank, where a document that was cut goes on, and shift
    labels across cuts. In a batch whose tensors are the loader's they are found again."""
    plugin = plugin_of()
    model, batch = distca_hf.enable(tiny_model(), plugin), batch_of(plugin)
    loss = model(**batch).loss.item()
    del batch[column]
    assert model(**batch).loss.item() == loss
    batch = {name: value if name == "distca_plan" else value.clone() for name, value in batch.items()}
    with pytest.raises(PlanError, match=f"micro-batch 0: a placed batch {words}"):
        model(**batch)


def test_placed_batch_without_labels_has_no_loss() -> None:
    plugin = plugin_of()
    model, batch = distca_hf.enable(tiny_model(), plugin), batch_of(plugin)
    del batch["shift_labels"], batch["labels"]

    assert model(**batch).loss is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copied_batch_brings_its_plan_and_cannot_be_stored(copied: Any) -> None:
    plugin = plugin_of()
    model, batch = distca_hf.enable(tiny_model(), plugin), batch_of(plugin)
    twin = {name: copied(value) for name, value in batch.items()}

    assert torch.equal(model(**twin).loss, model(**batch).loss)
    with pytest.raises(PlanError, match="can neither be stored nor sent to another process"):
        pickle.dumps(batch)


def _trained() -> weakref.ref[torch.nn.Module]:
    plugin = plugin_of()
    model = distca_hf.enable(tiny_model(), plugin)
    for _, batch in zip(range(3), plugin.dataloader(random_dataset(20)), strict=False):
        model(**batch).loss.backward()
    return weakref.ref(model)


def test_model_is_let_go_after_training() -> None:
    """The newest plans are kept, and on one rank nobody asks for what ranks show each other."""
    held = _trained()

    gc.collect()
    assert held() is None


# --- positions


def test_document_longer_than_a_table_of_positions_is_refused() -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_head=2, n_layer=1, n_positions=64)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    plugin = plugin_of()
    model = distca_hf.enable(AutoModelForCausalLM.from_config(config, attn_implementation="distca"), plugin)
    model(**batch_of(plugin, lengths=(60, 64)))
    with pytest.raises(UnsupportedAttentionError, match="has 65 tokens, and the model's table of position embeddings"):
        model(**batch_of(plugin, lengths=(65,)))


def test_document_longer_than_the_model_was_made_for_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "distca_hf")
    plugin = plugin_of()
    model = distca_hf.enable(tiny_model(max_position_embeddings=64), plugin)
    for lengths in ((60,), (65,), (150,)):
        model(**batch_of(plugin, lengths=lengths))

    told = [record.getMessage() for record in caplog.records if "max_position_embeddings" in record.getMessage()]
    assert len(told) == 1
    assert "has 65 tokens, and the model was made for 64" in told[0]


# --- stored


@pytest.mark.parametrize("checkpointed_attention", ["", "save", "offload", "recompute"])
def test_stored_model_comes_back_as_one_that_was_never_enabled(checkpointed_attention: str) -> None:
    """A whole model is stored by torch.save, MLflow and programs that send it to other processes."""
    plugin = plugin_of(**{"checkpointed_attention": checkpointed_attention} if checkpointed_attention else {})
    model = distca_hf.enable(tiny_model(), plugin).train()
    if checkpointed_attention:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # a hook that cannot be stored
    batch = batch_of(plugin)
    loss = model(**batch).loss
    loss.backward()
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    twin = torch.load(stored, weights_only=False)

    assert watch_of(twin) is None
    assert watch_of(model) is not None
    with pytest.raises(PlanError, match="in a model that was not enabled"):
        twin(**batch)
    assert torch.equal(distca_hf.enable(twin, plugin)(**batch_of(plugin)).loss, loss)
