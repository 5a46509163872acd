"""Padded rows: rows that cannot be made a pack are refused by name, or stay padded."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from distca_hf.analysis.check.tiny_config import tiny_config
from distca_hf.batches.read_documents import DocumentReader, padded_rows_of
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.errors import PackingError, UnsupportedAttentionError
from distca_hf.integrations.models.counted_rows import CountedRows
from distca_hf.integrations.models.decoder_borders import DecoderBorders
from support.models import tiny_model


IDS = torch.arange(1, 13).view(3, 4)
RIGHT = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
LEFT = RIGHT.flip(1)
CPU = torch.device("cpu")


def batch_of(mask: list[list[int]] | torch.Tensor, **others: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": torch.as_tensor(mask), **others}


@pytest.mark.parametrize("mask", [RIGHT, LEFT, RIGHT.bool(), RIGHT.float()], ids=["right", "left", "bool", "float"])
def test_values_are_packed(mask: torch.Tensor) -> None:
    rows = padded_rows_of(batch_of(mask))

    assert rows is not None
    assert rows.pack(IDS).tolist() == [IDS[mask.bool()].tolist()]
    assert rows.offsets.tolist() == [0, 3, 7, 8]


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ([[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], r"row 1 of a padded batch has no token.*\(and 1 more like it\)"),
        (
            [[1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
            "row 0 .* begins again at place 3",
        ),
        ([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]], "row 2 .* between tokens: .* begins again at place 3"),
    ],
)
def test_rows_without_tokens_or_with_holes_are_named(mask: list[list[int]], told: str) -> None:
    with pytest.raises(PackingError, match=told):
        padded_rows_of(batch_of(mask))


@pytest.mark.parametrize(
    "given",
    [
        {"cu_seq_lens_q": torch.tensor([0, 12])},
        {"pixel_values": torch.ones(1)},
        {"position_ids": torch.zeros(3, 3, 4, dtype=torch.int64)},
        {"labels": IDS},  # the first token behind padding on the left
        {"shift_labels": IDS},
    ],
    ids=lambda given: next(iter(given)),
)
def test_rows_that_say_more_than_a_pack_can_stay_padded(given: dict[str, Any]) -> None:
    assert padded_rows_of(batch_of(LEFT, **given)) is None


@pytest.mark.parametrize("place", [0, 3])
def test_rows_with_a_label_in_padding_stay_padded(place: int) -> None:
    """A loss of single tokens reads hidden states there."""
    mask = torch.ones_like(IDS)
    mask[1, place] = 0
    learnt = IDS.clone()
    learnt[1, :2] = IGNORED_LABEL  # the token after padding is not learnt
    ignored = learnt.masked_fill(mask == 0, IGNORED_LABEL)
    learnt[1, place] = 1

    assert padded_rows_of(batch_of(mask, labels=learnt)) is None
    assert padded_rows_of(batch_of(mask, labels=ignored)) is not None


def test_a_table_of_positions_does_not_count_padding_on_the_left() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8))
    borders = DecoderBorders(model, True, CountedRows(model), lambda plan: None)

    with pytest.raises(UnsupportedAttentionError, match=r"GPT2LMHeadModel looks positions up in a table, and rows"):
        borders.begin(padded_rows_of(batch_of(LEFT)))
    tempered = DecoderBorders(tiny_model("llama4"), False, CountedRows(model), lambda plan: None)
    with pytest.raises(UnsupportedAttentionError, match="Llama4ForCausalLM tempers queries by position, and rows"):
        tempered.begin(padded_rows_of(batch_of(LEFT)))
    # Weights of HunYuan's norms come after the rotation; NanoChat's norms have no weights.
    scaled, unscaled = (
        AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING[of])) for of in ("hunyuan_v1_dense", "nanochat")
    )
    DecoderBorders(unscaled, False, CountedRows(model), lambda plan: None).begin(padded_rows_of(batch_of(LEFT)))
    with pytest.raises(
        UnsupportedAttentionError, match=r"HunYuan.* scales queries and keys after their rotation, and"
    ):
        DecoderBorders(scaled, False, CountedRows(model), lambda plan: None).begin(padded_rows_of(batch_of(LEFT)))
    own = (LEFT.cumsum(1) - 1).clamp(min=0)
    for batch in (batch_of(LEFT, position_ids=own), batch_of(RIGHT)):
        borders.begin(padded_rows_of(batch))
        assert DocumentReader(packs_rows=True).read(batch).lengths.tolist() == [3, 4, 1]
