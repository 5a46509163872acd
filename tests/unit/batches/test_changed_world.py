"""A run that goes on with micro-batches of another size than it began with."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.errors import ConfigError
from support.data import random_dataset


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


def test_position_at_the_beginning_of_an_epoch_is_that_of_any_size() -> None:
    first, second = loader_of(400), loader_of(200)
    list(first)
    second.load_state_dict(saved(first))
    expected = loader_of(200)
    expected.set_epoch(1)

    assert [batch["input_ids"].tolist() for batch in second] == [batch["input_ids"].tolist() for batch in expected]


def test_documents_that_were_split_otherwise_are_refused() -> None:
    def split(tokens: int) -> PlacedLoader:
        return distca_hf.DistCAPlugin(tokens_per_rank=tokens, overlong="split").dataloader(DATASET, device="cpu")

    loader = split(100)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"dataset='\w+', this loader has '\w+'; .*overlong"):
        split(200).load_state_dict(saved(loader))
