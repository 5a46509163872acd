"""Resumed loaders: the next batches are those of the loader that went on; every token comes once in other sizes."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.errors import ConfigError
from distca_hf.testing import LoopbackTransport, run_ranks
from support.data import random_dataset


NEXT = 8
COLUMNS = ("input_ids", "position_ids", "labels", "shift_labels")


def _loader(transport: LoopbackTransport, micro_steps: int) -> PlacedLoader:
    planner = PlacedPlanner(distca_hf.DistCAPlugin(tokens_per_rank=96), transport.world_size)
    device = torch.device("cpu")
    return PlacedLoader(random_dataset(60), planner, transport, device, seed=5, micro_steps=micro_steps)


def _stream(loader: PlacedLoader) -> Any:
    while True:
        yield from loader


def _next(batches: Any) -> list[tuple[list[torch.Tensor], int]]:
    """Tensors and plans of the next batches."""
    return [([batch[name] for name in COLUMNS], batch["distca_plan"].fingerprint) for batch in islice(batches, NEXT)]


@pytest.mark.parametrize(
    ("micro_steps", "epochs", "further"),
    [
        *((1, *begun) for begun in [(0, 0), (0, 1), (0, 3), (1, -2), (1, -1), (1, 0), (1, 1), (2, -1)]),
        *((4, *begun) for begun in [(0, 2), (0, 3), (0, 4), (0, 6)]),
    ],
)
def test_next_batches_after_a_resume_are_bit_equal(micro_steps: int, epochs: int, further: int) -> None:
    """In the midst of an epoch, at its last batch, and at the first one of the next; in the midst of a step."""

    def body(transport: LoopbackTransport) -> tuple[int, int]:
        going_on = _loader(transport, micro_steps)
        begun = epochs * len(going_on) + further
        batches = _stream(going_on)
        for _ in islice(batches, begun):
            pass
        saved = json.loads(json.dumps(going_on.state_dict()))  # as a checkpoint keeps it
        expected = _next(batches)

        resumed = _loader(transport, micro_steps)
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


DATASET = random_dataset(60)


def loader_of(tokens: int, **arguments: Any) -> PlacedLoader:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens, pad_to_multiple_of=1)
    return plugin.dataloader(DATASET, seed=3, device="cpu", **arguments)


def tokens_of(batches: Any) -> Counter[int]:
    return Counter(token for batch in batches for token in batch["input_ids"][0].tolist())


def saved(loader: PlacedLoader) -> dict[str, Any]:
    """The state as it comes back from a file."""
    return json.loads(json.dumps(loader.state_dict()))


WHOLE = Counter(token for row in DATASET["input_ids"] for token in row)


@pytest.mark.parametrize("sizes", [(400, 200), (200, 400), (200, 400, 160), (160, 160, 400, 200)])
def test_every_token_of_the_epoch_is_seen_once(sizes: tuple[int, ...]) -> None:
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    for size in sizes[:-1]:
        loader = loader_of(size)
        if state is not None:
            loader.load_state_dict(state)
        seen += tokens_of(islice(iter(loader), 3))
        state = saved(loader)
    last = loader_of(sizes[-1])
    last.load_state_dict(state)
    seen += tokens_of(last)

    assert seen == WHOLE
    assert tokens_of(last) == WHOLE, "the next epoch is whole again"


def test_documents_that_were_split_otherwise_are_refused() -> None:
    def split(tokens: int) -> PlacedLoader:
        return distca_hf.DistCAPlugin(tokens_per_rank=tokens, overlong="split").dataloader(DATASET, device="cpu")

    loader = split(100)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"dataset='\w+', this loader has '\w+'; .*overlong"):
        split(200).load_state_dict(saved(loader))
