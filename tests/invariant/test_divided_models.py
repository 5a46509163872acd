"""Models that Transformers divides as it loads them train as one process does: experts, replicas, and all at once."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from test_packs_training import GLOBAL_BATCH, dataset
from test_packs_training import Run as PacksRun
from test_packs_training import train as train_on_packs
from torch import nn
from transformers import AutoModelForCausalLM

from support.ranks import run_ranks
from support.shard_on_cpu import let_accelerate_shard_on_cpu
from support.thorough import is_thorough
from support.training import (
    CAPACITY_TOKENS,
    LEARNING_RATE,
    SEED,
    Curve,
    References,
    curve_of,
    quiet_arguments,
    train_reference,
    training_dataset,
)


pytestmark = pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23), reason="Transformers divides experts rightly since 5.23"
)
STEPS = 3


@dataclass(frozen=True)
class Run:
    """How a training is computed.

    Attributes:
        sizes: of `DistributedConfig`.
        loop: "trainer" or "plain".
        batches: "placed" or "packs".
        meshes: what the weights must be divided over.
    """

    model: str
    sizes: dict[str, int]
    meshes: set[str]
    loop: str
    batches: str = "placed"

    @property
    def data_ranks(self) -> int:
        return self.sizes["fsdp_size"] * self.sizes.get("dp_replicate_size", 1)

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.sizes.get("tp_size", 1)

    def __str__(self) -> str:
        sizes = "-".join(f"{name.removesuffix('_size')}{size}" for name, size in self.sizes.items())
        return f"{self.model}-{sizes}-{self.loop}-{self.batches}"


def train_all(runs: Sequence[Run], folder: Path) -> list[tuple[Curve, Counter[str]]]:
    """All runs on this rank, one after the other."""
    if any("tp_size" in run.sizes for run in runs):
        let_accelerate_shard_on_cpu()  # Accelerate knows no ParallelismConfig on CPUs
    return [train(run, folder) for run in runs]


def train(run: Run, folder: Path) -> tuple[Curve, Counter[str]]:
    """Curve of a run, and how many weights are divided over which mesh."""
    from accelerate.state import AcceleratorState
    from transformers.distributed import DistributedConfig

    import distca_hf

    AcceleratorState._reset_state()  # what the run before told it
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="distca", distributed_config=DistributedConfig(**run.sizes)
    )
    tokens_per_rank = 0 if run.batches == "packs" else CAPACITY_TOKENS // run.data_ranks
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens_per_rank, metrics="all")
    how = train_in_plain_loop if run.loop == "plain" else train_with_trainer
    curve = how(run, model, plugin, folder)
    return curve, Counter(mesh_of(parameter) for parameter in model.parameters())


def mesh_of(parameter: nn.Parameter) -> str:
    """Dimensions and sizes of the mesh that a weight is divided over."""
    mesh = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return " ".join(f"{name}{mesh.size(names.index(name))}" for name in names if mesh.size(names.index(name)) > 1)


def train_with_trainer(run: Run, model: Any, plugin: Any, folder: Path) -> Curve:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    packs = run.batches == "packs"
    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=STEPS,
        **{} if packs else {"seed": SEED},
        optim="adamw_torch",
        max_grad_norm=1.0,
        use_cpu="tp_size" not in run.sizes,
        **{"per_device_train_batch_size": GLOBAL_BATCH // run.data_ranks, "dataloader_drop_last": True}
        if packs
        else {},
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=dataset("collator") if packs else training_dataset(),
        data_collator=DataCollatorWithFlattening() if packs else None,
    )
    plugin.attach(trainer)
    return curve_of(trainer)


def train_in_plain_loop(run: Run, model: Any, plugin: Any, folder: Path) -> Curve:
    import distca_hf

    loader = plugin.dataloader(training_dataset(), SEED, model=model)
    distca_hf.enable(model, plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    for batch in islice(loader, STEPS):
        loss = model.train()(**batch).loss
        loss.backward()
        norms.append(clip_gradients(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / run.world_size)
    return Curve(losses, norms, type(model).__name__)


def clip_gradients(parameters: Iterable[nn.Parameter], longest: float) -> float:
    """torch's `clip_grad_norm_` for gradients on several meshes, as experts have them."""
    on_meshes: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        on_meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in on_meshes.values()]
    total = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
    for parameter in (parameter for some in on_meshes.values() for parameter in some):
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, longest / (float(total) + 1e-6)))
    return float(total)


