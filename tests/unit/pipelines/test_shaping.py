"""Steps shaped for a pipeline: every document once, work in the shares that were asked for, and less waiting."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.data.epochs import EpochPacker
from distca_hf.errors import PackingError
from distca_hf.flops import LLAMA_8B_COSTS
from distca_hf.pipelines.pipeline import (
    Pipeline,
    divide,
    shape_step,
    simulate,
    work_of_documents,
)
from distca_hf.pipelines.schedules import Schedule
from distca_hf.placement.whole import fit_whole


PRETRAIN = Path(__file__).parents[3] / "examples" / "lengths" / "pretrain.json.gz"


def mix(seed: int, tokens: int, longest: int) -> IntArray:
    """Mostly short documents, and a few per cent that are long."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while tokens > 0:
        median = 30_000 if rng.random() < 0.03 else 1_500
        lengths.append(min(tokens, longest, max(1, int(rng.lognormvariate(np.log(median), 0.8)))))
        tokens -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def packed(lengths: IntArray, capacity: int, micro_batches: int) -> tuple[IntArray, list[IntArray]]:
    """The first step of an epoch: its lengths, and its micro-batches as indices."""
    epoch = EpochPacker(lengths, capacity, multiple=micro_batches).epoch(0)
    offsets = epoch.offsets[: micro_batches + 1]
    groups = np.split(np.arange(offsets[-1]), offsets[1:-1])
    return lengths[epoch.documents[: offsets[-1]]], groups


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    micro_batches=st.integers(2, 9),
    fill=st.sampled_from([0.3, 0.9, 0.99]),
    light=st.integers(0, 4),
    longest=st.sampled_from([3_000, 60_000, 131_072]),
)
def test_every_document_is_in_one_micro_batch_that_holds_it(
    seed: int, micro_batches: int, fill: float, light: int, longest: int
) -> None:
    capacity = 131_072
    lengths = mix(seed, int(fill * micro_batches * capacity), longest)
    shares = [0.0] * min(light, micro_batches - 1) + [1.0] * (micro_batches - min(light, micro_batches - 1))
    groups = divide(lengths, work_of_documents(lengths), shares, capacity)

    if groups is None:  # whole documents need not fit
        assert fill == 0.99 or longest > capacity // 2
        return
    assert len(groups) == micro_batches
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert all(lengths[group].sum() <= capacity for group in groups)


def test_a_full_step_finds_room_by_exchanging_documents() -> None:
    """A step of real documents with 31 tokens of room in eight micro-batches; dealing leaves over one of 39 tokens."""
    capacity = 8 * 32_768
    lengths = np.array(json.loads(gzip.decompress(PRETRAIN.read_bytes())))
    epoch = EpochPacker(lengths, capacity).epoch(0)
    steps = (epoch.documents[epoch.offsets[at] : epoch.offsets[at + 8]] for at in range(0, 32, 8))
    fullest = max((lengths[documents] for documents in steps), key=lambda tokens: int(tokens.sum()))
    groups = divide(fullest, work_of_documents(fullest), [1.0] * 8, capacity)

    assert 8 * capacity - fullest.sum() == 31
    assert groups is not None
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(fullest)))
    assert all(fullest[group].sum() <= capacity for group in groups)


def test_no_room_is_no_division() -> None:
    lengths = np.array([60, 60, 60])
    assert divide(lengths, work_of_documents(lengths), [1.0, 1.0], 100) is None


