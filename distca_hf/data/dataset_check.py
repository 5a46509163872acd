"""Dataset check: a look at the documents of a dataset before the first step.

All documents of a small dataset are read, and a sample of a large one: for the checksum that ranks compare, for rows
that look padded, and for rows that a transform does not make again as it made them before.
"""

import hashlib
from collections import Counter

import numpy as np

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.data.documents import DocumentSource
from distca_hf.data.rows import Draws
from distca_hf.errors import PackingError
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Largest dataset, in tokens, of which all tokens are read: it takes a tenth of a second.
MOST_TOKENS = 1 << 22
# The same in documents; of a larger dataset, this many documents are read.
MOST_DOCUMENTS = 1024
# Documents whose rows are drawn twice, if a transform makes them: one that changes a row in fifty is found as well.
MOST_DRAWN_TWICE = 256
# Equal tokens at an end of a document that count as a run, and the share of documents with a run of one token that is
# told. Texts end in a token twice or three times at most.
RUN_TOKENS, TOLD_SHARE = 4, 0.1
# Tokens at the end of a document in which runs are looked for.
END_TOKENS = 64


def checked_contents(source: DocumentSource) -> str:
    """Returns a checksum of tokens and labels: of all documents if they are few, else of a sample over the dataset.
    Warns of rows that look padded.

    Raises:
        PackingError: a document cannot be trained on, or a transform gives other values when a row is drawn again.
    """
    lengths = source.document_tokens
    everything = len(lengths) <= MOST_DOCUMENTS and int(lengths.sum()) <= MOST_TOKENS
    documents = np.arange(len(lengths))
    if not everything:
        documents = np.unique(np.linspace(0, len(lengths) - 1, MOST_DOCUMENTS).astype(np.int64))
    most_tokens = int(lengths.max(initial=0)) if everything else MOST_TOKENS // MOST_DOCUMENTS
    digest, runs = hashlib.blake2b(digest_size=8), Runs()
    drawn: dict[int, dict[str, str]] = {}
    twice = set(documents[:: ceil_div(len(documents), MOST_DRAWN_TWICE)].tolist())
    for document in documents.tolist():
        draws, tokens = source.draw([document]), int(lengths[document])
        beginning = source.read(document, 0, min(tokens, most_tokens), draws)
        digest.update(beginning.to_bytes())
        end = beginning
        if tokens > most_tokens:
            end = source.read(document, max(0, tokens - END_TOKENS), tokens, draws)
        runs.note(int(source.rows[document]), beginning.input_ids, end.input_ids[-END_TOKENS:])
        if draws and document in twice:
            drawn[document] = _digests(draws)
    runs.warn(len(documents))
    # In reverse order, so that a transform that remembers the row before gives other values, too.
    for document in reversed(drawn):
        now, before = _digests(source.draw([document])), drawn[document]
        if wrong := [name for name in {**before, **now} if now.get(name) != before.get(name)]:
            raise PackingError(
                f"row {source.rows[document]}: the dataset's transform gives other {wrong[0]!r} when it makes the row "
                "again. Ranks that share a document, and a resumed run, must see one row: draw from random, "
                "numpy.random or torch, which are seeded for it, not from another generator, the clock or a "
                "tokenizer's dropout; or use dataset.map"
            )
    return digest.hexdigest()


def _digests(draws: Draws) -> dict[str, str]:
    """Returns a checksum of each column of one drawn row."""
    (values,) = draws.values()
    return {name: hashlib.blake2b(array.tobytes()).hexdigest() for name, array in values.items()}


class Runs:
    """Runs of one token at the ends of documents, as padding makes them."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._longest: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, row: int, beginning: IntArray, end: IntArray) -> None:
        """Notes a document, of which these are the first and the last tokens, unless it repeats one token."""
        if (beginning == beginning[0]).all() and (end == beginning[0]).all():
            return
        for verb, ids in (("end in", end[::-1]), ("begin with", beginning[:END_TOKENS])):
            run = int(np.argmin(ids == ids[0])) or len(ids)
            if run >= RUN_TOKENS:
                self._counts[found := (verb, int(ids[0]))] += 1
                self._longest[found] = max(self._longest.get(found, (0, 0)), (run, row))

    def warn(self, num_documents: int) -> None:
        """Warns if many of these documents have a run of the same token."""
        for (verb, token), count in self._counts.items():
            if count > 1 and count >= TOLD_SHARE * num_documents:
                run, row = self._longest[verb, token]
                log.warning(
                    "%d of %d documents that were looked at %s a run of token %d (row %d: %s%d of them). If it is "
                    "padding, it costs time, and is learnt unless labels say otherwise: tokenise without padding, "
                    "because documents are packed here",
                    *(count, num_documents, verb, token, row, "at least " if run == END_TOKENS else "", run),
                )
