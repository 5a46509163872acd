"""Which models are accepted, that accepted ones compute their own loss, and what an enabled model does with a plan."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import (
    LilyConfig,
    LoraConfig,
    PeftConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    ShadowConfig,
    XLoraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    StableLmConfig,
    T5Config,
)

import distca_hf
from distca_hf import DistCAPlugin
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.models.check import check_model
from distca_hf.testing import run_ranks
from support.data import random_dataset, random_documents
from support.models import VOCABULARY, tiny_model
from support.versions import builds_nemotron


LONGEST_TOKENS = 150
CPU = torch.device("cpu")
PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
GROUPED = PLAIN | {"num_key_value_heads": 2}
HEADS_OF_16 = GROUPED | {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2}
BERT = PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": 0.1}
MLA = {
    **PLAIN,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
}
LINEAR = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
LINEAR |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}


def rotary(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


def long_rotary(original_tokens: int) -> PreTrainedConfig:
    """A model with other rotary frequencies in batches that hold a document longer than this."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + pair for pair in range(8)]}
    return Phi3Config(
        pad_token_id=0,
        original_max_position_embeddings=original_tokens,
        rope_parameters=rotary("longrope", **factors),
        **GROUPED,
    )


YARN = rotary("yarn", factor=4.0, original_max_position_embeddings=64)
DYNAMIC = rotary("dynamic", factor=2.0)

ACCEPTED: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**GROUPED),
    "Qwen2 with a window it does not use": Qwen2Config(use_sliding_window=False, sliding_window=16, **GROUPED),
    "Mistral with a short window": MistralConfig(sliding_window=16, **GROUPED),
    "Qwen2 with a short window in one layer": Qwen2Config(
        use_sliding_window=True, sliding_window=16, layer_types=["full_attention", "sliding_attention"], **GROUPED
    ),
    "Gemma 4, whose layers have heads of their own": Gemma4TextConfig(
        sliding_window=16, vocab_size_per_layer_input=VOCABULARY, **HEADS_OF_16
    ),
    "Gemma 3 with short windows": Gemma3TextConfig(
        sliding_window=64, layer_types=["full_attention", "sliding_attention"], **HEADS_OF_16
    ),
    "Qwen3": Qwen3Config(**HEADS_OF_16),
    "Qwen3 MoE": Qwen3MoeConfig(num_experts=4, moe_intermediate_size=32, **EXPERTS, **HEADS_OF_16),
    "Mistral with a window as long as documents": MistralConfig(sliding_window=LONGEST_TOKENS, **GROUPED),
    "DeepSeek V3": DeepseekV3Config(**MLA),
    "Phi 3": Phi3Config(pad_token_id=0, **GROUPED),
    "Phi 3 with long rotary embeddings for longer documents": long_rotary(LONGEST_TOKENS),
    "Llama with yarn": LlamaConfig(rope_parameters=YARN, **GROUPED),
    "OLMo 2": Olmo2Config(**GROUPED),
    "Granite": GraniteConfig(**GROUPED),
    "GPT-2": GPT2Config(**GPT2),
    "GPT-2 scaled by layer": GPT2Config(scale_attn_by_inverse_layer_idx=True, **GPT2),
    "GPT-NeoX": GPTNeoXConfig(**PLAIN),
    "OPT": OPTConfig(ffn_dim=64, word_embed_proj_dim=64, attention_dropout=0.0, dropout=0.0, **PLAIN),
    "BERT as decoder": BertConfig(is_decoder=True, **BERT),
}

