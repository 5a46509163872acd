"""Which documents a batch of others holds, in every form in which it may say so."""

from typing import Any

import pytest
import torch

import distca_hf
from distca_hf.batches.batch_documents import check_mask_numbers, document_lengths, ids_checked, media_of
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.read_documents import fill_empty, padded_rows_of
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError
from distca_hf.testing import LoopbackTransport, run_ranks
from support.models import tiny_model


OFFSETS = torch.tensor([0, 4, 7, 10], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
# Ways in which torch waits for the device.
WAITS = ("cpu", "tolist", "item", "numpy", "nonzero", "__bool__", "__int__")


def batch(rows: int = 1, tokens: int = 10, **given: Any) -> dict[str, Any]:
    return {"input_ids": torch.ones(rows, tokens, dtype=torch.int64), **given}


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, [10]),
        ({"position_ids": POSITIONS}, [4, 3, 3]),
        ({"cu_seq_lens_q": OFFSETS}, [4, 3, 3]),
        ({"cu_seq_lens_q": OFFSETS[None].long(), "position_ids": POSITIONS}, [4, 3, 3]),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 4, 7, 10, 10]), "position_ids": POSITIONS}, [4, 3, 3]),
        ({"cu_seq_lens_q": OFFSETS, "position_ids": torch.zeros(3, 1, 10, dtype=torch.int64)}, [4, 3, 3]),
        ({"position_ids": torch.stack([POSITIONS, *3 * [torch.zeros_like(POSITIONS)]])}, [4, 3, 3]),
        ({"rows": 2, "tokens": 5, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, [2, 3, 2, 3]),
        (
            {
                "rows": 2,
                "tokens": 5,
                "cu_seq_lens_q": torch.tensor([0, 2, 5, 7, 10]),
                "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
            },
            [2, 3, 2, 3],
        ),
        ({"rows": 2, "tokens": 5, "attention_mask": torch.ones(2, 5)}, [5, 5]),
        ({"tokens": 0, "position_ids": torch.zeros(1, 0)}, []),
    ],
    ids=[
        *["row", "positions", "offsets", "both", "both, empty documents", "offsets and positions of images"],
        "positions of text and of images",
        *["rows of equal positions", "both, rows of equal positions", "mask of ones", "nothing"],
    ],
)
def test_documents_are_found(given: dict[str, Any], lengths: list[int]) -> None:
    assert document_lengths(batch(**given)).tolist() == lengths


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        (list(range(10)), "token 4: position_ids say position 4, but cu_seq_lens_q says 0 .*begins at token 4"),
        ([0, 1, 2, 3, 0, 1, 2, 3, 4, 5], "token 7: position_ids say position 3, but cu_seq_lens_q says 0"),
        ([0, 1, 0, 1, 0, 1, 2, 0, 1, 2], "token 2: position_ids say position 0, but cu_seq_lens_q says 2"),
        ([5, 6, 7, 8, 0, 1, 2, 0, 1, 2], "token 0: position_ids say position 5, but cu_seq_lens_q says 0"),
        ([0, 1, 2, 3, 0, 1, 2, 0, 1, 1], "token 9: position_ids say position 1, but cu_seq_lens_q says 2"),
    ],
    ids=["never restart", "restart once too few", "restart once too often", "begin late", "differ at the end"],
)
def test_offsets_and_positions_that_disagree_are_refused_at_the_first_token(positions: list[int], told: str) -> None:
    with pytest.raises(PackingError, match=told):
        document_lengths(batch(cu_seq_lens_q=OFFSETS, position_ids=torch.tensor([positions])))


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["positions", "both"])
@pytest.mark.parametrize("shape", [(1, 9), (2, 10)], ids=str)
def test_positions_of_another_shape_are_refused(shape: tuple[int, int], offsets: torch.Tensor | None) -> None:
    positions = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(PackingError, match=rf"\({shape[0]}, {shape[1]}\) do not fit tokens of shape \(1, 10\)"):
        document_lengths(batch(cu_seq_lens_q=offsets, position_ids=positions))
    with pytest.raises(PackingError, match="do not fit tokens"):
        padded_rows_of(batch(attention_mask=torch.arange(10)[None] < 8, position_ids=positions))


def test_offsets_that_do_not_fit_are_refused_with_positions_too() -> None:
    with pytest.raises(PackingError, match="ends at 9, but there are 10"):
        document_lengths(batch(cu_seq_lens_q=torch.tensor([0, 4, 9]), position_ids=POSITIONS))


@pytest.mark.parametrize("keys", [[0, 10], [0, 4, 8, 10]], ids=str)
def test_keys_of_other_documents_are_refused(keys: list[int]) -> None:
    assert document_lengths(batch(cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS.long())).tolist() == [4, 3, 3]
    with pytest.raises(PackingError, match=r"differs from cu_seq_lens_q \(of 3\); give the same documents"):
        document_lengths(batch(cu_seq_lens_q=OFFSETS, cu_seq_lens_k=torch.tensor(keys)))


def test_padded_batch_has_no_lengths_that_could_be_planned() -> None:
    assert document_lengths(batch(attention_mask=(torch.arange(10)[None] > 3).int())) is None


