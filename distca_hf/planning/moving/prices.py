"""Prices: what it costs a rank to send and to receive a byte. They steer a planner away from ranks that move most."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from distca_hf.cost import TokenBytes


# No byte is free, also where nothing moves.
LOWEST_PRICE = 0.1


@dataclass(frozen=True, slots=True)
class Prices:
    """`[ranks]` prices of sending and of receiving a byte."""

    send: list[float]
    receive: list[float]

    @classmethod
    def opening(cls, gives: Iterable[bool], quiet: float) -> Self:
        """Prices before anything is known: what ranks with too much work send costs 1, all other bytes `quiet`."""
        send = [1.0 if giver else quiet for giver in gives]
        return cls(send, [quiet] * len(send))

    def of_queries(self, home: int, server: int, token_bytes: TokenBytes) -> float:
        """Price of computing one query elsewhere: the query goes, its output comes back."""
        there = token_bytes.query * (self.send[home] + self.receive[server])
        return there + token_bytes.output * (self.send[server] + self.receive[home])

    def of_keys(self, home: int, server: int, token_bytes: TokenBytes) -> float:
        """Price of the key and value of one token."""
        return token_bytes.key_value * (self.send[home] + self.receive[server])

    def copy(self) -> "Prices":
        return Prices(list(self.send), list(self.receive))

    def follow(self, sent: list[int], received: list[int]) -> "Prices":
        """Prices for the next plan, from the bytes that this one moves: the busier a rank, the more it asks for."""
        most = max(*sent, *received, 1)
        return Prices(_follow(self.send, sent, most), _follow(self.receive, received, most))


def _follow(prices: list[float], moved: list[int], most: int) -> list[float]:
    """Geometric mean of old prices and those that the bytes ask for: without old ones two plans would alternate."""
    return [(price * (LOWEST_PRICE + (share / most) ** 2)) ** 0.5 for price, share in zip(prices, moved, strict=True)]
