"""Heads and losses of a whole model (`HEADS`), which replace the model's own and have the same loss."""

import argparse
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from lib.liger import use_liger_loss
from lib.model import PROBE_TOKENS, LossModel, without_attention
from lib.report import equal_losses


def use_head(model: LossModel, name: str) -> None:
    """Replaces the head of the model inside by one of `HEADS`; call it before it is enabled or sharded. Exits if that
    is not installed, or has another loss than the model's own head."""
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


HEADS: dict[str, Callable[[PreTrainedModel], None]] = {"none": lambda _: None, "liger": use_liger_loss}


def add_head(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--head`, by default this one."""
    parser.add_argument("--head", choices=[*HEADS], default=default, help="none is Transformers' own")
