"""After a resume the next eight batches are those of the loader that went on, bit for bit."""

import json
from itertools import islice
from typing import Any

import pytest
import torch

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.testing import LoopbackTransport, run_ranks
from support.data import random_dataset


NEXT = 8
COLUMNS = ("input_ids", "position_ids", "labels", "shift_labels")


def _loader(transport: LoopbackTransport) -> PlacedLoader:
    config = distca_hf.DistCAPlugin(tokens_per_rank=96)
    return PlacedLoader(
        random_dataset(60), PlacedPlanner(config, transport.world_size), transport, torch.device("cpu"), seed=5
    )


def _stream(loader: PlacedLoader) -> Any:
    while True:
        yield from loader


def _next(batches: Any) -> list[tuple[list[torch.Tensor], int]]:
    """Tensors and plans of the next batches."""
    return [([batch[name] for name in COLUMNS], batch["distca_plan"].fingerprint) for batch in islice(batches, NEXT)]


@pytest.mark.parametrize("taken", [0, 1, 3, -2, -1], ids=lambda taken: f"taken {taken}")
def test_next_batches_after_a_resume_are_bit_equal(taken: int) -> None:
    def body(transport: LoopbackTransport) -> tuple[int, int]:
        going_on = _loader(transport)
        begun = taken if taken >= 0 else len(going_on) + taken  # the latter go into the next epoch
        batches = _stream(going_on)
        for _ in islice(batches, begun):
            pass
        saved = json.loads(json.dumps(going_on.state_dict()))  # as a checkpoint keeps it
        expected = _next(batches)

        resumed = _loader(transport)
        resumed.load_state_dict(saved)
        got = _next(_stream(resumed))
        assert len(got) == len(expected) == NEXT
        for (tensors, fingerprint), (same, same_fingerprint) in zip(expected, got, strict=True):
            assert fingerprint == same_fingerprint
            for left, right in zip(tensors, same, strict=True):
                assert left.dtype == right.dtype
                assert torch.equal(left, right)
        return len(going_on), len({tuple(tensors[0].flatten().tolist()) for tensors, _ in expected})

    for micro_batches, different in run_ranks(2, body):
        assert NEXT < micro_batches + 2
        assert different == NEXT, "these batches must differ from each other"