def largest_differences(curve: Curve, expected: Curve) -> str:
    """Of losses, and of gradient norms."""
    loss, norm = (
        max(abs(a - b) for a, b in zip(numbers, others, strict=True))
        for numbers, others in ((curve.losses, expected.losses), (curve.gradient_norms, expected.gradient_norms))
    )
    return f"{loss:.1e}, {norm:.1e}"


EP = {"fsdp_size": 2, "ep_size": 2}
EP_OF_SHARDS = {"fsdp_size": 4, "ep_size": 2}
ALL = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
REPLICAS = {"dp_replicate_size": 2, "fsdp_size": 2}
RUNS = [
    Run("qwen3_moe", EP, {"fsdp2", "ep2"}, "trainer", "packs"),
    Run("qwen3_moe", EP, {"fsdp2", "ep2"}, "plain"),
    *([Run("qwen3_moe", EP_OF_SHARDS, {"fsdp4", "efsdp2 ep2"}, "trainer")] if is_thorough() else []),
    Run("qwen3_moe", ALL, {"fsdp2", "fsdp2 tp2", "ep4"}, "trainer"),
    Run("llama", REPLICAS, {"dp_replicate2 fsdp2"}, "trainer", "packs"),
    Run("llama", REPLICAS, {"dp_replicate2 fsdp2"}, "plain"),
    Run("qwen3_5", {"tp_size": 2, "fsdp_size": 2}, {"fsdp2", "fsdp2 tp2"}, "trainer"),
]


@pytest.fixture(scope="module")
def trained(
    references: References, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Run], tuple[Curve, Counter[str]]]:
    """Returns what a run gave. Runs of one model on as many ranks share their processes."""
    done: dict[str, tuple[Curve, Counter[str]]] = {}

    def trained(run: Run) -> tuple[Curve, Counter[str]]:
        if str(run) not in done:
            alike = [
                other
                for other in RUNS
                if (other.model, other.world_size, "tp_size" in other.sizes)
                == (run.model, run.world_size, "tp_size" in run.sizes)
            ]
            folder = tmp_path_factory.mktemp("ranks")
            results = run_ranks(run.world_size, train_all, folder, alike, references.initial_models[run.model])[0]
            done.update({str(other): result for other, result in zip(alike, results, strict=True)})
        return done[str(run)]

    return trained


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_losses_follow_one_process_sdpa(
    run: Run,
    trained: Callable[[Run], tuple[Curve, Counter[str]]],
    references: References,
    record_property: Callable[[str, object], None],
) -> None:
    folder = references.initial_models[run.model]
    if run.batches == "packs":
        alone = PacksRun("collator", "none", 1, "none", 1, steps=STEPS)
        expected = references.once((run.model, alone), lambda: train_on_packs(alone, folder, "sdpa"))
    else:
        expected = references.once(
            (run.model, 1, False, STEPS), lambda: train_reference(folder, 1, lora=False, steps=STEPS)
        )
    curve, meshes = trained(run)

    record_property("largest differences", largest_differences(curve, expected))
    assert len(curve.losses) == STEPS
    assert set(meshes) == run.meshes, meshes
    if run.loop == "trainer":
        before, after = curve.imbalance
        assert after < min(1.1, before), (before, after)
        assert curve.places_loss == (run.batches == "packs")
    np.testing.assert_allclose(curve.losses, expected.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(curve.gradient_norms, expected.gradient_norms, rtol=0, atol=1e-5)
