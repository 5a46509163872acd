"""Run report: the two lines that rank 0 writes at the start of a training."""

import logging

from distca_hf.batches.preview import PlacedPlan, Preview
from distca_hf.config import DistCAConfig
from distca_hf.flops import StepCost
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.version import __version__


log = get_logger(__name__)


class RunReport:
    """The first lines about a training of one model.

    Args:
        config: settings.

    Attributes:
        written: whether they have been written.
    """

    def __init__(self, config: DistCAConfig) -> None:
        self._config = config
        self._steps_per_epoch: int | None = None
        self.written = False

    def restart(self, steps_per_epoch: int | None) -> None:
        """Writes the first lines again when the next training begins; its optimizer steps per epoch, where known."""
        self._steps_per_epoch, self.written = steps_per_epoch, False

    def begin(self, plan: LivePlan, cost: StepCost | None) -> None:
        """Writes the two lines, behind the first forward pass of a training.

        Args:
            plan: of that pass.
            cost: of a token and a pair, as the model is checkpointed; None if it is not known.
        """
        self.written = True
        if plan.transport.rank != 0 or not log.isEnabledFor(logging.INFO):
            return
        log.info("%s: %s", __version__, self._first_line(plan), extra=OF_THIS_RANK)
        if isinstance(plan, PlacedPlan):
            preview, seen = plan.data.preview, f"means over {len(plan.data.preview.tokens)} micro-batches"
        else:
            preview, seen = Preview.of(plan.facts), "in the first micro-batch"
        log.info("%s", second_line(preview, cost, plan.transport.world_size, seen), extra=OF_THIS_RANK)

    def _first_line(self, plan: LivePlan) -> str:
        """Returns the words of the first line."""
        num_ranks = plan.transport.world_size
        topology = self._config.topology(num_ranks)
        nodes = f"on {count(topology.num_nodes, 'node')}, kernel {plan.kernel_name}"
        ranks = count(num_ranks, "rank")
        if not isinstance(plan, PlacedPlan):
            facts = plan.facts
            steps = f"; {count(self._steps_per_epoch, 'step')} per epoch" if self._steps_per_epoch else ""
            return (
                f"{ranks} {nodes}; packs stay as they are, attention tasks move; first micro-batch: "
                f"{count(facts.num_documents, 'document')}, {facts.num_tokens:,} tokens, longest "
                f"{facts.longest_document_tokens:,}{steps}"
            )
        data = plan.data
        lengths = data.document_tokens
        if self._steps_per_epoch is not None or data.micro_steps > 1:
            steps = count(self._steps_per_epoch or -(-data.per_epoch // data.micro_steps), "step")
        else:
            steps = count(data.per_epoch, "micro-batch")
        return (
            f"{ranks} x {self._config.tokens_per_rank:,} tokens {nodes}; {count(len(lengths), 'document')}, "
            f"{int(lengths.sum()):,} tokens, longest {int(lengths.max()):,} of {data.planner.capacity_tokens:,} "
            f"possible; {steps} per epoch"
        )


def second_line(preview: Preview, cost: StepCost | None, num_ranks: int, seen: str) -> str:
    """Returns the words of the second line: balance, the share of attention, and the speed-up that follows.

    Args:
        preview: micro-batches of the training.
        cost: of a token and a pair; None if it is not known.
        seen: which micro-batches these are.
    """
    words = []
    if num_ranks == 1:
        words.append("one rank: there is nothing to balance")
    else:
        before, after = preview.imbalance_before.mean(), preview.imbalance.mean()
        words.append(f"attention work of the busiest rank {before:.2f} -> {after:.2f} times the mean")
    if cost is not None:
        share = cost.attention_share(preview.tokens.sum(), preview.pairs.sum())
        words.append(f"attention is about {share:.0%} of a step")
        if num_ranks > 1:
            speed_up = cost.speed_up(preview.tokens, preview.pairs, preview.imbalance_before, preview.imbalance)
            words.append(f"steps should be {speed_up:.2f} times as fast as in the order of the data")
    return f"{'; '.join(words)} ({seen})"


def count(number: int, noun: str) -> str:
    """Returns a number and its noun: "1 rank", "2 ranks"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