# Configuration, and what the message says besides the model's class.
REFUSED: dict[str, tuple[PreTrainedConfig, list[str]]] = {
    "Bloom": (BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4), ["attn_implementation"]),
    "Mamba": (
        MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2),
        ["none of its layers looks attention up by name"],
    ),
    "Mistral with an empty window": (
        MistralConfig(sliding_window=0, **GROUPED),
        ["sliding window 0 (model.layers.0.self_attn) holds no token", "1 is the shortest"],
    ),
    "Gemma 3 looking both ways": (
        Gemma3TextConfig(sliding_window=512, use_bidirectional_attention=True, **HEADS_OF_16),
        ["is_causal=False", "model.layers.0.self_attn"],
    ),
    "Llama looking both ways": (LlamaConfig(is_causal=False, **GROUPED), ["config.is_causal=False", "not causal"]),
    "BERT with dropout": (BertConfig(is_decoder=True, **PLAIN), ["attention dropout 0.1", "bert.encoder.layer.0"]),
    "BERT as encoder": (BertConfig(is_decoder=False, **BERT), ["is_causal=False", "bert.encoder.layer.0"]),
    "GPT-2 with cross-attention": (
        GPT2Config(add_cross_attention=True, **GPT2),
        ["(is_causal=False): transformer.h.0.crossattention (and 1 more like it)"],
    ),
    "ALiBi": (LlamaConfig(alibi=True, **GROUPED), ["alibi=True"]),
    "Llama with dropout": (
        LlamaConfig(attention_dropout=0.1, **GROUPED),
        ["attention dropout 0.1", "model.layers.0.self_attn"],
    ),
    "Phi 3 with long rotary embeddings for long documents": (
        long_rotary(LONGEST_TOKENS - 1),
        ["rope_type 'longrope'", "more than 149 tokens, and they have up to 150", "use 'yarn'"],
    ),
    "Llama with dynamic rotary embeddings": (
        LlamaConfig(rope_parameters=DYNAMIC, **GROUPED),
        ["rope_type 'dynamic'", "change with the longest document", "use 'yarn'"],
    ),
    "Gemma 3 with dynamic rotary embeddings in one kind of layer": (
        Gemma3TextConfig(
            sliding_window=LONGEST_TOKENS,
            rope_parameters={"full_attention": DYNAMIC, "sliding_attention": rotary("default")},
            **HEADS_OF_16,
        ),
        ["rope_type 'dynamic'", "change with the longest document", "use 'yarn'"],
    ),
}


def build(config: PreTrainedConfig, implementation: str = "distca", auto: Any = AutoModelForCausalLM) -> Any:
    """A model with random weights that are the same every time."""
    torch.manual_seed(0)
    return auto.from_config(copy.deepcopy(config), attn_implementation=implementation)


def refusal(model: nn.Module) -> str:
    with pytest.raises(UnsupportedAttentionError) as caught:
        check_model(model, LONGEST_TOKENS)
    return str(caught.value)


