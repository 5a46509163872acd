"""Why documents of some models and batches must not share prefixes."""

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PveraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

import distca_hf
from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import Batch
from distca_hf.batches.given import LEARNT
from distca_hf.batches.read_documents import ENTRY, DocumentReader, Reading, ReadingCollator, take_reading
from distca_hf.integrations.models.forward_watch import watch_of
from support.log_lines import KeptLines
from support.models import tiny_model
from support.multimodal import document, multimodal_model
from support.versions import states_travel


def with_adapters(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], lora_dropout=0.25))


def with_noisy_adapters(model: nn.Module) -> nn.Module:
    return get_peft_model(model, PveraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def with_noise(model: nn.Module) -> nn.Module:
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    return model


def with_setting(model: nn.Module) -> nn.Module:
    model.config.router_jitter_noise = 0.5
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model, ""),
        (with_adapters, "lora_dropout.default drops 0.25 of its values at random"),
        (with_noisy_adapters, "a Linear of peft.tuners.pvera.layer adds noise to every token"),
        (with_noise, "embeddings get noise (NEFTune)"),
        (with_setting, "router_jitter_noise=0.5 in the model's config makes rows random"),
    ],
)
def test_random_models_share_nothing_while_they_train(change: Callable[[nn.Module], nn.Module], said: str) -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=20)
    model = distca_hf.enable(change(tiny_model()), plugin).train()
    watch, prompt = watch_of(model), torch.arange(60)
    ids = torch.stack([torch.cat([prompt, torch.tensor([token])]) for token in (70, 71)])

    for _ in range(2):  # hooks of noise are replaced in the first pass
        loss = model(input_ids=ids, labels=ids).loss
        refusal = watch._sharing.refusal({"input_ids": ids}, True, watch._counted.has_noise())
        assert refusal.endswith(said)
        assert bool(refusal) == bool(said)
    assert loss.isfinite()
    assert watch._sharing.refusal({"input_ids": ids}, False, watch._counted.has_noise()) == ""
    assert (watch.planner is None) == bool(said)
    plugin.close()


class OfLanguages(LlamaForCausalLM):
    """Adds something of each row to embeddings of its tokens."""

    def forward(self, input_ids: torch.Tensor, languages_B: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(
            inputs_embeds=self.get_input_embeddings()(input_ids) + languages_B[:, None, None], **kwargs
        )


def hooked(model: nn.Module) -> nn.Module:
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: None)
    return model


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (hooked, {}, f"a hook of {__name__} on a LlamaDecoderLayer may compute something of each row"),
        (
            lambda model: OfLanguages(model.config),
            {"languages_B": torch.tensor([0.0, 1.0])},
            f"forward of OfLanguages, of {__name__}, may change tokens before layers see them",
        ),
    ],
)
def test_unknown_functions_see_every_row(
    change: Callable[[nn.Module], nn.Module], given: dict[str, torch.Tensor], said: str
) -> None:
    ids = torch.arange(60).expand(2, -1) + torch.tensor([[0], [1]]) * (torch.arange(60) == 59)
    losses = {}
    for tokens in (0, 20):
        torch.manual_seed(0)
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=tokens)
        model = distca_hf.enable(change(tiny_model()), plugin).train()
        watch = watch_of(model)
        losses[tokens] = model(input_ids=ids, labels=ids, **given).loss.item()
        assert watch.planner is None
        if tokens:
            assert watch._sharing.refusal({"input_ids": ids}, False, False) == said
        plugin.close()
    assert losses[20] == losses[0]


def test_dropout_that_was_added_later_is_seen() -> None:
    plugin = distca_hf.DistCAPlugin()
    model = distca_hf.enable(tiny_model(), plugin).train()
    refusal, batch = watch_of(model)._sharing.refusal, {"input_ids": torch.ones(2, 5)}
    for _ in range(4):
        assert refusal(batch, True, False) == ""
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], lora_dropout=0.25), model)
    assert refusal(batch, True, False).endswith("lora_dropout.default drops 0.25 of its values at random")
    plugin.close()


@pytest.mark.parametrize("change", ["cache", "empty row", "hole", "positions that count padding"])
def test_one_rank_trains_on_batches_that_ranks_cannot_place(change: str) -> None:
    ids = torch.arange(60).expand(2, -1).contiguous()
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    kind = "llama"
    if change == "cache":
        batch |= {"use_cache": True}
    elif change == "positions that count padding":
        kind = "llama4"
        batch["input_ids"][1] = ids[1].roll(1)
        batch["attention_mask"][1, 0], batch["labels"][1, :2] = 0, -100
    else:
        batch["attention_mask"][1, slice(0, 60) if change == "empty row" else slice(20, 25)] = 0
        batch["labels"][1] = -100
    losses = []
    for tokens in (0, 20):
        torch.manual_seed(0)
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=tokens)
        model = distca_hf.enable(tiny_model(kind), plugin).train()
        losses.append(model(**batch).loss.item())
        plugin.close()
    assert losses[1] == losses[0]


