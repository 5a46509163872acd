"""Accumulation: divides the documents of one optimizer step among its micro-steps, long ones together.

That changes no gradient: the gradients of the micro-steps are summed.

    micro-step    0                        1                        2
    as packed     | 64K 2K 2K 1K ...     | | 3K 64K 1K ...        | | 2K 1K 64K ...        |
    regrouped     | 64K 64K 64K          | | 3K 2K 2K 2K ...      | | 1K 1K 1K ...         |

Only the ranks of one micro-step need equal work. Among other long documents, a long one is not more than a rank's
work, so it is cut less or not at all. Micro-steps of short documents move nothing. Documents are sorted: the first
micro-step takes the longest ones that fit, and so on. If placements show that this does not move less, all micro-steps
get the same mix, or documents keep their micro-steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks
from distca_hf.data.epochs import Epoch
from distca_hf.errors import PackingError
from distca_hf.layout import Layout, Topology, check_document_tokens
from distca_hf.placement.place import place
from distca_hf.placement.predicted import moved_rows
from distca_hf.placement.whole import place_whole, surplus_work


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Documents of one micro-step."""

    documents: IntArray  # `[documents]` their numbers
    layout: Layout | None = None  # their placement, with equal work on all ranks; None if no placement was tried


# Divides documents of one optimizer step, given their `[documents]` lengths and, as indices, those of each micro-batch
# as packed. Returns equally many micro-steps, whose documents are indices, too.
Divide = Callable[[IntArray, list[IntArray]], list[MicroStep]]


@dataclass(eq=False)
class SteppedEpoch:
    """An epoch in optimizer steps, each of which is divided anew among its micro-batches."""

    epoch: Epoch
    document_tokens: IntArray  # `[documents]` lengths of all documents
    micro_steps: int  # micro-batches of an optimizer step; the first and the last one of an epoch may have fewer
    divide: Divide
    steps_from: int = 0  # a micro-batch with which an optimizer step begins

    def __post_init__(self) -> None:
        self._step: tuple[int, list[MicroStep]] = (-1, [])

    @property
    def num_micro_batches(self) -> int:
        return self.epoch.num_micro_batches

    def micro_batch(self, index: int) -> IntArray:
        return self._micro_step(index).documents

    def layout(self, index: int) -> Layout | None:
        """Returns the placement of one micro-batch by which its step was divided; None if no placement was tried."""
        return self._micro_step(index).layout

    def left(self, index: int) -> IntArray:
        """Returns the documents of this and all later micro-batches."""
        step_ends = min(self.num_micro_batches, index + (self.steps_from - index) % self.micro_steps)
        of_step = [self.micro_batch(number) for number in range(index, step_ends)]
        return np.concatenate([*of_step, self.epoch.documents[self.epoch.offsets[step_ends] :]])

    def _micro_step(self, index: int) -> MicroStep:
        """Returns one micro-batch. Its optimizer step is divided at the first call."""
        first = max(0, index - (index - self.steps_from) % self.micro_steps)
        if self._step[0] != first:
            self._step = (first, self._divided(first))
        return self._step[1][index - first]

    def _divided(self, first: int) -> list[MicroStep]:
        """Returns the micro-batches of the step that begins with this one; documents are numbers of the epoch."""
        last = first + self.micro_steps - (first - self.steps_from) % self.micro_steps
        offsets = self.epoch.offsets[first : last + 1]
        documents = self.epoch.documents[offsets[0] : offsets[-1]]
        as_packed = np.split(np.arange(len(documents)), offsets[1:-1] - offsets[0])
        if len(as_packed) == 1:
            return [MicroStep(documents)]
        divided = self.divide(self.document_tokens[documents], as_packed)
        return [MicroStep(documents[one.documents], one.layout) for one in divided]


