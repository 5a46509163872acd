"""Trains a small Llama on Python's own sources twice, with distca and with sdpa, and compares.

    accelerate launch --config_file recipes/accelerate/cpu_2proc.yaml -m distca_hf.run \
        --recipe recipes/train/quickstart.yaml examples/quickstart.py

The distca run is an ordinary Trainer with one line more. Its recipe sets `tokens_per_rank` and starts two processes:
documents are placed so that both ranks have the same attention work. A document may span both. The sdpa run takes the
same documents, one by one and whole. Losses and gradient norms must agree.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import python_sources
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from quickstart_report import Step, TrainingBar, report
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import distca_hf


# Adam divides gradients by their size. With its default epsilon rounding noise in gradients of rare tokens grows to
# whole steps, and two exact ways to compute the same drift apart.
ADAM_EPSILON = 1e-6
MAX_GRADIENT_NORM = 1.0
# Largest differences between the two trainings in a step: of losses, and of gradient norms as a part of them.
LOSS_LIMIT, NORM_LIMIT = 1e-3, 1e-2


@dataclass
class Arguments:
    output_dir: Path = field(
        default=Path("quickstart_output"), metadata={"help": "folder for data, model and picture"}
    )
    steps: int = field(default=24, metadata={"help": "optimizer steps of each run"})
    learning_rate: float = field(default=1e-3, metadata={"help": "constant learning rate"})


ARGUMENTS = (Arguments,)  # `distca train` reads them, and calls check, before it starts processes


def check(arguments: Arguments) -> None:
    if arguments.steps < 1:
        raise SystemExit(f"--steps {arguments.steps}: the two trainings need at least 1")


class StepRecord(TrainerCallback):
    """Counts the bytes that each step sends, and moves a bar."""

    def __init__(self, plugin: distca_hf.DistCAPlugin, device: torch.device, bar: TrainingBar) -> None:
        self.traffic = plugin.transport(device).traffic
        self.bar = bar
        self.bytes_sent: list[int] = []

    def on_step_begin(self, *_: object, **kwargs: object) -> None:
        self._sent_before = self.traffic.bytes_sent

    def on_step_end(self, *_: object, **kwargs: object) -> None:
        self.bytes_sent.append(self.traffic.bytes_sent - self._sent_before)

    def on_log(self, *_: object, logs: dict[str, float], **kwargs: object) -> None:
        if "loss" in logs:
            self.bar.advance(logs["loss"])


def new_model(implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=python_sources.VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def train_with_distca(
    arguments: Arguments, dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, bar: TrainingBar
) -> tuple[Trainer, StepRecord]:
    """Trains with an ordinary Trainer and `attach`; returns it, and the bytes of each step."""
    args = TrainingArguments(
        output_dir=str(arguments.output_dir / "model"),
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        adam_epsilon=ADAM_EPSILON,
        max_grad_norm=MAX_GRADIENT_NORM,
        per_device_train_batch_size=1,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    plugin = distca_hf.DistCAPlugin()
    record = StepRecord(plugin, args.device, bar)
    model = new_model("distca")
    trainer = Trainer(model, args, train_dataset=dataset, processing_class=tokenizer, callbacks=[record])
    trainer.remove_callback(PrinterCallback)  # the bar shows losses
    plugin.attach(trainer)
    trainer.train()
    trainer.save_model()
    return trainer, record


def train_with_sdpa(
    arguments: Arguments, loader: distca_hf.PlacedLoader, bar: TrainingBar
) -> tuple[list[float], list[float]]:
    """Makes the same steps by hand: documents are divided among ranks, each attends by itself, gradients are summed.

    Returns:
        The loss and the gradient norm of each step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = new_model("sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, eps=ADAM_EPSILON, weight_decay=0.0)
    losses, norms = [], []
    for step in range(arguments.steps):
        documents = sorted(loader.documents(*divmod(step, len(loader))), key=lambda document: len(document.input_ids))
        labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
        total = torch.zeros(())
        for document in documents[rank::world]:
            loss = model(
                input_ids=torch.from_numpy(document.input_ids)[None],
                labels=torch.from_numpy(document.labels)[None],
                num_items_in_batch=labels,
                use_cache=False,
            ).loss
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        dist.all_reduce(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        bar.advance(losses[-1])
    return losses, norms


def main() -> None:
    (arguments,) = HfArgumentParser(ARGUMENTS, allow_abbrev=False).parse_args_into_dataclasses()
    check(arguments)
    state = PartialState(cpu=True)
    if not distca_hf.DistCAPlugin().tokens_per_rank or not dist.is_initialized():
        raise SystemExit("run `distca train quickstart`: its recipe sets tokens_per_rank and starts two processes")
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    data = arguments.output_dir / "data"
    state.print("Reading Python's sources and learning a tokenizer from them (10 to 30 seconds the first time) ...")
    with state.main_process_first():
        dataset, tokenizer = python_sources.load(data), python_sources.load_tokenizer(data)

    state.print(f"Training a small Llama on {state.num_processes} ranks: with distca, then the same with sdpa.")
    with TrainingBar("distca", arguments.steps, shown=state.is_main_process) as bar:
        trainer, record = train_with_distca(arguments, dataset, tokenizer, bar)
    loader = trainer.get_train_dataloader()
    with TrainingBar("sdpa  ", arguments.steps, shown=state.is_main_process) as bar:
        sdpa = train_with_sdpa(arguments, loader, bar)

    sent = torch.tensor(record.bytes_sent)
    dist.all_reduce(sent)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    distca = [log["loss"] for log in logs], [log["grad_norm"] for log in logs]
    losses, norms = (zip(*both, strict=True) for both in zip(distca, sdpa, strict=True))
    steps = [Step(*each) for each in zip(losses, norms, loader.history, sent.tolist(), strict=False)]
    if state.is_main_process:
        report(steps, [len(row) for row in dataset["input_ids"]], arguments.output_dir)
    agree = all(step.loss_difference <= LOSS_LIMIT and step.norm_difference <= NORM_LIMIT for step in steps)
    state.print("OK: both trainings agree" if agree else "FAILED: the trainings differ", end=" ")
    state.print(f"(limits: {LOSS_LIMIT:.0e} for a loss, {NORM_LIMIT:.0e} of a gradient norm)")
    state.wait_for_everyone()
    state.destroy_process_group()
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
