"""Counted rows: keeps numbers that Transformers computes from the rows of a batch as they are without placement.

A placed row holds parts of many documents, followed by padding. NEFTune's noise depends on the length of a row, and
some losses are means over all rows. Here each document gets the noise of a row that holds only this document, and
these losses see no padding. Tokens that are placed inside the model get the noise of their original row. A rank
without tokens runs a row of padding, for which routers and these losses would return some loss: its loss is set to 0.

In some layers of Llama 4, queries are scaled up with their place in the row. Here attention scales them instead, by
the positions given to the model.
"""

import ast
import math
import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook

from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.preview import PlacedPlan
from distca_hf.integrations.attention import Tempered
from distca_hf.integrations.models.hooks import HiddenHook, Hook
from distca_hf.integrations.models.structure import attention_layers, embedding_holder, syntax_of
from distca_hf.runtime.live_plan import LivePlan


# Attributes of models: factors of those terms of their loss that are means over all rows of logits.
MEANS_OVER_ROWS = ("z_loss_coefficient",)  # Bamba
LARGEST_SEED = 2**62
# A part of a layer that normalises, in source text.
NORM = re.compile(r"self\.(\w*norm\w*)\(")


class CountedRows:
    """Corrects passes of one model on placed batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._noise = model, HiddenHook(self._add_noise)
        self._embedding_holder = embedding_holder(model)
        self._lengths_T: torch.Tensor | None = None
        self._longest_tokens = self._rank = self._padding_rows = 0
        self.is_noisy = self._is_empty = False

    def begin(self, batch: Batch, plan: LivePlan | None, trains: bool, row_tokens: int = 0) -> dict[str, Any]:
        """Begins a pass; returns entries to replace in its batch.

        Args:
            trains: whether the pass trains; others get no noise.
            row_tokens: tokens of each row of a batch that was not placed.
        """
        self._lengths_T, self._longest_tokens, self._padding_rows = None, 0, 0
        self.is_noisy = self._is_empty = False
        if plan is None:
            return {}
        if trains:  # Trainer or a program may have added Transformers' hook to the embeddings
            hooks = self._embedding_holder.get_input_embeddings()._forward_hooks
            for number in [number for number, hook in hooks.items() if hook is neftune_post_forward_hook]:
                hooks[number] = self._noise
            self.is_noisy = self._noise in hooks.values()
        if self.is_noisy:
            self._longest_tokens, self._rank = row_tokens, plan.transport.rank
        if (lengths := plan.document_tokens) is None:
            return {}
        if not isinstance(plan, PlacedPlan):
            self._is_empty = not len(lengths) and batch.get("labels") is not None
            return {}
        if self.is_noisy:
            self._longest_tokens = int(plan.whole_tokens.max(initial=1))
            self._lengths_T = torch.from_numpy(np.repeat(plan.whole_tokens, lengths)).to(tokens_of(batch).device)
        is_cut = not isinstance(kept := batch.get("logits_to_keep", 0), int) or kept != 0
        if is_cut or batch.get("labels") is None or not any(getattr(self._model, name, 0) for name in MEANS_OVER_ROWS):
            return {}
        tokens, real = tokens_of(batch), max(1, int(lengths.sum()))  # a mean over no rows is NaN
        self._padding_rows = tokens.shape[1] - real
        of_loss = {name: batch[name][:, :real] for name in ("labels", "shift_labels") if batch.get(name) is not None}
        return {**of_loss, "logits_to_keep": torch.arange(real, device=tokens.device)}

    def has_noise(self) -> bool:
        """Returns whether embeddings of passes that train get noise."""
        hooks = self._embedding_holder.get_input_embeddings()._forward_hooks.values()
        return any(hook is neftune_post_forward_hook or hook is self._noise for hook in hooks)

    def place(self, row_tokens_T: torch.Tensor) -> None:
        """Notes the length of each token's original row, 0 for padding."""
        self._lengths_T = row_tokens_T.clamp(min=1)

    def end(self, output: Any) -> Any:
        """Ends a pass whose results are of this rank's batch. Returns its output with logits of all rows, zeros in
        padding, and a loss of 0 if the batch has no token."""
        if self._is_empty and isinstance(output, tuple):
            return _zero(output[0]), *output[1:]
        if self._is_empty and isinstance(output, dict):
            for name in {"loss", "aux_loss"} & output.keys():
                output[name] = _zero(output[name])
        padding = 0, 0, 0, self._padding_rows
        if self._padding_rows and isinstance(output, tuple):
            loss, logits_TV, *others = output
            return loss, nn.functional.pad(logits_TV, padding), *others
        if self._padding_rows:
            output.logits = nn.functional.pad(output.logits, padding)
        return output

    def _add_noise(self, embeddings: nn.Module, args: object, output_BTD: torch.Tensor) -> torch.Tensor:
        """Adds uniform noise of at most alpha / sqrt(L x D) to embeddings `[1, T, D]`. L is the number of tokens in
        the whole document, or in a padded row."""
        if not self._longest_tokens or not embeddings.training:
            noisy: torch.Tensor = neftune_post_forward_hook(embeddings, args, output_BTD)
            return noisy
        noise_BTD, lengths_T, device = torch.zeros_like(output_BTD), self._lengths_T, output_BTD.device
        real = None if lengths_T is None else len(lengths_T)
        alpha: Any = embeddings.neftune_noise_alpha
        most = alpha / math.sqrt(self._longest_tokens * output_BTD.shape[-1])
        # Ranks usually have the same seed, and two parts of one document must not have the same noise.
        seed = int(torch.randint(LARGEST_SEED, ())) + self._rank
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            noise_BTD[:, :real].uniform_(-most, most)
        if lengths_T is not None:
            noise_BTD[:, :real] *= torch.sqrt(self._longest_tokens / lengths_T)[:, None].to(noise_BTD.dtype)
        return output_BTD + noise_BTD


