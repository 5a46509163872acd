"""The one shape all kernels have, and what each of them can do.

Tensor names end in their shape:
    T = query rows, S = key rows, N = query heads, G = KV heads (N is a multiple of G), H = head dimension, V = value
    dimension
"""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch


class AttentionSpec(NamedTuple):
    """How a call attends, beside its tensors. All fields are numbers: `[*spec]` is the argument of an operator.

    Causal masks are aligned bottom-right: the last query attends to all keys of its task, and each query before it to
    one key less. No task has more queries than keys then.

    Attributes:
        scale: factor of the scores.
        causal: without it every query attends to all keys of its task, of which there is at least one.
        window_tokens: keys that a query attends to, its own among them; 0 if there is no sliding window.
        softcap: scores become softcap * tanh(score / softcap); 0 if they stay.
        deterministic: gradients are bit-equal from run to run.
    """

    scale: float
    causal: bool = True
    window_tokens: int = 0
    softcap: float = 0.0
    deterministic: bool = False


@lru_cache(maxsize=256)
def spec_of(*numbers: float) -> AttentionSpec:
    """Returns the spec that crossed an operator as these numbers."""
    scale, causal, window_tokens, softcap, deterministic = numbers
    return AttentionSpec(float(scale), bool(causal), int(window_tokens), float(softcap), bool(deterministic))


@lru_cache(maxsize=256)
def without_mask(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec of calls whose queries attend to all keys of their tasks."""
    return spec._replace(causal=False)


@lru_cache(maxsize=256)
def made_deterministic(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec with gradients that are bit-equal from run to run."""
    return spec._replace(deterministic=True)


@dataclass(frozen=True, eq=False)
class Spans:
    """Tasks of one varlen call: task i has query rows `queries[i]:queries[i + 1]` and key rows `keys[i]:keys[i + 1]`.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: `[tasks + 1]` int32 offsets, on the device of the tensors.
        max_seqlen_q, max_seqlen_k: rows of the longest task.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @cached_property
    def queries(self) -> list[int]:
        """Query offsets on the host, for kernels that loop over tasks; waits for the device."""
        return self.cu_seqlens_q.tolist()

    @cached_property
    def keys(self) -> list[int]:
        """Key offsets on the host."""
        return self.cu_seqlens_k.tolist()


class Kernel(Protocol):
    """Attention of all tasks of a call."""

    def forward(
        self,
        q_TNH: torch.Tensor,
        k_SGH: torch.Tensor,
        v_SGV: torch.Tensor,
        spans: Spans,
        spec: AttentionSpec,
        out_TNV: torch.Tensor | None = None,
        lse_NT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention output and log-sum-exp (natural, of scaled scores; fp32, fp64 for fp64 inputs), in the caller's
        tensors where these are given, otherwise in contiguous ones."""
        ...

    def backward(
        self,
        dout_TNV: torch.Tensor,
        q_TNH: torch.Tensor,
        k_SGH: torch.Tensor,
        v_SGV: torch.Tensor,
        out_TNV: torch.Tensor,
        lse_NT: torch.Tensor,
        spans: Spans,
        spec: AttentionSpec,
        dq_TNH: torch.Tensor,
        dk_SGH: torch.Tensor,
        dv_SGV: torch.Tensor,
    ) -> None:
        """Writes the gradients of q, k and v, in their own dtypes."""
        ...


# Options of attention that a kernel need not have: fields of `AttentionSpec`, and sinks.
OPTIONS = ("window_tokens", "softcap", "sinks")


@dataclass(frozen=True)
class Capabilities:
    """Limits of a kernel; `refusal` says why it cannot do a given job.

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

    def refusal(self, job: "Job", spec: AttentionSpec) -> str | None:
        """Returns why the kernel cannot do `job` as `spec` says, or None if it can."""
        if self.device_type not in (None, job.device_type):
            return f"runs on {self.device_type}, tensors are on {job.device_type}"
        if self.compute_capability is not None and job.compute_capability not in self.compute_capability:
            return f"needs compute capability {self.compute_capability}, the GPU has {job.compute_capability}"
        if job.dtype not in self.dtypes:
            return f"computes {', '.join(str(dtype) for dtype in self.dtypes)}, tensors are {job.dtype}"
        largest = max(job.head_dim, job.value_dim)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            return f"has head dimensions up to {self.max_head_dim}, the model has {largest}"
        if job.head_dim % self.head_dim_multiple or job.value_dim % self.head_dim_multiple:
            dims = f"{job.head_dim} and {job.value_dim}"
            return f"needs head dimensions that are multiples of {self.head_dim_multiple}, the model has {dims}"
        if self.equal_dims and job.head_dim != job.value_dim:
            return f"needs equal key and value dimensions, the model has {job.head_dim} and {job.value_dim}"
        asked = {"window_tokens": spec.window_tokens, "softcap": spec.softcap, "sinks": job.sinks}
        for option in OPTIONS:
            if asked[option] and option not in self.options:
                return f"does not compute {option}={asked[option]}"
        return None


@dataclass(frozen=True)
class Job:
    """Tensors that a kernel is to attend with.

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
    ) -> "Job":
        """Returns the job that these tensors pose."""
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


def empty_outputs(q_TNH: torch.Tensor, v_SGV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Kernel.forward` returns: `[T, N, V]` output and `[N, T]` log-sum-exp."""
    rows, heads = q_TNH.shape[:2]
    lse_NT = q_TNH.new_empty((heads, rows), dtype=accumulation_dtype(q_TNH.dtype))
    return q_TNH.new_empty((rows, heads, v_SGV.shape[2])), lse_NT


def outputs(
    q_TNH: torch.Tensor, v_SGV: torch.Tensor, out_TNV: torch.Tensor | None, lse_NT: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel that writes its results part by part writes to: the caller's tensors, or new ones."""
    if out_TNV is not None and lse_NT is not None:
        return out_TNV, lse_NT
    new_out, new_lse = empty_outputs(q_TNH, v_SGV)
    return new_out if out_TNV is None else out_TNV, new_lse if lse_NT is None else lse_NT


def put(result: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """A kernel's result in the caller's tensor, or contiguous if there is none."""
    return result.contiguous() if target is None else target.copy_(result)


def empty_gradients(
    dout_TNV: torch.Tensor, q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `Kernel.backward` writes: contiguous gradients, whatever else an operator takes."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_TNH, k_SGH, v_SGV))
    return dq, dk, dv


def has_fused_kernels(x: torch.Tensor) -> bool:
    """Whether kernels of ours, in Triton, which comes with torch for GPUs, compute for such tensors; they sum in
    fp32."""
    return x.is_cuda and x.dtype.itemsize <= 4


@cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """max(fp32, dtype): what log-sum-exps and gradient sums are kept in."""
    return torch.promote_types(torch.float32, dtype)