def group_documents(
    document_tokens: Sequence[int] | IntArray,
    micro_steps: int,
    capacity_tokens: int,
    topology: Topology | None = None,
    head_groups: int = 1,
    as_they_came: Sequence[IntArray] | None = None,
    layer_masks: LayerMasks = CAUSAL_LAYERS,
    whole_tokens: int | None = None,
) -> list[MicroStep]:
    """Divides the documents of one optimizer step among its micro-steps, long ones together, tokens nearly equal.

    Args:
        capacity_tokens: tokens that a micro-step holds at most: ranks x tokens per rank.
        topology: ranks to try placements on; without it, long documents are always put together.
        as_they_came: a division that fits, as a list of indices for each micro-step; kept if no other moves less.
        whole_tokens: tokens of a rank if documents stay whole; else None.

    Returns:
        The micro-steps. Their documents are ascending indices, and every document is in one of them. With a topology,
        they have the placements that were tried.

    Raises:
        PackingError: a length is out of range, a document is longer than the capacity, or no way was found to fit all.
    """
    lengths = check_document_tokens(document_tokens)
    if micro_steps < 1 or capacity_tokens < 1:
        raise PackingError(
            f"{micro_steps} micro-steps of {capacity_tokens} tokens hold nothing; both must be positive"
        )
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    if longest > capacity_tokens:
        at = int(lengths.argmax())
        raise PackingError(
            f"document {at} has {longest} tokens, a micro-step holds {capacity_tokens}; split or remove it, or train "
            "with more tokens per rank"
        )
    # Fills to the mean first, or a micro-step may be left nearly empty; to the brim only if that leaves a rest.
    mean = max(ceil_div(total, micro_steps), longest)
    limits = (min(mean, capacity_tokens), capacity_tokens, 0)
    found = [_first_fit(lengths, micro_steps, limit_tokens, capacity_tokens) for limit_tokens in limits]
    divisions = [division for division in (found[0] or found[1], found[2], as_they_came) if division is not None]
    if divisions:
        if topology is None:
            return [MicroStep(documents) for documents in divisions[0]]
        return _cheapest(lengths, divisions, topology, head_groups, layer_masks, whole_tokens)
    raise PackingError(
        f"{len(lengths)} documents of {total} tokens do not fit into {micro_steps} micro-steps of {capacity_tokens} "
        f"({micro_steps * capacity_tokens} together) without cutting; leave some for the next optimizer step"
    )


def _first_fit(lengths: IntArray, micro_steps: int, limit_tokens: int, capacity_tokens: int) -> list[IntArray] | None:
    """Puts documents, longest first, each into the first micro-step with room up to a limit. The rest go to the
    micro-step with most room up to the capacity. Returns None if that is not enough."""
    # 1. Long documents meet in the first micro-steps, up to the limit.
    used = [0] * micro_steps
    step_of = np.empty(len(lengths), dtype=np.int64)
    rest: list[tuple[int, int]] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[document])
        step = next((step for step in range(micro_steps) if used[step] + tokens <= limit_tokens), None)
        if step is None:
            rest.append((document, tokens))
        else:
            step_of[document] = step
            used[step] += tokens
    # 2. The others go to the micro-step with most room: micro-steps get about equal tokens.
    for document, tokens in rest:
        step = min(range(micro_steps), key=used.__getitem__)
        if used[step] + tokens > capacity_tokens:
            return None
        step_of[document] = step
        used[step] += tokens
    return [np.flatnonzero(step_of == step) for step in range(micro_steps)]


def _cheapest(
    lengths: IntArray,
    divisions: Sequence[Sequence[IntArray]],
    topology: Topology,
    head_groups: int,
    layer_masks: LayerMasks,
    whole_tokens: int | None,
) -> list[MicroStep]:
    """Places the documents of all divisions. Returns the first division whose placements move least: rows, or work if
    documents stay whole. In that case, some divisions may have no room for a document."""

    def placed(documents: IntArray) -> Layout:
        if whole_tokens is not None:
            return place_whole(lengths[documents], topology.num_ranks, whole_tokens)
        tokens, num_ranks = lengths[documents], topology.num_ranks
        return place(tokens, num_ranks, topology=topology, head_groups=head_groups, layer_masks=layer_masks)

    tried: list[tuple[float, list[MicroStep]]] = []
    for division in divisions:
        try:
            layouts = [placed(documents) for documents in division]
        except PackingError as error:
            if whole_tokens is None or (division is divisions[-1] and not tried):
                raise error
            continue
        moved = sum(map(moved_rows if whole_tokens is None else surplus_work, layouts))
        tried.append((moved, list(map(MicroStep, division, layouts))))
    return min(tried, key=lambda of_division: of_division[0])[1]