NUMBERS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3]])


@pytest.mark.parametrize("token", [128, 1 << 40, -1])
def test_tokens_that_the_model_has_no_embedding_for_are_named(token: int) -> None:
    ids = torch.tensor([[5, 127, 0], [6, token, 8]])

    def check(given: torch.Tensor, vocabulary_tokens: int | None, waits: bool = False) -> None:
        with ids_checked({"input_ids": given}, vocabulary_tokens, waits):
            pass

    check(ids[:1], 128)
    check(ids, None, waits=True)
    check(ids.to("meta"), 128)
    told = f"row 1 of the batch: input_ids is {token} at token 1, and tokens are 0 to 127 in this model"
    with pytest.raises(PackingError, match=told):
        check(ids, 128)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1, vocab_size=128), distca_hf.DistCAPlugin())
    with pytest.raises(PackingError, match=told):
        model(ids)


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_checked_without_another_wait() -> None:
    ids = torch.tensor([[5, 127, 0]], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with ids_checked({"input_ids": ids}, 128, waits=True):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(PackingError, match="is 127 at token 1"), ids_checked({"input_ids": ids}, 127, waits=True):
        pass


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_that_numbers_documents_is_refused_where_nothing_else_tells_them_apart(dtype: torch.dtype) -> None:
    with pytest.raises(PackingError, match=r"numbers documents \(its largest value is 3\).*position_ids"):
        document_lengths(batch(attention_mask=NUMBERS.to(dtype)))


def test_mask_that_numbers_the_documents_of_the_positions_is_accepted() -> None:
    assert document_lengths(batch(attention_mask=NUMBERS, position_ids=POSITIONS)).tolist() == [4, 3, 3]


@pytest.mark.parametrize("at", [3, 4, 8])
def test_mask_that_numbers_other_documents_than_the_positions_is_refused(at: int) -> None:
    other = NUMBERS.clone()
    other[0, at:] += 1
    if at == 4:
        other[0, 4:] -= 1
        other[0, 4] = 1
    with pytest.raises(PackingError, match="position_ids restart at other tokens"):
        document_lengths(batch(attention_mask=other, position_ids=POSITIONS))


def test_numbers_of_a_padded_row_are_compared_where_there_are_tokens() -> None:
    left = {
        "attention_mask": torch.tensor([[0, 0, 1, 1, 2, 2, 2, 3, 3, 3]]),
        "position_ids": torch.tensor([[1, 1, 0, 1, 0, 1, 2, 0, 1, 2]]),
    }
    assert document_lengths(batch(**left)) is None


def test_mask_of_a_cache_is_left_alone() -> None:
    check_mask_numbers({"attention_mask": NUMBERS, "past_key_values": object()})
    check_mask_numbers({"attention_mask": NUMBERS > 0})
    check_mask_numbers({"attention_mask": (NUMBERS > 0).float()})


@pytest.mark.parametrize("given", [{}, {"position_ids": POSITIONS}], ids=["offsets", "both"])
def test_one_copy_to_the_host_brings_offsets_and_positions(
    given: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def counted(name: str) -> Any:
        right = getattr(torch.Tensor, name)
        return lambda *arguments, **keywords: (called.append(name), right(*arguments, **keywords))[1]

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    document_lengths(batch(cu_seq_lens_q=OFFSETS, **given))

    assert called == ["cpu", "numpy"], "numpy() of what is on the host already copies nothing"


def test_a_batch_holds_media_if_they_are_not_empty() -> None:
    tokens = torch.ones(1, 4)
    batch = {"input_ids": tokens, "mm_token_type_ids": tokens, "pixel_values": torch.ones(4, 8), "image_sizes": None}

    assert media_of(batch) == ["pixel_values"]
    assert media_of(batch | {"pixel_values": torch.ones(0, 8)}) == []
    assert media_of({"input_ids": tokens, "images": [tokens]}) == ["images"]


def test_a_rank_without_tokens_gets_one_of_padding_and_no_image() -> None:
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    positions = torch.zeros(3, 1, 0, dtype=torch.int64)
    filled = fill_empty({"input_ids": nothing, "position_ids": positions, "pixel_values": torch.zeros(0, 1176)})

    assert filled["pixel_values"] is None
    assert torch.equal(torch.as_tensor(filled["position_ids"]), torch.zeros(3, 1, 1, dtype=torch.int64))
    assert torch.equal(torch.as_tensor(filled["input_ids"]), torch.zeros(1, 1, dtype=torch.int64))


def test_packs_are_planned_at_the_first_look() -> None:
    def run(transport: LoopbackTransport) -> tuple[int, int, int]:
        planner = GivenPlanner(DistCAConfig(), transport)
        live = planner.plan(batch(tokens=10 * (1 + transport.rank)))
        assert live is not None
        before = planner.totals.micro_batches
        assert live.facts.num_documents == 2
        assert len(planner.history) == planner.times.micro_batches == 1
        return before, live.longest_document_tokens, planner.totals.micro_batches

    assert run_ranks(2, run) == 2 * [(0, 20, 1)]
