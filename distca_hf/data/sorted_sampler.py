"""Sorted packs: an order of packs in which all ranks have packs of about equal work at the same time.

Within one optimizer step the order of packs changes no gradient. All packs of a step are sorted by attention work and
dealt out micro-step by micro-step. No token and no task moves for it.
"""

from collections.abc import Iterator

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.errors import PackingError


class SortedPackSampler:
    """A sampler: indices of a shuffled dataset, sorted within the packs of each optimizer step.

    Args:
        work: `[rows]` attention work of each row of the dataset, in any unit.
        num_ranks, packs_per_rank, micro_steps: rank r's micro-batch m of a step takes `packs_per_rank` rows.
        seed: together with the epoch's number it decides the order.

    Raises:
        PackingError: a size is not positive.
    """

    def __init__(self, work: np.ndarray, num_ranks: int, packs_per_rank: int, micro_steps: int, seed: int) -> None:
        if min(num_ranks, packs_per_rank, micro_steps) < 1:
            raise PackingError(f"{num_ranks} ranks x {packs_per_rank} packs x {micro_steps} micro-steps hold no pack")
        self._work = work
        self._num_ranks = num_ranks
        self._packs_per_rank = packs_per_rank
        self._micro_steps = micro_steps
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._work)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = np.random.RandomState([self._seed & 0xFFFFFFFF, self._epoch]).permutation(len(self._work))
        at_once = self._num_ranks * self._packs_per_rank
        step_packs = at_once * self._micro_steps
        for first in range(0, len(order), step_packs):
            step = order[first : first + step_packs]
            step = step[np.argsort(-self._work[step], kind="stable")]
            for begin in range(0, len(step), at_once):
                yield from self._dealt(step[begin : begin + at_once]).tolist()

    def _dealt(self, packs: IntArray) -> IntArray:
        """Deals the sorted packs of a micro-step to ranks, forwards and backwards in turn, so that sums are close."""
        if len(packs) < self._num_ranks * self._packs_per_rank:
            return packs
        rounds = packs.reshape(self._packs_per_rank, self._num_ranks).copy()
        rounds[1::2] = rounds[1::2, ::-1]
        return rounds.T.reshape(-1)
