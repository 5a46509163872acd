"""Modes of a step of a whole model (`MODES`): the same documents and their labels, as plain packs or placed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from datasets import Dataset
from torch.optim import AdamW

from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from lib.documents import attended_pairs, whole_documents
from lib.modes import build_mode
from lib.place import Mode, Place
from lib.rounds import Runner
from lib.trainer_batches import Batch


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
    mode = build_mode("local", place, documents)
    count = _label_count(sum(lengths) - len(lengths), num_ranks)
    batches = [{**batch, **_labels(batch), **count} for batch in mode.batches]
    holding = whole_documents(lengths, num_ranks)
    work = [attended_pairs([tokens for _, _, tokens in held]) for held in holding]
    return Planned(replace(mode, batches=batches), imbalance(work))


def _placed(place: Place, documents: Sequence[IntArray], steps: int) -> Planned:
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
    return Planned(Mode.of_product("placed", OfLoader(batches)), first["distca_plan"].facts.imbalance)


def _labels(batch: Batch) -> Batch:
    """Labels of whole documents: none for a document's first token, and so none after its last one."""
    labels = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)
    return {"labels": labels, "shift_labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}


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
