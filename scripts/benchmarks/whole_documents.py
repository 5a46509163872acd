"""Placement of whole documents, measured: tokens and attention work of the ranks, documents put off, time of plans.

    python scripts/benchmarks/whole_documents.py [--ranks 2 8 64] [--micro-batches 8] [--tokens-per-rank 65536]

An epoch of the shipped lengths is packed for a model whose layers carry a state, without
documents that are longer than a rank holds. The first micro-batches are planned, and the last one apart, because it
has to take what is left. Figures are the largest of them. Documents are put off if they were chosen for a micro-batch
whose ranks have no room for them; their tokens are counted over the whole epoch. The time of a micro-batch is the
shortest processor time of several plans.
"""

import time
from dataclasses import dataclass, field

from distca_hf.arrays import BoolArray, IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.data.epochs import EpochPacker
from lib.parser import add_ranks, add_tokens_per_rank, count, parse_plans, parser_of
from lib.planning.mixes import file_lengths
from lib.planning.planners import HEAD_GROUPS, LLAMA, RANKS_PER_NODE, print_row, table


MIXES = ("pretrain", "prolong")
# Plans of each micro-batch whose time is taken; the shortest counts.
ROUNDS = 3


@dataclass
class PutOff:
    """Which documents have room, and the tokens of all documents that had none.

    Attributes:
        planner: decides which have room.
        tokens: tokens of documents that were chosen for a micro-batch and waited for the next one.
    """

    planner: PlacedPlanner
    tokens: int = 0

    def fits(self, document_tokens: IntArray) -> BoolArray:
        """Returns which of `[documents]` have room."""
        fits = self.planner.fits
        assert fits is not None
        have_room = fits(document_tokens)
        self.tokens += int(document_tokens[~have_room].sum())
        return have_room


@dataclass
class Figures:
    """Figures of the micro-batches of one row."""

    tokens: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, planner: PlacedPlanner, document_tokens: IntArray) -> None:
        """Plans a micro-batch."""
        seconds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            plan = planner.plan(document_tokens)
            seconds.append(time.process_time() - began)
        self.tokens.append(imbalance(plan.layout.rank_tokens))
        self.before.append(imbalance(plan.layout.rank_work))
        self.after.append(plan.imbalance)
        self.seconds.append(min(seconds))


def main() -> None:
    parser = parser_of(__doc__)
    add_ranks(parser, (2, 8, 64))
    parser.add_argument("--micro-batches", type=count, default=8, help="micro-batches of an epoch that are planned")
    add_tokens_per_rank(parser, 65_536)
    options = parse_plans(parser)
    for mix in MIXES:
        tokens = sum(tokens for tokens in file_lengths(mix).tolist() if tokens <= options.tokens_per_rank)
        if tokens <= max(options.ranks) * options.tokens_per_rank:
            parser.error(
                f"documents of {mix} up to --tokens-per-rank {options.tokens_per_rank} have {tokens} tokens, which do "
                f"not fill two micro-batches of {max(options.ranks)} ranks"
            )
    table(
        f"Whole documents, {options.tokens_per_rank:,} tokens per rank",
        *("lengths", "ranks", "tokens, max/mean", "of the last", "work of attention before tasks move", "after"),
        *("of the last", "put off", "planning"),
    )
    for mix in MIXES:
        lengths = file_lengths(mix)
        document_tokens = lengths[lengths <= options.tokens_per_rank]
        for num_ranks in options.ranks:
            config = DistCAConfig(
                tokens_per_rank=options.tokens_per_rank, ranks_per_node=min(num_ranks, RANKS_PER_NODE)
            )
            planner = PlacedPlanner(config, num_ranks, HEAD_GROUPS, token_bytes=LLAMA, whole_documents=True)
            put_off = PutOff(planner)
            packer = EpochPacker(document_tokens, planner.capacity_tokens, fits=put_off.fits)
            epoch, last = packer.epoch(0), Figures()
            packed_tokens = int(document_tokens.sum())
            figures = Figures()
            for index in range(min(options.micro_batches, epoch.num_micro_batches - 1)):
                figures.add(planner, document_tokens[epoch.micro_batch(index)])
            last.add(planner, document_tokens[epoch.micro_batch(epoch.num_micro_batches - 1)])
            print_row(
                *(mix, num_ranks, f"{max(figures.tokens):.3f}", f"{max(last.tokens):.3f}"),
                *(f"{max(figures.before):.2f}", f"{max(figures.after):.3f}", f"{max(last.after):.3f}"),
                *(f"{100 * put_off.tokens / packed_tokens:.2f} %", f"{1e3 * max(figures.seconds):.0f} ms"),
            )


if __name__ == "__main__":
    main()
