"""Batches are found again by the storages of their tensors, by copies of them, and no longer than they are in use."""

import gc
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
from datasets import Dataset

import distca_hf
from distca_hf.batches import known_batch as known_batches
from distca_hf.batches.known_batch import KnownBatch, any_known, copied_batch, known_batch, note_batch
from distca_hf.errors import PackingError, PlanError
from support.data import random_dataset
from support.models import tiny_model


MODEL = "SomeModel"
LENGTHS = (3, 5, 4)


@pytest.fixture(autouse=True)
def no_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before may have left some."""
    monkeypatch.setattr(known_batches, "_in_use", weakref.WeakValueDictionary())


def placed(number: int = 0) -> dict[str, Any]:
    batches = iter(distca_hf.DistCAPlugin(tokens_per_rank=192).dataloader(random_dataset(20)))
    for _ in range(number):
        next(batches)
    return next(batches)


def pack() -> dict[str, torch.Tensor]:
    """A row of three documents."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": torch.arange(12)[None] + 3, "position_ids": positions, "labels": torch.ones(1, 12).long()}


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "attention_mask", "labels", "shift_labels"])
def test_every_entry_of_a_placed_batch_and_its_views_lead_to_the_plan(name: str) -> None:
    batch = placed()
    for given in (batch[name], batch[name][:, 1:], batch[name].detach(), batch[name].view(-1)):
        known = known_batch({name: given})
        assert known is not None
        assert known.plan is batch["distca_plan"]


def test_missing_entries_of_a_placed_batch_are_its_own() -> None:
    batch = placed()
    given = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    found = known_batch(given).missing(given, MODEL)

    assert found.keys() == {"position_ids", "attention_mask", "shift_labels", "distca_plan"}
    assert all(found[name] is batch[name] for name in found)
    given["labels"] = batch["labels"].clone()
    assert "shift_labels" not in known_batch(given).missing(given, MODEL), "labels of a program may be others"


def test_part_or_multiple_of_a_placed_batch_is_refused() -> None:
    ids = placed()["input_ids"]
    part = {"input_ids": ids[:, :-1]}
    shape = re.escape(str(tuple(part["input_ids"].shape)))
    with pytest.raises(PlanError, match=f"SomeModel got tokens of shape {shape}, taken from a placed batch"):
        known_batch(part).missing(part, MODEL)
    for several in (torch.cat([ids, ids]), torch.cat([torch.zeros_like(ids), ids.to(torch.int32)])):
        given = {"input_ids": several}
        with pytest.raises(PlanError, match="SomeModel got a copy of tokens of this placed batch, without its plan"):
            copied_batch(given).missing(given, MODEL)


def test_copies_of_tokens_are_noticed_and_others_are_not() -> None:
    batch = placed()
    ids, positions = batch["input_ids"], batch["position_ids"]
    copy = {"input_ids": ids.clone()}

    assert known_batch(copy) is None
    assert copied_batch(copy).plan is batch["distca_plan"]
    with pytest.raises(PlanError, match="SomeModel got a copy of tokens of this placed batch, without its plan"):
        copied_batch(copy).missing(copy, MODEL)
    assert copied_batch({"inputs_embeds": torch.ones(*ids.shape, 4), "position_ids": positions.clone()}) is not None
    assert copied_batch({"input_ids": ids + 1, "position_ids": positions.clone()}) is None
    assert copied_batch({"input_ids": ids[:, :-1].clone()}) is None


def test_copies_of_a_row_that_is_one_document_need_no_plan() -> None:
    """On one of several ranks it may be the same as a document that every rank is given."""
    dataset = Dataset.from_dict({"input_ids": [[3] * 128]})
    batch = next(iter(distca_hf.DistCAPlugin(tokens_per_rank=128).dataloader(dataset)))

    assert copied_batch({"input_ids": batch["input_ids"].clone()}) is None
    assert known_batch({"input_ids": batch["input_ids"]}) is not None


