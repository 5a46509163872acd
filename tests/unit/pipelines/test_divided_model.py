"""Models divided into the parts of a pipeline: parts one after the other are the whole, and all else is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import distca_hf
from distca_hf import Pipeline
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError, PlanError
from distca_hf.layout import Layout
from distca_hf.pipelines.stages import (
    DividedModel,
    ModelPart,
    StepInputs,
    check_schedule,
    parts_of_stage,
    save_parts,
)
from support.models import SIZES, tiny_config
from support.parity import live_plan


LAYERS = 5
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    """A tiny configuration with embeddings and head apart, unless they are to be tied."""
    changes = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False} | changes
    if kind == "mixtral":
        return MixtralConfig(**SIZES | MIXTRAL | changes)
    return Olmo2Config(**SIZES | changes) if kind == "olmo2" else tiny_config(kind, **changes)


def checkpoint_of(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def logits_of(model: PreTrainedModel, **given: torch.Tensor) -> torch.Tensor:
    length = next(iter(given.values())).shape[1]
    logits: torch.Tensor = model(**given, position_ids=torch.arange(length)[None], use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2", "gemma3", "gpt_oss", "mixtral"])
def test_parts_one_after_the_other_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = checkpoint_of(config_of(kind), tmp_path / "checkpoint")
    whole = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="distca")
    divided = DividedModel(folder, Pipeline(2, 2))
    parts = [divided.read(number) for number in range(4)]
    tokens = torch.randint(0, 128, (1, 40))

    hidden = logits_of(parts[0], input_ids=tokens)
    for part in parts[1:]:
        hidden = logits_of(part, inputs_embeds=hidden)

    assert torch.equal(hidden, logits_of(whole, input_ids=tokens))
    named = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(named) == sorted(name for name, _ in whole.named_parameters()), "each weight is in one part"
    assert [len([name for name in part.state_dict() if "q_proj.weight" in name]) for part in parts] == [2, 1, 1, 1]
    assert all(weight.is_meta for weight in divided.outline.parameters())


REFUSED = {
    "tied": (
        tiny_config("llama", tie_word_embeddings=True),
        "tie_word_embeddings=True, and its embeddings are on stage",
    ),
    "mixers": (config_of("qwen3_5", num_hidden_layers=4), "carries a state from token to token"),
    "scaled": (GraniteConfig(**SIZES, embedding_multiplier=2.0), "computes on hidden states outside of"),
    "scaled logits": (CohereConfig(**SIZES, tie_word_embeddings=False, eos_token_id=1), "computes on hidden states"),
    "capped logits": (Gemma2Config(**SIZES, tie_word_embeddings=False), "computes on hidden states outside of"),
    "positions": (
        GPT2Config(n_layer=4, n_embd=64, n_head=4, tie_word_embeddings=False),
        "cannot be divided into stages",
    ),
    "router loss": (config_of("mixtral", output_router_logits=True), "output_router_logits=True adds a loss"),
    "few layers": (
        tiny_config("llama", num_hidden_layers=3),
        "2 stages of 2 chunks are 4 parts of a model with 3 layers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_model_that_cannot_be_divided_is_refused(kind: str, tmp_path: Path) -> None:
    config, words = REFUSED[kind]
    config.save_pretrained(tmp_path)  # no weights are read before

    with pytest.raises(ConfigError, match=re.escape(words)):
        DividedModel(tmp_path, Pipeline(2, 2))


def test_checkpoint_without_some_weights_is_refused_by_their_name(tmp_path: Path) -> None:
    folder = checkpoint_of(config_of("llama"), tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.4.mlp.up_proj.weight"]
    weights["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    divided = DividedModel(folder, Pipeline(2, 2))

    divided.read(0)
    with pytest.raises(
        ConfigError, match=r"part 2: model\.layers\.3\.mlp\.up_proj\.weight is \(3, 3\) and not \(64, 64\);"
    ):
        divided.read(2)
    with pytest.raises(ConfigError, match=r"part 3: model\.layers\.4\.mlp\.up_proj\.weight is missing; give"):
        divided.read(3)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_parts_are_written_as_the_checkpoint_that_they_came_from(kind: str, tmp_path: Path) -> None:
    """Experts have other names and shapes in files than in models."""
    folder, pipeline = checkpoint_of(config_of(kind), tmp_path / "checkpoint"), Pipeline(2, 2)
    divided, written = DividedModel(folder, pipeline), tmp_path / "written"
    parts = [ModelPart(divided.read(number), (), number, pipeline, 16) for number in range(4)]

    save_parts(parts, written, distca_hf.DistCAPlugin())

    weights = load_file(folder / "model.safetensors")
    files = sorted(written.glob("*.safetensors"))
    found = {name: weight for file in files for name, weight in load_file(file).items()}
    assert [file.name for file in files] == [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert (written / "config.json").read_text() == (folder / "config.json").read_text()


def test_parts_that_cannot_be_seen_leave_an_earlier_checkpoint_alone(tmp_path: Path) -> None:
    folder, pipeline = checkpoint_of(config_of("llama"), tmp_path / "checkpoint"), Pipeline(2)
    part = ModelPart(DividedModel(folder, pipeline).read(0), (), 0, pipeline, 16)

    with pytest.raises(
        ConfigError, match=r"1 of 2 parts .* first model-00002-of-00002.safetensors; give a folder that"
    ):
        save_parts([part], folder, distca_hf.DistCAPlugin())

    AutoModelForCausalLM.from_pretrained(folder)


def test_ranks_that_are_no_stages_are_refused(tmp_path: Path) -> None:
    divided = DividedModel(checkpoint_of(config_of("llama"), tmp_path), Pipeline(2))

    with pytest.raises(
        ConfigError, match=r"rank 0: the pipeline has 2 stages.* the plugin works on 1 rank; give it a"
    ):
        divided.load(0, distca_hf.DistCAPlugin())


def part_of(folder: Path, recompute: bool = False) -> ModelPart:
    pipeline = Pipeline(2, 2)
    model = DividedModel(checkpoint_of(config_of("llama"), folder), pipeline).read(1)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return ModelPart(model, (), 1, pipeline, 16)


def test_several_micro_batches_at_once_are_refused(tmp_path: Path) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)

    with pytest.raises(PlanError, match=r"part 1: torch gave 2 micro-batches at once: schedule.step got another"):
        part_of(tmp_path)(tokens, plan=torch.tensor([[1], [2]]), position_ids=tokens, attention_mask=tokens)


def test_number_of_a_plan_on_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"came on meta, and reading it would wait for the GPU; wrap parts in Distr"):
        part_of(tmp_path)(plan=torch.zeros(1, 1, dtype=torch.int64, device="meta"))


def test_rows_that_stages_do_not_exchange_are_refused(tmp_path: Path) -> None:
    part, plan = (
        part_of(tmp_path),
        live_plan(Layout.from_segments([8], [[(0, 0, 8)]]), LocalTransport(), DistCAConfig()),
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    with pytest.raises(
        PlanError, match=r"rank 0, micro-batch 0, part 1: .* \(1, 8\) rows, and stages exchange \(1, 16\)"
    ):
        part(torch.zeros(1, 8, 64), plan=torch.tensor([[plan.handle]]), position_ids=tokens, attention_mask=tokens)


@pytest.mark.parametrize("schedule", [ScheduleZBVZeroBubble, ScheduleInterleavedZeroBubble, ScheduleDualPipeV])
def test_divided_backward_is_refused_with_checkpointing_and_wrappers(schedule: type, tmp_path: Path) -> None:
    part, pipeline = part_of(tmp_path / "plain"), Pipeline(2, 2)
    recomputed = part_of(tmp_path / "recomputed", recompute=True)

    check_schedule(schedule, pipeline, 4, [part])
    check_schedule(ScheduleInterleaved1F1B, pipeline, 4, [recomputed])
    with pytest.raises(ConfigError, match=f"{schedule.__name__} with activation checkpointing"):
        check_schedule(schedule, pipeline, 4, [part, recomputed])

    class Wrapper(nn.parallel.DistributedDataParallel):
        """One that needs no process group."""

        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    check_schedule(ScheduleInterleaved1F1B, pipeline, 4, [Wrapper(part)])
    with pytest.raises(ConfigError, match=f"{schedule.__name__} with Wrapper .* miss gradients of weights"):
        check_schedule(schedule, pipeline, 4, [Wrapper(part)])


def test_schedules_that_do_not_fit_the_pipeline_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 micro-batches per optimizer step are not a multiple of 4 stages"):
        check_schedule(ScheduleInterleaved1F1B, Pipeline(4, 2), 6, [])
    with pytest.raises(ConfigError, match="Schedule1F1B runs 1 part on each stage, and the pipeline has 2 chunks"):
        check_schedule(Schedule1F1B, Pipeline(4, 2), 8, [])


def test_parts_that_send_hidden_states_in_several_dtypes_are_refused(tmp_path: Path) -> None:
    """In a step stages compare that of one part each."""
    part, pipeline = part_of(tmp_path), Pipeline(2, 2)
    in_half = ModelPart(part.model, (), 3, pipeline, 16, hidden_dtype=torch.bfloat16)

    check_schedule(ScheduleInterleaved1F1B, pipeline, 4, [part, part])
    with pytest.raises(ConfigError, match=r"part 1 .* in torch\.float32, and part 3 in torch\.bfloat16"):
        check_schedule(ScheduleInterleaved1F1B, pipeline, 4, [part, nn.Sequential(in_half)])


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [(Schedule1F1B, [1]), (ScheduleInterleaved1F1B, [1, 5]), (ScheduleZBVZeroBubble, [1, 6])],
)
def test_parts_of_a_stage(schedule: type, parts: list[int]) -> None:
    assert parts_of_stage(schedule, Pipeline(4, len(parts)), 1) == parts


def test_steps_of_several_shapes_are_refused() -> None:
    batches = [{"input_ids": torch.zeros(1, tokens)} for tokens in (8, 8, 6)]

    with pytest.raises(
        ConfigError, match=r"micro-batch 2 of the step has \(1, 6\) rows, and micro-batch 0 has \(1, 8\)"
    ):
        StepInputs.of(batches)
    with pytest.raises(ConfigError, match="an optimizer step of 0 micro-batches"):
        StepInputs.of([])
