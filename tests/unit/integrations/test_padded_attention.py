"""Padded batches, which every rank attends to by itself: rows are documents, and padding takes no part."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from distca_hf.errors import PackingError, UnsupportedAttentionError
from distca_hf.runtime import local_attention
from support.models import SIZES, VOCABULARY, tiny_model


TOKENS = 10
CHANGES: dict[str, Any] = {"initializer_range": 0.3}
GENERATE: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def both(kind: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same tiny model with distca and with sdpa, fp64; its weights are large enough for attention to matter."""
    ours, theirs = (tiny_model(kind, implementation=name, **CHANGES).double() for name in ("distca", "sdpa"))
    return ours.eval(), theirs.eval()


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of which are padded, and their mask."""
    ids = torch.randint(3, VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, missing in ((0, 3), (1, 6)):
        mask[row, slice(None, missing) if side == "left" else slice(TOKENS - missing, None)] = 0
    return ids, mask


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference."""
    return (left - right).abs().max().item()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_padded_rows_have_the_logits_of_sdpa(side: str, use_cache: bool, training: bool) -> None:
    """Also without gradients in training, as old log-probabilities are computed."""
    ids, mask = padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": use_cache}
    with torch.no_grad():
        ours, theirs = (model.train(training)(ids, **arguments).logits for model in both())

    assert largest(ours[mask.bool()], theirs[mask.bool()]) <= 1e-12


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_train_with_the_gradients_of_sdpa(kind: str, side: str) -> None:
    ids, mask = padded(side)
    labels = ids.masked_fill(mask == 0, -100)
    model, same = both(kind)
    losses = []
    for net in (model, same):
        loss = net.train()(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())

    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), same.named_parameters(), strict=True):
        assert largest(ours.grad, theirs[1].grad) <= 1e-11, name


def test_left_padded_batch_generates_the_tokens_of_sdpa() -> None:
    ids, mask = padded("left")
    ours, theirs = (model.generate(ids, attention_mask=mask, **GENERATE) for model in both())

    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS, TOKENS)], ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_mask_of_another_shape_is_refused(shape: tuple[int, ...], value: int) -> None:
    model, _ = both()
    with pytest.raises(
        UnsupportedAttentionError, match=r"layer 0: got an attention_mask of shape .* \[batch, tokens\]"
    ):
        model(torch.ones(1, TOKENS, dtype=torch.long), attention_mask=torch.full(shape, value))


def test_outputs_of_padding_are_zero() -> None:
    """Nothing of other rows, or of memory that was never written, can leave through them."""
    model, _ = both()
    ids, mask = padded("right")
    seen: list[torch.Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(ids, attention_mask=mask)

    assert seen[0].shape[-1] == SIZES["hidden_size"]
    assert seen[0][mask == 0].abs().max() == 0


@pytest.mark.parametrize("rows", ["one", "all"])
def test_rows_of_padding_alone_have_no_part(rows: str) -> None:
    """A rank whose last batch is smaller may fill it like that."""
    ids, mask = padded("right")
    mask[0 if rows == "one" else slice(None)] = 0
    model, same = both()
    logits = [net.train()(ids, attention_mask=mask, use_cache=False).logits for net in (model, same)]
    logits[0].sum().backward()

    assert torch.isfinite(logits[0]).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    if rows == "one":
        assert largest(logits[0][mask.bool()], logits[1][mask.bool()]) <= 1e-10


def test_no_kernel_is_asked_about_padding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = padded("right")
    model, _ = both()
    monkeypatch.setattr(local_attention, "choose_kernel", lambda *given: pytest.fail("a kernel was asked"))
    model.train()(ids, attention_mask=torch.zeros_like(mask), use_cache=False).logits.sum().backward()

    assert model.model.layers[0].self_attn.v_proj.weight.grad.abs().max() == 0


def test_positions_that_jump_where_no_padding_is_begin_a_part_of_a_document() -> None:
    """Rows of a placed batch, say, whose plan was lost."""
    ids, mask = padded("right")
    positions = torch.arange(TOKENS).expand(3, TOKENS).clone()
    positions[:, 2:] += 30

    with pytest.raises(PackingError, match="begin a document at position 32 instead of 0"):
        both()[0](ids, attention_mask=mask, position_ids=positions, use_cache=False)


def test_positions_may_leave_padding_out_or_count_it() -> None:
    ids, mask = padded("left")
    mask[:, 7] = 0
    counted = torch.arange(TOKENS).expand(3, TOKENS)
    left_out = (mask.cumsum(1) - 1).clamp(min=0)

    for positions in (counted, left_out):
        ours, theirs = (model(ids, attention_mask=mask, position_ids=positions, use_cache=False) for model in both())
        assert largest(ours.logits[mask.bool()], theirs.logits[mask.bool()]) <= 1e-10
