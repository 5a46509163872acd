"""Trains a small Llama on Python's own sources twice, with distca and with sdpa, and compares.

    accelerate launch --config_file recipes/accelerate/cpu_2proc.yaml -m distca_hf.run \
        --recipe recipes/train/quickstart.yaml examples/quickstart.py

The distca run is an ordinary Trainer with one line more: documents are placed so that both ranks have the same
attention work, and may span both. The sdpa run takes the same batches, every document alone and whole. The losses must
agree.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import python_sources
import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import distca_hf
from distca_hf.insight.report import draw_balance


# Adam divides gradients by their size: with its default epsilon the rounding noise in gradients of rare tokens grows
# to whole steps, and two exact ways to compute the same drift apart.
ADAM_EPSILON = 1e-6
# Largest difference between the two losses of a step.
LIMIT = 1e-3


@dataclass
class Arguments:
    output: Path = field(default=Path("quickstart_output"), metadata={"help": "folder for data, model and picture"})
    steps: int = field(default=24, metadata={"help": "optimizer steps of each run"})
    learning_rate: float = field(default=1e-3, metadata={"help": "constant learning rate"})


class StepRecord(TrainerCallback):
    """What the loader and the transport did in each step."""

    def __init__(self, plugin: distca_hf.DistCAPlugin, device: torch.device) -> None:
        self.traffic = plugin.transport(device).traffic
        self.bytes_sent: list[int] = []
        self.seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._began, self._sent = time.perf_counter(), self.traffic.bytes_sent

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds += time.perf_counter() - self._began
        self.bytes_sent.append(self.traffic.bytes_sent - self._sent)


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
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def train_with_distca(arguments: Arguments, dataset):
    """An ordinary Trainer, and `attach`."""
    args = TrainingArguments(
        output_dir=str(arguments.output / "checkpoints"),
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        adam_epsilon=ADAM_EPSILON,
        per_device_train_batch_size=1,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    plugin = distca_hf.DistCAPlugin()
    record = StepRecord(plugin, args.device)
    trainer = Trainer(model=new_model("distca"), args=args, train_dataset=dataset, callbacks=[record])
    plugin.attach(trainer)
    trainer.train()
    trainer.save_model(str(arguments.output / "model"))
    return trainer, record


def train_with_sdpa(arguments: Arguments, loader) -> tuple[list[float], float]:
    """The same steps by hand: documents of each batch divided among ranks, each attended alone; gradients summed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = new_model("sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, eps=ADAM_EPSILON, weight_decay=0.0)
    losses = []
    began = time.perf_counter()
    for step in range(arguments.steps):
        documents = sorted(loader.documents(0, step), key=lambda document: len(document.input_ids))
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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, time.perf_counter() - began


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    state = PartialState(cpu=True)
    with state.main_process_first():
        dataset = python_sources.load(arguments.output / "data")

    state.print(f"Training {arguments.steps} steps with distca on {state.num_processes} ranks ...")
    trainer, record = train_with_distca(arguments, dataset)
    loader = trainer.get_train_dataloader()
    state.print("The same batches with sdpa, every document alone; this takes about twice as long ...")
    sdpa_losses, sdpa_seconds = train_with_sdpa(arguments, loader)

    sent = torch.tensor(record.bytes_sent)
    dist.all_reduce(sent)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    if state.is_main_process:
        report(arguments, loader, logs, sdpa_losses, sent.tolist(), record.seconds, sdpa_seconds)
    largest = max(abs(log["loss"] - loss) for log, loss in zip(logs, sdpa_losses, strict=True))
    agree = largest <= LIMIT
    state.print(f"{'OK' if agree else 'FAILED'}: losses differ by at most {largest:.1e} (limit {LIMIT:.0e})")
    state.wait_for_everyone()
    state.destroy_process_group()
    sys.exit(0 if agree else 1)


def report(arguments, loader, logs, sdpa_losses, sent, distca_seconds, sdpa_seconds) -> None:
    console = Console()
    table = Table(title="The same batches, trained twice")
    for column in ("step", "loss distca", "loss sdpa", "difference", "imbalance before", "placed", "MB moved"):
        table.add_column(column, justify="right")
    differences = [abs(log["loss"] - loss) for log, loss in zip(logs, sdpa_losses, strict=True)]
    for log, loss, difference, moved in zip(logs, sdpa_losses, differences, sent, strict=True):
        before, placed = log["distca/imbalance_before"], log["distca/imbalance"]
        row = (f"{log['loss']:.6f}", f"{loss:.6f}", f"{difference:.1e}", f"{before:.3f}", f"{placed:.4f}")
        table.add_row(str(log["step"]), *row, f"{moved / 1e6:.2f}")
    console.print(table)

    facts = list(loader.history)[: arguments.steps]
    tokens = sum(len(document.input_ids) for step in range(arguments.steps) for document in loader.documents(0, step))
    before = sum(log["distca/imbalance_before"] for log in logs) / len(logs)
    placed = sum(log["distca/imbalance"] for log in logs) / len(logs)
    spanning = sum(sum(fact.key_rows_sent) > 0 for fact in facts)
    summary = Table(show_header=False)
    lengths = [len(row) for row in loader.dataset["input_ids"]]
    summary.add_row("documents in the dataset", f"{len(lengths)}, of {min(lengths)} to {max(lengths)} tokens")
    summary.add_row("largest loss difference", f"{max(differences):.1e}")
    summary.add_row("attention work, max / mean", f"{before:.3f} packed in order, {placed:.4f} placed")
    summary.add_row("batches with a document on both ranks", f"{spanning} of {len(facts)}")
    summary.add_row("bytes moved", f"{sum(sent) / 1e6:.1f} MB")
    speed = f"{tokens / distca_seconds:.0f} distca, {tokens / sdpa_seconds:.0f} sdpa (one document at a time)"
    summary.add_row("tokens/s", speed)
    picture = arguments.output / "balance.png"
    draw_balance([fact.work_before for fact in facts], [fact.work for fact in facts], picture)
    summary.add_row("picture", str(picture))
    summary.add_row("model", str(arguments.output / "model"))
    console.print(summary)


if __name__ == "__main__":
    main()
