"""distca check: verdicts on models that the package knows and on others, kernels, limits, and sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from distca_hf.analysis.check.find import Candidate, find_candidate
from distca_hf.analysis.check.tiny_config import WINDOW_TOKENS, tiny_config, tiny_version
from distca_hf.analysis.check.trial import TinyModel, compare
from distca_hf.analysis.check.verdict import Verdict, decoder_size, judge
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.models import PRESETS
from distca_hf.cost import Mask
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.flops import find_gpu
from distca_hf.integrations.models.check import check_model
from distca_hf.integrations.models.decoder_layers import MOST_KINDS, grouped, layer_kinds, ranges, verdict_in_short
from distca_hf.integrations.models.structure import weights_outside_text
from support.models import tiny_model
from support.versions import classes_of_today, states_travel


CAPACITY = 8 * 16_384


def verdict_of(name: str, gpu: str = "h200", tries: bool = False, **changes: object) -> Verdict:
    """Returns the verdict on the default sizes of a model type, with some changes."""
    config = CONFIG_MAPPING[name](**changes)
    candidate = Candidate(name, config, AutoModelForCausalLM.from_config, name)
    return judge(candidate, find_gpu(gpu), CAPACITY, tries)[0]


def layers(verdict: Verdict) -> list[str]:
    return [f"{ranges(numbers)}: {kind.in_words()}" for numbers, kind in grouped(verdict.kinds)]


LAYERS = {
    "llama": ["0-31: full, 32/32 heads of 128"],
    "gemma3_text": [
        "0-4, 6-10, 12-16, ... 24-25: window 4,096, 8/4 heads of 256",
        "5, 11, 17, 23: full, 8/4 heads of 256",
    ],
    "gpt_oss": [
        "0, 2, ... 34: window 128, 64/8 heads of 64, sinks",
        "1, 3, ... 35: full, 64/8 heads of 64, sinks",
    ],
    "gemma2": [
        "0, 2, ... 24: window 4,096, 8/4 heads of 256, softcap 50",
        "1, 3, ... 25: full, 8/4 heads of 256, softcap 50",
    ],
    "deepseek_v3": ["0-60: full, 128/128 heads of 192 (values 128), MLA"],
    "qwen3_next": [
        "0-2, 4-6, 8-10, ... 44-46: state (Qwen3NextGatedDeltaNet)",
        "3, 7, ... 47: full, 16/2 heads of 256",
    ],
    "falcon_h1": ["0-31: state (FalconH1Mixer), full, 32/8 heads of 128"],
    "nemotron_h": [
        "0: state (NemotronHMamba2Mixer)",
        "1, 3: tokens only",
        "2: full, 32/8 heads of 128",
    ],
    "minimax": [
        "0, 2, ... 30: full, 32/8 heads of 128",
        "1, 3, ... 31: state (MiniMaxLightningAttention), whole documents",
    ],
    "recurrent_gemma": [
        "0-1, 3-4, 6-7, ... 24-25: state (RecurrentGemmaRecurrentBlock), whole documents",
        "2, 5, ... 23: window 2,048, 10/10 heads of 256",
    ],
    "llama4_text": [
        "0-2, 4-6, 8-10, ... 44-46: chunks of 8,192, 40/8 heads of 128",
        "3, 7, ... 47: full, 40/8 heads of 128",
    ],
    "bloom": ["0-1: refused: attention that is not looked up by name"],
}


@classes_of_today
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_told_apart(name: str) -> None:
    assert layers(verdict_of(name)) == LAYERS[name]


def test_kinds_are_those_of_the_model_whatever_its_name() -> None:
    """Windows, heads and sinks follow the configuration."""
    changes = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    verdict = verdict_of("gpt_oss", sliding_window=77, num_attention_heads=32, **changes)

    assert layers(verdict) == ["0, 2: full, 32/8 heads of 64, sinks", "1: window 77, 32/8 heads of 64, sinks"]


KERNELS = {
    ("llama", "h200"): ("works", ("flash4", "flash3", "flash2", "torch_varlen")),
    ("llama", "rtx4090"): ("works", ("flash2", "torch_varlen")),
    ("llama", "rtx5090"): ("works", ("flash4", "flash2", "torch_varlen")),
    ("llama", "v100"): ("refused", ()),
    ("llama", "cpu"): ("works", ("cpu", "reference")),
    ("gemma2", "a100"): ("works with limits", ("flash2",)),
    ("gemma2", "b200"): ("works with limits", ("flash2",)),  # FlashAttention 4 lacks it there for heads of 256
    ("deepseek_v3", "h100"): ("works with limits", ("flash4",)),
    ("deepseek_v3", "a100"): ("refused", ()),
}


@pytest.mark.parametrize(("name", "gpu"), KERNELS)
def test_kernels_are_those_that_can_compute_the_layers(name: str, gpu: str) -> None:
    verdict = verdict_of(name, gpu)
    status, able = KERNELS[name, gpu]

    assert (verdict.status, {choice.able for choice in verdict.kernels}) == (status, {able})
    if status == "works with limits":
        assert any("its layers need a package (pip install flash-attn" in limit for limit in verdict.limits)


@classes_of_today
def test_each_kind_of_layers_has_kernels_for_its_own_heads() -> None:
    verdict = verdict_of("gemma4_text")
    sliding, full = sorted(verdict.kernels, key=lambda choice: choice.need.heads.dim)

    assert (sliding.need.heads.dim, len(sliding.layers)) == (256, 25)
    assert sliding.able == ("flash4", "flash3", "flash2", "torch_varlen")
    assert sliding.unable == {"ffpa": "has head dimensions from 320, the model has 256"}
    assert (full.need.heads.dim, len(full.layers), full.able) == (512, 5, ("ffpa",))
    assert verdict.status == "works with limits"
    assert verdict.limits == [
        "on h200 5 of its layers need a package (pip install ffpa-attn): torch's own kernel has head dimensions up to "
        "256, the model has 512",
    ]


@classes_of_today
@pytest.mark.parametrize(
    ("gpu", "changes", "told"),
    [
        ("h200", {"global_head_dim": 1024}, "ffpa: has head dimensions up to 512, the model has 1024"),
        ("h200", {"global_head_dim": 480}, "ffpa: needs head dimensions that are multiples of 64"),
        ("a100", {}, "flash3, ffpa: needs compute capability (9,), the GPU has 8"),
        ("b200", {}, "flash3, ffpa: needs compute capability (9,), the GPU has 10"),
    ],
)
def test_heads_that_are_too_wide_are_refused_on_gpus_alone(gpu: str, changes: dict[str, int], told: str) -> None:
    on_gpu, on_cpu = verdict_of("gemma4_text", gpu, **changes), verdict_of("gemma4_text", "cpu", **changes)

    assert f"no kernel for {gpu} computes 5 of its layers" in on_gpu.reasons[0]
    assert told in on_gpu.reasons[0]
    assert on_cpu.status == "works"


@states_travel
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "nemotron_h", "jamba"])
def test_hybrids_whose_states_travel_have_no_limits(name: str) -> None:
    hybrid = verdict_of(name)

    assert any(kind.mixer for kind in hybrid.kinds)
    assert all(kind.cuts_documents for kind in hybrid.kinds)
    assert (hybrid.status, hybrid.limits, hybrid.cuts_documents) == ("works", [], True)


@classes_of_today
@pytest.mark.parametrize(("name", "layers"), [("minimax", "1, 3, ... 31"), ("recurrent_gemma", "0-1, 3-4, 6-7")])
def test_models_whose_states_cannot_travel_are_limited(name: str, layers: str) -> None:
    limited = verdict_of(name)

    assert (limited.status, limited.cuts_documents) == ("works with limits", False)
    assert [kind.cuts_documents for kind in limited.kinds] == [not kind.mixer for kind in limited.kinds]
    longest, zero3 = limited.limits
    assert longest.startswith(f"documents stay whole on a rank, because layers {layers}")
    assert longest.endswith("in placed batches none may have more than tokens_per_rank tokens")
    assert zero3.startswith("ZeRO-3 is refused")


def test_limits_are_named() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}
    longrope = verdict_of("phi3", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4} | factors)
    assert (longrope.status, longrope.longest_document_tokens) == ("works with limits", 4096)
    assert "documents have up to 4,096 tokens: its RoPE changes with the batch" in longrope.limits

    table = verdict_of("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    assert "documents have up to 1,024 tokens: its table of positions ends there" in table.limits


def test_dynamic_rope_and_dropout_are_refused() -> None:
    dynamic = verdict_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "rope_type 'dynamic'" in dynamic.reasons[0]
    assert "attention dropout 0.1 is not computed" in verdict_of("gpt2").reasons[0]


def test_a_loss_of_its_own_is_refused_in_placed_batches_alone() -> None:
    reward, _ = judge(find_candidate("LlamaForSequenceClassification"), find_gpu("h200"), CAPACITY, tries=False)

    assert reward.status == "refused"
    assert all("leave tokens_per_rank out to train it on your own batches" in reason for reason in reward.reasons)


STRANGE = {
    "StrangeForCausalLM": "",
    "RollingForCausalLM": "tokens see each other otherwise than by attention",
    "ConvolvingForCausalLM": "model.layers.0.mlp.conv (and 31 more) mixes tokens, or computes from all rows",
    "BiasedForCausalLM": "score_bias",
}


@pytest.mark.parametrize("name", STRANGE)
def test_classes_that_nobody_knows_are_judged(name: str) -> None:
    """By their structure, by what they ask for in a forward pass, or by their numbers."""
    candidate = find_candidate(f"support.strange_models.{name}")
    verdict, _ = judge(candidate, find_gpu("h200"), CAPACITY)

    assert candidate.class_name == name
    if STRANGE[name]:
        assert verdict.status == "refused"
        assert STRANGE[name] in verdict.reasons[0]
    else:
        assert verdict.status == "works", verdict.reasons
        assert verdict.numerics is not None
        assert verdict.numerics.agree


@classes_of_today
def test_layers_with_other_numbers_of_kv_heads_train() -> None:
    """As in Gemma 4 31B, whose full layers also take keys for values."""
    values = tiny_of("gemma4_text", attention_k_eq_v=True).to_dict()
    del values["per_layer_config"]
    config = CONFIG_MAPPING["gemma4_text"](**values, global_head_dim=32, num_global_key_value_heads=1)
    found = compare(TinyModel(config, AutoModelForCausalLM.from_config))

    assert [(kind.heads.dim, kind.heads.key_value) for kind in layer_kinds(_outline(config)) if kind.heads] == [
        (16, 2),
        (32, 1),
    ]
    assert found.agree
    assert found.gradients < 5e-5


def test_a_model_that_draws_random_numbers_is_compared_in_evaluation_mode() -> None:
    found = compare(TinyModel(tiny_config(CONFIG_MAPPING["phimoe"]), AutoModelForCausalLM.from_config))

    assert (found.agree, found.in_training_mode) == (True, False)


def tiny_of(name: str, **changes: object) -> PreTrainedConfig:
    return tiny_version(CONFIG_MAPPING[name](**changes))


def test_a_tiny_version_keeps_flags_and_kinds_of_layers() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    tiny = tiny_of("gpt_oss", num_hidden_layers=3, layer_types=kinds, attention_bias=False, rms_norm_eps=0.5)

    assert (tiny.layer_types, tiny.num_hidden_layers) == (["full_attention", "sliding_attention"], 2)
    assert (tiny.attention_bias, tiny.rms_norm_eps, tiny.sliding_window) == (False, 0.5, WINDOW_TOKENS)
    assert tiny_of("mistral", sliding_window=None).sliding_window is None
    assert tiny_of("llama", tie_word_embeddings=True, hidden_act="gelu").hidden_act == "gelu"
    assert not any(kind.mask.window_tokens for kind in layer_kinds(_outline(tiny_of("mistral", sliding_window=None))))


def _outline(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="distca")


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-0.6b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_built_in_names_have_the_sizes_of_distca_plan(name: str) -> None:
    model = find_candidate(name).outline()
    size, known = decoder_size(model, layer_kinds(model)), PRESETS[name]
    assert size is not None
    assert known.size is not None
    expected = known.size.decoder(known.heads)

    assert size.parameters == pytest.approx(expected.parameters, rel=1e-3)
    assert size.embedding_parameters == pytest.approx(expected.embedding_parameters, rel=1e-3)
    (layer,), (expected_layer,) = size.layers, expected.layers
    assert layer.count == expected_layer.count
    assert (layer.parameters, layer.mlp_size) == pytest.approx(
        (expected_layer.parameters, expected_layer.mlp_size), rel=1e-2
    )


def test_weights_are_counted_as_distca_plan_counts_them() -> None:
    for name in ("gpt_neox", "deepseek_v3", "gemma3_text"):
        model = find_candidate(name).outline()
        size, planned = decoder_size(model, layer_kinds(model)), find_model(name).size
        assert size is not None
        assert planned is not None
        assert (size.parameters, size.num_layers, size.vocabulary) == (
            planned.parameters,
            planned.layers,
            planned.vocabulary,
        )


def test_all_weights_outside_of_layers_are_gathered_together() -> None:
    """Gemma 4 has an embedding for each layer, and towers of multimodal models are no part of the text."""
    for name in ("gemma4_text", "gemma3"):
        model = find_candidate(name).outline()
        size = decoder_size(model, layer_kinds(model))
        assert size is not None
        beside = sum(weight.numel() for weight in weights_outside_text(model).values())
        in_layers = sum(layer.count * layer.parameters for layer in size.layers)

        assert size.embedding_parameters + in_layers + beside == size.parameters
        assert size.embedding_parameters >= size.head_parameters
        assert (beside > 0) == (name == "gemma3")


def test_numbers_of_layers_in_words() -> None:
    assert ranges([0, 1, 2, 3, 4, 6, 7]) == "0-4, 6-7"
    assert ranges([3]) == "3"
    assert ranges([0, 2, 4, 6, 8]) == "0, 2, ... 8"
    assert ranges([0, 2]) == "0, 2"
    assert ranges([0, 1, 3, 4, 6, 7, 9, 10, 12, 13]) == "0-1, 3-4, 6-7, ... 12-13"
    assert ranges(range(5)) == "0-4"


def test_a_saved_folder_is_judged_by_the_class_that_it_names(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, architectures=["LlamaForSequenceClassification"])
    config.save_pretrained(tmp_path)

    for path in (tmp_path, tmp_path / "config.json"):
        candidate = find_candidate(str(path))
        assert candidate.class_name == "LlamaForSequenceClassification"
        assert candidate.config.num_hidden_layers == 2


REFUSED = {
    "gpt2": {},
    "bloom": {},
    "deepseek_v32": {},
    "mamba": {},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@classes_of_today
@pytest.mark.parametrize("name", REFUSED)
def test_training_refuses_for_the_same_reasons(name: str) -> None:
    """The check of `attach` and `enable` lists what the command lists."""
    config = CONFIG_MAPPING[name](**REFUSED[name])
    reasons = verdict_of(name, "cpu", **REFUSED[name]).reasons

    with pytest.raises(UnsupportedAttentionError) as error:
        check_model(_outline(config), longest_document_tokens=1)
    assert reasons
    assert [reason for reason in reasons if reason not in str(error.value)] == []
    assert "`distca check` shows it layer by layer" in str(error.value)


QUANTISED: dict[str, tuple[dict[str, object], str, str]] = {
    "fp8": (
        {"activation_scheme": "dynamic"},
        "works with limits",
        "quantization_config=FineGrainedFP8Config(dequantize=True)",
    ),
    "mxfp4": ({}, "works with limits", "load it with quantization_config=Mxfp4Config(dequantize=True). Memory is"),
    "bitsandbytes": ({"load_in_4bit": True}, "works with limits", "does not train quantised weights: train adapters"),
    "gptq": ({"bits": 4}, "works with limits", "train adapters (LoRA)"),  # with or without its package
    "nvfp4": ({}, "refused", "nor adapters of them; take a checkpoint in bfloat16"),
    "modelopt": ({"quant_algo": "NVFP4"}, "refused", "(modelopt), and Transformers"),
}


@classes_of_today
@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_checkpoints_train_as_trainer_trains_them(method: str) -> None:
    settings, status, words = QUANTISED[method]
    verdict = verdict_of("llama", quantization_config={"quant_method": method, **settings})

    assert verdict.status == status
    (said,) = verdict.reasons if status == "refused" else verdict.limits
    assert f"its weights are quantised ({method})" in said
    assert words in said
    if method == "bitsandbytes":
        assert verdict_of("llama", quantization_config=settings).limits == verdict.limits, "as older checkpoints are"
        assert verdict_of("llama", quantization_config={}).status == "refused"
    if "dequantize=True" in words:
        as_loaded = {"quant_method": method, **settings, "dequantize": True}
        assert verdict_of("llama", quantization_config=as_loaded).status == "works"


def test_the_line_of_a_training_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))
    assert "layers 0-1: full" in verdict_in_short(model)
    (kind, _) = layer_kinds(model)
    many = [replace(kind, mask=Mask(10 + number)) for number in range(30)]
    monkeypatch.setattr("distca_hf.integrations.models.decoder_layers.layer_kinds", lambda model: many)
    line = verdict_in_short(model)

    assert line.count("window") == MOST_KINDS
    assert line.endswith(f"{30 - MOST_KINDS} more kinds of layers.")


def test_the_line_of_a_training_names_the_command_where_it_answers_for_this_model(tmp_path: Path) -> None:
    """Not for a model made from a config, nor for another class than the checkpoint's."""
    folder = tmp_path / "a model"
    tiny_model("llama").save_pretrained(folder)
    loaded, other, made = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoModelForSequenceClassification.from_pretrained(folder),
        tiny_model("llama"),
    )

    assert verdict_in_short(loaded).endswith(f". The whole answer: distca check '{folder}'")
    assert "distca check" not in verdict_in_short(other) + verdict_in_short(made)
