"""Estimates of distca plan: speed and memory beside what was measured, and by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distca_hf.analysis import answer as estimates
from distca_hf.analysis.answer import make_estimates, simulation_request
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.models import PRESETS, ModelSize, SimulatedModel, preset
from distca_hf.analysis.profiles.cluster_profile import find_profile, gpu_gib_of
from distca_hf.analysis.request import Assumptions, PlanRequest, fit_lengths
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import simulate
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError
from distca_hf.pipelines.pipeline import Pipeline
from support.versions import classes_of_today, states_travel


LLAMA = preset("llama3-8b")
SMALL = Heads(query=2, key_value=1, dim=4, value_dim=4, groups=1)
SIZE = ModelSize.of_gated_layers(SMALL, layers=3, hidden_size=8, mlp_size=16, vocabulary=10)


def test_weights_by_hand() -> None:
    layer = 8 * (8 + 8 + 4 + 4) + 3 * 8 * 16
    assert SIZE.layer_parameters == 3 * layer
    assert SIZE.parameters == 3 * layer + 2 * 80
    assert SIZE.mlp_size(SMALL) == 16
    experts = ModelSize.of_gated_layers(SMALL, 3, 8, 16, 10, tied=True, experts=4, experts_per_token=2)
    assert experts.parameters == 3 * (8 * 24 + 8 * 4 + 4 * 3 * 8 * 16) + 80
    assert experts.layer_parameters == 3 * (8 * 24 + 8 * 4 + 2 * 3 * 8 * 16)


PUBLIC = {
    "llama3-8b": ("llama", {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}),
    "qwen3-0.6b": (
        "qwen3",
        {
            **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "vocab_size": 151936},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
            "num_experts_per_tok": 8,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_table_has_as_many_weights_as_transformers_builds(name: str) -> None:
    """The table leaves out norms, which are less than a thousandth."""
    model_type, sizes = PUBLIC[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    size = PRESETS[name].size
    assert size is not None
    assert size.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "LlamaForCausalLM", "gpt_neox", "deepseek_v3"])
def test_models_of_transformers_are_found_by_type_and_class(name: str) -> None:
    found = find_model(name)
    assert found.size is not None
    if "lama" in name:
        assert found.size.parameters == 6_738_415_616  # LlamaConfig() is Llama-7B
    if name == "deepseek_v3":
        assert found.size.parameters == 671_026_404_352
        assert found.size.layer_parameters < found.size.parameters / 15  # eight of 256 experts


def test_a_name_on_the_hub_is_read_from_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, dtype="float16")
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name: config)
    found = find_model("somebody/something")
    assert (found.name, found.number_bytes) == ("somebody/something", 2)
    assert found.size is not None
    assert found.size.layers == 2


@classes_of_today
@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava"])  # of the first there is no model of the text alone
def test_of_a_multimodal_model_the_text_is_counted(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    vision = {} if model_type == "llava" else {"depth": 1, "out_hidden_size": 128}
    text = AutoConfig.for_model(model_type).text_config.to_dict() | sizes | heads
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name: config)
    size = find_model("somebody/something").size

    assert size is not None
    assert (size.layers, size.hidden_size, size.vocabulary) == (2, 128, 1000)
    assert size.layer_parameters == 2 * (4 * 128 * 128 + 3 * 128 * 256)


def test_a_name_that_the_hub_does_not_have_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name} is not there\nand much more")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"no such folder with a config\.json.*is not there$"):
        find_model("somebody/something")


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("llama").name == "llama (default sizes)"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", ""),
        ("gemma3_text", "22 with a window of 4,096 tokens"),
        ("qwen3_next", "36 that carry a state"),
    ],
)
def test_layers_that_count_as_full_ones_are_named(name: str, words: str) -> None:
    assert find_model(name).other_layers == words


@states_travel
@pytest.mark.parametrize(
    ("name", "states", "stay_whole"), [("llama", 0, False), ("qwen3_next", 36, False), ("minimax", 16, True)]
)
def test_documents_stay_whole_only_if_a_state_cannot_travel(name: str, states: int, stay_whole: bool) -> None:
    model = SimulatedModel.of(find_model(name, tries=False))
    plan, simulated = PlanRequest(2, 1024, 8, 1, model), SimulationRequest(model, 2, 1024, None)

    assert (model.mixer_layers, model.whole_documents) == (states, stay_whole)
    assert plan.planner.whole_documents is simulated.planner.whole_documents is stay_whole
    assert plan.planner.longest_tokens == simulated.longest_tokens == (1024 if stay_whole else 2048)
    memory = simulated.rank_load(1024, 0).by_sharding(simulated.setup("fsdp2"), stay_whole)
    assert ("zero3" in memory) is not stay_whole


def test_a_model_nobody_knows_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'llama3-8' is not known.*Did you mean 'llama3-8b'"):
        find_model("llama3-8")


@pytest.mark.parametrize(
    ("micro_steps", "compare", "cluster", "pipeline"),
    [
        (3, False, "h100", None),
        (3, True, "h200", None),
        (2, False, "h200", Pipeline(2, 2)),
    ],
)
def test_plan_says_what_simulate_says(
    micro_steps: int, compare: bool, cluster: str, pipeline: Pipeline | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same ranks, tokens, model, seed and kernels, over the same steps: every figure of every way.

    `plan` takes the ranks of a stage and its micro-batches, `simulate` all GPUs and their micro-steps."""
    monkeypatch.setattr(estimates, "MOST_STEPS", 4)
    ranks, lengths = 8, np.random.RandomState(0).lognormal(6, 1.5, 10_000).astype(int).clip(1, 100_000)
    stages = 1 if pipeline is None else pipeline.num_stages
    profile = find_profile(cluster)
    world = ranks // stages, 32_768, 8, micro_steps * stages, LLAMA
    training: dict[str, Any] = {"liger": True, "gpu_gib": gpu_gib_of(profile), "seed": 3}
    plan = PlanRequest(*world, pipeline=pipeline, cluster=cluster, **training)
    made = make_estimates(plan, fit_lengths(lengths, plan), compare=compare)
    assert made is not None
    model = SimulatedModel.of(LLAMA)
    request = SimulationRequest(
        *(model, ranks, 32_768, None, micro_steps),
        liger=True,
        gpu_gib=gpu_gib_of(profile),
        batches=4,
        seed=3,
        pipeline=pipeline,
    )
    result, _ = simulate(request, profile, lengths)

    assert made.costs.profile == profile
    assert made.ours == result.way("placed")
    assert made.memory["fsdp2"].total == result.way("placed").memory_bytes
    assert made.simulated.plain == result.plain
    assert {way.key for way in made.simulated.ways} <= {way.key for way in result.ways}
    in_stages = {way.key for way in made.simulated.ways if way.in_stages}
    assert in_stages == (set() if pipeline is None else {"pipeline_plain", "pipeline_placed", "pipeline_shaped"})
    assert all(way == result.way(way.key) for way in made.simulated.ways)
    assert (len(made.simulated.ways) == len(result.ways)) == compare
    assert made.over_sorted == result.way("placed").gain_over(result.way("sorted_packs"))


def test_micro_batches_that_stages_do_not_divide() -> None:
    """Five micro-batches in two stages are three micro-steps of the same GPUs without them, and none is lost."""
    lengths = np.random.RandomState(0).lognormal(6, 1.0, 3000).astype(int).clip(1, 30_000)
    plan = PlanRequest(2, 32_768, 8, 5, LLAMA, pipeline=Pipeline(2))
    request = simulation_request(plan).for_documents(fit_lengths(lengths, plan))
    step, *_ = request.steps(lengths)
    joined = request.without_stages(step)

    assert (request.gpus, request.accumulation, len(step), len(joined)) == (4, 3, 5, 3)
    assert [int(batch.sum()) <= request.num_ranks * 32_768 for batch in joined] == [True] * 3
    assert np.array_equal(np.concatenate(joined), np.concatenate(step))
    made = make_estimates(plan, lengths)
    assert made is not None
    assert made.simulated.way("pipeline_shaped").step_seconds > made.ours.step_seconds > 0


@pytest.mark.parametrize("wrong", [{"checkpointing": "some"}, {"gpu_gib": 0.0}, {"gpu_gib": float("nan")}])
def test_assumptions_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        Assumptions(**wrong)  # type: ignore[arg-type]
