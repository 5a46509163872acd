"""The training of `scripts/faults/lose_servers.py`: an unmodified Trainer with `plugin.attach`.

Arguments: folder, wrap, accumulation, steps (0: until the file `ended` is there), device, `--one-gpu`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import distca_hf
from distca_hf.arrays import ceil_div
from support import data
from support.data import random_dataset
from support.models import tiny_model
from support.training import computing_arguments, quiet_arguments


MOST_STEPS = 100_000
# On CPUs, and on GPUs: tokens per rank, if all ranks hold the longest document then; lengths of documents; changes of
# the model.
CAPACITY_TOKENS = {"cpu": 96, "cuda": 32768}
LENGTHS = {"cpu": data.LENGTHS, "cuda": (4, 100, 3000, 9000, 32000)}
CHANGES: dict[str, dict[str, Any]] = {
    "cpu": {"num_hidden_layers": 2},
    "cuda": {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}


class EndTogether(TrainerCallback):
    """Ends the training with the first step that ends after a file is there: rank 0 looks, for all ranks.

    Attributes:
        seconds: of every step so far.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seconds: list[float] = []

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._began = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        ended = torch.tensor(int(self._file.exists()), device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(ended, 0)
        control.should_training_stop = bool(ended)
        self.seconds.append(time.monotonic() - self._began)


def main() -> None:
    folder, wrap, accumulation, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    device = sys.argv[5]
    if "--one-gpu" in sys.argv:
        os.environ["LOCAL_RANK"] = "0"
    computing = computing_arguments(wrap, "", "LlamaDecoderLayer") if device == "cpu" else on_gpus(wrap)
    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=steps or MOST_STEPS,
        gradient_accumulation_steps=accumulation,
        optim="adamw_torch",
        logging_nan_inf_filter=False,  # else a loss that is NaN is logged as another one
        **computing,
    )
    end = EndTogether(folder / "ended")
    torch.manual_seed(0)
    trainer = Trainer(
        model=tiny_model("llama", "distca", **CHANGES[device]),
        args=TrainingArguments(**arguments),
        train_dataset=random_dataset(400, lengths=LENGTHS[device]),
        callbacks=[] if steps else [end],  # it makes ranks wait for each other, and the host for the GPU
    )
    capacity = capacity_tokens(device, trainer.args.world_size)
    distca_hf.DistCAPlugin(tokens_per_rank=capacity).attach(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    if trainer.args.process_index == 0:
        result = {
            "steps": trainer.state.global_step,
            "losses": [log["loss"] for log in logs],
            "norms": [log["grad_norm"] for log in logs],
            "redone": sum(log.get("distca/redone_steps", 0.0) for log in logs),
            "seconds": end.seconds,
        }
        (folder / "losses.json").write_text(json.dumps(result))


def capacity_tokens(device: str, num_trainers: int) -> int:
    """Returns the tokens that a trainer holds: all together hold the longest document, also if there is only one."""
    return max(CAPACITY_TOKENS[device], ceil_div(max(LENGTHS[device]), num_trainers))


def on_gpus(wrap: str) -> dict[str, Any]:
    """Returns arguments of `TrainingArguments` on GPUs, as users write them."""
    arguments: dict[str, Any] = {"bf16": True}
    if wrap == "fsdp2":
        config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
        return arguments | {"fsdp": True, "fsdp_config": config}
    if wrap == "zero3":
        auto = dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        return arguments | {"deepspeed": {**auto, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}}
    return arguments


if __name__ == "__main__":
    main()
