"""Batches for a pipeline: whole steps, equal rows, documents that keep their step, positions that are resumed."""

import json
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import distca_hf
from distca_hf import ConfigError, PackingError, Pipeline
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.grid import Grid
from distca_hf.config import DistCAConfig
from support.data import random_dataset


DATASET = random_dataset(200)
TOKENS = 200


TWO_STAGES = Pipeline(2)


def loader_of(
    pipeline: Pipeline | None = TWO_STAGES, micro_steps: int = 4, tokens: int = TOKENS, **more: Any
) -> PlacedLoader:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens)
    return plugin.dataloader(DATASET, seed=3, device="cpu", micro_steps=micro_steps, pipeline=pipeline, **more)


def saved(loader: PlacedLoader) -> dict[str, Any]:
    """The state as it comes back from a file."""
    return json.loads(json.dumps(loader.state_dict()))


def tokens_of(batch: Mapping[str, torch.Tensor]) -> list[int]:
    return batch["input_ids"][batch["attention_mask"] == 1].tolist()


@pytest.mark.parametrize("pipeline", [Pipeline(2), Pipeline(4), Pipeline(2, 3)], ids=str)
def test_an_epoch_has_whole_steps_of_equal_rows_and_every_document_once(pipeline: Pipeline) -> None:
    loader = loader_of(pipeline)
    batches = list(loader)

    assert len(batches) == len(loader)
    assert len(batches) % 4 == 0
    assert {batch["input_ids"].shape for batch in batches} == {(1, TOKENS)}
    expected = Counter(token for row in DATASET["input_ids"] for token in row)
    assert sum((Counter(tokens_of(batch)) for batch in batches), Counter()) == expected
    assert all((batch["attention_mask"] == 1).any() for batch in batches)


@pytest.mark.parametrize("taken", [1, 3, 4])
@pytest.mark.parametrize("pipeline", [Pipeline(2), Pipeline(2, 2)], ids=str)
def test_a_position_in_the_midst_of_a_step_goes_on_bit_equal(pipeline: Pipeline, taken: int) -> None:
    whole = list(loader_of(pipeline))
    first, second = loader_of(pipeline), loader_of(pipeline)
    list(islice(first, taken))
    second.load_state_dict(saved(first))
    rest = list(second)

    assert len(rest) == len(whole) - taken
    for batch, expected in zip(rest, whole[taken:], strict=True):
        assert torch.equal(batch["input_ids"], expected["input_ids"])
        assert torch.equal(batch["shift_labels"], expected["shift_labels"])
        assert torch.equal(batch["position_ids"], expected["position_ids"])


@pytest.mark.parametrize(
    ("taken", "other"),
    [
        (4, (Pipeline(2, 2),)),
        (4, (Pipeline(2), 6)),
        (4, (Pipeline(2), 4, 300)),
        (4, (None,)),
        (6, (Pipeline(2, 2),)),
    ],
    ids=str,
)
def test_a_position_of_another_pipeline_is_refused(taken: int, other: tuple[Any, ...]) -> None:
    first = loader_of()
    list(islice(first, taken))

    with pytest.raises(
        ConfigError, match=r"in the middle of an epoch of a pipeline.*'pipeline': \(2, 1\)}; .*end of an epoch"
    ):
        loader_of(*other).load_state_dict(saved(first))


def test_a_position_without_a_pipeline_is_refused_by_one() -> None:
    first = loader_of(None)
    list(islice(first, 4))
    with pytest.raises(ConfigError, match=r"in the middle.*'pipeline': \(\)}; this loader.*'pipeline': \(2, 1\)"):
        loader_of().load_state_dict(saved(first))


def test_at_the_end_of_an_epoch_another_pipeline_goes_on() -> None:
    first, second = loader_of(), loader_of(Pipeline(2, 3), 6)
    list(first)
    second.load_state_dict(saved(first))
    expected = Counter(token for row in DATASET["input_ids"] for token in row)

    assert sum((Counter(tokens_of(batch)) for batch in second), Counter()) == expected


def test_all_ranks_of_a_stage_have_as_many_rows() -> None:
    lengths = np.array([900, 100, 30, 20, 400, 10])
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=1000), 4, step_shape=Pipeline(2))

    assert planner.layout(lengths).rank_rows.tolist() == [1000] * 4
    assert PlacedPlanner(DistCAConfig(tokens_per_rank=1000), 4).layout(lengths).rank_rows.tolist() == [384] * 4


def test_a_model_says_its_layers_and_costs() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **sizes))
    planner = loader_of(Pipeline(3), 6, model=model).preparer.planner

    # Queries, keys, values, outputs and three matrices of an MLP, without embedding and head; two heads of eight.
    weights, pair = 3 * (4 * 16 * 16 + 3 * 16 * 32), 3 * 2 * (8 + 8) * 2
    forward, backward = planner.costs.forward, planner.costs.backward
    assert backward.token_seconds == pytest.approx(3 * forward.token_seconds)  # with the forward pass again
    assert forward.token_seconds * 518e12 == pytest.approx(2 * weights)
    assert forward.pair_seconds * 650e12 == pytest.approx(pair)
    with pytest.raises(ConfigError, match="4 stages of 1 chunk are 4 parts of a model with 3 layers"):
        loader_of(Pipeline(4), 4, model=model)


@pytest.mark.parametrize(
    ("pipeline", "micro_steps", "words"),
    [
        (Pipeline(2), 1, "1 micro-batches per optimizer step do not fill a pipeline of 2 stages"),
        (Pipeline(4, 2), 6, "6 micro-batches per optimizer step are not a multiple of 4 stages"),
    ],
)
def test_steps_that_a_pipeline_cannot_run(pipeline: Pipeline, micro_steps: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loader_of(pipeline, micro_steps)


def test_another_number_of_stages_than_the_mesh_has() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS)
    plugin.use_grid(Grid(ranks=(0, 1), shape=(2, 1, 1), rank=0))

    with pytest.raises(ConfigError, match=r"the mesh has 2 stages x 1 data ranks.*has 4 stages; give both the same"):
        plugin.dataloader(DATASET, device="cpu", micro_steps=4, pipeline=Pipeline(4))


def test_a_document_longer_than_a_micro_batch_of_a_stage() -> None:
    longest = max(len(row) for row in DATASET["input_ids"])
    with pytest.raises(PackingError, match=f"{longest} tokens"):
        loader_of(tokens=longest - 1)
