"""Maps: what a routing says in runs, as numbers on the device."""

import random

import pytest
import torch

from distca_hf.planning.legs import Legs
from distca_hf.planning.routing import route
from distca_hf.runtime.maps import HostMaps
from support.layouts import random_layout, random_plan


@pytest.mark.parametrize("seed", range(40))
def test_index_maps_hold_the_numbers_of_their_runs(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice([1, 2])
    plan = random_plan(rng, random_layout(rng, 3), groups)
    for rank in range(3):
        routing = route(plan, rank, legs=Legs.cut(plan, rng.choice([1, 2])))
        maps = HostMaps.prepare(routing).to(torch.device("cpu"))
        runs_of = {
            "send_rows": (routing.send_rows, maps.send_rows),
            "received_to_store": (routing.received_to_store, maps.received_to_store),
            "kept_to_store": (routing.kept_to_store, maps.kept_to_store),
            "own_rows": (routing.own_rows, maps.own_rows),
            "own_to_store": (routing.own_to_store, maps.own_to_store),
            "shared rows": (routing.shared_rows, maps.sums.rows),
        }
        if routing.queries is not None:
            assert maps.queries is not None
            for name in ("send_rows", "received_to_guest", "own_rows", "own_to_guest"):
                runs_of[f"queries.{name}"] = getattr(routing.queries, name), getattr(maps.queries, name)

        assert (routing.queries is None) == (maps.queries is None)
        for name, (runs, index) in runs_of.items():
            assert index.tolist() == runs.numbers.tolist(), name
            assert index.dtype == torch.int64, name
