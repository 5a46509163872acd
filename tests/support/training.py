"""One training run, computed in every way that must give the same numbers."""

import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM

from support.data import random_dataset
from support.models import VOCABULARY, tiny_model


STEPS = 50
CAPACITY_TOKENS = 192
LEARNING_RATE = 1e-3
SEED = 7

DISTRIBUTED_TYPES = {"none": "NO", "ddp": "MULTI_CPU", "fsdp": "FSDP", "zero": "DEEPSPEED"}
# How often a layer runs for one micro-batch, and how often its attention: twice if recomputed for backward.
LAYER_CALLS = {
    "": (1, 1),
    "non-reentrant": (2, 1),
    "reentrant": (2, 2),
    "fsdp": (2, 1),
    "selective": (2, 1),
    "trl": (2, 1),
}


@dataclass(frozen=True)
class Curve:
    """Loss and gradient norm of every step, and how they were computed.

    Attributes:
        distributed_type: what Accelerate made of the model, or the class around it.
        layer_calls: as in `LAYER_CALLS`.
        imbalance: before and after balancing, mean over all steps.
    """

    losses: list[float]
    gradient_norms: list[float]
    distributed_type: str = ""
    layer_calls: tuple[float, float] = (0, 0)
    imbalance: tuple[float, float] = (0, 0)


@dataclass(frozen=True)
class Run:
    """How a training run is computed; what it computes is fixed by `model`, `accumulation` and `lora`."""

    model: str
    world_size: int
    wrap: str  # "none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2" or "zero3"
    loop: str  # "trainer", "sft" (TRL's) or "plain"
    accumulation: int
    received_kv: str = "refetch"
    checkpointing: str = ""  # a key of LAYER_CALLS
    lora: bool = False


def quiet_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of `TrainingArguments`, or of `SFTConfig`: every step is logged, nothing is saved, shown or reported,
    and what is learnt does not depend on how many steps there are."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    } | changes


def training_dataset() -> Dataset:
    return random_dataset(count=240)


def train_reference(folder: Path, steps: int, accumulation: int, lora: bool = False) -> Curve:
    """sdpa in one process, every document alone; the mean over all labels of a step."""
    import distca_hf

    loader = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS).dataloader(training_dataset(), SEED)
    model = load_model(folder, "sdpa", lora).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    epochs = ([(epoch, at) for at in range(len(loader))] for epoch in count())
    for window in islice(_windows(epochs, accumulation), steps):
        documents = [document for position in window for document in loader.documents(*position)]
        labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
        total = 0.0
        for document in documents:
            loss = model(
                input_ids=torch.from_numpy(document.input_ids)[None],
                labels=torch.from_numpy(document.labels)[None],
                num_items_in_batch=labels,
                use_cache=False,
            ).loss
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Curve(losses, norms)


def load_model(folder: Path, implementation: str, lora: bool = False) -> Any:
    """The saved initial model; with adapters that are the same every time, and nothing else to train."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"]))


def train(run: Run, folder: Path) -> Curve:
    """The same run on this rank of an initialised group (or alone)."""
    return train_with_trainer(run, folder) if run.loop == "trainer" else train_in_plain_loop(run, folder)


def train_in_plain_loop(run: Run, folder: Path) -> Curve:
    """A torch loop: DDP or FSDP2 straight from torch."""
    import distca_hf

    plugin = _plugin(run)
    loader = plugin.dataloader(training_dataset(), SEED)
    model = load_model(folder, "distca", run.lora).train()
    distca_hf.enable(model, plugin)
    wrapped = _wrap(model, run.wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    for window in islice(_windows(repeat(loader), run.accumulation), run.steps):
        labels = sum(batch["distca_plan"].label_tokens for batch in window)
        total = torch.zeros(())
        for batch in window:
            with _without_sync(wrapped, run.wrap, last=batch is window[-1]):
                # A window of one micro-batch needs no count: the batch brings it.
                given = {"num_items_in_batch": labels / run.world_size} if run.accumulation > 1 else {}
                loss = wrapped(**batch, **given).loss
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean_over_ranks(total))
    return Curve(losses, norms, type(wrapped).__name__)


def train_with_trainer(run: Run, folder: Path) -> Curve:
    """An unmodified Trainer, attached."""
    sharding = sharding_arguments(run.wrap, {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer"}[run.model])
    from transformers import Trainer, TrainingArguments

    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=run.steps,
        gradient_accumulation_steps=run.accumulation,
        optim="adamw_torch",
        max_grad_norm=1.0,
        seed=SEED,
        gradient_checkpointing=run.checkpointing,
        **sharding,
    )
    model = load_model(folder, "distca", run.lora)
    trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=training_dataset())
    _plugin(run).attach(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    kind = trainer.accelerator.distributed_type.name
    return Curve([log["loss"] for log in logs], [log["grad_norm"] for log in logs], kind)


def _plugin(run: Run) -> Any:
    import distca_hf

    return distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS // run.world_size, received_kv=run.received_kv)


def _windows(epochs: Iterable[Iterable[Any]], accumulation: int) -> Iterator[list[Any]]:
    """The micro-batches of each step; like Trainer's, the last window of an epoch may be shorter."""
    for epoch in epochs:
        batches = iter(epoch)
        while window := list(islice(batches, accumulation)):
            yield window


def _wrap(model: nn.Module, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrap == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _without_sync(wrapped: nn.Module, wrap: str, last: bool) -> Any:
    if wrap == "fsdp2":
        wrapped.set_requires_gradient_sync(last)
    return wrapped.no_sync() if wrap == "ddp" and not last else nullcontext()


def _mean_over_ranks(value: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def sharding_arguments(wrap: str, layer: str) -> dict[str, Any]:
    """Arguments of `TrainingArguments` that shard a model in some way, on CPUs."""
    if wrap in ("none", "ddp"):
        return {"use_cpu": True}
    let_accelerate_shard_on_cpu()
    if wrap.startswith("zero"):
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile collectives of its own first
        stage: dict[str, Any] = {"stage": int(wrap[-1]), "stage3_param_persistence_threshold": 0}
        auto = dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        return {"deepspeed": {**auto, "zero_optimization": stage, "zero_allow_untested_optimizer": True}}
    config = {
        "version": int(wrap[-1]),
        "transformer_layer_cls_to_wrap": [layer],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True if wrap == "fsdp2" else "FULL_SHARD",
        "use_orig_params": True,
        "sync_module_states": False,  # Accelerate looks for a GPU to do it on
        "cpu_ram_efficient_loading": False,
    }
    return {"fsdp": True, "fsdp_config": config}


def let_accelerate_shard_on_cpu() -> None:
    """Accelerate runs plain DDP when FSDP or DeepSpeed is asked for on a CPU; this takes its accelerator path over
    gloo instead."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend
