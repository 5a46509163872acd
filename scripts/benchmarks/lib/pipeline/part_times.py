"""Seconds that micro-batches take in the parts of a pipeline: lines by attended pairs, fitted to a few of them."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.pipelines.schedules import Seconds


@dataclass(frozen=True)
class PartTimes:
    """Fitted seconds of every part.

    Attributes:
        lines: `[2, parts, 2]` float64: forward and backward of each part, seconds of a micro-batch without any pair,
            and seconds of a pair.
        error: largest difference from a time that they were fitted to, as a part of it.
    """

    lines: Seconds
    error: float

    @classmethod
    def fit(cls, pairs: IntArray, seconds: Seconds) -> Self:
        """Returns lines fitted by least squares.

        Args:
            pairs: `[micro_batches]` attended pairs of a layer.
            seconds: `[2, parts, micro_batches]`, forward and backward.
        """
        unit = float(pairs.max())
        columns = np.stack([np.ones(len(pairs)), pairs / unit], axis=1)
        lines, *_ = np.linalg.lstsq(columns, seconds.reshape(-1, len(pairs)).T, rcond=None)
        scaled: Seconds = (lines.T / np.array([1.0, unit])).reshape(*seconds.shape[:2], 2)
        fitted = np.array(cls(scaled, 0.0).of(pairs))
        return cls(scaled, float(np.abs(fitted / seconds - 1).max()))

    def of(self, pairs: IntArray) -> tuple[Seconds, Seconds]:
        """Returns `[parts, micro_batches]` seconds, forward and backward, of `[micro_batches]` pairs."""
        forward, backward = self.lines[..., :1] + self.lines[..., 1:] * pairs
        return forward, backward

    def in_words(self) -> str:
        """Returns words for all lines, part by part: milliseconds, and nanoseconds of a pair."""
        shown = (
            f"{name} {', '.join(f'{1e3 * fixed:.2f} + {1e9 * of_pair:.5f}' for fixed, of_pair in parts)}"
            for name, parts in zip(("forward", "backward"), self.lines, strict=True)
        )
        return f"parts alone, ms + ns per pair: {'; '.join(shown)} (fitted to within {100 * self.error:.1f} %)"
