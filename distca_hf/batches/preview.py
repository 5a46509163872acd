"""Preview: predicts how a dataset will train, from some micro-batches looked at before they are due.

Rank 0 writes it as the first two lines of a training.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.data.accumulation import SteppedEpoch
from distca_hf.flops import StepCost, StepFlops
from distca_hf.placement.place import work_in_order
from distca_hf.planning.kinds import LayerWork, PlanTotals, imbalance_of_layers
from distca_hf.planning.plan import PlanFacts
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

# Number of micro-batches whose work is counted, and of those that are also placed. Placing one takes up to a twentieth
# of a second, and all come out alike.
COUNTED = 128
PLACED = 8


@dataclass(frozen=True, eq=False)
class Preview:
    """Some micro-batches of a training.

    Attributes:
        tokens, pairs: `[micro-batches]` that all ranks compute; a pair of a query and a key counts once for all heads.
            If layers attend with several masks, pairs are means over layers.
        imbalance_before, imbalance: `[micro-batches]` attended pairs of the busiest rank over the mean that ranks
            compute: as documents came, and as ranks compute them. With servers the latter is the longest time over the
            time of an even split.
        speeds: relative speeds of all ranks, attention servers last; empty without servers.
        given: totals of a given micro-batch; None if batches are placed.
    """

    tokens: IntArray
    pairs: NDArray[np.float64]
    imbalance_before: NDArray[np.float64]
    imbalance: NDArray[np.float64]
    speeds: tuple[float, ...] = ()
    given: PlanTotals | None = None

    @classmethod
    def of(cls, facts: PlanFacts, flops: StepFlops | None = None) -> Self:
        """Returns the preview of one given micro-batch that is already planned.

        Args:
            flops: operations of the model; None if they are not known.
        """
        saved = sum(facts.work_before) / max(1, sum(facts.work)) if facts.shared_tokens else 1.0
        return cls(
            tokens=np.array([facts.num_tokens - facts.shared_tokens]),
            pairs=np.array([sum(facts.work) / facts.rows_per_token]),
            imbalance_before=np.array([facts.imbalance_before * saved]),
            imbalance=np.array([facts.imbalance]),
            speeds=facts.speeds,
            given=PlanTotals().plus(facts, flops),
        )


@dataclass(frozen=True, eq=False)
class PlacedData:
    """Data that a placed loader is about to hand out.

    Attributes:
        planner: plans its micro-batches.
        document_tokens: `[documents]` lengths of all documents.
        micro_batches: micro-batches of the epoch, or of its rest.
        first: index of the next one.
        micro_steps: micro-batches of an optimizer step within which documents are divided anew.
        per_epoch: micro-batches of a whole epoch; None for a stream, of which only the buffer is known.
    """

    planner: PlacedPlanner
    document_tokens: IntArray
    micro_batches: SteppedEpoch
    first: int
    micro_steps: int
    per_epoch: int | None

    @cached_property
    def preview(self) -> Preview:
        """Looks at micro-batches from all over the epoch."""
        counted = list(self._spread(COUNTED))
        placed = set(islice(self._spread(PLACED), PLACED))
        extra_ranks, num_ranks = self.planner.extra_ranks, self.planner.num_ranks
        num_extra, layer_masks = 0 if extra_ranks is None else extra_ranks.count, self.planner.layer_masks
        tokens, in_order, after = [], [], []
        for index in counted:
            lengths = self.document_tokens[self.micro_batches.micro_batch(index)]
            tokens.append(lengths.sum())
            in_order.append([work_in_order(lengths, num_ranks, mask) for mask, _ in layer_masks])
            if index in placed:
                plan = self.planner.plan(lengths, self.micro_batches.layout(index))
                after.append(imbalance_of_layers(plan, layer_masks, num_extra))
        before = LayerWork(np.array(in_order).swapaxes(0, 1), layer_masks)
        return Preview(
            tokens=np.array(tokens),
            pairs=before.total,
            imbalance_before=before.imbalance,
            imbalance=np.full(len(counted), np.mean(after)),
            speeds=() if extra_ranks is None else extra_ranks.rank_speeds(num_ranks),
        )

    def _spread(self, most: int) -> Iterator[int]:
        """Yields numbers of about `most` micro-batches from all over the epoch, in whole optimizer steps."""
        left = self.micro_batches.num_micro_batches - self.first
        steps = ceil_div(left, self.micro_steps)
        wanted = min(steps, max(1, most // self.micro_steps))
        for step in range(wanted):
            begin = self.micro_steps * (step * steps // wanted)
            for at in range(begin, min(begin + self.micro_steps, left)):
                yield self.first + at


class PlacedPlan(LivePlan):
    """A live plan that knows the data it comes from.

    Attributes:
        whole_tokens: `[segments]` tokens of the whole document to which each of this rank's segments belongs.
    """

    def __init__(self, data: PlacedData, whole_tokens: IntArray, **plan: Any) -> None:
        super().__init__(**plan)
        self.data, self.whole_tokens = data, whole_tokens


class RunReport:
    """The first lines about a training of one model.

    Attributes:
        written: whether they have been written.
    """

    def __init__(self, config: DistCAConfig) -> None:
        self._config = config
        self._steps_per_epoch: int | None = None
        self.written = False

    def restart(self, steps_per_epoch: int | None) -> None:
        """Makes the next training write its first lines again; `steps_per_epoch` are its optimizer steps, if known."""
        self._steps_per_epoch, self.written = steps_per_epoch, False

    def begin(self, plan: LivePlan, cost: StepCost | None, flops: StepFlops | None = None) -> None:
        """Writes the two lines, after the first forward pass of a training.

        Args:
            cost: of a token and a pair, with the model's checkpointing; None if not known.
            flops: operations of the model; None if not known.
        """
        self.written = True
        if plan.transport.grid.number != 0 or plan.part != 0 or not log.isEnabledFor(logging.INFO):
            return
        log.info("%s: %s", __version__, self._first_line(plan), extra=OF_THIS_RANK)
        if isinstance(plan, PlacedPlan):
            preview, seen = plan.data.preview, f"means over {len(plan.data.preview.tokens)} micro-batches"
        else:
            preview, seen = Preview.of(plan.facts, flops), "in the first micro-batch"
        log.info("%s", second_line(preview, cost, plan.transport.world_size, seen), extra=OF_THIS_RANK)

    def _first_line(self, plan: LivePlan) -> str:
        """Returns the text of the first line."""
        num_ranks = plan.transport.world_size
        topology = self._config.topology(num_ranks)
        extra = len(plan.facts.speeds) - num_ranks
        others = f"and {count(extra, 'attention server')} " if extra > 0 else ""
        nodes = f"{others}on {count(topology.num_nodes, 'node')}, kernel {plan.kernel_name}"
        grid = plan.transport.grid
        ranks, each = grid.in_words(), "" if grid.is_flat else " per data rank"
        if not isinstance(plan, PlacedPlan):
            facts = plan.facts
            steps = f"; {count(self._steps_per_epoch, 'step')} per epoch" if self._steps_per_epoch else ""
            moved = (
                "tokens stay on their ranks, and attention moves to ranks with less work"
                if plan.planned.moves is None
                else "inside the model their rows move to ranks with less work"
                if num_ranks > 1
                else "layers compute their shared prefixes once"
            )
            shared = f" ({facts.shared_tokens:,} of them saved by shared prefixes)" if facts.shared_tokens else ""
            return (
                f"{ranks} {nodes}; your own batches: {moved}; first micro-batch: "
                f"{count(facts.num_documents, 'document')}, {facts.num_tokens:,} tokens{shared}, longest "
                f"{facts.longest_document_tokens:,}{steps}"
            )
        data = plan.data
        lengths = data.document_tokens
        known = f"{count(len(lengths), 'document')}, {int(lengths.sum()):,} tokens"
        if data.per_epoch is None:
            return (
                f"{ranks} x {self._config.tokens_per_rank:,} tokens{each} {nodes}; a stream; read ahead: "
                f"{known}, longest {int(lengths.max()):,} of {data.planner.capacity_tokens:,} possible"
            )
        if self._steps_per_epoch is not None or data.micro_steps > 1:
            steps = count(self._steps_per_epoch or ceil_div(data.per_epoch, data.micro_steps), "step")
        else:
            steps = count(data.per_epoch, "micro-batch")
        return (
            f"{ranks} x {self._config.tokens_per_rank:,} tokens{each} {nodes}; {known}, "
            f"longest {int(lengths.max()):,} of {data.planner.capacity_tokens:,} "
            f"possible; {steps} per epoch"
        )


def second_line(preview: Preview, cost: StepCost | None, num_ranks: int, seen: str) -> str:
    """Returns the text of the second line: balance, the share of attention, and the speed-up that follows.

    Args:
        cost: of a token and a pair; None if not known.
        seen: which micro-batches these are.
    """
    parts = []
    # Share of its time without servers that attention takes with an even split.
    left = num_ranks / sum(preview.speeds) if preview.speeds else 1.0
    imbalance_after = preview.imbalance * left
    before, after = preview.imbalance_before.mean(), imbalance_after.mean()
    if preview.speeds:
        parts.append(f"attention time of the busiest rank {before:.2f} -> {after:.2f} times the mean of the trainers")
    elif num_ranks == 1:
        parts.append("one rank: there is nothing to balance")
    elif preview.given is not None:
        parts.append(preview.given.balance)
    else:
        parts.append(f"attention work of the busiest rank {before:.2f} -> {after:.2f} times the mean")
    if cost is not None:
        share = cost.attention_share(preview.tokens.sum(), preview.pairs.sum())
        parts.append(f"attention is about {share:.0%} of a step")
        given, imbalances = preview.given, (preview.imbalance_before, imbalance_after)
        if num_ranks > 1 or preview.speeds or (given is not None and given.shared_tokens):
            of_tokens = () if given is None else (given.token_imbalance_before, given.token_imbalance)
            if given is not None and given.shared_tokens:  # before, ranks computed them, too
                saved = given.tokens / (given.tokens - given.shared_tokens)
                of_tokens = given.token_imbalance_before * saved, given.token_imbalance
            speed_up = cost.speed_up(preview.tokens, preview.pairs, *imbalances, *of_tokens)
            of_placed = f"steps should be {speed_up:.2f} times as fast as packed in order"
            of_rows = f"layers should be {speed_up:.2f} times as fast as without"  # the head may stay
            parts.append(of_placed if given is None else of_rows)
    return f"{'; '.join(parts)} ({seen})"


def count(number: int, noun: str) -> str:
    """Returns a number and its noun: "1 rank", "2 ranks"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
