"""One training run, computed in every way that must give the same numbers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from distca_hf.batches.agreement import Returning
from distca_hf.integrations.models.forward_watch import watch_of
from support.checkpointing import checkpointing_arguments, count_layer_calls, settings_of
from support.data import random_dataset
from support.models import VOCABULARY, plain_attention, tiny_model
from support.shard_on_cpu import let_accelerate_shard_on_cpu


# Drift shows in many steps, everything else in a few; in these an epoch ends, too.
MANY_STEPS = 50
STEPS = 4
CAPACITY_TOKENS = 192
LEARNING_RATE = 1e-3
SEED = 7

# Classes of decoder layers.
LAYERS = {
    "llama": "LlamaDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gemma3": "Gemma3DecoderLayer",
    "gpt_oss": "GptOssDecoderLayer",
    "qwen3_5": "Qwen3_5DecoderLayer",
}
DISTRIBUTED_TYPES = {"none": "NO", "ddp": "MULTI_CPU", "fsdp": "FSDP", "zero": "DEEPSPEED"}


@dataclass(frozen=True)
class Curve:
    """Loss and gradient norm of every step, and how they were computed.

    Attributes:
        distributed_type: what Accelerate made of the model, or the class around it.
        layer_calls: as in `support.checkpointing.LAYER_CALLS`.
        imbalance: before and after balancing, mean over all steps.
        places_loss: whether head and loss ran on placed rows in the last pass.
    """

    losses: list[float]
    gradient_norms: list[float]
    distributed_type: str = ""
    layer_calls: tuple[float, float] = (0, 0)
    imbalance: tuple[float, float] = (0, 0)
    places_loss: bool = False


class References:
    """Curves of one process, made when they are first needed.

    Attributes:
        initial_models: folders of the models that all trainings begin with, by kind.
    """

    def __init__(self, initial_models: dict[str, Path]) -> None:
        self.initial_models = initial_models
        self._curves: dict[object, Curve] = {}

    def once(self, key: object, train: Callable[[], Curve]) -> Curve:
        """The curve of a key, which stands for all that matters to it."""
        if key not in self._curves:
            self._curves[key] = train()
        return self._curves[key]


@dataclass(frozen=True)
class Run:
    """How a training run is computed; what it computes is fixed by `model`, `accumulation`, `lora` and `steps`."""

    model: str
    world_size: int
    wrap: str  # "none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2" or "zero3"
    loop: str  # "trainer", "sft" (TRL's) or "plain"
    accumulation: int
    kv_residency: str = "auto"
    checkpointing: str = ""  # a key of LAYER_CALLS
    lora: bool = False
    steps: int = STEPS


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
    """Documents of three micro-batches."""
    return random_dataset(count=12)


def train_reference(folder: Path, accumulation: int, lora: bool, steps: int) -> Curve:
    """sdpa in one process, every document alone; the mean over all labels of a step."""
    import distca_hf

    loader = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS).dataloader(training_dataset(), SEED)
    model = load_model(folder, plain_attention(AutoConfig.from_pretrained(folder).model_type), lora).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    epochs = ([(epoch, at) for at in range(len(loader))] for epoch in count())
    for window in islice(_windows(epochs, accumulation), steps):
        documents = [document for position in window for document in loader.documents(*position)]
        labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
        total = 0.0
        for document in documents:
            row = {name: torch.from_numpy(getattr(document, name))[None] for name in ("input_ids", "labels")}
            loss = model(**row, num_items_in_batch=labels, use_cache=False).loss
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Curve(losses, norms)


def save_initial_model(kind: str, folder: Path) -> Path:
    """Writes a tiny model's initial weights; every run of a comparison begins from them. Two layers, as time goes by
    layer, and recomputation does not need more."""
    tiny_model(kind, plain_attention(kind), num_hidden_layers=2).save_pretrained(folder)
    return folder


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
    return train_in_plain_loop(run, folder) if run.loop == "plain" else train_with_trainer(run, folder)


def train_in_plain_loop(run: Run, folder: Path) -> Curve:
    """A torch loop: DDP or FSDP2 straight from torch."""
    import distca_hf

    plugin = _plugin(run)
    loader = plugin.dataloader(training_dataset(), SEED)
    model = load_model(folder, "distca", run.lora).train()
    distca_hf.enable(model, plugin)
    layer_calls = count_layer_calls(model)
    wrapped = _wrap(model, run.wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    for window in islice(_windows(repeat(loader), run.accumulation), run.steps):
        labels = sum(batch["distca_plan"].label_tokens for batch in window)
        for attempt in plugin.attempts(wrapped, window):
            with attempt:
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
    return Curve(losses, norms, type(wrapped).__name__, layer_calls())


def train_with_trainer(run: Run, folder: Path) -> Curve:
    """An unmodified Trainer, or TRL's, attached."""
    layer = LAYERS[run.model]
    computing = computing_arguments(run.wrap, run.checkpointing, layer)
    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=run.steps,
        gradient_accumulation_steps=run.accumulation,
        optim="adamw_torch",
        max_grad_norm=1.0,
        seed=SEED,
        **computing,
    )
    model = load_model(folder, "distca", run.lora)
    if run.loop == "sft":
        trainer = sft_trainer(model, training_dataset(), max_length=None, **arguments)
    else:
        from transformers import Trainer, TrainingArguments

        trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=training_dataset())
    _plugin(run).attach(trainer)
    return curve_of(trainer)


