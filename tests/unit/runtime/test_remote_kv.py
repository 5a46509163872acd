"""The store: keys of prefixes in order, and gradients of rows that several calls read."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from distca_hf.comm.transport import AllToAll, Arrived, LocalTransport
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.layout import Layout
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.routing import Routing, route
from distca_hf.planning.transfers import ExchangeChunks
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting, PinnedRouting
from distca_hf.runtime.kernel_calls import keys_of
from distca_hf.runtime.remote_kv import KVDispatch, PreparedKV, RemoteKV, RemoteKVGradients, side_by_side
from distca_hf.testing import run_ranks
from support.layouts import SCATTERED, SHARED, THRICE
from support.parity import Case, compare


KV_HEADS, DIM, VALUE_DIM = 2, 8, 4
ALL = slice(None)


def routing_of(layout: Layout, rank: int, num_chunks: int = 1) -> Routing:
    plan = plan_in_place(layout)
    return route(plan, rank, chunks=ExchangeChunks.cut(plan, num_chunks))


def maps_of(layout: Layout, rank: int, num_chunks: int = 1) -> DeviceRouting:
    return PinnedRouting.prepare(routing_of(layout, rank, num_chunks)).to(torch.device("cpu"))


def keys(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, KV_HEADS, dim) for dim in (DIM, VALUE_DIM))
    k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return k, v


# --- keys


def test_rows_that_have_left_are_let_go() -> None:
    """Kernels that read the received rows run then: sent rows would take memory beside them."""
    sent: list[weakref.ref[torch.Tensor]] = []

    class Silent(LocalTransport):
        def exchange(self, asked: AllToAll) -> Arrived:
            whole = asked.rows if asked.rows._base is None else asked.rows._base
            sent.append(weakref.ref(whole))
            return Arrived(asked.room())

    maps, (k, v) = maps_of(SHARED, 0, 2), keys(7)
    rows = PreparedKV(k, v, maps)
    dispatch = KVDispatch(k, v, rows, sends=True)
    for chunk in maps.chunks:
        dispatch.start(chunk, Silent(), "here")
    assert [one() is None for one in sent] == [False, False]
    store = RemoteKV.open(k, v, dispatch.received, rows)
    for chunk in maps.chunks:
        dispatch.receive(chunk, store)
    assert [one() is None for one in sent] == [True, True]


# --- gradients


def parts_of(maps: DeviceRouting, dtype: torch.dtype) -> Iterator[tuple[DeviceCall, torch.Tensor, torch.Tensor]]:
    """Something that each call on remote keys could contribute."""
    generator = torch.Generator().manual_seed(1)
    for call in [call for chunk in maps.chunks for call in chunk.prefix]:
        rows = call.keys.stop - call.keys.start
        yield (
            call,
            *(torch.randn(rows, KV_HEADS, dim, generator=generator).to(dtype) for dim in (DIM, VALUE_DIM)),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("layout", "reads"),
    [(SCATTERED, [2] * 2 + [1] * 8), (THRICE, [3] * 2 + [2] * 4 + [1] * 4)],
    ids=["two calls", "three calls"],
)
def test_gradients_of_rows_that_several_calls_read_are_summed_and_rounded_once(
    layout: Layout, reads: list[int], dtype: torch.dtype
) -> None:
    maps, (k, v) = maps_of(layout, 0), keys(6, dtype)
    gradients = RemoteKVGradients(k, v, PreparedKV(k, v, maps))
    precise = accumulation_dtype(dtype)
    expected = [torch.zeros(maps.remote_kv_rows, KV_HEADS, dim, dtype=precise) for dim in (DIM, VALUE_DIM)]
    counted = torch.zeros(maps.remote_kv_rows)
    for call, *parts in parts_of(maps, dtype):
        counted[call.keys] += 1
        totals = keys_of(call, 1, gradients.total.k, gradients.total.v)
        targets = [gradients.target(call, total) for total in totals]
        for target, part, total, sum_of in zip(targets, parts, totals, expected, strict=True):
            assert target.dtype == dtype
            target.copy_(part)
            gradients.settle(call, target, total)
            sum_of[call.keys] += part.to(precise)
    gradients.complete()

    assert counted.tolist() == reads
    for total, sum_of in zip((gradients.total.k, gradients.total.v), expected, strict=True):
        assert total.dtype == (precise if max(reads) > 2 else dtype)
        assert torch.equal(total, sum_of.to(total.dtype))
    came = maps.received_to_remote_kv
    for rows in (slice(0, len(came)), slice(2, 5)):
        travelling = gradients.rows_to_send(rows)
        assert travelling.dtype == dtype
        assert torch.equal(travelling, side_by_side(*(x[came[rows]].to(dtype) for x in expected), ALL))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", [SCATTERED, SHARED, THRICE], ids=["scattered", "shared", "thrice"])
def test_attention_is_exact_where_calls_read_the_same_keys(layout: Layout, seed: int) -> None:
    case = Case.draw(seed, layout)

    for difference in run_ranks(2, lambda transport: compare(case, transport)):
        assert difference.largest <= 1e-12
        assert difference.as_planned