def test_embeddings_alone_are_known_by_their_shape() -> None:
    batch = placed()
    embeddings = torch.ones(*batch["input_ids"].shape, 4)
    with pytest.raises(PackingError, match="placed micro-batch 0 has as many tokens"):
        copied_batch({"inputs_embeds": embeddings})

    assert copied_batch({"inputs_embeds": embeddings[:, 1:]}) is None
    own = torch.arange(embeddings.shape[1])[None] % 7
    assert copied_batch({"inputs_embeds": embeddings, "position_ids": own}) is None


def test_passes_inside_of_transforms_of_torch_func_are_left_alone() -> None:
    """Their tensors have no memory to look at, and no value may decide anything."""
    batch, other = placed(), tiny_model(implementation="sdpa", num_hidden_layers=1)
    rows = torch.full((2, *batch["input_ids"].shape), 3)
    torch.func.vmap(lambda ids: other(input_ids=ids, use_cache=False).logits)(rows)

    assert known_batch({"input_ids": torch.eye(3).to_sparse()}) is None


def test_models_inside_of_a_program_s_module_are_asked_for_their_own_tokens() -> None:
    """Whatever the module around them was given."""
    batch, other = placed(), tiny_model(implementation="sdpa", num_hidden_layers=1)

    class Distils(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
            return other(input_ids=texts).logits

    given = {name: batch[name] for name in ("input_ids", "labels")}
    Distils()(**given, texts=torch.full((1, 7), 3))
    for texts in (batch["input_ids"], batch["input_ids"].clone(), torch.where(batch["labels"] > 9, 3, 4)):
        with pytest.raises(PlanError, match="a placed batch arrived in a model that was not enabled"):
            Distils()(**given, texts=texts)


def test_entries_of_one_batch_with_the_plan_of_another_are_refused() -> None:
    first, second = placed(), placed(1)
    given = first | {"distca_plan": second["distca_plan"]}
    with pytest.raises(
        PlanError, match=r"micro-batch 0: SomeModel got entries of this .* plan of micro-batch 1; pass"
    ):
        known_batch(given).missing(given, MODEL)


def test_token_ids_that_a_program_made_are_known_after_a_pass_with_their_plan() -> None:
    batch = placed()
    noisy = torch.where(batch["attention_mask"] > 0, 3, batch["input_ids"])
    assert known_batch({"input_ids": noisy}) is None
    given = batch | {"input_ids": noisy}
    known_batch(given).missing(given, MODEL)

    assert known_batch({"input_ids": noisy}).plan is batch["distca_plan"]


def test_buffers_that_are_used_for_one_batch_after_the_other_lead_to_the_latest() -> None:
    first, second = placed(), placed(1)
    rows = max(batch["input_ids"].shape[1] for batch in (first, second))
    buffer = torch.zeros(1, rows, dtype=torch.long)
    for batch in (first, second):
        ids = buffer[:, : batch["input_ids"].shape[1]]
        given = {"input_ids": ids, "position_ids": batch["position_ids"].clone(), "distca_plan": batch["distca_plan"]}
        assert known_batch(given) is None
        note_batch(given)
        assert known_batch({"input_ids": ids}).plan is batch["distca_plan"]


def test_missing_entries_of_a_pack_are_found_where_nothing_else_tells_its_documents() -> None:
    batch = pack()
    note_batch(batch)
    for find, ids in ((known_batch, batch["input_ids"]), (copied_batch, batch["input_ids"].clone())):
        given = {"input_ids": ids}
        found = find(given).missing(given, MODEL)
        assert [*found] == ["position_ids"]
        assert found["position_ids"] is batch["position_ids"]

    own = {"input_ids": batch["input_ids"], "position_ids": torch.arange(12)[None]}
    assert known_batch(own).missing(own, MODEL) == {}
    twice = {"input_ids": torch.cat([batch["input_ids"]] * 2)}
    with pytest.raises(PackingError, match=r"SomeModel got tokens of a pack of shape \(1, 12\) without anything"):
        copied_batch(twice).missing(twice, MODEL)


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens_q"])
def test_parts_of_a_pack_have_its_positions_where_they_are_of_several_documents(told_by: str) -> None:
    ids, positions = torch.arange(24).view(2, 12), pack()["position_ids"].repeat(2, 1)
    offsets = torch.tensor([0, 3, 8, 12, 15, 20, 24])
    note_batch({"input_ids": ids, told_by: positions if told_by == "position_ids" else offsets})
    for rows, places in itertools.product((slice(2), slice(1, 2)), (slice(1, 9), slice(11), slice(2, 12))):
        given = {"input_ids": ids[rows, places]}
        found = known_batch(given).missing(given, MODEL)
        assert [*found] == ["position_ids"]
        assert torch.equal(found["position_ids"], positions[rows, places])
    for places in (slice(3), slice(3, 8), slice(4, 6), slice(8, 12)):
        given = {"input_ids": ids[1:, places]}
        assert known_batch(given).missing(given, MODEL) == {}, "one document"


@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], None),
        ([[-1, -1, 0, 1], [0, 1, 2, 3]], [[0, 0, 1, 1], [1, 1, 1, 1]]),
        ([[1, 1, 0, 1], [0, 1, 2, 3]], [[0, 0, 1, 1], [1, 1, 1, 1]]),
        ([[0, 1, 0, 0], [0, 1, 2, 0]], [[1, 1, 0, 0], [1, 1, 1, 0]]),
    ],
    ids=["whole rows", "padded on the left", "positions of padding are 1", "padded on the right"],
)
def test_rows_of_one_document_need_no_positions(positions: list[list[int]], mask: list[list[int]] | None) -> None:
    """Programs make positions for one pass, and leave them to the model in another."""
    batch = {"input_ids": torch.arange(8).view(2, 4), "position_ids": torch.tensor(positions)}
    if mask is not None:
        batch["attention_mask"] = torch.tensor(mask)
    note_batch(batch)
    del batch["position_ids"]

    assert known_batch(batch).missing(batch, MODEL) == {}


