"""The pool: pieces of documents from the light end to the dense end, and the two ways to take tokens from it.

    light end                                                     dense end
    | d7 | d2 | d9 |     ...     | d5[0:60K] | d1[0:90K]  ·  d1[90K:120K] |
     take_light: whole documents,                            take_tail: the end of
     the last one cut, front first                           any piece; its front stays

The density of a piece is its mean cost per token. Short documents and beginnings of documents are light, ends of long
ones are dense. Sums over the light end are maintained as pieces come and go: every step of a placement needs them.
Taken tokens are pieces again, so the work of a whole document is counted once, however often it is dealt.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter

from distca_hf.arrays import MAX_INTEGER, IntArray
from distca_hf.cost import DocumentCost, Work
from distca_hf.errors import PackingError


Segment = tuple[int, int, int]  # document, start, stop
# Mean cost of a token, document, start, stop, work. A plain tuple: a NamedTuple would make placement on 64 ranks 8 %
# slower, since pieces are made and sorted by the thousand.
Piece = tuple[float, int, int, int, int]

# Maximum tokens of the rest of a document cut at the light end that stays there for the next rank. A longer rest would
# put dense tokens among light ones.
LIGHT_REST_TOKENS = 8192


class PiecePool:
    """Pieces, sorted by mean cost; indices grow towards the dense end.

    Args:
        pieces: pieces to take from.
        work: work of a query range, `work(document, start, stop)`.

    Attributes:
        work_left: work of the pieces that are left.
    """

    def __init__(self, pieces: Iterable[Piece], work: Work) -> None:
        self.work = work
        self._pieces = sorted(pieces)
        self.work_left = work_of(self._pieces)
        self._first = 0  # pieces before it are taken
        # Tokens and work of all pieces before each of the first pieces, as far as they were needed and are still
        # valid.
        self._tokens_before = [0]
        self._work_before = [0]
        self._tails: list[tuple[int, Piece, int | None]] = []  # index, piece, index of its front
        self._misplaced: list[Piece] = []

    @classmethod
    def of_documents(cls, document_tokens: IntArray, cost: DocumentCost, first_own: IntArray) -> "PiecePool":
        """Makes a pool of documents.

        Args:
            first_own: first token of each document to place: 0 for a whole document.

        Raises:
            PackingError: the cost of the longest document is beyond int64.
        """
        lengths = document_tokens.tolist()
        exact_work = cost.of_documents(lengths)
        if lengths:
            longest = int(document_tokens.argmax())
            most_work = exact_work(longest, 0, lengths[longest])
            if most_work > MAX_INTEGER:
                raise PackingError(
                    f"a document of {lengths[longest]} tokens costs {most_work}, more than {MAX_INTEGER}; split it"
                )
        work = cost.work_of(first_own, document_tokens, document_tokens)
        works = work.tolist()
        mean_costs = (work / (document_tokens - first_own)).tolist()
        pieces = zip(mean_costs, range(len(lengths)), first_own.tolist(), lengths, works, strict=True)
        return cls(pieces, exact_work)

    def copy(self) -> "PiecePool":
        """Returns a pool of the remaining pieces. Taking from it leaves this one unchanged."""
        pool = PiecePool([], self.work)
        pool._pieces, pool.work_left = self._pieces[self._first :], self.work_left
        return pool

    @property
    def indices(self) -> range:
        """Indices of the pieces that are left."""
        return range(self._first, len(self._pieces))

    def piece(self, index: int) -> Piece:
        """Returns the piece at an index."""
        return self._pieces[index]

    def first_index(self, is_dense: Callable[[Piece], bool], begin: int | None = None) -> int:
        """Finds the first piece, from `begin` on if given, for which `is_dense` is true; the index beyond the last if
        there is none. It must be true for all pieces after that one."""
        return bisect_left(self._pieces, True, self._first if begin is None else begin, key=is_dense)

    @property
    def densest(self) -> Piece | None:
        """The densest piece."""
        return self._pieces[-1] if self._first < len(self._pieces) else None

    def light_work(self, tokens: int) -> int:
        """Returns the work of the `tokens` lightest tokens, documents front first."""
        first, tokens_before, work_before = self._first, self._tokens_before, self._work_before
        end = tokens_before[first] + tokens
        if tokens_before[-1] <= end:  # the sums do not reach that far yet
            reached, work_reached = tokens_before[-1], work_before[-1]
            for _, _, start, stop, work in islice(self._pieces, len(tokens_before) - 1, None):
                reached += stop - start
                work_reached += work
                tokens_before.append(reached)
                work_before.append(work_reached)
                if reached > end:
                    break
        last = bisect_right(tokens_before, end, first) - 1
        rest, whole = end - tokens_before[last], work_before[last] - work_before[first]
        if rest == 0 or last == len(self._pieces):
            return whole
        piece = self._pieces[last]
        return whole + self.work(piece[1], piece[2], piece[2] + rest)

    def take_tail(self, index: int, tokens: int, stay: bool = False) -> Piece:
        """Takes the last tokens of the piece at an index. Sorts its front in, or with `stay` leaves it at that index
        until `settle`."""
        piece = tail = self._remove(index)
        _, document, start, stop, work = piece
        cut, at = stop - tokens, None
        if cut > start:
            front = piece_of(document, start, cut, self.work(document, start, cut))
            tail = piece_of(document, cut, stop, work - front[4])
            at = self._insert(front, index if stay else None)
            if stay:
                self._misplaced.append(front)
        self._tails.append((index, piece, at))
        self.work_left -= tail[4]
        return tail

    def take_densest(self) -> Piece:
        """Takes the whole densest piece. No piece may be misplaced, and no tail may wait to be put back."""
        piece = self._pieces.pop()
        if len(self._tokens_before) > len(self._pieces) + 1:
            self._tokens_before.pop()
            self._work_before.pop()
        self.work_left -= piece[4]
        return piece

    def put_back(self, tails: int) -> None:
        """Undoes the last `take_tail`s, if nothing else was taken since."""
        for _ in range(tails):
            index, piece, at = self._tails.pop()
            work = piece[4]
            if at is not None:
                work -= self._remove(at)[4]
            self._insert(piece, index)
            self.work_left += work

    def take_light(self, tokens: int) -> list[Piece]:
        """Takes the `tokens` lightest tokens. Cuts the last piece, and takes its front."""
        # 1. Whole pieces.
        before = self.light_work(tokens)  # also extends the sums that far
        end = self._tokens_before[self._first] + tokens
        last = bisect_right(self._tokens_before, end, self._first) - 1
        taken = self._pieces[self._first : last]
        if self._misplaced:
            self._misplaced = [piece for piece in self._misplaced if piece not in self._pieces[self._first : last + 1]]
        work_end = self._work_before[self._first] + before
        self._first, left = last, end - self._tokens_before[last]

        # 2. The front of the next piece. Its rest stays at the light end if it is short.
        if left:
            _, document, start, stop, work = self._pieces[last]
            front = piece_of(document, start, start + left, work_end - self._work_before[last])
            rest = piece_of(document, start + left, stop, work - front[4])
            taken.append(front)
            if stop - start - left <= LIGHT_REST_TOKENS:
                self._pieces[last] = rest
                self._misplaced.append(rest)
                self._tokens_before[last], self._work_before[last] = end, work_end
            else:
                self._first += 1
                self._insert(rest)
        self._tails.clear()
        self.work_left -= before
        return taken

    def take_all(self) -> list[Piece]:
        """Takes all pieces that are left; the pool is not used afterwards."""
        taken = self._pieces[self._first :]
        self._first, self.work_left = len(self._pieces), 0
        return taken

    def settle(self) -> None:
        """Sorts misplaced pieces in."""
        if self._misplaced:
            self._pieces[self._first :] = sorted(self._pieces[self._first :])
            del self._tokens_before[self._first + 1 :], self._work_before[self._first + 1 :]
        self._misplaced.clear()
        self._tails.clear()

    def _insert(self, piece: Piece, index: int | None = None) -> int:
        """Inserts a piece at an index, or in order; returns the index."""
        if index is None:
            index = bisect_left(self._pieces, piece, self._first)
        self._pieces.insert(index, piece)
        after = index + 1
        if after < len(self._tokens_before):
            tokens, work = piece[3] - piece[2], piece[4]
            self._tokens_before[after:] = [before + tokens for before in self._tokens_before[index:]]
            self._work_before[after:] = [before + work for before in self._work_before[index:]]
        return index

    def _remove(self, index: int) -> Piece:
        """Takes a piece out."""
        piece = self._pieces.pop(index)
        if piece in self._misplaced:
            self._misplaced.remove(piece)
        after = index + 1
        if after < len(self._tokens_before):
            tokens, work = piece[3] - piece[2], piece[4]
            self._tokens_before[after:] = [before - tokens for before in self._tokens_before[after + 1 :]]
            self._work_before[after:] = [before - work for before in self._work_before[after + 1 :]]
        return piece


def piece_of(document: int, start: int, stop: int, work: int) -> Piece:
    """Makes a piece of tokens [start, stop) of a document with their work."""
    return work / (stop - start), document, start, stop, work


def work_of(pieces: list[Piece]) -> int:
    """Sums the work of pieces."""
    return sum([work for _, _, _, _, work in pieces])


def joined(pieces: list[Piece]) -> list[Piece]:
    """Joins pieces that follow each other in a document, such as a tail and tokens taken later from the light end."""
    if len({document for _, document, _, _, _ in pieces}) == len(pieces):
        return pieces
    together: list[Piece] = []
    # By document and start: two sorts by numbers take less time than one by pairs.
    for piece in sorted(sorted(pieces, key=itemgetter(2)), key=itemgetter(1)):
        _, document, start, stop, work = piece
        if together and together[-1][1] == document and together[-1][3] == start:
            before = together.pop()
            piece = piece_of(document, before[2], stop, before[4] + work)
        together.append(piece)
    return together