@pytest.mark.parametrize("pipeline", [Pipeline(2), Pipeline(4), Pipeline(4, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_a_shaped_step_never_takes_longer_than_as_packed(pipeline: Pipeline, seed: int) -> None:
    ranks, tokens, micro_batches = 8, 32_768, 8
    lengths, as_packed = packed(mix(seed, 3 * micro_batches * ranks * tokens, 250_000), ranks * tokens, micro_batches)
    work, schedule = work_of_documents(lengths), Schedule(pipeline, micro_batches)
    groups = shape_step(lengths, work, as_packed, schedule, ranks, tokens, LLAMA_8B_COSTS)

    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    before, after = (
        simulate(schedule, np.array([work[group].sum() for group in one]), ranks, tokens, LLAMA_8B_COSTS)
        for one in (as_packed, groups)
    )
    assert after < before
    again = shape_step(lengths, work, as_packed, schedule, ranks, tokens, LLAMA_8B_COSTS)
    assert [group.tolist() for group in again] == [group.tolist() for group in groups]


def test_light_micro_batches_are_first_and_last() -> None:
    lengths, as_packed = packed(mix(1, 20 * 2**20, 60_000), 2**20, 8)
    work = work_of_documents(lengths)
    groups = shape_step(lengths, work, as_packed, Schedule(Pipeline(4), 8), 8, 131_072, LLAMA_8B_COSTS)
    load = np.array([work[group].sum() for group in groups])

    assert load[0] < 0.5 * load.mean()
    assert load[-1] < 0.5 * load.mean()


def test_work_is_a_mean_over_layers() -> None:
    lengths = np.array([1, 10, 100])
    full, window = lengths * (lengths + 1) // 2, np.array([1, 4 * 10 - 6, 4 * 100 - 6])
    assert work_of_documents(lengths).tolist() == full.tolist()
    layers = ((Mask(), 1), (Mask(4), 3))
    assert work_of_documents(lengths, layers).tolist() == ((full + 3 * window) // 4).tolist()


def test_steps_keep_their_documents() -> None:
    lengths = mix(5, 12 * 65_536, 60_000)
    epoch = EpochPacker(lengths, 65_536, seed=3, multiple=4).epoch(0)
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=32_768), 2, step_shape=Pipeline(2, 2))
    shaped = planner.regroup(epoch, lengths, 4)

    assert epoch.num_micro_batches % 4 == 0
    changed = 0
    for first in range(0, epoch.num_micro_batches, 4):
        before = [epoch.micro_batch(number) for number in range(first, first + 4)]
        after = [shaped.micro_batch(number) for number in range(first, first + 4)]
        assert sorted(np.concatenate(after)) == sorted(np.concatenate(before))
        changed += [sorted(one) for one in after] != [sorted(one) for one in before]
        assert all(shaped.layout(number) is None for number in range(first, first + 4))
    assert changed


def test_divisions_without_room_for_whole_documents_are_passed_over() -> None:
    lengths, as_packed = packed(mix(1, 20 * 131_072, 60_000), 131_072, 4)
    work, schedule = work_of_documents(lengths), Schedule(Pipeline(2), 4)
    arguments = lengths, work, as_packed, schedule, 2, 65_536, LLAMA_8B_COSTS
    kept = shape_step(*arguments, lambda tokens: np.zeros(len(tokens), dtype=bool))
    fitting = shape_step(*arguments, lambda tokens: fit_whole(tokens, 2, 65_536))

    assert sorted(group.tolist() for group in kept) == sorted(group.tolist() for group in as_packed)
    assert all(fit_whole(lengths[group], 2, 65_536).all() for group in fitting)


def test_fewer_documents_than_micro_batches_are_refused() -> None:
    with pytest.raises(
        PackingError, match="steps of 8 micro-batches need 8 documents or more, and the dataset holds 3"
    ):
        EpochPacker(np.array([5, 6, 7]), 100, multiple=8)


def least_heaviest(document_tokens: IntArray, micro_batches: int) -> float:
    """The least work of the heaviest micro-batch over the mean, of any division of whole documents into micro-batches
    of equal tokens: that of the longest document with the shortest ones."""
    lengths = np.sort(document_tokens)
    work = work_of_documents(lengths)
    room = int(lengths.sum()) // micro_batches - int(lengths[-1])
    shortest = int(np.searchsorted(np.cumsum(lengths[:-1]), room, side="right"))
    return max(1.0, int(work[-1] + work[:shortest].sum()) * micro_batches / int(work.sum()))


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "micro_batches"),
    [
        ("pretrain", 8, 131_072, 8),
        ("pretrain", 16, 131_072, 16),
        ("pretrain", 32, 65_536, 8),
        ("pretrain", 64, 65_536, 4),
    ],
)
@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(4, 2)], ids=str)
def test_equal_work_reaches_what_the_schedule_allows(
    name: str, ranks: int, tokens: int, micro_batches: int, pipeline: Pipeline
) -> None:
    request = PlanRequest(ranks, tokens, 8, micro_batches, preset("llama3-8b"), overlong="split")
    lengths = read_lengths(Path(name)).tokens
    packed = pack_epoch(lengths, request, seed=0)
    schedule, seen = Schedule(pipeline, micro_batches), 0
    for step in range(packed.epoch.num_micro_batches // micro_batches):
        numbers = range(step * micro_batches, (step + 1) * micro_batches)
        documents = lengths[np.concatenate([packed.epoch.micro_batch(number) for number in numbers])]
        if seen == 3 or least_heaviest(documents, micro_batches) > 1.1:
            continue
        seen += 1
        work = work_of_documents(documents)
        even = divide(documents, work, [1.0] * micro_batches, ranks * tokens)
        assert even is not None
        loads = np.array([work[group].sum() for group in even])
        perfect = np.full(micro_batches, work.sum() / micro_batches)
        took, ideal = (simulate(schedule, one, ranks, tokens, LLAMA_8B_COSTS) for one in (loads, perfect))
        assert ideal / took >= 0.98
    assert seen
