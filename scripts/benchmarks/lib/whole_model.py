"""Modes of a step of a whole model (`MODES`): the same documents and their labels, as plain packs or placed; and
workloads, each of which is measured by itself, in all modes."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.optim import AdamW
from transformers import PreTrainedModel

from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from lib.documents import attended_pairs, whole_documents
from lib.model import PROBE_TOKENS, LossModel, use_liger_loss, without_attention
from lib.modes import build_mode
from lib.parser import write_figures
from lib.place import Mode, Place
from lib.report import Measured, equal_losses, facts_of
from lib.rounds import Runner
from lib.tables import Columns, Figures, table_of
from lib.trainer_batches import Batch


MODES = {
    "local": "plain packing: whole documents, packed in order, and the kernel itself; nothing is exchanged",
    "placed": "the product as users have it: plugin.dataloader makes a batch for every step, in a thread during the "
    "step before",
}
# Tokens of a rank and step, measurements of each mode by its name, and further figures of these.
Workload = tuple[int, Mapping[str, Measured], Mapping[str, Figures]]


class OfLoader:
    """A loader's next batch for every step, which has one micro-step."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        batch = next(self._batches)
        plan = batch["distca_plan"]
        yield {**batch, **_label_count(plan.label_tokens, plan.transport.world_size)}


def fitting_modes(lengths: Sequence[int], num_ranks: int) -> list[str]:
    """Returns the names of all modes; without `local` if a document does not fit one rank."""
    return [name for name in MODES if name != "local" or max(lengths) <= sum(lengths) // num_ranks]


def build_planned(name: str, place: Place, documents: Sequence[IntArray], steps: int) -> tuple[Mode, float]:
    """Returns the mode of a name, good for so many steps on documents of int64 `[tokens]`, the same on all ranks; and
    attended pairs of the busiest rank over the mean. Exits if the loader's batches do not hold the documents. A
    collective call."""
    return _local(place, documents) if name == "local" else _placed(place, documents, steps)


def _local(place: Place, documents: Sequence[IntArray]) -> tuple[Mode, float]:
    num_ranks, lengths = place.wires.world_size, [len(tokens) for tokens in documents]
    mode = build_mode("local", place, documents)
    count = _label_count(sum(lengths) - len(lengths), num_ranks)
    batches = []
    for batch in mode.batches:  # a document's first token is no label, and its last one has none
        labels = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        batches.append({**batch, **count, "labels": labels, "shift_labels": shifted})
    holding = whole_documents(lengths, num_ranks)
    work = [attended_pairs([tokens for _, _, tokens in held]) for held in holding]
    return replace(mode, batches=batches), imbalance(work)


def _placed(place: Place, documents: Sequence[IntArray], steps: int) -> tuple[Mode, float]:
    tokens_per_rank = sum(len(tokens) for tokens in documents) // place.wires.world_size
    dataset = Dataset.from_dict({"input_ids": [*documents] * (steps + 1)})
    loader = place.plugin(tokens_per_rank).dataloader(dataset, shuffle=False, device=place.device, model=place.model)
    batches = iter(loader)
    first = next(batches)  # for a look at its plan
    if len(loader) != steps + 1 or first["input_ids"].shape[1] != tokens_per_rank:
        raise SystemExit(
            f"placed: {len(loader)} micro-batches, the first of {first['input_ids'].shape[1]} tokens on a rank, not "
            f"{steps + 1} of {tokens_per_rank}"
        )
    return Mode.of_product("placed", OfLoader(batches)), first["distca_plan"].facts.imbalance


def _label_count(labels: int, num_ranks: int) -> dict[str, float]:
    """Returns the divisor of a rank's loss: its share of all labels. No tensor: FSDP would round it to bf16."""
    return {"num_items_in_batch": labels / num_ranks}


class TrainingRunner(Runner):
    """Runs forward, backward, and AdamW at a learning rate of 0."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._optimizer = AdamW(place.model.parameters(), lr=0.0, fused=True)

    def step(self, mode: Mode) -> torch.Tensor:
        """Runs a step, and the optimizer's; returns the loss of this rank's tokens, a scalar."""
        loss = super().step(mode)
        self._optimizer.step()
        return loss


def measure_workloads(
    options: argparse.Namespace,
    config: Any,
    device: torch.device,
    measure: Callable[[str], Workload],
    columns: Columns,
    remark: str,
) -> None:
    """Measures one workload after the other; rank 0 prints a table of each, and writes all so far. Exits at the end if
    losses of the same documents differ: those of all modes but `ideal`. A collective call.

    Args:
        measure: measures the workload of a name.
        columns: of the table, after the mode.
        remark: last part of the line above it.
    """
    figures: dict[str, dict[str, Figures]] = {}
    wrong = []
    for workload in options.workloads:
        tokens, measured, further = measure(workload)
        figures[workload] = {
            name: {**vars(mode), "step_seconds": mode.step_seconds, **further[name]} for name, mode in measured.items()
        }
        if dist.get_rank() == 0:
            options.documents = f"of {workload}"
            header = "; ".join([*facts_of(options, config, tokens, device), remark])
            print(f"{header}\n\n{table_of(columns, figures[workload])}\n", flush=True)
            write_figures(options, workloads=figures)
        losses = {name: mode.loss for name, mode in measured.items() if name != "ideal"}
        if not equal_losses([*losses.values()], options.dtype):
            wrong.append(f"{workload}: {losses}")
    if wrong:
        raise SystemExit(f"losses of the same documents differ: {'; '.join(wrong)}")


def use_head(model: LossModel, name: str) -> None:
    """Replaces the head of the model inside by one of `HEADS`; call it before it is enabled or sharded. Exits if that
    is not installed, or has another loss than the model's own head."""
    own = _loss_of_few_tokens(model)
    HEADS[name](model.causal_lm)
    replaced = _loss_of_few_tokens(model)
    if not equal_losses([own, replaced], model.causal_lm.dtype):
        raise SystemExit(
            f"--head {name}: the loss of {PROBE_TOKENS} tokens is {replaced}, with the model's head {own}"
        )


def _loss_of_few_tokens(model: LossModel) -> float:
    """Returns the loss: a sum over all but one of them, divided by a number of our choice."""
    positions = torch.arange(PROBE_TOKENS, device=model.causal_lm.device)[None]
    tokens = positions % model.causal_lm.config.get_text_config().vocab_size
    shift_labels = tokens.roll(-1).masked_fill(positions == PROBE_TOKENS - 1, -100)
    labels = {"labels": tokens, "shift_labels": shift_labels, "num_items_in_batch": PROBE_TOKENS / 3}
    with without_attention(model.causal_lm), torch.no_grad():
        return model.forward(input_ids=tokens, position_ids=positions, **labels).item()


HEADS: dict[str, Callable[[PreTrainedModel], None]] = {"none": lambda _: None, "liger": use_liger_loss}
