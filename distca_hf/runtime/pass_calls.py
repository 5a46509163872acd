"""Pass calls: what ranks expect of each other in a forward pass, given the previous one."""

from typing import NamedTuple

import torch

from distca_hf.cost import Mask


class CallTensors(NamedTuple):
    """Dtypes of an attention call's queries, keys and values, and their heads with dimensions."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    heads: tuple[torch.Size, torch.Size, torch.Size]

    @classmethod
    def of(cls, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> "CallTensors":
        return cls((q_TNH.dtype, k_TGH.dtype, v_TGV.dtype), (q_TNH.shape[1:], k_TGH.shape[1:], v_TGV.shape[1:]))

    @property
    def dtypes_in_words(self) -> str:
        """The dtypes as text; only one if all three are the same."""
        return str(self.dtypes[0]) if len(set(self.dtypes)) == 1 else ", ".join(map(str, self.dtypes))

    @property
    def heads_in_words(self) -> str:
        """Number and dimension of heads, as text."""
        return ", ".join(f"{name} {tuple(heads)}" for name, heads in zip("qkv", self.heads, strict=True))


class PassCalls(NamedTuple):
    """Attention calls of a forward pass, and exchanges of layers with a state, without recomputed ones."""

    masks: list[Mask]
    tensors: list[CallTensors]
    # Layer, dtype and shape of each exchange, and attention calls between them. A pass without cut documents keeps the
    # previous pass's.
    states: list[str]
