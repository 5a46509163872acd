"""Modes of a step of a whole model (`MODES`): the same documents and their labels, as plain packs or placed."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from lib.documents import attended_pairs, whole_documents
from lib.liger import use_liger_loss
from lib.model import PROBE_TOKENS, LossModel, without_attention
from lib.modes import Mode, Place, build_mode
from lib.rounds import Runner, equal_losses
from lib.trainer_batches import Batch
from lib.wires import Wires


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


def _use_chunks(causal_lm: PreTrainedModel) -> None:
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise SystemExit(f"--head chunked: torch {torch.__version__} has no LinearCrossEntropyOptions; torch 2.13 has")
    causal_lm.forward = MethodType(_forward_in_chunks, causal_lm)


def _forward_in_chunks(
    causal_lm: PreTrainedModel,
    labels: torch.Tensor,
    shift_labels: torch.Tensor,
    num_items_in_batch: float,
    **batch: Any,
) -> CausalLMOutputWithPast:
    hidden = causal_lm.base_model(**batch).last_hidden_state
    losses = nn.functional.linear_cross_entropy(
        hidden.flatten(0, 1),
        causal_lm.get_output_embeddings().weight,
        shift_labels.flatten(),
        reduction="none",
        options=nn.LinearCrossEntropyOptions(),
    )
    return CausalLMOutputWithPast(loss=losses.float().sum() / num_items_in_batch)


HEADS: dict[str, Callable[[PreTrainedModel], None]] = {
    "none": lambda _: None,
    "chunked": _use_chunks,
    "liger": use_liger_loss,
}

MODES = {
    "local": "plain packing: whole documents, packed in order, and the kernel itself; nothing is exchanged",
    "placed": "the product as users have it: plugin.dataloader makes a batch for every step, in a thread during the "
    "step before",
}


@dataclass(frozen=True)
class Planned:
    """A mode, and its plan."""

    mode: Mode  # how to run its steps
    imbalance: float  # attended pairs of the busiest rank over the mean


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


def build_planned(name: str, place: Place, documents: Sequence[IntArray], steps: int) -> Planned:
    """Returns the mode of a name, good for so many steps on documents of int64 `[tokens]`, the same on all ranks.
    Exits if the loader's batches do not hold these. A collective call."""
    return _local(place, documents) if name == "local" else _placed(place, documents, steps)


def _local(place: Place, documents: Sequence[IntArray]) -> Planned:
    num_ranks, lengths = place.wires.world_size, [len(tokens) for tokens in documents]
    mode = build_mode("local", place, [documents])
    count = _label_count(sum(lengths) - len(lengths), num_ranks)
    batches = [{**batch, **_labels(batch), **count} for batch in mode.batches]
    holding = whole_documents(lengths, num_ranks)
    work = [attended_pairs([tokens for _, _, tokens in held]) for held in holding]
    return Planned(replace(mode, batches=batches), imbalance(work))


def _placed(place: Place, documents: Sequence[IntArray], steps: int) -> Planned:
    from datasets import Dataset  # programs with other modes run without the package

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
    mode = Mode("placed", "distca", OfLoader(batches), watched=True, exchanges=True)
    return Planned(mode, first["distca_plan"].facts.imbalance)


def _labels(batch: Batch) -> Batch:
    """Labels of whole documents: none for a document's first token, and so none after its last one."""
    labels = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)
    return {"labels": labels, "shift_labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}


def _label_count(labels: int, num_ranks: int) -> dict[str, float]:
    """Returns the divisor of a rank's loss: its share of all labels. No tensor: FSDP would round it to bf16."""
    return {"num_items_in_batch": labels / num_ranks}


class TrainingRunner(Runner):
    """Runs forward, backward, and AdamW at a learning rate of 0."""

    def __init__(self, model: LossModel, wires: Wires, device: torch.device) -> None:
        super().__init__(model, wires, device)
        self._optimizer = AdamW(model.parameters(), lr=0.0, fused=True)

    def step(self, mode: Mode) -> torch.Tensor:
        """Runs a step, and the optimizer's; returns the loss of this rank's tokens, a scalar."""
        loss = super().step(mode)
        self._optimizer.step()
        return loss


def add_head(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--head`, by default this one."""
    parser.add_argument("--head", choices=[*HEADS], default=default, help="none is Transformers' own")
