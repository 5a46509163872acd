"""One training run, computed in every supported way, gives the same losses: fifty AdamW steps from one start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.models import save_tiny_model
from support.ranks import run_ranks
from support.training import Curve, Run, train, train_reference


# Pairwise cover of model, world and wrapping, loop, accumulation, kept or re-fetched keys, checkpointing and adapters.
RUNS = [
    Run("llama", 1, "none", "trainer", 1),
    Run("qwen3", 1, "none", "plain", 3, "keep"),
    Run("llama", 2, "ddp", "plain", 3, "keep"),
    Run("qwen3", 2, "ddp", "trainer", 1),
    Run("llama", 4, "ddp", "trainer", 3, "keep"),
    Run("qwen3", 4, "ddp", "plain", 1),
    Run("llama", 2, "fsdp2", "plain", 1, "keep"),
    Run("qwen3", 2, "fsdp2", "trainer", 3),
    Run("llama", 2, "fsdp2", "trainer", 1, checkpointing=True),
    Run("llama", 2, "zero1", "trainer", 1, "keep", checkpointing=True),
    Run("qwen3", 2, "zero1", "trainer", 3),
    Run("qwen3", 2, "zero2", "trainer", 3, checkpointing=True),
    Run("llama", 2, "zero2", "trainer", 1),
    Run("llama", 2, "zero3", "trainer", 3),
    Run("qwen3", 2, "zero3", "trainer", 1, "keep", checkpointing=True),
    Run("qwen3", 2, "fsdp1", "trainer", 1),
    Run("llama", 2, "fsdp1", "trainer", 3, "keep", checkpointing=True),
    Run("llama", 2, "ddp", "trainer", 1, lora=True),
    Run("qwen3", 2, "fsdp2", "trainer", 3, lora=True, checkpointing=True),
]
DISTRIBUTED_TYPES = {
    ("none", "trainer"): "NO",
    ("ddp", "trainer"): "MULTI_CPU",
    ("fsdp1", "trainer"): "FSDP",
    ("fsdp2", "trainer"): "FSDP",
    ("zero1", "trainer"): "DEEPSPEED",
    ("zero2", "trainer"): "DEEPSPEED",
    ("zero3", "trainer"): "DEEPSPEED",
    ("ddp", "plain"): "DistributedDataParallel",
    ("fsdp2", "plain"): "FSDPLlamaForCausalLM",
}


@pytest.fixture(scope="session")
def initial_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3")}


@pytest.fixture(scope="session")
def references() -> dict[tuple[str, int, bool], Curve]:
    """Filled as they are needed."""
    return {}


@pytest.mark.parametrize(
    "run",
    RUNS,
    ids=lambda run: f"{run.model}-{run.wrap}-{run.world_size}-{run.loop}-{run.accumulation}-{'lora' * run.lora}",
)
def test_losses_follow_one_process_sdpa(
    run: Run,
    initial_models: dict[str, Path],
    references: dict[tuple[str, int, bool], Curve],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    key = run.model, run.accumulation, run.lora
    if key not in references:
        references[key] = train_reference(initial_models[run.model], run.steps, run.accumulation, run.lora)
    expected = references[key]
    if run.world_size == 1:
        curve = train(run, initial_models[run.model])
    else:
        curve = run_ranks(run.world_size, train, tmp_path, run, initial_models[run.model])[0]

    assert curve.distributed_type == DISTRIBUTED_TYPES.get((run.wrap, run.loop), curve.distributed_type)
    differences = [loss - reference for loss, reference in zip(curve.losses, expected.losses, strict=True)]
    drift = abs(sum(differences) / len(differences))
    record_property("largest loss difference, drift", f"{max(map(abs, differences)):.1e}, {drift:.1e}")
    assert max(map(abs, differences)) <= 1e-5
    assert drift <= 1e-6
    for norm, reference in zip(curve.gradient_norms, expected.gradient_norms, strict=True):
        assert norm == pytest.approx(reference, rel=1e-4)