def loader_of(dataset: Dataset, transport: Transport, capacity_tokens: int = 384) -> PlacedLoader:
    config = DistCAConfig(tokens_per_rank=capacity_tokens // transport.world_size, pad_to_multiple_of=32)
    return PlacedLoader(dataset, PlacedPlanner(config, transport.world_size), transport, CPU)


def documents_dataset() -> Dataset:
    """Two micro-batches of 384 tokens, with documents of up to `LONGEST_TOKENS` and uneven labels."""
    documents = random_documents(6) + random_documents(4, seed=1, lengths=(LONGEST_TOKENS, 90))
    masks = [[int(at % 7 > row % 5) for at in range(len(ids))] for row, ids in enumerate(documents)]
    return Dataset.from_dict({"input_ids": documents, "completion_mask": masks})


@torch.no_grad()
def losses_of_whole_documents(config: PreTrainedConfig, loader: PlacedLoader) -> list[float]:
    """Mean loss over the labels of each micro-batch, every document alone with sdpa."""
    model, losses = build(config, "sdpa").eval(), []
    for at in range(len(loader)):
        total, labels = 0.0, 0
        for document in loader.documents(0, at):
            count = int((document.shift_labels != -100).sum())
            if count:
                ids, targets = (torch.from_numpy(x)[None] for x in (document.input_ids, document.labels))
                total += model(input_ids=ids, labels=targets, num_items_in_batch=1, use_cache=False).loss.item()
            labels += count
        losses.append(total / labels)
    return losses


@torch.no_grad()
def losses_with_a_plan(config: PreTrainedConfig, dataset: Dataset, num_ranks: int) -> list[float]:
    """Loss of each micro-batch, averaged over ranks, as a plain loop gets it."""
    models = [build(config).eval() for _ in range(num_ranks)]

    def run(transport: Transport) -> list[float]:
        model = distca_hf.enable(models[transport.rank], DistCAPlugin(), LONGEST_TOKENS)
        return [model(**batch).loss.item() for batch in loader_of(dataset, transport)]

    by_rank = run_ranks(num_ranks, run)
    return [sum(losses) / num_ranks for losses in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_model_computes_its_own_loss_on_placed_documents(name: str) -> None:
    """The mean over two ranks is the mean over all labels, as if every document were computed alone."""
    config, dataset = ACCEPTED[name], documents_dataset()
    check_model(build(config), LONGEST_TOKENS)
    expected = losses_of_whole_documents(config, loader_of(dataset, LocalTransport()))

    assert len(expected) > 1
    assert losses_with_a_plan(config, dataset, num_ranks=2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_model_is_told_what_is_in_the_way(name: str) -> None:
    config, told = REFUSED[name]
    model = build(config)
    message = refusal(model)

    assert message.startswith(f"{type(model).__name__} cannot run on distca: ")
    assert [part for part in told if part not in message] == [], message
    assert not re.search(r"[:;]\s+\(and", message), f"a reason names no layer: {message}"


@pytest.mark.parametrize(
    ("config", "auto", "told"),
    [
        (T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4), AutoModelForSeq2SeqLM, []),
        (
            BartConfig(vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64),
            AutoModelForSeq2SeqLM,
            [],
        ),
        (LlamaConfig(**GROUPED), AutoModelForSequenceClassification, ["its loss ignores shift_labels"]),
        (LlamaConfig(**GROUPED), AutoModel, ["its loss ignores shift_labels"]),
        (LlamaConfig(**GROUPED), AutoModelForQuestionAnswering, ["padding included"]),
    ],
    ids=["T5", "Bart", "classification head", "no head", "question answering head"],
)
def test_model_that_is_no_causal_language_model_is_refused(
    config: PreTrainedConfig, auto: Any, told: list[str]
) -> None:
    message = refusal(build(config, auto=auto))
    told = told or ["encoder-decoder", "its loss ignores shift_labels"]

    assert [part for part in told if part not in message] == [], message


def test_loss_that_reads_padding_is_refused_for_own_batches_too() -> None:
    """A head for question answering has a softmax over all tokens of a padded row."""
    model = build(LlamaConfig(**GROUPED), auto=AutoModelForQuestionAnswering)
    with pytest.raises(UnsupportedAttentionError, match=r"start_positions, end_positions.*padding included"):
        check_model(model, LONGEST_TOKENS, given_batches=True)


def test_norm_over_rows_is_refused() -> None:
    model = build(LlamaConfig(**GROUPED))
    model.model.layers[1].mlp.norm = nn.BatchNorm1d(4)

    assert "model.layers.1.mlp.norm (and 0 more) mixes tokens, or computes from all rows of a batch" in refusal(model)


def test_all_reasons_are_told_at_once() -> None:
    message = refusal(build(MistralConfig(sliding_window=0, attention_dropout=0.5, **GROUPED)))

    assert "attention dropout 0.5" in message
    assert "sliding window 0" in message


class ShiftsItself(LlamaForCausalLM):
    """How models of the Hub often compute their loss."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **kwargs)
        if labels is not None:
            shift_logits = output.logits[..., :-1, :]
            shift_labels = labels[..., 1:]
            output.loss = nn.functional.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten())
        return output


class KeepsKeywords(LlamaForCausalLM):
    """Passes to the loss what older versions of Transformers passed."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **kwargs)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


class TakesShiftLabels(LlamaForCausalLM):
    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, shift_labels: Any = None, **kwargs: Any
    ) -> Any:
        return super().forward(input_ids, labels=labels, shift_labels=shift_labels, **kwargs)


@pytest.mark.parametrize("model_class", [ShiftsItself, KeepsKeywords])
def test_model_whose_loss_ignores_shift_labels_is_refused(model_class: type[PreTrainedModel]) -> None:
    message = refusal(model_class._from_config(LlamaConfig(**GROUPED), attn_implementation="distca"))

    assert "its loss ignores shift_labels" in message
    assert f"{model_class.__name__}.forward" in message


def test_model_with_a_loss_of_its_own_trains_on_batches_that_are_not_placed() -> None:
    model = ShiftsItself._from_config(LlamaConfig(**GROUPED), attn_implementation="distca").train()
    ids, placing = torch.arange(3, 20)[None], DistCAPlugin(tokens_per_rank=LONGEST_TOKENS)
    told = r"its loss ignores shift_labels.* leave tokens_per_rank out to train it on your own batches"
    with pytest.raises(UnsupportedAttentionError, match=told):
        distca_hf.enable(model, placing)
    distca_hf.enable(model, DistCAPlugin())

    assert model(ids, labels=ids).loss > 0
    with pytest.raises(UnsupportedAttentionError, match=f"cannot train on placed batches, .*{told}"):
        model(**next(iter(placing.dataloader(random_dataset(4), device="cpu"))))


def test_model_with_a_parameter_shift_labels_is_accepted() -> None:
    check_model(TakesShiftLabels._from_config(LlamaConfig(**GROUPED), attn_implementation="distca"), LONGEST_TOKENS)


def shifts_again(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    """A loss as users set it on their model."""
    return nn.functional.cross_entropy(logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())


def takes_shifted(logits: torch.Tensor, labels: torch.Tensor, shift_labels: Any = None, **kwargs: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def test_loss_function_of_the_users_own_must_take_shift_labels() -> None:
    model = tiny_model()
    model.loss_function = shifts_again
    assert "its loss_function shifts_again takes no shift_labels" in refusal(model)

    model.loss_function = takes_shifted
    check_model(model, LONGEST_TOKENS)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, ValueError])
def test_model_whose_heads_cannot_be_read_is_refused_with_the_reason(error: type[Exception]) -> None:
    """Transformers refuses to give one number for layers that differ."""

    class HeadsDiffer(LlamaConfig):
        @property
        def num_attention_heads(self) -> int:
            raise error("layers differ")

    model = tiny_model()
    model.config.__class__ = HeadsDiffer

    assert "its heads can be read neither from its config nor from its layers (layers differ)" in refusal(model)


@pytest.mark.parametrize(
    ("wrap", "take"),
    [
        (nn.Identity, "load it with from_pretrained"),
        (lambda: nn.DataParallel(tiny_model()), "take its part 'module', a LlamaForCausalLM"),
        (lambda: nn.Sequential(tiny_model()), "take its part '0', a LlamaForCausalLM"),
    ],
)
def test_module_that_is_no_transformers_model_is_refused(wrap: Any, take: str) -> None:
    model = wrap()
    with pytest.raises(
        UnsupportedAttentionError, match=f"{type(model).__name__} is not a Transformers model; {take}.* wrapped"
    ):
        distca_hf.enable(model, DistCAPlugin())


def lora(model: PreTrainedModel) -> nn.Module:
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))


