"""Calls of a pass: what every forward pass of a model has alike, so that ranks know each other's exchanges.

A window decides which rows of a layer travel, dtypes and heads how many bytes a row has.
"""

from typing import NamedTuple

import torch

from distca_hf.errors import PlanError


class CallTensors(NamedTuple):
    """Dtypes of an attention call's queries, keys and values, and their heads with dimensions."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    heads: tuple[torch.Size, torch.Size, torch.Size]

    @classmethod
    def of(cls, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> "CallTensors":
        """Returns those of a call with these tensors."""
        return cls((q_TNH.dtype, k_TGH.dtype, v_TGV.dtype), (q_TNH.shape[1:], k_TGH.shape[1:], v_TGV.shape[1:]))

    @property
    def dtypes_in_words(self) -> str:
        """One dtype if all three are the same."""
        return str(self.dtypes[0]) if len(set(self.dtypes)) == 1 else ", ".join(map(str, self.dtypes))

    @property
    def heads_in_words(self) -> str:
        """Number and dimension of heads."""
        return ", ".join(f"{name} {tuple(heads)}" for name, heads in zip("qkv", self.heads, strict=True))


class PassCalls(NamedTuple):
    """Attention calls of a forward pass, recomputed ones left out.

    Attributes:
        windows: tokens of the sliding window of each call, 0 without one.
        tensors: of each call.
    """

    windows: list[int]
    tensors: list[CallTensors]


def other_window(now_tokens: int, before_tokens: int, where: str) -> PlanError:
    """Returns the error to raise for a call with another window than in the pass before.

    Args:
        where: rank and call.
    """
    windows = now_tokens, before_tokens
    now, before = (f"a sliding window of {one} tokens" if one else "no window" for one in windows)
    return PlanError(
        f"{where}: the layer attends with {now}, and with {before} in the pass before; other ranks exchange rows for "
        "that. Windows of layers cannot change after the first pass: enable the model again, on all ranks"
    )


def other_tensors(now: CallTensors, before: CallTensors, where: str) -> PlanError:
    """Returns the error to raise for a call with other dtypes or heads than in the pass before.

    Args:
        where: rank and call.
    """
    if now.dtypes != before.dtypes:
        words = f"in {now.dtypes_in_words}, and in {before.dtypes_in_words}"
    else:
        words = f"with heads {now.heads_in_words}, and with {before.heads_in_words}"
    return PlanError(
        f"{where}: the layer attends {words} in the pass before; other ranks exchange rows for that, and none of this "
        "layer were sent. Dtypes and heads of layers cannot change after the first pass: compute the layer as before, "
        "or enable the model again, on all ranks"
    )