def test_of_a_pack_the_latest_entries_count() -> None:
    batch = pack()
    note_batch(batch)
    first = known_batch(batch)
    note_batch(batch)
    assert known_batch(batch) is first
    note_batch(batch | {"position_ids": torch.arange(12)[None] % 6})
    given = {"input_ids": batch["input_ids"]}

    assert known_batch(given).missing(given, MODEL)["position_ids"].max() == 5


def test_batches_without_anything_that_tells_documents_are_not_noted() -> None:
    ids = torch.arange(8).view(2, 4)
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"labels": ids}, {}):
        note_batch(batch)

    assert not any_known()


@pytest.mark.parametrize("shared", ["all", "two that are kept", "nothing"])
def test_batches_end_with_their_tokens(shared: str) -> None:
    """Also where tensors of one storage know each other."""
    batch = pack()
    if shared == "all":
        batch = dict(zip(batch, torch.stack([*batch.values()]).unbind(), strict=True))
    if shared == "two that are kept":
        positions, mask = torch.stack([batch["position_ids"], torch.ones(1, 12).long()]).unbind()
        batch |= {"position_ids": positions, "attention_mask": mask}
        del positions, mask
    note_batch(batch)
    known = weakref.ref(known_batch(batch))
    part = batch.pop("input_ids")[:, :2]
    gc.collect()
    assert known() is not None
    assert known_batch({"input_ids": part}) is known()
    del part
    batch.clear()
    gc.collect()

    assert known() is None
    assert not any_known()


def test_a_storage_may_hold_many_packs() -> None:
    ids, positions = torch.arange(48).view(4, 1, 12), torch.stack([pack()["position_ids"]] * 4)
    first, other = ({"input_ids": ids[at], "position_ids": positions[at]} for at in (0, 2))
    note_batch(first)

    assert known_batch({"input_ids": ids[0]}) is not None
    assert known_batch({"input_ids": ids[2]}) is None
    note_batch(other)
    assert isinstance(known_batch({"input_ids": ids[2]}), KnownBatch)
