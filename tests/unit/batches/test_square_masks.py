"""Masks of every pair of tokens become numbers of documents, or are refused by row and token."""

import pytest
import torch

import distca_hf
from distca_hf.batches.read_documents import DocumentReader
from distca_hf.batches.square_masks import numbered_rows, tokens_in
from distca_hf.errors import PackingError
from support.data import square_mask
from support.models import tiny_model


NUMBERS = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 0, 1, 2, 3, 4, 5, 6]])


def batch(mask: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(2, 8, dtype=torch.int64), "attention_mask": mask, **others}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_all_dtypes_say_their_documents(dtype: torch.dtype) -> None:
    given = batch(square_mask(NUMBERS, dtype), position_ids=POSITIONS)

    assert torch.equal(numbered_rows(given)["attention_mask"], NUMBERS)
    assert torch.equal(tokens_in(given)["attention_mask"], NUMBERS > 0)
    read = DocumentReader(packs_rows=True).read(given)
    assert read.lengths.tolist() == [3, 2, 1, 1, 7]


def test_padding_on_the_left_and_one_document() -> None:
    numbers = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])

    assert torch.equal(numbered_rows(batch(square_mask(numbers)))["attention_mask"], numbers)


def test_other_masks_are_left_alone() -> None:
    for mask in (torch.ones(2, 8), torch.ones(2, 1, 8, 9, dtype=torch.bool), torch.ones(2, 2, 8, 8, dtype=torch.bool)):
        given = batch(mask)
        assert numbered_rows(given) is given
        assert tokens_in(given) == {}
    cached = batch(square_mask(NUMBERS)) | {"past_key_values": object()}
    assert numbered_rows(cached) is cached


@pytest.mark.parametrize(
    ("query", "key", "attends"),
    [(1, 2, True), (4, 2, True), (2, 0, False), (2, 1, False), (2, 2, False), (7, 6, True), (7, 7, True)],
    ids=["later", "another document", "hole", "inner hole", "itself", "padding sees padding", "a gap"],
)
def test_any_pair_that_differs_is_refused(query: int, key: int, attends: bool) -> None:
    mask = square_mask(NUMBERS)
    mask[0, 0, query, key] = attends
    if (query, key) == (7, 7):  # a token after padding is a document
        assert numbered_rows(batch(mask))["attention_mask"][0].tolist() == [1, 1, 1, 2, 2, 3, 0, 4]
        return
    with pytest.raises(PackingError, match=r"row 0, token \d: attention_mask lets it attend to tokens outside"):
        numbered_rows(batch(mask))


def test_windows_and_biases_are_refused() -> None:
    window = square_mask(NUMBERS)
    window[1] &= torch.ones(8, 8, dtype=torch.bool).triu(-2)
    with pytest.raises(PackingError, match="row 1, token 4: attention_mask lets it attend to tokens outside"):
        numbered_rows(batch(window))
    bias = square_mask(NUMBERS, torch.float32)
    bias[0, 0, 1, 0] = -0.5
    with pytest.raises(PackingError, match=r"adds -0\.5 to a score"):
        numbered_rows(batch(bias))
    with pytest.raises(PackingError, match="adds 1 to a score"):
        numbered_rows(batch(square_mask(NUMBERS).long()))


def test_positions_must_say_the_same() -> None:
    one = torch.tensor([[1] * 8, [1] * 8])
    with pytest.raises(PackingError, match="row 0, token 3: position_ids restart, and attention_mask lets it attend"):
        numbered_rows(batch(square_mask(one), position_ids=POSITIONS))
    with pytest.raises(PackingError, match="no position_ids restart with them"):
        DocumentReader(packs_rows=True).read(batch(square_mask(NUMBERS)))
    counted = torch.arange(8).expand(2, -1)
    with pytest.raises(PackingError, match="position_ids restart at other tokens"):
        DocumentReader(packs_rows=True).read(batch(square_mask(NUMBERS), position_ids=counted))


@pytest.mark.parametrize("trains", [True, False])
def test_document_longer_than_a_window_of_the_model_is_refused(trains: bool) -> None:
    """With sdpa layers of a window follow the mask, too, and see the whole document."""
    logits = []
    for window, enabled in ((7, False), (7, True), (6, True)):
        model = tiny_model("gemma3", implementation="sdpa", num_hidden_layers=2, sliding_window=window).train(trains)
        if enabled:
            distca_hf.enable(model, distca_hf.DistCAPlugin())
        given = batch(square_mask(NUMBERS), position_ids=POSITIONS)
        if window == 6:
            with pytest.raises(PackingError, match=r"row 1, token 7: .* some layers of this model have a window of 6"):
                model(**given, use_cache=False)
        else:
            logits.append(model(**given, use_cache=False).logits[1])
    torch.testing.assert_close(*logits)


def test_document_that_goes_on_after_padding_keeps_its_positions() -> None:
    gap = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]] * 2)
    counted = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]] * 2)

    assert (
        numbered_rows(batch(square_mask(gap), position_ids=counted))["attention_mask"][0].tolist() == gap[0].tolist()
    )
    counted[1, 4:] -= 4
    with pytest.raises(PackingError, match="row 1, token 4: position_ids restart"):
        numbered_rows(batch(square_mask(gap), position_ids=counted))
