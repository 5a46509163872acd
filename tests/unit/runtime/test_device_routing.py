"""DeviceRouting: what a routing says in runs, as numbers on the device."""

import random
from itertools import chain, pairwise

import pytest
import torch

from distca_hf.planning.routing import route
from distca_hf.planning.transfers import ExchangeChunks
from distca_hf.runtime.device_routing import PinnedRouting
from support.layouts import random_layout, random_plan


@pytest.mark.parametrize("seed", range(40))
def test_index_maps_hold_the_numbers_of_their_runs(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice([1, 2])
    plan = random_plan(rng, random_layout(rng, 3), groups)
    for rank in range(3):
        routing = route(plan, rank, chunks=ExchangeChunks.cut(plan, rng.choice([1, 2])))
        maps = PinnedRouting.prepare(routing).to(torch.device("cpu"))
        runs_of = {
            "send_rows": (routing.send_rows, maps.send_rows),
            "received_to_remote_kv": (routing.received_to_remote_kv, maps.received_to_remote_kv),
            "kept_to_remote_kv": (routing.kept_to_remote_kv, maps.kept_to_remote_kv),
            "local_rows": (routing.local_rows, maps.local_rows),
            "local_to_remote_kv": (routing.local_to_remote_kv, maps.local_to_remote_kv),
            "shared rows": (routing.shared_rows, maps.sums.rows),
        }
        if routing.queries is not None:
            assert maps.queries is not None
            for name in ("send_rows", "received_to_queries", "local_rows", "local_to_queries"):
                runs_of[f"queries.{name}"] = getattr(routing.queries, name), getattr(maps.queries, name)

        assert (routing.queries is None) == (maps.queries is None)
        for name, (runs, index) in runs_of.items():
            assert index.tolist() == runs.numbers.tolist(), name
            assert index.dtype == torch.int64, name
        calls = routing.local, *routing.prefix_of_chunk, *routing.remote_queries_of_chunk
        on_device = maps.local, *(chunk.prefix for chunk in maps.chunks), *(one.remote_queries for one in maps.chunks)
        for call, made in zip(chain(*calls), chain(*on_device), strict=True):
            # GPU kernels take the longest task's rows on trust: with fewer they would leave out the rest.
            for offsets, spans, longest in (
                (call.cu_seqlens_q, made.spans.cu_seqlens_q, made.spans.max_seqlen_q),
                (call.cu_seqlens_k, made.spans.cu_seqlens_k, made.spans.max_seqlen_k),
            ):
                assert spans.tolist() == offsets.tolist()
                assert spans.data_ptr() % 16 == 0, "FlashAttention 4 copies them in each layer"
                assert longest == max(stop - start for start, stop in pairwise(offsets.tolist()))