def _zero(loss: torch.Tensor) -> torch.Tensor:
    """Returns 0 for a loss, even if it is NaN (a mean over no label); backward still reaches all weights."""
    return (0 * loss).nan_to_num()


def tempers_queries(attention: nn.Module) -> bool:
    """Returns whether queries of a layer are tempered by their place."""
    tempers = getattr(attention, "attn_temperature_tuning", False)
    return (bool(tempers) or isinstance(tempers, Tempered)) and not getattr(attention, "use_rope", True)


def scales_rotated(attention: nn.Module) -> bool:
    """Returns whether weights of norms scale queries or keys after their rotation (HunYuan). Scores then depend on
    positions, not only on distances."""
    norms = _norms_after_rotation(type(attention))  # type: ignore[arg-type]
    return any([*part.parameters()] for name, part in attention.named_children() if name in norms)


@lru_cache(maxsize=1024)
def _norms_after_rotation(module_class: Hashable) -> tuple[str, ...]:
    """Returns names of parts that the class's own forward applies to what rotary embeddings returned."""
    rotated, norms = set[str](), list[str]()
    forward: Any = getattr(module_class, "forward", None)
    assigned = (node for node in syntax_of(forward) if isinstance(node, ast.Assign))
    for node in sorted(assigned, key=lambda one: one.lineno):
        names, read = (
            {one.id for part in parts for one in ast.walk(part) if isinstance(one, ast.Name)}
            for parts in (node.targets, [node.value])
        )
        if "rotary" in ast.unparse(node.value):
            rotated |= names
        elif read & rotated:
            norms += NORM.findall(ast.unparse(node.value))
    return tuple(norms)


def temper_by_position(model: PreTrainedModel) -> list[RemovableHandle]:
    """Makes attention temper queries that layers would temper by their place in the row. Returns the hooks that give
    it positions."""
    handles, modules = [], dict(model.named_modules())
    for name, attention in attention_layers(model).items():
        if tempers_queries(attention):
            vars(attention)["attn_temperature_tuning"] = Tempered()
            layer = modules[name.rpartition(".")[0]]
            handles.append(layer.register_forward_pre_hook(Hook(_with_positions), with_kwargs=True))
    return handles


def temper_by_row(model: PreTrainedModel) -> None:
    """Undoes `temper_by_position`, except its hooks."""
    for attention in attention_layers(model).values():
        if isinstance(getattr(attention, "attn_temperature_tuning", False), Tempered):
            vars(attention)["attn_temperature_tuning"] = True


def _with_positions(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "distca_positions": kwargs["position_ids"]}
