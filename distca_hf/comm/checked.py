"""Checked exchanges: before rows leave, all ranks show each other which exchange they mean.

A process group delivers exchanges in the order in which each rank starts them. If two ranks start them in different
orders, rows of one place arrive in another. Wrong numbers (gloo, equal sizes), an abort or a hang follow. This package
keeps one order; the check finds code that does not, for one more message per exchange. For debugging.
"""

from collections.abc import Sequence

from distca_hf.comm.agreement import by_value, integers_of, text_of
from distca_hf.comm.transport import AllToAll, Exchange, Gather, Transport
from distca_hf.errors import PlanMismatchError


# Longest name of a place, in bytes.
PLACE_BYTES = 96


class CheckedTransport:
    """Passes everything on to another transport, once all ranks mean the same exchange."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.world_size, self.traffic = inner.rank, inner.world_size, inner.traffic
        self._inner = inner
        self._number = 0

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an exchange that all ranks mean.

        Raises:
            PlanMismatchError: ranks mean different exchanges, or one sends what another does not expect. Names both
                places, or both numbers of rows; nothing was sent.
        """
        number, self._number = self._number, self._number + 1
        row = [asked.rows.shape[1:].numel(), asked.rows.element_size()]
        header = [*row, *integers_of(asked.where.encode(), PLACE_BYTES), *asked.send_counts, *asked.receive_counts]
        shown = self._inner.gather(header, f"{asked.where}, check of exchange {number}").wait()
        counts_at = len(header) - 2 * self.world_size
        meant = [f"{text_of(row[2:counts_at])} (rows of {row[0]} x {row[1]} bytes)" for row in shown]
        here = f"rank {self.rank}, exchange {number}"
        if len(set(meant)) > 1:
            raise PlanMismatchError(
                f"{here}: ranks exchange in different orders, nothing was sent: {by_value(meant)}. Run the same "
                "forward and backward passes in the same order on all ranks, from one thread"
            )
        sent = [row[counts_at : counts_at + self.world_size] for row in shown]
        for target, row in enumerate(shown):
            for source, expected in enumerate(row[counts_at + self.world_size :]):
                if sent[source][target] != expected:
                    raise PlanMismatchError(
                        f"{here}, {asked.where}: rank {source} sends {sent[source][target]} rows to rank {target}, "
                        f"which expects {expected}; nothing was sent"
                    )
        return self._inner.exchange(asked)

    def gather(self, values: Sequence[int], where: str) -> Gather:
        """Passes integers on unchecked: agreements check themselves."""
        return self._inner.gather(values, where)

    def close(self) -> None:
        """Closes the inner transport."""
        self._inner.close()
