"""distca plan, an epoch: the figures that training logs of the same micro-batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.analysis.answer import TOKENS_PER_RANK, Choice, make_answer
from distca_hf.analysis.epoch import MOST_PLANNED_RANKS, make_report, pack_epoch, pack_in_order, plan_epoch
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
from distca_hf.batches import base_loader
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.data.epochs import EpochPacker
from distca_hf.placement.place import fill_in_order


class OneOfEight(LocalTransport):
    """A transport for a loader without a model."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = 3, 8


def long_tail(documents: int, longest: int) -> list[int]:
    lengths = np.random.RandomState(0).lognormal(4, 1.5, documents).astype(int) + 1
    return np.minimum(lengths, longest).tolist()


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_an_epoch_has_the_imbalance_that_training_logs(micro_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8 ranks, over all micro-batches; documents in order are the packed ones, before regrouping."""
    monkeypatch.setattr(base_loader, "check_cuts", lambda *given: None)  # nobody holds the other side of a cut
    lengths, tokens_per_rank = long_tail(1500, 4000), 1000
    request = PlanRequest(8, tokens_per_rank, 8, micro_steps, preset("llama3-8b"))
    packed = pack_epoch(np.array(lengths), request, seed=7)
    plans = plan_epoch(request, packed.document_tokens, packed.epoch)
    trained = PlacedLoader(
        Dataset.from_dict({"input_ids": [np.zeros(length, dtype=np.int32) for length in lengths]}),
        PlacedPlanner(DistCAConfig(tokens_per_rank=tokens_per_rank, ranks_per_node=8), 8, request.model.heads.groups),
        OneOfEight(),
        torch.device("cpu"),
        seed=7,
        micro_steps=micro_steps,
    )
    facts = [batch["distca_plan"].facts for batch in trained]

    assert len(plans.tokens) == len(facts) > 20
    planned = [facts[number].imbalance for number in plans.planned]
    assert plans.imbalance == pytest.approx(planned)
    if micro_steps == 1:
        assert plans.imbalance_before == pytest.approx([fact.imbalance_before for fact in facts])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    num_ranks=st.integers(1, 9),
    tokens_per_rank=st.integers(50, 90),
)
def test_all_micro_batches_at_once_are_filled_as_one_by_one(
    lengths: list[int], num_ranks: int, tokens_per_rank: int
) -> None:
    document_tokens = np.array(lengths)
    epoch = EpochPacker(document_tokens, num_ranks * tokens_per_rank, seed=1).epoch(0)
    tokens, work = pack_in_order(document_tokens, epoch, num_ranks)
    for number in range(epoch.num_micro_batches):
        layout = fill_in_order(document_tokens[epoch.micro_batch(number)], num_ranks)
        assert work[number].tolist() == layout.rank_work.tolist()
        assert tokens[number] == layout.rank_tokens.sum()


def test_sums_over_an_epoch_may_wrap_around() -> None:
    """Five documents of the greatest length have more pairs than int64 holds."""
    longest = 2**31 - 1
    document_tokens = np.array([longest] * 5)
    epoch = EpochPacker(document_tokens, longest).epoch(0)
    _, work = pack_in_order(document_tokens, epoch, 2)
    assert work.tolist() == [fill_in_order(document_tokens[:1], 2).rank_work.tolist()] * 5


def test_of_many_steps_some_are_planned_from_the_first_to_the_last() -> None:
    request = PlanRequest(64, 10, 8, 2, preset("llama3-8b"))
    document_tokens = np.full(64 * 40, 10)
    packed = pack_epoch(document_tokens, request, seed=0)
    gone_over: list[int] = []

    def track(steps: Sequence[int]) -> Sequence[int]:
        gone_over.extend(steps)
        return steps

    plans = plan_epoch(request, packed.document_tokens, packed.epoch, track)
    assert len(gone_over) == MOST_PLANNED_RANKS // (64 * 2) < packed.epoch.num_micro_batches // 2
    assert gone_over[0] == 0
    assert gone_over[-1] == packed.epoch.num_micro_batches // 2 - 1
    assert plans.planned.tolist() == [2 * step + half for step in gone_over for half in (0, 1)]
    assert plans.work.shape == (2 * len(gone_over), 64)


def choices(lengths: list[int], **more: Any) -> dict[int, Choice]:
    """Choices for 2 ranks that were to hold 40,000 tokens each, by their tokens per rank."""
    request = PlanRequest(2, 40_000, 8, 1, preset("llama3-8b"), liger=True, gpu_gib=140.0, **more)
    packed = pack_epoch(np.array(lengths), request, seed=0)
    plans = plan_epoch(request, packed.document_tokens, packed.epoch)
    answer = make_answer(make_report(request, packed), plans, packed, np.array(lengths))
    return {choice.tokens_per_rank: choice for choice in answer.choices}


def test_other_choices_say_what_fits_and_what_is_too_long() -> None:
    found = choices([*[500] * 4000, 20_000, 70_000])
    assert list(found) == sorted([*TOKENS_PER_RANK, 40_000])
    assert [found[tokens].too_long_documents for tokens in (8192, 32768, 40_000)] == [2, 1, 0]
    assert [found[tokens].fits for tokens in (65536, 131_072)] == [True, False]
    assert [found[tokens].over_plain is None for tokens in (8192, 32768, 40_000, 65536)] == [True, True, False, False]


def test_documents_that_are_too_long_are_cut_if_asked() -> None:
    found = choices([*[500] * 400, 70_000], overlong="split")
    assert [found[tokens].over_plain is None for tokens in (8192, 32768, 65536)] == [False] * 3
