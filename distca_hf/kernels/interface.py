"""The interface of all kernels: arguments, results and room for both; and views of some rows.

A new kernel is a class in a file next to this one, and an entry with its capabilities in `kernels.registry`.

Tensor names end in their shape:
    T = query rows, S = key rows, N = query heads, G = KV heads (N is a multiple of G), H = head dimension, V = value
    dimension

Each layer makes many views of rows, and each costs microseconds. So a view is made only if it leaves something out,
and always by `as_strided`: kernel functions fill the processor's caches, and after one of them, a function of torch
that was used recently takes half the time of another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch

from distca_hf.cost import Mask


# Functions that `kernels.rows` prepares for tensors of one device, dtype, shape and strides.
# Takes sources and targets:
CopyRows = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
# Takes the target, own and returned rows:
AddRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# Takes outputs and log-sum-exps, and the same over other keys:
MergeRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# Shape of one row of a tensor, strides of the tensor, dtype: the same in all layers and batches.
KindOfRows = tuple[torch.Size, tuple[int, ...], torch.dtype]


class AttentionSpec(NamedTuple):
    """How a call attends, apart from its tensors. All fields are numbers: `[*spec]` is the argument of an operator.

    Masks are aligned bottom-right: the last query of a task is at its last key, each query before it one place further
    left. A query at place p among the keys of its task attends to

        causal   window_tokens   keys                          tasks have
        True     0               0 ... p                       at least as many keys as queries
        True     w               p - w + 1 ... p               the same
        False    0               all                           a key
        False    w               p - w + 1 ... the last one    a key; with more queries than keys some p are negative

    so every query attends to a key. Keys before the first one do not count.
    """

    scale: float  # factor of the scores
    causal: bool = True  # whether keys after a query's place are hidden
    # Keys up to and including a query's place that it attends to; 0 if there is no sliding window.
    window_tokens: int = 0
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 leaves them unchanged
    deterministic: bool = False  # gradients are bit-equal from run to run
    # The window is a chunk of a document (`Mask`). Only layers attend so: kernels get tasks that are cut at the
    # beginnings of chunks.
    chunked: bool = False


@lru_cache(maxsize=256)
def spec_of(*numbers: float) -> AttentionSpec:
    """Returns the spec that crossed an operator as these numbers."""
    scale, causal, window_tokens, softcap, deterministic, chunked = numbers
    return AttentionSpec(
        float(scale), bool(causal), int(window_tokens), float(softcap), bool(deterministic), bool(chunked)
    )


@lru_cache(maxsize=256)
def mask_of(spec: AttentionSpec) -> Mask:
    """Returns the mask of a layer that attends like this."""
    return Mask(spec.window_tokens or None, spec.chunked)


@lru_cache(maxsize=256)
def before_queries(spec: AttentionSpec, window_tokens: int = 0) -> AttentionSpec:
    """Returns the spec of calls whose keys all come before their queries. The last query attends to the last
    `window_tokens` keys, and each query before it to one more; 0 for all keys."""
    return spec._replace(causal=False, window_tokens=window_tokens)


@lru_cache(maxsize=256)
def without_window(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec of calls in which no task is longer than the window."""
    return spec._replace(window_tokens=0, chunked=False)


