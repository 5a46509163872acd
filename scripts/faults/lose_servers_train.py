"""The training of `lose_servers.py`: an unmodified Trainer with `plugin.attach`, on CPUs over gloo.

Arguments: folder, wrap, accumulation, steps (0: until the file `ended` is there).
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import distca_hf
from support.data import random_dataset
from support.models import tiny_model
from support.training import computing_arguments, quiet_arguments


MOST_STEPS = 100_000


class EndTogether(TrainerCallback):
    """Ends the training some steps after a file is there: rank 0 looks, and all ranks end at the same step."""

    def __init__(self, file: Path, steps: int) -> None:
        self._file, self._steps = file, steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        ended = torch.tensor(int(self._file.exists() if not self._steps else state.global_step == self._steps))
        torch.distributed.broadcast(ended, 0)
        control.should_training_stop = bool(ended)


def main() -> None:
    folder, wrap, accumulation, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=MOST_STEPS,
        gradient_accumulation_steps=accumulation,
        optim="adamw_torch",
        **computing_arguments(wrap, "", "LlamaDecoderLayer"),
    )
    torch.manual_seed(0)
    trainer = Trainer(
        model=tiny_model("llama", "distca", num_hidden_layers=2),
        args=TrainingArguments(**arguments),
        train_dataset=random_dataset(400),
        callbacks=[EndTogether(folder / "ended", steps)],
    )
    distca_hf.DistCAPlugin(tokens_per_rank=96).attach(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    if trainer.args.process_index == 0:
        result = {
            "steps": trainer.state.global_step,
            "losses": [log["loss"] for log in logs],
            "norms": [log["grad_norm"] for log in logs],
            "redone": sum(log.get("distca/redone_steps", 0.0) for log in logs),
        }
        (folder / "losses.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
