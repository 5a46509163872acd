"""Documents that begin alike, as agents and trainers of preferences make them (`WORKLOADS`)."""

import argparse
import random
from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import numpy as np

from distca_hf.arrays import IntArray


MicroBatch = Sequence[Sequence[IntArray]]  # documents of every rank


class Drawn:
    """Random numbers of one step, the same on all ranks."""

    def __init__(self, options: argparse.Namespace, workload: str, step: int, vocabulary: int) -> None:
        self.options, self._vocabulary = options, vocabulary
        self.random = random.Random(f"{options.seed} {workload} {step}")
        self._tokens = np.random.default_rng(self.random.getrandbits(64))

    def tokens(self, number: int) -> IntArray:
        """Returns `number` random tokens."""
        return self._tokens.integers(0, self._vocabulary, number)

    def about(self, mean: int) -> IntArray:
        """Returns random tokens, half to one and a half times as many as the mean."""
        return self.tokens(self.random.randint(-(-mean // 2), mean + mean // 2))

    def answers(self, number: int) -> list[IntArray]:
        """Returns documents of a prompt and an answer each, all of the same prompt."""
        prompt = self.tokens(self.options.prompt_tokens)
        return [np.concatenate([prompt, self.about(self.options.turn_tokens)]) for _ in range(number)]


def _trees(drawn: Drawn, num_ranks: int) -> list[MicroBatch]:
    return [_tree(drawn, num_ranks) for _ in range(drawn.options.micro_batches)]


def _tree(drawn: Drawn, num_ranks: int) -> MicroBatch:
    options, prompt = drawn.options, drawn.tokens(drawn.options.prompt_tokens)
    trajectories: list[list[tuple[IntArray, IntArray]]] = []
    for _ in range(options.branches):
        begun = drawn.random.choice(trajectories) if trajectories else []
        turns = begun[: drawn.random.randrange(options.turns)]
        while len(turns) < options.turns:
            turns = [*turns, (drawn.about(options.turn_tokens), drawn.about(options.tool_tokens))]
        trajectories.append(turns)
    documents = [np.concatenate([prompt, *chain.from_iterable(turns)]) for turns in trajectories]
    borders = [len(documents) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [documents[borders[rank] : borders[rank + 1]] for rank in range(num_ranks)]


def _grpo(drawn: Drawn, num_ranks: int) -> list[MicroBatch]:
    rows, number = drawn.options.rows, drawn.options.micro_batches
    answers: list[IntArray] = []
    while len(answers) < num_ranks * number * rows:
        answers += drawn.answers(drawn.options.generations)
    of_ranks = [answers[rank * number * rows : (rank + 1) * number * rows] for rank in range(num_ranks)]
    for of_rank in of_ranks:
        drawn.random.shuffle(of_rank)
    return [[of_rank[first : first + rows] for of_rank in of_ranks] for first in range(0, number * rows, rows)]


def _dpo(drawn: Drawn, num_ranks: int) -> list[MicroBatch]:
    pairs = [[drawn.answers(2) for _ in range(drawn.options.rows // 2)] for _ in range(num_ranks)]
    return [[[pair[of] for of in (0, 1) for pair in of_rank] for of_rank in pairs]]


def _none(drawn: Drawn, num_ranks: int) -> list[MicroBatch]:
    return [[[drawn.answers(1)[0] for _ in range(drawn.options.rows)] for _ in range(num_ranks)]]


# Returns the micro-batches of a step, from its random numbers and the number of ranks.
Workload = Callable[[Drawn, int], list[MicroBatch]]
WORKLOADS: dict[str, Workload] = {"trees": _trees, "grpo": _grpo, "dpo": _dpo, "none": _none}


def equal_beginnings(documents: Sequence[IntArray]) -> tuple[list[int], list[int]]:
    """Returns, in the order of their tokens, how many tokens each document has in common with others before it; and
    the lengths of documents in this order."""
    in_order = sorted(documents, key=lambda tokens: tokens.astype(">u4").tobytes())
    common = [0]
    for before, after in pairwise(in_order):
        least = min(len(before), len(after))
        differs = np.flatnonzero(before[:least] != after[:least])
        common.append(int(differs[0]) if len(differs) else least)
    return common, [len(tokens) for tokens in in_order]
