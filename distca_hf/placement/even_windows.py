"""Even windows: every share gets an equal part of the pairs that windows leave out, so that window layers are even, too.

Ranks meet in every layer. So layers with full attention have to be even among ranks, and layers with a sliding window
as well; an even sum of both is not enough. Placement by full attention gives one rank the dense end of a long document
beside dust, another one documents of medium length. In window layers dust is light work, and all else costs a window
per token:

    rank 0     | end of 128K | dust dust dust dust |     full: even     window of 4K: 0.6
    rank 1     |  12K  |  11K  |  13K  |  12K | 9K |     full: even     window of 4K: 1.3

In each layer

    window work = full work - pairs that the window leaves out,

and full work is even in any case. So window work is even where the pairs left out are. Only long documents have any. Their
ends have most, far more than their beginnings. Shares (nodes, or the ranks of one) are filled in two steps:

1. Long documents are handed out, longest first, each to the share that misses most pairs left out. They stay whole where
   they can; a document with more of them than a share misses is cut.
2. Short documents, of hardly any pairs left out, make up for tokens and work with the accordion. Their cuts cost few
   bytes.

The first shares would use up the ends of documents, and the last ones get beginnings, of which they cannot hold
enough. Then shares take only a part of what they miss at once, so that all get some of either. The largest part that
works is taken. If none does, long documents and short ones are two lines. Each is dealt out with the accordion, so that
every share has an equal part of the tokens and the work of both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from distca_hf.layout import TILE_TOKENS
from distca_hf.placement.accordion import Goal, deal_lightest_first, largest, largest_miss
from distca_hf.placement.longest_first import finish
from distca_hf.placement.piece_pool import Piece, PiecePool


# Length of a document beyond which it is long, in windows.
LONG_WINDOWS = 2.0
# Parts of the pairs left out that a share takes at once of what it misses, in the order in which they are tried.
PARTS = (1.0, 0.9, 0.8, 0.65, 0.5)
# Minimum tokens of a tail.
LEAST_TAIL_TOKENS = 512
STAT = {}


@dataclass(frozen=True)
class EvenWindows:
    left_out_before: Callable[[int], float]
    long_tokens: int
    slack_per_work: float
    alike: float
    parts: tuple = PARTS

    def left_out(self, pieces) -> float:
        """Sums the pairs left out of pieces."""
        before = self.left_out_before
        return sum([before(stop) - before(start) for _, _, start, stop, _ in pieces])

    def deal(self, pool: PiecePool, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        if len(goals) == 1:
            return [pool.take_all()]
        pieces = [pool.piece(index) for index in pool.indices]
        long = [piece for piece in pieces if piece[3] > self.long_tokens]
        whole = sum(goal.work for goal in goals) or 1.0
        per_work = self.left_out(long) / whole
        missing = [per_work * goal.work for goal in goals]
        slack = [self.slack_per_work * goal.load for goal in goals]
        long_tokens, long_work = sum([stop - start for _, _, start, stop, _ in long]), sum([p[4] for p in long])
        short_cost = (pool.work_left - long_work) / max(1, sum(goal.tokens for goal in goals) - long_tokens)
        for part in self.parts:
            left = pool.copy()
            STAT["try"] = STAT.get("try", 0) + 1
            hand_out = _HandOut(left, goals, missing, slack, short_cost, part, self)
            if hand_out.succeeds():
                shares, goals_left = hand_out.shares, hand_out.goals()
                for share, short in finish(left, goals_left, off * .5, self.alike).items():
                    shares[share] = shares[share] + short
                if largest_miss(shares, goals) <= off:
                    STAT[part] = STAT.get(part, 0) + 1
                    return shares
                STAT["off"] = STAT.get("off", 0) + 1
        STAT["lines"] = STAT.get("lines", 0) + 1
        return self._two_lines(pool, long, pieces, goals, off)

    def _two_lines(self, pool, long, pieces, goals, off):
        long_pool = PiecePool(long, pool.work)
        short_pool = PiecePool([p for p in pieces if p[3] <= self.long_tokens], pool.work)
        tokens = sum(stop - start for _, _, start, stop, _ in long)
        whole_t, whole_w = sum(g.tokens for g in goals), sum(g.work for g in goals) or 1
        ends = [0]
        for g in goals:
            ends.append(ends[-1] + g.tokens)
        of_long = [tokens * b // whole_t - tokens * a // whole_t for a, b in pairwise(ends)]
        long_goals = [Goal(t, g.work * long_pool.work_left / whole_w, g.load) for t, g in zip(of_long, goals)]
        one = deal_lightest_first(long_pool, long_goals)
        short_goals = [Goal(g.tokens - t, max(0., g.work - sum(p[4] for p in h)), g.load) for t, g, h in zip(of_long, goals, one)]
        other = deal_lightest_first(short_pool, short_goals)
        shares = [a + b for a, b in zip(one, other)]
        return shares


class _HandOut:
    def __init__(self, pool, goals, missing, slack, short_cost, part, even) -> None:
        self.shares = [[] for _ in goals]
        self._pool, self._goals = pool, goals
        self._tokens, self._work = [g.tokens for g in goals], [g.work for g in goals]
        self._missing, self._slack = list(missing), slack
        self._short_cost, self._part = short_cost, part
        self._before, self._long = even.left_out_before, even.long_tokens

    def goals(self):
        return [Goal(t, w, g.load) for t, w, g in zip(self._tokens, self._work, self._goals, strict=True)]

    def succeeds(self) -> bool:
        pool, before, missing, slack = self._pool, self._before, self._missing, self._slack
        closed = float("-inf")
        while (piece := pool.densest) is not None and piece[3] > self._long:
            most = max(missing)
            if most == closed:
                return True
            share = missing.index(most)
            _, document, start, stop, work = piece
            left_out, tokens = before(stop) - before(start), stop - start
            at_once = self._part * most
            if most - at_once <= GR * slack[share]:
                at_once = most
            fits_whole = left_out <= (at_once + slack[share] if at_once == most else at_once)
            if fits_whole and self._has_room(share, tokens, work):
                taken = pool.take_densest()
            else:
                def fits(tiles):
                    cut = stop - tiles * TILE_TOKENS
                    return before(stop) - before(cut) <= at_once and self._has_room(share, stop - cut, pool.work(document, cut, stop))
                take = TILE_TOKENS * largest((tokens - 1) // TILE_TOKENS, fits)
                if take < LEAST_TAIL_TOKENS:
                    if most > slack[share]:
                        return False
                    missing[share] = closed
                    continue
                taken = pool.take_tail(pool.indices[-1], take)
                left_out, tokens, work = before(stop) - before(stop - take), take, taken[4]
            self.shares[share].append(taken)
            self._tokens[share] -= tokens
            self._work[share] -= work
            missing[share] -= left_out
        return all([m <= s for m, s in zip(missing, slack)])

    def _has_room(self, share, tokens, work):
        tokens, work = self._tokens[share] - tokens, self._work[share] - work
        if tokens < 0 or work < 0:
            return False
        short_cost, pool = self._short_cost, self._pool
        if work >= short_cost * tokens:
            return True
        cost = work / max(1, tokens)
        if work < pool.light_work(tokens):
            return False
        needs = [(w / max(1, t), t, w) for s, (w, t) in enumerate(zip(self._work, self._tokens)) if s != share and w < short_cost * t]
        needs.append((cost, tokens, work))
        needs.sort()
        t_sum = w_sum = 0
        for c, t, w in needs:
            t_sum += t
            w_sum += w
            if c >= cost and w_sum < pool.light_work(t_sum):
                return False
        return True


GR = 0.5
