"""Documents of a benchmark step: which there are, and which rank holds which part of them in every mode.

A holding is a list of segments (document, start, stop) for every rank, in row order. All holdings give every rank
equally many tokens.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.layout import MAX_DOCUMENT_TOKENS


GPUS = 4  # of a preset without a number: `A` is `A:4`
# Numbers are compared with exact attention on documents up to about this length.
COMPARED_TOKENS = 1024
# Most documents of one length.
MOST_DOCUMENTS = 1_000_000

Documents = Sequence[IntArray]  # int64 `[tokens]` of each
Segment = tuple[int, int, int]
Holding = list[list[Segment]]


def _a(gpus: int) -> list[tuple[int, int]]:
    """64K tokens per GPU: one document fills a GPU; a third of the rest each in documents of 32K, 16K and 2K."""
    rest = 32 * (gpus - 1)
    longer, shorter = round(rest / 48), round(rest / 24)
    return [(1, 65_536), (longer, 32_768), (shorter, 16_384), (rest - 16 * longer - 8 * shorter, 2048)]


# Counts and lengths for so many GPUs: 64K tokens for each, or 128K in B. In B and C one document fills a GPU and all
# others are short; the one of D fills all of them.
PRESETS: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "A": _a,
    "B": lambda gpus: [(1, 131_072), (32 * (gpus - 1), 4096)],
    "C": lambda gpus: [(1, 65_536), (16 * (gpus - 1), 4096)],
    "D": lambda gpus: [(1, 65_536 * gpus)],
}


def spelled_out(text: str) -> str:
    """Returns the lengths of a preset, of `A` as of `A:8` for eight GPUs, as "131072,96x4096"; other texts as they
    are."""
    name, _, gpus = text.partition(":")
    if name not in PRESETS:
        return text
    if gpus and not 1 <= int(gpus) <= MOST_DOCUMENTS:
        raise ValueError(f"{text} has no GPUs")
    counted = [(count, tokens) for count, tokens in PRESETS[name](int(gpus or GPUS)) if count]
    return ",".join(f"{count}x{tokens}" if count > 1 else f"{tokens}" for count, tokens in counted)


def parse_documents(text: str) -> list[int]:
    """Returns the lengths of documents, in tokens, from a preset's name or "131072,96x4096"; raises ValueError if the
    text is neither, or a document has no tokens, or too many."""
    lengths: list[int] = []
    for part in spelled_out(text).split(","):
        count, _, tokens = part.rpartition("x")
        if not 1 <= int(count or 1) <= MOST_DOCUMENTS or not 1 <= int(tokens) <= MAX_DOCUMENT_TOKENS:
            raise ValueError(f"{part} are no documents")
        lengths += [int(tokens)] * int(count or 1)
    return lengths


def check_lengths(lengths: Sequence[int], num_ranks: int) -> None:
    """Exits unless every document can be cut in 2 equal chunks per rank: then all modes can hold equal tokens."""
    wrong = [tokens for tokens in lengths if tokens < 1 or tokens % (2 * num_ranks)]
    if wrong:
        raise SystemExit(f"a document of {wrong[0]} tokens cannot be cut in {2 * num_ranks} equal chunks, 2 per rank")


def smaller_lengths(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Returns lengths of the same documents, in tokens, all shorter by the same power of two, for comparisons with
    exact attention: the longest has about 1024, as long as all can still be cut in 2 equal chunks per rank."""
    factor = 1
    while max(lengths) > factor * COMPARED_TOKENS and not any(
        tokens % (2 * factor * 2 * num_ranks) for tokens in lengths
    ):
        factor *= 2
    return [tokens // factor for tokens in lengths]


def random_tokens(lengths: Sequence[int], vocabulary: int) -> Documents:
    """Returns documents of random tokens of a vocabulary, the same on all ranks."""
    random = np.random.RandomState(0)
    return [random.randint(0, vocabulary, tokens).astype(np.int64) for tokens in lengths]


def attended_pairs(lengths: Sequence[int], mask: Mask = CAUSAL_MASK) -> int:
    """Returns the attended pairs of whole documents of so many tokens, in one layer with this mask."""
    return sum(mask.pairs(0, tokens) for tokens in lengths)


def whole_documents(lengths: Sequence[int], num_ranks: int, shares: Sequence[int] = ()) -> Holding:
    """Packs whole documents in order, each to the first rank with room, or the longest first if that does not
    fill all ranks; exits if neither does. Ranks have tokens in proportion to the shares, or equally many."""
    parts = shares or [1] * num_ranks
    room = [sum(lengths) * part // sum(parts) for part in parts]
    in_order = range(len(lengths))
    for order in (in_order, sorted(in_order, key=lambda document: -lengths[document])):
        holding = _first_fit(lengths, order, [*room])
        if holding is not None:
            return holding
    raise SystemExit(
        f"whole documents do not fill ranks of {', '.join(map(str, room))} tokens: choose other --documents, or "
        "--modes without local, given and moved"
    )


def _first_fit(lengths: Sequence[int], order: Sequence[int], room: list[int]) -> Holding | None:
    holding: Holding = [[] for _ in room]
    for document in order:
        rank = next((rank for rank, tokens in enumerate(room) if tokens >= lengths[document]), None)
        if rank is None:
            return None
        holding[rank].append((document, 0, lengths[document]))
        room[rank] -= lengths[document]
    return holding


def zigzag(documents: Sequence[int], lengths: Sequence[int], num_ranks: int) -> Holding:
    """Returns the r-th and the r-th last of 2 x ranks chunks of every document for rank r, first chunks before second.
    Work is equal on all ranks, to the pair. `documents` are the numbers of those that are cut."""
    holding: Holding = []
    for rank in range(num_ranks):
        held: list[Segment] = []
        for chunk in (rank, 2 * num_ranks - 1 - rank):
            for document in documents:
                tokens = lengths[document] // (2 * num_ranks)
                held.append((document, chunk * tokens, (chunk + 1) * tokens))
        holding.append(held)
    return holding


def evenly_spread(lengths: Sequence[int], num_ranks: int) -> tuple[Holding, Holding]:
    """Returns whole documents, and parts of documents, with equal tokens and equal work for every rank, to the pair:
    of each length as many whole documents for every rank as there are, and the rest in zigzag."""
    whole: Holding = [[] for _ in range(num_ranks)]
    rest: list[int] = []
    for tokens in sorted(set(lengths)):
        alike = [document for document, other in enumerate(lengths) if other == tokens]
        shared = len(alike) - len(alike) % num_ranks
        for place, document in enumerate(alike[:shared]):
            whole[place % num_ranks].append((document, 0, tokens))
        rest += alike[shared:]
    return whole, zigzag(rest, lengths, num_ranks)


def share_of(segments: Sequence[Segment], rank: int, num_ranks: int) -> list[Segment]:
    """Returns the rows of some segments that come to a rank, in order; all ranks get equally many."""
    rows = sum(stop - start for _, start, stop in segments)
    first, last = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
    share, at = [], 0
    for document, start, stop in segments:
        begin, end = max(first - at, 0), min(last - at, stop - start)
        if begin < end:
            share.append((document, start + begin, start + end))
        at += stop - start
    return share


def batch_of(segments: Sequence[Segment], tokens: Documents, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns `input_ids` and `position_ids`, int64 `[1, rows]`, of one rank's segments."""
    ids = np.concatenate([tokens[document][start:stop] for document, start, stop in segments])
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in segments])
    return {
        name: torch.from_numpy(values)[None].to(device)
        for name, values in (("input_ids", ids), ("position_ids", positions))
    }


def gathered_rows(holding: Holding, lengths: Sequence[int]) -> list[IntArray]:
    """Returns int64 `[tokens]` of every document: the rows of its tokens when the rows of all ranks lie one after the
    other."""
    rows = [np.zeros(tokens, dtype=np.int64) for tokens in lengths]
    at = 0
    for document, start, stop in chain.from_iterable(holding):
        rows[document][start:stop] = np.arange(at, at + stop - start)
        at += stop - start
    return rows
