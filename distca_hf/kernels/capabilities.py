"""Capabilities: the limits of a kernel, and the kind of tensors that a call has.

Shape legend in `kernels.interface`.
"""

from dataclasses import dataclass

import torch

from distca_hf.kernels.interface import AttentionSpec


# Options of attention that a kernel need not have: fields of `AttentionSpec`, and sinks.
OPTIONS = ("window_tokens", "softcap", "sinks")


@dataclass(frozen=True)
class Capabilities:
    """Limits of a kernel; `refusal` says why it cannot compute for given tensors.

    Attributes:
        device_type: "cpu", "cuda", or None for any.
        dtypes: input dtypes.
        max_head_dim, head_dim_multiple: limits of both head dimensions (None: no limit).
        equal_dims: value and key dimension must be the same.
        compute_capability: GPU generations (major version), None for any.
        options: names of the `OPTIONS` that are computed.
    """

    device_type: str | None
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    equal_dims: bool = False
    compute_capability: tuple[int, ...] | None = None
    options: frozenset[str] = frozenset()

    def refusal(self, operands: "Operands", spec: AttentionSpec) -> str | None:
        """Returns why the kernel cannot attend with these operands as `spec` says, or None if it can."""
        if self.device_type not in (None, operands.device_type):
            return f"runs on {self.device_type}, tensors are on {operands.device_type}"
        if self.compute_capability is not None and operands.compute_capability not in self.compute_capability:
            return f"needs compute capability {self.compute_capability}, the GPU has {operands.compute_capability}"
        if operands.dtype not in self.dtypes:
            return f"computes {', '.join(str(dtype) for dtype in self.dtypes)}, tensors are {operands.dtype}"
        largest = max(operands.head_dim, operands.value_dim)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            return f"has head dimensions up to {self.max_head_dim}, the model has {largest}"
        if operands.head_dim % self.head_dim_multiple or operands.value_dim % self.head_dim_multiple:
            dims = f"{operands.head_dim} and {operands.value_dim}"
            return f"needs head dimensions that are multiples of {self.head_dim_multiple}, the model has {dims}"
        if self.equal_dims and operands.head_dim != operands.value_dim:
            return f"needs equal key and value dimensions, the model has {operands.head_dim} and {operands.value_dim}"
        asked = {"window_tokens": spec.window_tokens, "softcap": spec.softcap, "sinks": operands.sinks}
        for option in OPTIONS:
            if asked[option] and option not in self.options:
                return f"does not compute {option}={asked[option]}"
        return None


@dataclass(frozen=True)
class Operands:
    """Queries, keys and values of a call, as far as the choice of a kernel depends on them.

    Attributes:
        sinks: whether every query head has a sink, a score without a key.
    """

    device_type: str
    compute_capability: int | None
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sinks: bool = False

    @classmethod
    def of(
        cls,
        q_TNH: torch.Tensor,
        k_SGH: torch.Tensor,
        v_SGV: torch.Tensor,
        sinks_N: torch.Tensor | None = None,
    ) -> "Operands":
        """Returns the operands of a call on these tensors."""
        capability = torch.cuda.get_device_capability(q_TNH.device)[0] if q_TNH.is_cuda else None
        return cls(
            device_type=q_TNH.device.type,
            compute_capability=capability,
            dtype=q_TNH.dtype,
            num_heads=q_TNH.shape[1],
            num_kv_heads=k_SGH.shape[1],
            head_dim=q_TNH.shape[2],
            value_dim=v_SGV.shape[2],
            sinks=sinks_N is not None,
        )