def test_peft_model_is_accepted_when_its_base_is() -> None:
    check_model(lora(tiny_model()), LONGEST_TOKENS)
    assert "attention dropout 0.1" in refusal(lora(tiny_model(attention_dropout=0.1)))


def test_adapters_that_count_tokens_in_rows_are_refused() -> None:
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4])
    model = get_peft_model(tiny_model(), adapters)
    assert "alora_invocation_tokens=[3, 4] counts from the end of a row" in refusal(model)


@pytest.mark.parametrize(
    ("adapters", "why"),
    [
        (LilyConfig(target_modules=["q_proj"]), "lily mixes its experts by a mean over all tokens of a batch"),
        (PolyConfig(target_modules=["q_proj"], n_tasks=2), "poly takes a task for every row (task_ids)"),
        (ShadowConfig(task_type="CAUSAL_LM"), "shadow runs another decoder on the rows of the batch"),
        ("xlora", "xlora weighs its adapters in an earlier pass on the rows of the batch"),
    ],
    ids=["lily", "poly", "shadow", "xlora"],
)
def test_adapters_that_compute_something_of_several_tokens_are_refused(
    adapters: PeftConfig | str, why: str, tmp_path: Path
) -> None:
    model = tiny_model(use_cache=False)
    if isinstance(adapters, str):
        lora(tiny_model()).save_pretrained(tmp_path)
        of_model = {"task_type": "CAUSAL_LM", "hidden_size": model.config.hidden_size}
        adapters = XLoraConfig(**of_model, adapters={"0": str(tmp_path)})
    assert f"PEFT's method {why}" in refusal(get_peft_model(model, adapters))


def test_a_method_that_was_injected_is_refused() -> None:
    model = tiny_model()
    inject_adapter_in_model(LilyConfig(target_modules=["q_proj"]), model)
    assert "lily mixes its experts" in refusal(model)


