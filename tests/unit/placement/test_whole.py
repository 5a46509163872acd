"""Whole documents: tokens and room of the ranks, which documents are put off."""

import random

import numpy as np
import pytest

from distca_hf.analysis.lengths import read_lengths
from distca_hf.cost import imbalance
from distca_hf.data.epochs import EpochPacker
from distca_hf.errors import PackingError
from distca_hf.placement.whole import fit_whole, place_whole
from distca_hf.recipe import LENGTHS


RANK_TOKENS = 65_536


@pytest.mark.parametrize("name", ["pretrain", "prolong"])
@pytest.mark.parametrize(("num_ranks", "documents"), [(2, 1_000), (8, 3_000), (64, 20_000)])
def test_tokens_are_even_on_shipped_lengths_and_few_documents_are_put_off(
    name: str, num_ranks: int, documents: int
) -> None:
    """The last micro-batch of an epoch, which has to take what is left, is as even as the others."""
    lengths = read_lengths(LENGTHS.find(name)).tokens
    lengths = np.random.default_rng(num_ranks).permutation(lengths[lengths <= RANK_TOKENS])[:documents]
    put_off_tokens = 0

    def fits(document_tokens: np.ndarray) -> np.ndarray:
        nonlocal put_off_tokens
        have_room = fit_whole(document_tokens, num_ranks, RANK_TOKENS)
        put_off_tokens += int(document_tokens[~have_room].sum())
        return have_room

    epoch = EpochPacker(lengths, num_ranks * RANK_TOKENS, fits=fits).epoch(0)

    for index in range(epoch.num_micro_batches):
        of_batch = lengths[epoch.micro_batch(index)]
        layout = place_whole(of_batch, num_ranks, RANK_TOKENS)
        longest = int(of_batch.max()) * num_ranks / int(of_batch.sum())  # no placement is more even
        assert imbalance(layout.rank_tokens) <= max(1.01, longest)
    assert np.array_equal(np.sort(epoch.documents), np.arange(len(lengths)))
    assert put_off_tokens <= 0.01 * lengths.sum()


@pytest.mark.parametrize("seed", range(30))
def test_documents_that_fit_together_are_placed_together(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, rank_tokens = rng.choice([1, 2, 3, 8]), rng.choice([100, 4096])
    lengths = [
        min(rank_tokens, max(1, int(rng.lognormvariate(np.log(rank_tokens / 8), 1.2)))) for _ in range(12 * num_ranks)
    ]
    fits = fit_whole(np.array(lengths), num_ranks, rank_tokens)

    layout = place_whole(np.array(lengths)[fits], num_ranks, rank_tokens)

    assert not fits.all() or layout.num_documents == len(lengths)
    assert layout.rank_tokens.max() <= rank_tokens
    assert len(layout.segment_document) == layout.num_documents
    if not fits.all():
        with pytest.raises(PackingError, match=r"stays whole.*has room for it"):
            place_whole(np.array(lengths), num_ranks, rank_tokens)
