"""What each way to train keeps of gradients between micro-steps, under an unmodified Trainer in bf16, is what commands
estimate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, training_args

from distca_hf.analysis.memory import gradient_bytes
from support.ranks import run_ranks
from support.training import DISTRIBUTED_TYPES, computing_arguments, quiet_arguments


LAYER = "LlamaDecoderLayer"
# Ways to wrap a model, with ranks. On 2, whole gradients in bf16 are as many bytes as a rank's share in fp32.
WRAPS = {"ddp": 2, "fsdp2": 4, "zero2": 2, "zero3": 2}


def kept_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of all gradients on this rank, wherever torch and DeepSpeed keep them."""
    kept = [weight.grad for weight in model.parameters() if weight.grad is not None]
    kept = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in kept]
    groups = {module._get_fsdp_state()._fsdp_param_group for module in model.modules() if hasattr(module, "unshard")}
    for weight in (weight for group in groups if group is not None for weight in group.fsdp_params):
        whole = weight.unsharded_accumulated_grad
        if whole is None and hasattr(weight, "_unsharded_param"):
            whole = weight._unsharded_param.grad
        kept += [] if whole is None else [whole]
    zero = getattr(optimizer, "optimizer", None)
    kept += [grad for grads in (getattr(zero, "all_grad_tensors", None) or {}).values() for grad in grads or ()]
    buffer = getattr(zero, "grad_partitions_flat_buffer", None)  # of ZeRO-3; all else lies in it
    return sum(grad.numel() * grad.element_size() for grad in (kept if buffer is None else [buffer]))


class Measured(Trainer):
    """Looks at gradients before each micro-step."""

    seen: list[int]

    def training_step(self, model: nn.Module, *given: Any) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), kept_bytes(model, self.optimizer)]
        return super().training_step(model, *given)


def measure(folder: Path, wrap: str) -> dict[tuple[int, bool], tuple[int, int]]:
    """Weights of the model, and bytes before the last micro-step, by micro-steps and `sync_each_batch`."""
    training_args.is_torch_bf16_gpu_available = lambda: True  # Trainer asks for it, unless it is told to use a CPU
    row = [5 + number % 50 for number in range(16)]
    dataset = Dataset.from_dict({"input_ids": [row] * 32, "labels": [row] * 32})
    found = {}
    for micro_steps, synced in ((1, False), (4, False), (4, True)):
        computing = computing_arguments(wrap, "", LAYER)
        if "deepspeed" in computing:
            computing["deepspeed"]["bf16"] = {"enabled": "auto"}
        args = TrainingArguments(
            **quiet_arguments(folder, max_steps=1, gradient_accumulation_steps=micro_steps, optim="adamw_torch")
            | computing
            | {"bf16": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": synced}}}
        )
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4))
        weights = sum(int(getattr(weight, "ds_numel", weight.numel())) for weight in model.parameters())
        trainer = Measured(model, args, train_dataset=dataset)
        trainer.train()
        assert trainer.accelerator.distributed_type.name == DISTRIBUTED_TYPES[wrap.rstrip("0123456789")]
        assert len(trainer.seen) == micro_steps
        found[micro_steps, synced] = weights, trainer.seen[-1]
        trainer.accelerator.free_memory()
    return found


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_are_those_that_commands_estimate(wrap: str, tmp_path: Path) -> None:
    ranks = WRAPS[wrap]
    for of_rank in run_ranks(ranks, measure, tmp_path, tmp_path, wrap):
        for (micro_steps, synced), (weights, kept) in of_rank.items():
            way: Any = "fsdp2_synced" if wrap == "fsdp2" and synced else wrap
            assert kept == pytest.approx(gradient_bytes(way, weights, weights // ranks, micro_steps), rel=0.02), (
                micro_steps,
                synced,
            )