@pytest.mark.parametrize("method", [PrefixTuningConfig, PromptTuningConfig])
def test_peft_method_that_adds_tokens_is_refused(method: type[Any]) -> None:
    """Virtual tokens are in no plan: their keys would be taken for those of the documents."""
    model = get_peft_model(tiny_model(), method(task_type="CAUSAL_LM", num_virtual_tokens=4))
    loader = loader_of(random_dataset(), LocalTransport())
    with pytest.raises((UnsupportedAttentionError, PlanError)):
        distca_hf.enable(model, DistCAPlugin(), LONGEST_TOKENS)(**next(iter(loader)))


@pytest.mark.parametrize("padding_token", [0, 1])
def test_model_that_counts_positions_from_elsewhere_computes_its_own_loss_or_is_refused(padding_token: int) -> None:
    """RoBERTa's positions begin behind its padding token's number."""
    config = RobertaConfig(is_decoder=True, pad_token_id=padding_token, **BERT)
    dataset = documents_dataset()
    try:
        losses = losses_with_a_plan(config, dataset, num_ranks=1)
    except UnsupportedAttentionError:
        return
    expected = losses_of_whole_documents(config, loader_of(dataset, LocalTransport()))
    assert losses == pytest.approx(expected, rel=1e-5)


def enabled(model: nn.Module | None = None) -> nn.Module:
    return distca_hf.enable(tiny_model() if model is None else model, DistCAPlugin(), LONGEST_TOKENS)


def first_batch() -> dict[str, Any]:
    return next(iter(loader_of(random_dataset(), LocalTransport())))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(NemotronConfig(**GROUPED), id="Nemotron", marks=builds_nemotron),
        pytest.param(StableLmConfig(**GROUPED), id="StableLM"),
    ],
)
def test_model_that_keeps_the_plan_from_its_layers_is_refused_after_the_first_forward(config: Any) -> None:
    model = enabled(build(config))
    with pytest.raises(UnsupportedAttentionError, match="0 of its 2 attention layers came through distca"):
        model(**first_batch())


def test_model_one_of_whose_layers_attends_otherwise_is_refused_after_the_first_forward() -> None:
    model = enabled()
    other = copy.deepcopy(model.config)
    other._attn_implementation = "sdpa"
    model.model.layers[1].self_attn.config = other
    with pytest.raises(UnsupportedAttentionError, match=r"scaled_dot_product_attention .* no step was taken"):
        model(**first_batch())


def test_layer_that_attends_otherwise_without_a_mask_is_refused_after_the_first_forward() -> None:
    model = enabled()
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedAttentionError, match=r"LlamaForCausalLM: 2 of its 3 attention layers .* no step"):
        model(**first_batch())


@pytest.mark.parametrize("plan", [{}, 3, torch.ones(1), "plan"])
def test_plan_of_another_type_is_refused(plan: Any) -> None:
    with pytest.raises(PlanError, match=f"distca_plan is a {type(plan).__name__}, .*pass batches on unchanged"):
        enabled()(**first_batch() | {"distca_plan": plan})


def test_given_count_of_items_is_kept() -> None:
    model, batch = enabled(), first_batch()
    labels = int((batch["shift_labels"] != -100).sum())
    mean = model(**batch).loss.item()

    assert model(**first_batch(), num_items_in_batch=2 * labels).loss.item() == pytest.approx(mean / 2, rel=1e-6)
    assert model(**first_batch(), num_items_in_batch=1).loss.item() == pytest.approx(mean * labels, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 3])  # two ranks: all accepted models
def test_mean_over_ranks_is_the_mean_over_labels_however_uneven_they_are(num_ranks: int) -> None:
    config, dataset = LlamaConfig(**GROUPED), documents_dataset()
    expected = losses_of_whole_documents(config, loader_of(dataset, LocalTransport()))

    assert losses_with_a_plan(config, dataset, num_ranks) == pytest.approx(expected, rel=1e-5)


def test_document_longer_than_rotary_embeddings_allow_is_refused_when_it_comes() -> None:
    """The model was enabled for shorter documents than the loader hands out."""
    model = distca_hf.enable(build(long_rotary(100)), DistCAPlugin(), longest_document_tokens=100)
    short, long = (Dataset.from_dict({"input_ids": [list(range(3, 13)) * tens]}) for tens in (10, 11))

    assert model(**next(iter(loader_of(short, LocalTransport())))).loss.isfinite()
    told = "micro-batch 0: .* more than 100 tokens, and they have up to 110"
    with pytest.raises(UnsupportedAttentionError, match=told):
        model(**next(iter(loader_of(long, LocalTransport()))))
