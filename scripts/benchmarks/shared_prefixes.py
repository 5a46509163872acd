"""Times training steps on documents that begin alike, with their prefixes shared and without.

    torchrun --nproc-per-node 2 scripts/benchmarks/shared_prefixes.py --layers 4 --rounds 8 --out prefixes.json
    torchrun --nproc-per-node 1 scripts/benchmarks/shared_prefixes.py --layers 4 --workloads grpo --prompt-tokens 16384
    torchrun --nproc-per-node 2 scripts/benchmarks/shared_prefixes.py --device cpu --preset tiny --prompt-tokens 300 \\
        --turn-tokens 20 --tool-tokens 40 --tasks 2 --rounds 2 --warmup 1

Each workload is measured by itself. A step is forward and backward of all its micro-batches, FSDP's collectives, and
AdamW at a learning rate of 0. All modes run in one process with the same weights, batches and kernel, one after the
other, again and again, on the batches of another task in every round.

    trees   agents. A task has a system prompt with the task, and trajectories of turns; in each turn the agent writes,
            and a tool answers. The first trajectory begins after the prompt, each other one branches off from an
            earlier one of its task after a random turn. A micro-batch is a task; ranks hold equally many of its
            trajectories
    grpo    a step is a generation batch of TRL's GRPOTrainer: each rank has consecutive rows of prompts with
            --generations answers, shuffles them, and cuts them into --micro-batches
    dpo     pairs of answers to a prompt, as DPOTrainer collates them: first all chosen ones, then all rejected ones
    none    documents as long as those of grpo, no two of which begin alike

Lengths of turns, answers and tool outputs are drawn from half to one and a half of the mean. Documents of a rank are a
pack. The loss is one of hidden states of all documents' tokens, without a head. Columns of the tables: README.md.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from distca_hf.arrays import IntArray
from distca_hf.integrations.models.sharing import Sharing
from lib.documents import batch_of
from lib.model import Shape, read_config
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import count, names, whole
from lib.place import Mode, Place
from lib.prefix_documents import WORKLOADS, Drawn, MicroBatch, equal_beginnings
from lib.report import EXCHANGED_GB, STEP_MS, Measured
from lib.tables import Columns, Figures, figure, number, peak_gib
from lib.trainer_batches import AsOfTrainer, Batch, Batches
from lib.whole_model import TrainingRunner, Workload, measure_workloads


MODES = {
    "plain": "packs as they are, and the kernel itself; nothing is exchanged but weights and gradients",
    "unshared": "the product, as with shared_prefix_tokens=0: rows are placed; on one GPU, where nothing is to place, "
    "its own attention",
    "shared": "the product",
}
COLUMNS: Columns = {
    "step ms": STEP_MS,
    **{f"÷ {of}": figure(f"ratio_to_{of}", 1, 3) for of in ("first", "trie", "work")},
    "given": lambda of: sum(of["given_tokens"]) // len(of["given_tokens"]),
    "trie ÷ given": lambda of: number(sum(of["trie_tokens"]) / sum(of["given_tokens"]), 1, 4),
    "computed ÷ given": lambda of: number(sum(of["computed_tokens"]) / sum(of["given_tokens"]), 1, 4),
    "peak GiB": peak_gib,
    "peak ÷ first": figure("peak_ratio_to_first", 1, 3),
    "exchanged GB": EXCHANGED_GB,
    "loss": figure("loss", 1, 4),
}


def main() -> None:
    on_all_ranks(measure, parse())


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, MODES)
    parser.set_defaults(modes="plain,unshared,shared", checkpointing="saved")
    chosen = names(WORKLOADS, "workload")
    parser.add_argument("--workloads", type=chosen, default=",".join(WORKLOADS), help="comma-separated, see above")
    parser.add_argument("--prompt-tokens", type=count, default=4096, help="of every prompt")
    parser.add_argument("--turn-tokens", type=count, default=512, help="mean of an agent's turn, or of an answer")
    parser.add_argument("--tool-tokens", type=count, default=512, help="mean of a tool's output")
    parser.add_argument("--turns", type=count, default=12, help="of every trajectory")
    parser.add_argument("--tasks", type=count, default=64, help="different steps")
    parser.add_argument("--branches", type=count, default=8, help="trajectories of a task")
    parser.add_argument("--generations", type=count, default=8, help="answers to a prompt of grpo")
    parser.add_argument("--rows", type=count, default=8, help="documents of a rank and micro-batch, not of trees")
    parser.add_argument(
        "--micro-batches", type=count, default=1, help="of a step of trees, or of grpo (steps_per_generation)"
    )
    parser.add_argument("--seed", type=whole, default=0, help="of lengths, branches and tokens")
    options = parse_shared(parser)
    if options.rows % 2:
        parser.error(f"--rows {options.rows} is odd, and dpo has pairs of rows")
    return options


def work_of(shape: Shape, lengths: Sequence[int]) -> float:
    """Returns the flops of layers, forward and backward; attention's backward is 2.5 times its forward."""
    return 3 * shape.linear_flops * sum(lengths) + 3.5 * shape.attention_flops(shape.pairs(lengths))


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Builds the model once, and measures one workload after the other."""
    num_ranks = dist.get_world_size()
    longest = options.prompt_tokens + options.turns * 3 * (options.turn_tokens + options.tool_tokens) // 2 + 1
    config = read_config(options, longest)
    place = Place.build(config, options, device)
    place.enable(0, longest, options)
    counted, vocabulary = count_rows(place.model.layers[0]), config.get_text_config().vocab_size
    number = min(options.tasks, options.warmup + options.rounds)

    def measure_one(workload: str) -> Workload:
        steps = [WORKLOADS[workload](Drawn(options, workload, step, vocabulary), num_ranks) for step in range(number)]
        own = [[micro_batch[place.wires.rank] for micro_batch in step] for step in steps]
        counts = {name: CountedBatches(_batches(name, place, own), counted) for name in options.modes}
        unshared = partial(mock.patch.object, Sharing, "refusal", return_value="this mode shares nothing")
        modes = [
            Mode(name, "bench_whole", of_mode)
            if name == "plain"
            else Mode.of_product(name, of_mode, *[unshared] * (name == "unshared"))
            for name, of_mode in counts.items()
        ]
        measured = TrainingRunner(place).run(modes, options.warmup, options.rounds)
        timed = [steps[(options.warmup + at) % number] for at in range(options.rounds)]
        rows = torch.tensor([of_mode.rows[options.warmup :] for of_mode in counts.values()], device=device)
        dist.all_reduce(rows)
        computed = dict(zip(counts, rows.tolist(), strict=True))
        further = further_figures(measured, computed, timed, place.shape)
        given = sum(further[options.modes[0]]["given_tokens"])
        return given // options.rounds // num_ranks, measured, further

    measure_workloads(options, config, device, measure_one, COLUMNS, "loss of states")


def count_rows(layer: nn.Module) -> list[int]:
    """Returns a list that will hold the rows of every call of a decoder layer."""
    counted, forward = list[int](), layer.forward

    def count_and_run(hidden_states: torch.Tensor, *args: Any, **given: Any) -> Any:
        counted.append(hidden_states.shape[0] * hidden_states.shape[1])
        return forward(hidden_states, *args, **given)

    layer.forward = count_and_run
    return counted


class CountedBatches:
    """Batches, and the rows that layers computed in their passes.

    Attributes:
        rows: of each step, on this rank.
    """

    def __init__(self, batches: Batches, counted: list[int]) -> None:
        self.rows: list[int] = []
        self._batches, self._counted = batches, counted

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        self.rows.append(0)
        for batch in self._batches:
            yield batch
            self.rows[-1] += self._counted[-1]


class InTurns:
    """Batches of one step after the other; after the last one the first follows."""

    def __init__(self, steps: Sequence[Sequence[Batch]]) -> None:
        self._len, self._steps = len(steps[0]), cycle(steps)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Batch]:
        return iter(next(self._steps))


def _batches(name: str, place: Place, steps: Sequence[Sequence[Sequence[IntArray]]]) -> Batches:
    """Returns the batches of a mode, for the documents of this rank in the micro-batches of all steps: packs."""
    made: list[list[Batch]] = []
    for step in steps:
        made.append([])
        for documents in step:
            lengths = [len(tokens) for tokens in documents]
            segments = [(number, 0, tokens) for number, tokens in enumerate(lengths)]
            work = {"bench_work": place.whole_work(lengths)} if name == "plain" else {}
            made[-1].append({**batch_of(segments, documents, place.device), **work})
    return InTurns(made) if name == "plain" else AsOfTrainer(place.model, made, shares=name == "shared")


def further_figures(
    measured: Mapping[str, Measured],
    computed: Mapping[str, list[int]],
    steps: Sequence[Sequence[MicroBatch]],
    shape: Shape,
) -> dict[str, Figures]:
    """Returns tokens of every round, and ratios of each mode.

    Args:
        measured: measurements by mode.
        computed: `[rounds]` rows that layers of all ranks computed, by mode.
        steps: micro-batches of every round.
        shape: of the model.
    """
    given, trie, remaining_work = [], [], []
    for step in steps:
        parts = [equal_beginnings([*chain.from_iterable(micro_batch)]) for micro_batch in step]
        common, lengths = (list(chain.from_iterable(of)) for of in zip(*parts, strict=True))
        given.append(sum(lengths))
        trie.append(sum(lengths) - sum(common))
        remaining_work.append(1 - work_of(shape, common) / work_of(shape, lengths))
    remaining_tokens = [least / whole for least, whole in zip(trie, given, strict=True)]
    first = next(iter(measured.values()))
    return {
        name: {
            "ratio_to_first": mode.ratio_to(first),
            "ratio_to_trie": mode.ratio_to(first, remaining_tokens),
            "ratio_to_work": mode.ratio_to(first, remaining_work),
            "given_tokens": given,
            "trie_tokens": trie,
            "remaining_work": remaining_work,
            "computed_tokens": computed[name],
            "peak_ratio_to_first": mode.peak_bytes / first.peak_bytes if first.peak_bytes else None,
        }
        for name, mode in measured.items()
    }


if __name__ == "__main__":
    main()
