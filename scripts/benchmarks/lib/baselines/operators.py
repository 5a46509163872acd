"""Operators of a benchmark step for modes other than the product's: its kernels and plain collectives.

They are built like the product's operator, with an explicit backward, so that activation checkpointing can save their
outputs.

Shape legend in `distca_hf.kernels.interface`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary

import torch

from distca_hf.comm.transport import AllToAll
from distca_hf.config import KernelName
from distca_hf.kernels.interface import (
    AttentionSpec,
    Gradients,
    Inputs,
    Outputs,
    Room,
    Saved,
    Spans,
    accumulation_dtype,
    empty_outputs,
)
from distca_hf.kernels.registry import Operands, choose_kernel
from lib.wires import Wires


@dataclass(frozen=True)
class OwnKeys:
    """Keys and values that a kernel call reads: consecutive rows, read and written in place."""

    rows: slice  # rows of this rank
    # Whether gradients of several calls are summed: totals begin with zero and are kept in max(fp32, dtype).
    adds: bool = False

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys `[S, G, H]` and values `[S, G, V]` of the call, from the rows of this rank (or of all)."""
        return k[self.rows], v[self.rows]

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in which the kernel writes the gradient of keys or values that were taken. `total` is the
        gradient of the rows that they were taken from."""
        return total[self.rows]

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        """Puts that gradient into the total."""


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """Any rows, none twice; other calls may read them, too."""

    rows: torch.Tensor  # int64 `[S]`
    adds: bool = True

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k.index_select(0, self.rows), v.index_select(0, self.rows)

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(taken)

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.index_add_(0, self.rows, gradient.to(total.dtype))


class MadeUpKeys:
    """Random numbers, among which this rank's own `rows` have `places`.

    Only these are copied, and only their gradients are kept: a made-up key is the key of no token. Widths are `(G, H)`
    of keys and `(G, V)` of values, for each kind of layers.
    """

    adds = False

    def __init__(
        self,
        num_rows: int,
        widths: Iterable[tuple[tuple[int, ...], ...]],
        dtype: torch.dtype,
        places: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        self.places, self.rows = places, rows
        self._num_rows, self._widths, self._dtype = num_rows, {*widths}, dtype
        self._made_up: dict[tuple[tuple[int, ...], ...], list[torch.Tensor]] = {}

    @contextmanager
    def made(self) -> Iterator[None]:
        """Makes keys and values up, and lets go of them: other modes need the memory."""
        new = partial(torch.randn, dtype=self._dtype, device=self.rows.device)
        self._made_up = {of: [new((self._num_rows, *width)) for width in of] for of in self._widths}
        yield
        self._made_up = {}

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._made_up[tuple(k.shape[1:]), tuple(v.shape[1:])]
        for store, x in ((key, k), (value, v)):
            store.index_copy_(0, self.places, x.index_select(0, self.rows))
        return key, value

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(taken)

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.index_copy_(0, self.rows, gradient.index_select(0, self.places))


Keys = OwnKeys | ChosenKeys | MadeUpKeys


@dataclass(frozen=True, eq=False)
class Call:
    """A varlen kernel call: consecutive query rows, and the keys they attend."""

    queries: slice  # rows of this rank
    keys: Keys  # which it reads
    spans: Spans  # offsets of its tasks


def make_call(
    first_query: int, query_tokens: Sequence[int], key_tokens: Sequence[int], keys: Keys, device: torch.device
) -> Call:
    """Returns a call of tasks with `[tasks]` query and key tokens; the keys are of all tasks, one after the other."""
    offsets_q, offsets_k = (
        torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=device)
        for tokens in (query_tokens, key_tokens)
    )
    spans = Spans(offsets_q, offsets_k, max(query_tokens), max(key_tokens))
    return Call(slice(first_query, first_query + sum(query_tokens)), keys, spans)


def whole_call(lengths: Sequence[int], device: torch.device) -> Call:
    """Returns the call of whole documents of so many tokens, one after the other."""
    return make_call(0, lengths, lengths, OwnKeys(slice(0, sum(lengths))), device)


class Work:
    """Kernel calls of a micro-batch on this rank, and the wires to the others.

    Operators carry its number, its `handle`, as the product's carry that of a plan: checkpointing passes it on.
    """

    def __init__(self, calls: Sequence[Call], wires: Wires, kernel: KernelName) -> None:
        self.calls, self.wires, self.kernel = tuple(calls), wires, kernel
        self.ranks = wires.world_size
        # Queries of the calls, the first ones of this rank. Outputs and gradients of rows after them are zero.
        self.rows = max((call.queries.stop for call in self.calls), default=0)
        self.handle = next(_handles)
        _works[self.handle] = self


# Operators take numbers, not objects. Whoever made a work keeps it; here it is only found by its number.
_works: WeakValueDictionary[int, Work] = WeakValueDictionary()
_handles = count()


@torch.library.custom_op("bench_step::flash_attn", mutates_args=())
def flash_attn(
    q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, scale: float, window_tokens: int, work: int
) -> Outputs:
    """Returns the attention output `[T, N, V]` and log-sum-exp of all calls; `window_tokens` 0: there is no sliding
    window."""
    spec = AttentionSpec(scale, window_tokens=window_tokens)
    kernel = choose_kernel(_works[work].kernel, Operands.of(q_TNH, k_SGH, v_SGV), spec)
    out, lse = empty_outputs(q_TNH, v_SGV)
    for call in _works[work].calls:
        rows = call.queries
        k, v = call.keys.take(k_SGH, v_SGV)
        kernel.forward(Inputs(q_TNH[rows], k, v), call.spans, spec, Room(out[rows], lse[:, rows]))
    out[_works[work].rows :].zero_()
    return out, lse


@torch.library.custom_op("bench_step::flash_attn_backward", mutates_args=())
def flash_attn_backward(
    dout_TNV: torch.Tensor, saved: Sequence[torch.Tensor], scale: float, window_tokens: int, work: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v, in their shapes; `saved` are these, output and log-sum-exp."""
    q, k, v, out, lse = saved
    spec = AttentionSpec(scale, window_tokens=window_tokens)
    kernel, calls = choose_kernel(_works[work].kernel, Operands.of(q, k, v), spec), _works[work].calls
    dq = torch.empty_like(q)
    adds = any(call.keys.adds for call in calls)
    dk, dv = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) if adds else torch.empty_like(x) for x in (k, v))
    for call in calls:
        rows, keys = call.queries, call.keys
        call_k, call_v = keys.take(k, v)
        call_dk, call_dv = keys.gradient(call_k, dk), keys.gradient(call_v, dv)
        of_rows = Saved(q[rows], call_k, call_v, out[rows], lse[:, rows])
        gradients = Gradients(dq[rows], call_dk, call_dv)
        kernel.backward(dout_TNV[rows], of_rows, gradients, call.spans, spec)
        keys.settle(call_dk, dk)
        keys.settle(call_dv, dv)
    for gradient in (dq, dk, dv) if _works[work].rows < len(q) else ():
        gradient[_works[work].rows :].zero_()
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@torch.library.custom_op("bench_step::tokens_to_heads", mutates_args=())
def tokens_to_heads(x_TND: torch.Tensor, ranks: int, work: int) -> torch.Tensor:
    """Exchanges `[T, N, D]`, all heads of local tokens, for `[ranks * T, N / ranks, D]`, some heads of all tokens."""
    rows, heads, dim = x_TND.shape
    packed = x_TND.new_empty((ranks, rows, heads // ranks, dim))
    packed.copy_(x_TND.view(rows, ranks, heads // ranks, dim).transpose(0, 1))
    counts = [rows] * ranks
    return _works[work].wires.exchange(AllToAll(packed.flatten(0, 1), counts, counts, "tokens to heads")).wait()


@torch.library.custom_op("bench_step::heads_to_tokens", mutates_args=())
def heads_to_tokens(x_TND: torch.Tensor, ranks: int, work: int) -> torch.Tensor:
    """Undoes `tokens_to_heads`: `[ranks * T, N / ranks, D]` in, `[T, N, D]` out."""
    rows, heads, dim = x_TND.shape[0] // ranks, x_TND.shape[1], x_TND.shape[2]
    counts = [rows] * ranks
    received = _works[work].wires.exchange(AllToAll(x_TND, counts, counts, "heads to tokens")).wait()
    unpacked = x_TND.new_empty((rows, ranks, heads, dim))
    unpacked.copy_(received.view(ranks, rows, heads, dim).transpose(0, 1))
    return unpacked.flatten(1, 2)


@torch.library.custom_op("bench_step::gather_tokens", mutates_args=())
def gather_tokens(x_TND: torch.Tensor, ranks: int, work: int) -> torch.Tensor:
    """Returns `[ranks * T, N, D]`: the rows of all ranks, by rank."""
    return _works[work].wires.all_gather(x_TND)


@torch.library.custom_op("bench_step::sum_tokens", mutates_args=())
def sum_tokens(x_TND: torch.Tensor, ranks: int, work: int) -> torch.Tensor:
    """Returns this rank's `[T, N, D]` of `[ranks * T, N, D]`, summed over ranks."""
    return _works[work].wires.reduce_scatter(x_TND)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)  # log-sum-exps are not differentiated
    ctx.save_for_backward(q, k, v, *output)


def _flash_attn_gradients(ctx: Any, dout: torch.Tensor, dlse: None) -> tuple[torch.Tensor | None, ...]:
    return *flash_attn_backward(dout.contiguous(), list(ctx.saved_tensors), *ctx.numbers), None, None, None


def _remember_place(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.place = inputs


flash_attn.register_autograd(_flash_attn_gradients, setup_context=_remember)
for there, back in (
    (tokens_to_heads, heads_to_tokens),
    (heads_to_tokens, tokens_to_heads),
    (gather_tokens, sum_tokens),
):
    there.register_autograd(
        lambda ctx, gradient, back=back: (back(gradient.contiguous(), *ctx.place), None, None),
        setup_context=_remember_place,
    )

# Selective checkpointing saves outputs of attention, in both shapes if there are two.
SAVED_OPERATORS = (torch.ops.bench_step.flash_attn.default, torch.ops.bench_step.heads_to_tokens.default)
