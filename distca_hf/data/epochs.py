"""Epochs: which documents form which global micro-batch. Whole documents, shuffled, every one exactly once.

Every epoch has the same number of micro-batches, of nearly equal tokens. A micro-batch takes documents in shuffled
order. If the next one does not fit, smaller ones from a little further on fill the gap, and the large one opens the
next micro-batch. In the dataset's order, the first documents of the next micro-batch that fit fill the gap.

A training that is resumed within an epoch may change the sizes of micro-batches and steps (`ResumedEpoch`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from distca_hf.arrays import BoolArray, IntArray, ceil_div
from distca_hf.errors import ConfigError, PackingError


# Number of documents to search for some that fill the gap before one that does not fit. Keeps padding below 0.2 %, and
# documents close to their shuffled place.
LOOKAHEAD_DOCUMENTS = 1024
# Returns which of `[documents]` lengths have room in one micro-batch.
Fits = Callable[[IntArray], BoolArray]


@dataclass(frozen=True, eq=False)
class Epoch:
    """All documents of an epoch, in order; micro-batch m is `documents[offsets[m] : offsets[m + 1]]`."""

    documents: IntArray
    offsets: IntArray

    @property
    def num_micro_batches(self) -> int:
        return len(self.offsets) - 1

    def after(self, micro_batches: int) -> "Epoch":
        offsets = self.offsets[micro_batches:]
        return Epoch(self.documents[offsets[0] :], offsets - offsets[0])

    def micro_batch(self, index: int) -> IntArray:
        return self.documents[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class ResumedEpoch:
    """An epoch in which training is resumed, counted in micro-batches and optimizer steps of the present size.

    Trainer finds its place by the number of steps that it has made. After a change of the size of micro-batches or
    steps, that is another place in the data. Here all counts follow from the rest of the epoch. With unchanged sizes,
    every count is the same as Trainer's own in an uninterrupted run.
    """

    number: int
    # Steps that the trained part of the epoch amounts to, rounded down. If rounded up, a run of half an epoch could
    # end before its share was trained.
    steps_done: int
    micro_batches_left: int  # micro-batches to train in this epoch; at least one
    micro_batches_per_epoch: int  # micro-batches of every later epoch
    accumulation_steps: int  # micro-batches of an optimizer step; the last step of an epoch may have fewer

    @property
    def steps_left(self) -> int:
        """Optimizer steps to make in this epoch."""
        return ceil_div(self.micro_batches_left, self.accumulation_steps)

    def epochs_after(self, steps: int) -> float:
        """Returns the number of epochs trained after `steps` steps in this epoch."""
        done = self.steps_done * self.accumulation_steps
        trained = min(steps * self.accumulation_steps, self.micro_batches_left)
        return self.number + (done + trained) / (done + self.micro_batches_left)

    def max_steps(self, step: int, num_train_epochs: float) -> int:
        """Returns the step that training ends with.

        Args:
            step: steps made before, in all epochs and sizes.
            num_train_epochs: epochs to train; a fraction of an epoch has the number of steps that Trainer gives it.
        """
        last = ceil(num_train_epochs) - 1
        if self.number > last:
            return step
        if self.number < last:
            per_epoch = ceil_div(self.micro_batches_per_epoch, self.accumulation_steps)
            later = ceil(num_train_epochs * per_epoch) - (self.number + 1) * per_epoch
            return step + self.steps_left + later
        in_this_epoch = self.steps_done + self.steps_left
        wanted = ceil(num_train_epochs * in_this_epoch) - last * in_this_epoch
        return step + max(0, wanted - self.steps_done)

    def num_train_epochs(self, step: int, max_steps: int) -> int:
        """Returns the number of epochs that a run of `max_steps` begins, including earlier ones and this one; without
        this one if no step is left."""
        steps = max_steps - step
        if steps <= 0:
            return self.number
        per_epoch = ceil_div(self.micro_batches_per_epoch, self.accumulation_steps)
        return self.number + 1 + ceil_div(max(0, steps - self.steps_left), per_epoch)


class EpochPacker:
    """Packs documents into the same number of global micro-batches in every epoch. Raises PackingError if the dataset
    is empty, a document is longer than a micro-batch, or there are too few for whole steps."""

    def __init__(
        self,
        document_tokens: IntArray,  # `[documents]` int64 lengths
        capacity_tokens: int,  # most tokens of a global micro-batch (ranks x tokens_per_rank)
        seed: int = 0,  # together with the epoch's number it decides the order of documents
        shuffle: bool = True,  # False keeps the dataset's order, except for documents that come one micro-batch early
        # Which documents have room, if ranks must hold whole ones; by default all of them. Others wait for the next
        # micro-batch. The longest of them must fit.
        fits: Fits | None = None,
        # Divides the number of micro-batches of an epoch: the number in an optimizer step, if all steps must be whole.
        multiple: int = 1,
    ) -> None:
        if len(document_tokens) == 0:
            raise PackingError("the dataset holds no document")
        longest = int(np.argmax(document_tokens))
        if document_tokens[longest] > capacity_tokens:
            raise PackingError(
                f"document {longest} has {document_tokens[longest]} tokens, a micro-batch holds {capacity_tokens}; "
                "split or remove it, or train with more tokens per rank"
            )
        self._tokens = document_tokens
        self._capacity_tokens = capacity_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._fits = fits
        order, in_order = self._order(0), not shuffle
        self._first = pack_evenly(document_tokens, order, capacity_tokens, fits, multiple, in_order)

    @property
    def num_micro_batches(self) -> int:
        return self._first.num_micro_batches

    def epoch(self, number: int) -> Epoch:
        if number == 0 or not self._shuffle:
            return self._first
        packed = _pack(self._tokens, self._order(number), self._capacity_tokens, self.num_micro_batches, self._fits)
        if packed.num_micro_batches == self.num_micro_batches:
            return packed
        # This order needs more micro-batches than the first epoch: keep the first epoch's groups, in a new order.
        groups = self._random(number).permutation(self.num_micro_batches)
        members = [self._first.micro_batch(group) for group in groups]
        return Epoch(np.concatenate(members), np.cumsum([0] + [len(group) for group in members]))

    def rest(self, number: int, taken: Sequence[tuple[int, int]]) -> Epoch:
        """Returns the rest of epoch `number`, after parts of it were taken in micro-batches of other sizes. `taken`
        has (capacity_tokens, micro-batches taken) of each part, in order. Raises PackingError if a document is longer
        than one of these micro-batches, and ConfigError if there were fewer of them."""
        packed: Epoch | None = None
        for capacity_tokens, micro_batches in taken:
            if packed is None:
                packed = EpochPacker(self._tokens, capacity_tokens, self._seed, self._shuffle).epoch(number)
            else:
                packed = self._packed_again(packed, capacity_tokens)
            if micro_batches > packed.num_micro_batches:
                raise ConfigError(
                    f"{micro_batches} micro-batches of {capacity_tokens} tokens were taken (taken, micro_batch), and "
                    f"epoch {number} had {packed.num_micro_batches} of them"
                )
            packed = packed.after(micro_batches)
        return self.epoch(number) if packed is None else self._packed_again(packed, self._capacity_tokens)

    def _packed_again(self, packed: Epoch, capacity_tokens: int) -> Epoch:
        return pack_evenly(self._tokens, packed.documents, capacity_tokens, in_order=not self._shuffle)

    def resumed(
        self, number: int, taken: Sequence[tuple[int, int]], micro_batch: int, accumulation_steps: int
    ) -> ResumedEpoch:
        """Counts the rest of epoch `number` in optimizer steps of `accumulation_steps` micro-batches.

        Args:
            taken: as for `rest`.
            micro_batch: micro-batches of the present size that were taken after these parts.
        """
        packed = self.rest(number, taken)
        packed_tokens = int(self._tokens[packed.documents].sum())
        taken_tokens = int(self._tokens.sum()) - packed_tokens
        steps_before = taken_tokens * packed.num_micro_batches // (packed_tokens * accumulation_steps)
        return ResumedEpoch(
            number=number,
            steps_done=steps_before + micro_batch // accumulation_steps,
            micro_batches_left=packed.num_micro_batches - micro_batch,
            micro_batches_per_epoch=self.num_micro_batches,
            accumulation_steps=accumulation_steps,
        )

    def _order(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return np.arange(len(self._tokens))
        return self._random(epoch).permutation(len(self._tokens)).astype(np.int64)

    def _random(self, epoch: int) -> np.random.RandomState:
        # RandomState, not Generator: its streams never change, so a saved position means the same documents forever.
        return np.random.RandomState([self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF, epoch])


def choose_full(
    document_tokens: IntArray, capacity_tokens: int, fits: Fits | None = None, in_order: bool = False
) -> IntArray:
    """Chooses documents of one full micro-batch, as places among these documents: the first ones, and some that fill
    the gap. Other arguments: see `EpochPacker`; `in_order` fills it with the first that fit."""
    chosen = _choose(document_tokens, capacity_tokens, capacity_tokens, len(document_tokens), in_order)
    return chosen if fits is None else chosen[fits(document_tokens[chosen])]


def pack_evenly(
    document_tokens: IntArray,
    order: IntArray,
    capacity_tokens: int,
    fits: Fits | None = None,
    multiple: int = 1,
    in_order: bool = False,
) -> Epoch:
    """Packs as few micro-batches as possible, a multiple of `multiple`, of nearly equal tokens."""
    wanted = ceil_div(int(document_tokens[order].sum()), capacity_tokens)
    while True:
        wanted = ceil_div(wanted, multiple) * multiple
        if multiple > 1 and wanted > len(order):
            raise PackingError(
                f"whole optimizer steps of {multiple} micro-batches need {wanted} documents or more, and the dataset "
                f"holds {len(order)}: a micro-batch would be empty. Give more documents, or fewer micro-batches a step"
            )
        packed = _pack(document_tokens, order, capacity_tokens, wanted, fits, in_order)
        if packed.num_micro_batches <= wanted:
            return packed
        wanted = packed.num_micro_batches  # packs again, now evenly: the last one may be nearly empty


def _pack(
    document_tokens: IntArray,
    order: IntArray,
    capacity_tokens: int,
    wanted: int,
    fits: Fits | None = None,
    in_order: bool = False,
) -> Epoch:
    """Packs micro-batches of at most `capacity_tokens`: `wanted` of them if the documents allow it, else more."""
    if len(order) == 0:
        return Epoch(order, np.zeros(1, dtype=np.int64))
    #     order     d0 d1 d2 d3 d4 | d5 d6 d7 ...     d3 had no room in earlier micro-batches: it is carried over,
    #     queue     d3 | d5 d6 d7 ...                 and `at` is the place of d5
    cumulative = np.cumsum(document_tokens[order])
    tokens_left, documents_left = int(cumulative[-1]), len(order)
    carried = np.zeros(0, dtype=np.int64)
    at = 0
    micro_batches: list[IntArray] = []
    while documents_left:
        # 1. An equal share of the tokens that are left, or the last micro-batch may be nearly empty.
        batches_left = max(1, wanted - len(micro_batches))
        target = min(capacity_tokens, ceil_div(tokens_left, batches_left))
        # 2. The queue: far enough to fill the share and to find documents for the gap that is left.
        done = int(cumulative[at - 1]) if at else 0
        ahead = int(np.searchsorted(cumulative, done + target, side="right")) + LOOKAHEAD_DOCUMENTS
        if in_order:
            ahead = int(np.searchsorted(cumulative, done + 2 * target, side="right")) + 1
        queue = np.concatenate([carried, order[at:ahead]])
        most_documents = max(1, documents_left - batches_left + 1)
        chosen = _choose(document_tokens[queue], target, capacity_tokens, most_documents, in_order)
        if fits is not None:
            chosen = chosen[fits(document_tokens[queue[chosen]])]
        # 3. Documents of the queue before the last chosen one are carried over.
        seen = max(int(chosen.max()) + 1, len(carried))
        left = np.ones(seen, dtype=bool)
        left[chosen] = False
        micro_batches.append(queue[chosen])
        at += seen - len(carried)
        carried = queue[:seen][left]
        tokens_left -= int(document_tokens[queue[chosen]].sum())
        documents_left -= len(chosen)
    return Epoch(np.concatenate(micro_batches), np.cumsum([0] + [len(documents) for documents in micro_batches]))


def _choose(
    queue_tokens: IntArray, target: int, capacity_tokens: int, most_documents: int, in_order: bool
) -> IntArray:
    """Chooses a micro-batch's documents, as places in the queue: its beginning, then the largest ones that fit the
    gap, or with `in_order` the first ones."""
    cumulative = np.cumsum(queue_tokens)
    reach = int(np.searchsorted(cumulative, target, side="left")) + 1
    count = min(reach, int(np.searchsorted(cumulative, capacity_tokens, side="right")), most_documents)
    chosen = list(range(count))
    load = int(cumulative[count - 1])
    candidates = queue_tokens[count : count + LOOKAHEAD_DOCUMENTS].copy()
    while load < target and len(chosen) < most_documents:
        fitting = np.where(candidates <= capacity_tokens - load, candidates, 0)
        best = int(np.argmax(fitting > 0 if in_order else fitting)) if len(fitting) else 0
        if len(fitting) == 0 or fitting[best] == 0:
            break
        load += int(fitting[best])
        candidates[best] = capacity_tokens + 1
        chosen.append(count + best)
    return np.array(chosen, dtype=np.int64)