@lru_cache(maxsize=256)
def cut_at_chunks(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec of calls whose tasks are cut at the beginnings of chunks."""
    return without_window(spec) if spec.chunked else spec


@lru_cache(maxsize=256)
def made_deterministic(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec with gradients that are bit-equal from run to run."""
    return spec._replace(deterministic=True)


class CallTensors(NamedTuple):
    """Dtypes of an attention call's queries, keys and values, and their heads with dimensions."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    heads: tuple[torch.Size, torch.Size, torch.Size]

    @property
    def dtypes_in_words(self) -> str:
        """The dtypes as text; only one if all three are the same."""
        return str(self.dtypes[0]) if len(set(self.dtypes)) == 1 else ", ".join(map(str, self.dtypes))

    @property
    def heads_in_words(self) -> str:
        """Number and dimension of heads, as text."""
        return ", ".join(f"{name} {tuple(heads)}" for name, heads in zip("qkv", self.heads, strict=True))


@dataclass(frozen=True, eq=False)
class Spans:
    """Tasks of one varlen call: task i has rows `queries[i]:queries[i + 1]` and key rows `keys[i]:keys[i + 1]`."""

    # `[tasks + 1]` int32 offsets, on the device of the tensors.
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    # Rows of the longest task.
    max_seqlen_q: int
    max_seqlen_k: int

    @cached_property
    def in_order(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """All fields in the order in which varlen functions take them."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    @cached_property
    def by_name(self) -> dict[str, torch.Tensor | int]:
        """All fields by the names that varlen functions have for them."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
        }

    @cached_property
    def offsets(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the fields: one if queries and keys share it."""
        own = self.cu_seqlens_q, self.cu_seqlens_k
        return own[:1] if self.cu_seqlens_q is self.cu_seqlens_k else own

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The numbers among the fields."""
        return self.max_seqlen_q, self.max_seqlen_k

    @cached_property
    def queries(self) -> list[int]:
        """Query offsets on the host, for kernels that loop over tasks; waits for the device."""
        return self.cu_seqlens_q.tolist()

    @cached_property
    def keys(self) -> list[int]:
        """Key offsets on the host."""
        return self.cu_seqlens_k.tolist()


class Inputs(NamedTuple):
    """Tensors that a call attends."""

    q_TNH: torch.Tensor
    k_SGH: torch.Tensor
    v_SGV: torch.Tensor


# Attention output `[T, N, V]` and log-sum-exp `[N, T]`.
Outputs = tuple[torch.Tensor, torch.Tensor]


class Room(NamedTuple):
    """Tensors that the results of a call are written to; None for a new, contiguous tensor."""

    out_TNV: torch.Tensor | None = None
    lse_NT: torch.Tensor | None = None

    def filled(self, out_TNV: torch.Tensor, lse_NT: torch.Tensor) -> Outputs:
        """Returns a kernel's results in this room; copies them unless the kernel wrote them here."""
        return _put(out_TNV, self.out_TNV), _put(lse_NT, self.lse_NT)

    def made(self, inputs: Inputs) -> Outputs:
        """Returns this room, with new tensors for None, for a kernel that writes its results part by part."""
        out, lse = self
        if out is None or lse is None:
            new_out, new_lse = empty_outputs(inputs.q_TNH, inputs.v_SGV)
            out, lse = new_out if out is None else out, new_lse if lse is None else lse
        return out, lse


NEW = Room()


class Saved(NamedTuple):
    """Tensors of forward that backward reads.

    Output and log-sum-exp may include more keys than k and v hold, and sinks. Gradients are then this call's part of
    the whole.
    """

    q_TNH: torch.Tensor
    k_SGH: torch.Tensor
    v_SGV: torch.Tensor
    out_TNV: torch.Tensor
    lse_NT: torch.Tensor


class Gradients(NamedTuple):
    """Room for the gradients of q, k and v, in their own dtypes."""

    dq_TNH: torch.Tensor
    dk_SGH: torch.Tensor
    dv_SGV: torch.Tensor


class Kernel(Protocol):
    """Attention of all tasks of a call."""

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        """Computes attention output and log-sum-exp (natural, of scaled scores; fp32, fp64 for fp64 inputs)."""
        ...

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        """Writes the gradients of q, k and v."""
        ...


def empty_outputs(q_TNH: torch.Tensor, v_SGV: torch.Tensor) -> Outputs:
    """Returns room for the results of `Kernel.forward`: `[T, N, V]` output and `[N, T]` log-sum-exp."""
    rows, heads = q_TNH.shape[:2]
    lse_NT = q_TNH.new_empty((heads, rows), dtype=accumulation_dtype(q_TNH.dtype))
    return q_TNH.new_empty((rows, heads, v_SGV.shape[2])), lse_NT


def empty_layer_outputs(
    q_TNH: torch.Tensor, v_SGV: torch.Tensor, head_by_head: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns room for the results of a layer: `[T, N, V]` output and `[T, N]` log-sum-exp. `head_by_head` makes the
    log-sum-exp `[N, T]` in memory, as kernels write and read it. If rows of it are sent, the heads of a row must
    follow each other instead."""
    rows, heads, _ = q_TNH.shape
    dtype, device = q_TNH.dtype, q_TNH.device
    strides = (1, max(1, rows)) if head_by_head else (heads, 1)
    out_TNV = torch.empty((rows, heads, v_SGV.shape[2]), dtype=dtype, device=device)
    return out_TNV, torch.empty_strided((rows, heads), strides, dtype=accumulation_dtype(dtype), device=device)


def _put(result: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    if target is None:
        return result.contiguous()
    return target if result is target else target.copy_(result)


def empty_gradients(
    dout_TNV: torch.Tensor, q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, *others: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns contiguous room for the gradients of q, k and v; takes all arguments of an operator's backward."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_TNH, k_SGH, v_SGV))
    return dq, dk, dv


def has_fused_kernels(x: torch.Tensor) -> bool:
    """Returns whether our Triton kernels take tensors like this: on GPUs, in dtypes whose sums fp32 holds."""
    return x.is_cuda and x.dtype.itemsize <= 4


@cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns max(fp32, dtype): the dtype of log-sum-exps and sums of gradients."""
    return torch.promote_types(torch.float32, dtype)


def kinds_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[KindOfRows, ...]:
    """Returns the kind of each tensor's rows."""
    return tuple([(x.shape[1:], x.stride(), x.dtype) for x in tensors])


def widths_of_parts(sources: Sequence[KindOfRows], targets: Sequence[KindOfRows]) -> list[int]:
    """Returns the elements of a row of each part that is copied. Raises ValueError if rows of sources and targets
    differ."""
    rows, places = ([shape for shape, *_ in kinds] for kinds in (sources, targets))
    widths, room = ([shape.numel() for shape in shapes] for shapes in (rows, places))
    same = rows == places if len(rows) == len(places) else sum(widths) == sum(room)
    if not same or len({dtype for *_, dtype in (*sources, *targets)}) > 1:
        shapes = (" and ".join(f"{tuple(row)} of {dtype}" for row, _, dtype in kinds) for kinds in (sources, targets))
        raise ValueError(f"cannot copy rows {' to '.join(shapes)}")
    return max(widths, room, key=len)


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, or `x` itself if these are all rows."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else part(x, rows)


def part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, for rows within `x`."""
    strides = x.stride()
    first = x.storage_offset() + rows.start * strides[0]
    return x.as_strided((rows.stop - rows.start, *x.shape[1:]), strides, first)
