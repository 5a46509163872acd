"""The head of a whole model: its last matrix product and the loss, in ways that need not hold all logits at once.

    none     Transformers' own: logits of all tokens, in the model's dtype and in fp32. 128K tokens of a vocabulary of
             128K are 100 GB.
    chunked  torch.nn.functional.linear_cross_entropy, some tokens at a time (torch 2.13 has it). Its losses come per
             token, because a sum would be in bf16; logits are computed once more in backward.
    liger    liger_kernel's fused linear cross entropy

All of them take `shift_labels` and `num_items_in_batch`. That they make the same of these as the model's own head is
looked at before anything is timed.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lib.liger import use_liger_loss
from lib.model import PROBE_TOKENS, LossModel, without_attention
from lib.rounds import equal_losses


def use_head(model: LossModel, name: str) -> None:
    """Replaces the head of the model inside; call it before it is enabled or sharded.

    Args:
        model: is changed in place.
        name: one of `HEADS`.

    Raises:
        SystemExit: it is not installed, or has another loss than the model's own head.
    """
    own = _loss_of_few_tokens(model)
    HEADS[name](model.causal_lm)
    replaced = _loss_of_few_tokens(model)
    if not equal_losses([own, replaced], model.causal_lm.dtype):
        raise SystemExit(
            f"--head {name}: the loss of {PROBE_TOKENS} tokens is {replaced}, with the model's head {own}"
        )


def _loss_of_few_tokens(model: LossModel) -> float:
    """Returns the loss: a sum over all but one of them, divided by a number of our choice."""
    positions = torch.arange(PROBE_TOKENS, device=model.causal_lm.device)[None]
    tokens = positions % model.causal_lm.config.get_text_config().vocab_size
    shift_labels = tokens.roll(-1).masked_fill(positions == PROBE_TOKENS - 1, -100)
    labels = {"labels": tokens, "shift_labels": shift_labels, "num_items_in_batch": PROBE_TOKENS / 3}
    with without_attention(model.causal_lm), torch.no_grad():
        return model.forward(input_ids=tokens, position_ids=positions, **labels).item()


def _keep(causal_lm: PreTrainedModel) -> None:
    pass


def _use_chunks(causal_lm: PreTrainedModel) -> None:
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise SystemExit(f"--head chunked: torch {torch.__version__} has no LinearCrossEntropyOptions; torch 2.13 has")
    causal_lm.forward = MethodType(_forward_in_chunks, causal_lm)


def _forward_in_chunks(
    causal_lm: PreTrainedModel,
    labels: torch.Tensor,
    shift_labels: torch.Tensor,
    num_items_in_batch: float,
    **batch: Any,
) -> CausalLMOutputWithPast:
    hidden = causal_lm.base_model(**batch).last_hidden_state
    losses = nn.functional.linear_cross_entropy(
        hidden.flatten(0, 1),
        causal_lm.get_output_embeddings().weight,
        shift_labels.flatten(),
        reduction="none",
        options=nn.LinearCrossEntropyOptions(),
    )
    return CausalLMOutputWithPast(loss=losses.float().sum() / num_items_in_batch)


HEADS: dict[str, Callable[[PreTrainedModel], None]] = {
    "none": _keep,
    "chunked": _use_chunks,
    "liger": use_liger_loss,
}