def sft_trainer(
    model: Any, dataset: Dataset, callbacks: Iterable[Any] = (), eval_dataset: Dataset | None = None, **arguments: Any
) -> Any:
    """TRL's trainer for tokens; imported here because that takes two seconds."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
        callbacks=list(callbacks),
    )


def curve_of(trainer: Any) -> Curve:
    """Trains, and reads what the trainer logged."""
    layer_calls = count_layer_calls(trainer.model)
    trainer.train()
    watch = watch_of(trainer.model)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    before, after = (
        sum(log.get(name, 0.0) for log in logs) / len(logs) for name in ("distca/imbalance_before", "distca/imbalance")
    )
    return Curve(
        losses=[log["loss"] for log in logs],
        gradient_norms=[log["grad_norm"] for log in logs],
        distributed_type=trainer.accelerator.distributed_type.name,
        layer_calls=layer_calls(),
        imbalance=(before, after),
        places_loss=watch is not None and watch.planner is not None and watch.planner.returning == Returning.LOSS,
    )


def assert_same_curve(curve: Curve, expected: Curve, record_property: Callable[[str, object], None]) -> None:
    """Loss and gradient norm of every step are those of the reference."""
    differences = [loss - reference for loss, reference in zip(curve.losses, expected.losses, strict=True)]
    largest, drift = max(map(abs, differences)), abs(sum(differences) / len(differences))
    record_property("largest loss difference, drift", f"{largest:.1e}, {drift:.1e}")
    assert largest <= 1e-5, differences
    assert drift <= 1e-6, drift
    np.testing.assert_allclose(curve.gradient_norms, expected.gradient_norms, rtol=1e-4)


def _plugin(run: Run) -> Any:
    import distca_hf

    return distca_hf.DistCAPlugin(
        tokens_per_rank=CAPACITY_TOKENS // run.world_size,
        kv_residency=run.kv_residency,
        **settings_of(run.checkpointing),
        metrics="all",
    )


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


def computing_arguments(wrap: str, checkpointing: str, layer: str) -> dict[str, Any]:
    """Arguments of `TrainingArguments` that say how to compute, on CPUs: what `Run` says, and the name of a layer's
    class."""
    arguments = checkpointing_arguments(checkpointing)
    if wrap in ("none", "ddp"):
        return arguments | {"use_cpu": True}
    let_accelerate_shard_on_cpu()
    if wrap.startswith("zero"):
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile collectives of its own first
        stage: dict[str, Any] = {"stage": int(wrap[-1]), "stage3_param_persistence_threshold": 0}
        auto = dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        return arguments | {"deepspeed": {**auto, "zero_optimization": stage, "zero_allow_untested_optimizer": True}}
    config = {
        "version": int(wrap[-1]),
        "transformer_layer_cls_to_wrap": [layer],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True if wrap == "fsdp2" else "FULL_SHARD",
        "use_orig_params": True,
        "sync_module_states": False,  # Accelerate looks for a GPU to do it on
        "cpu_ram_efficient_loading": False,
        "activation_checkpointing": checkpointing == "fsdp",
    }
    return arguments | {"fsdp": True, "fsdp_config": config}