def as_installed(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel as Transformers does: it gets the keywords that it knows."""

    def call(*args: Any, **keywords: Any) -> Any:
        known = inspect.signature(implementation).parameters
        return implementation(*args, **{name: value for name, value in keywords.items() if name in known})

    return call


@states_travel
@pytest.mark.parametrize("takes_states", [True, False])
def test_one_rank_shares_nothing_if_a_kernel_takes_no_states(
    takes_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(60).expand(2, -1) + torch.tensor([[0], [1]]) * (torch.arange(60) == 59)
    names = vars(sys.modules[type(tiny_model("qwen3_5")).__module__])
    rule, losses = names["torch_chunk_gated_delta_rule"], []

    def with_states(
        query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any, output_final_state: Any
    ) -> Any:
        return rule(query, key, value, g, beta, 64, initial_state, output_final_state, True)

    def without_states(query: Any, key: Any, value: Any, g: Any, beta: Any) -> Any:
        return rule(query, key, value, g, beta, 64, None, False, True)

    for tokens in (20, 0):
        torch.manual_seed(0)
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=tokens)
        model = distca_hf.enable(tiny_model("qwen3_5"), plugin).train()
        monkeypatch.setitem(
            names, "torch_chunk_gated_delta_rule", as_installed(with_states if takes_states else without_states)
        )
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        losses.append(model(**batch, use_cache=False).loss.item())
        assert (watch_of(model).planner is not None) == (takes_states and tokens > 0)
        plugin.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if takes_states else 0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("labels", torch.ones(2, 5), ""),
        ("position_ids", torch.ones(2, 5), ""),
        ("weights", torch.ones(2), ""),
        ("kinds", torch.ones(2, 5), "the batch has kinds, which may differ for equal tokens"),
        ("inputs", torch.ones(2, 5, 8), "the batch has inputs, which may differ for equal tokens"),
    ],
)
def test_further_columns_of_tokens_are_not_shared(name: str, value: torch.Tensor, said: str) -> None:
    plugin = distca_hf.DistCAPlugin()
    watch = watch_of(distca_hf.enable(tiny_model(), plugin))
    assert watch._sharing.refusal({"input_ids": torch.ones(2, 5), name: value}, True, False) == said
    plugin.close()


def test_one_rank_reads_ahead_and_plans_ahead_once_prefixes_were_shared() -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=20)
    model = distca_hf.enable(tiny_model(), plugin).train()
    watch = watch_of(model)
    batches: list[dict[str, Any]] = [{"input_ids": torch.arange(60).expand(2, -1) + at} for at in range(3)]
    collated = [ReadingCollator(lambda batch: {**batch}, watch.reader)(batch) for batch in batches]
    readings = [take_reading(batch) for batch in collated]
    planned_ahead = []
    for at, batch in enumerate(collated):
        following = readings[at + 1 : at + 2]
        watch.begin_step(following, 1, torch.device("cpu"))
        step = watch.planner and watch.planner._step
        planned_ahead.append(step is not None and readings[at].documents in step._planned)
        model(**batch).logits.sum().backward()
        assert all("documents" in vars(reading) for reading in following)
    assert planned_ahead == [False, False, True]
    plugin.close()


def test_one_rank_reads_nothing_ahead_while_it_may_not_share() -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=20)
    model = distca_hf.enable(with_adapters(tiny_model()), plugin).train()
    watch = watch_of(model)
    for is_training in (True, False):
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.train(is_training)
        collated = ReadingCollator(lambda batch: {**batch}, watch.reader)(
            {"input_ids": torch.arange(60).expand(2, -1)}
        )
        following = take_reading(collated)
        watch.begin_step([following], 1, torch.device("cpu"))
        model(input_ids=torch.arange(60).expand(2, -1) + 1).logits.sum().backward()
        assert ("documents" in vars(following)) != is_training
    plugin.close()


@pytest.mark.parametrize(
    ("change", "given", "returning", "said"),
    [
        (lambda model: model, {}, Returning.STATES, ""),
        (with_adapters, {}, Returning.STATES, "lora_dropout.default drops 0.25 of its values at random"),
        (hooked, {}, Returning.STATES, f"a hook of {__name__} on a LlamaDecoderLayer may compute something"),
        (lambda model: model, {"use_cache": True}, Returning.STATES, "use_cache=True keeps keys of every row"),
        (lambda model: model, {}, Returning.LOSS, LEARNT),
        (
            lambda model: model,
            {"answer": 500},
            Returning.STATES,
            "10% of a batch's tokens, and this saves 4.5%",
        ),
    ],
)
@pytest.mark.parametrize("is_read", [True, False])
def test_one_rank_says_once_why_documents_that_begin_alike_share_nothing(
    change: Callable[[nn.Module], nn.Module],
    given: dict[str, Any],
    returning: Returning,
    said: str,
    is_read: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=50)
    watch = watch_of(distca_hf.enable(change(tiny_model()), plugin).train())
    ids = torch.arange(60 + given.get("answer", 1)).remainder(90).repeat(2, 1)
    ids[1, 60:] += 1
    logging.getLogger("distca_hf").addHandler(kept := KeptLines())
    reads, read = list[int](), DocumentReader.read
    monkeypatch.setattr(DocumentReader, "read", lambda *of: reads.append(1) or read(*of))  # type: ignore[func-returns-value]

    for _ in range(4):
        batch = {"input_ids": ids.clone(), "labels": ids.clone()}
        batch[ENTRY] = Reading(watch.reader, batch)
        reading = take_reading(batch) if is_read else batch.pop(ENTRY)
        found = watch._sharing.found_on_one_rank(batch | given, watch.reader, False, returning)
        assert (found is None) == bool(said)
        del reading
    logging.getLogger("distca_hf").removeHandler(kept)

    is_refused = bool(said) and returning is Returning.STATES and "answer" not in given
    lines = [line for line in kept.lines if "begin alike" in line]
    assert [said in line for line in lines] == [True] * (bool(said) and (is_read or not is_refused))
    if is_refused:
        assert len(reads) == is_read, "reading what is on a device would wait for it"
    plugin.close()


def with_dropout_of_a_tower(model: nn.Module) -> nn.Module:
    model.model.visual.config.attention_dropout = 0.5
    return model


def with_batch_norm(model: nn.Module) -> nn.Module:
    model.model.visual.norm = nn.BatchNorm1d(4)
    return model


def with_own_features(model: nn.Module) -> nn.Module:
    def get_image_features(*args: Any, **kwargs: Any) -> Any:
        return type(model.model).get_image_features(model.model, *args, **kwargs)

    model.model.get_image_features = get_image_features
    return model


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (lambda model: model, {}, ""),
        (with_dropout_of_a_tower, {}, "attention_dropout=0.5 in the model's config makes rows random"),
        (with_batch_norm, {}, "a BatchNorm1d computes from all rows or images of the batch"),
        (with_own_features, {}, f"get_image_features of Qwen2_5_VLModel, of {__name__}, may change tokens before"),
        (lambda model: model, {"rows": torch.ones(2)}, "the batch has rows, and it is not known to which tokens"),
        (lambda model: model, {"num_crops": torch.ones(1)}, "the batch has num_crops, and it is not known to which"),
        (lambda model: model, {"num_items_in_batch": torch.ones(1), "weight": torch.tensor(1.0), "flag": True}, ""),
        (lambda model: model, {"mm_encoder_outputs": {"image": 1}}, "the batch has mm_encoder_outputs, and it is not"),
        (lambda model: model, {"pixel_values": torch.ones(16, 1176).requires_grad_()}, "pixel_values needs gradients"),
        (lambda model: model, {"second_per_grid_ts": [1.0, 1.0]}, "the batch has second_per_grid_ts, and it is not"),
    ],
)
def test_images_are_not_shared_if_towers_or_batches_may_tell_them_apart(
    change: Callable[[nn.Module], nn.Module], given: Batch, said: str
) -> None:
    plugin = distca_hf.DistCAPlugin()
    model = distca_hf.enable(change(multimodal_model("qwen2_5_vl")), plugin, longest_document_tokens=64)
    batch = document(0, 12, image_at=3) | {"use_cache": False, "labels": torch.ones(1, 12)} | given
    refusal = watch_of(model)._sharing.refusal

    assert refusal(batch, True, False).startswith(said)
    assert bool(refusal(batch, True, False)) == bool(said)
    if given == {} and "of Qwen" not in said:  # it computes the same in evaluation, and if the tower is frozen
        assert refusal(batch, False, False) == ""
        model.model.visual.eval()
        assert refusal(batch, True, False) == ""
    plugin.close()


def test_one_rank_shares_images_that_are_equal() -> None:
    """A row of the batch has the same text as another one, and the same image, another one, or part of one."""
    one, other = document(0, 60, image_at=3), document(1, 60, image_at=3)
    for image, saves in (
        (one["pixel_values"], True),
        (other["pixel_values"], False),
        (one["pixel_values"][:-1], None),
    ):
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=20)
        model = distca_hf.enable(multimodal_model("qwen2_5_vl"), plugin, longest_document_tokens=64)
        batch = {name: torch.cat([value, value]) for name, value in one.items()}
        batch["pixel_values"] = torch.cat([one["pixel_values"], image])
        if saves is None:
            with pytest.raises(RuntimeError):  # of Transformers
                model(**batch)
        else:
            model(**batch).logits.sum().backward()
        assert (watch_of(model).planner is not None) == bool(saves)
        plugin.close()
