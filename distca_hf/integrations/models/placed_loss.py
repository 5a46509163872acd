"""Placed loss: head and loss run on the rows that layers computed, and nothing returns but the loss.

    model(batch of this rank, [B, L])
      ──▶ tokens and shifted labels placed on this rank, [1, T] ──▶ embedding, layers, head, loss
      ◀── the loss

So head and loss are as even as the layers. The loss of a rank becomes that of other tokens. The sum over ranks stays,
if all of them divide by one number of labels. So this is for passes of which only that sum is ever seen. Every rank
says whether its pass may run like this; if one of them may not, results of all ranks return.
"""

import ast
import inspect
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.integrations.models.check import refused_loss
from distca_hf.integrations.models.counted_rows import MEANS_OVER_ROWS
from distca_hf.integrations.models.decoder_borders import OF_DOCUMENTS, DecoderBorders
from distca_hf.integrations.models.structure import syntax_of, text_decoder
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

READER_UNKNOWN = "the program may read logits, or the loss of its rank (plugin.attach knows what a Trainer reads)"
# Of a pass that does not train, or whose model keeps rows where they are.
ROWS_STAY = "rows stay"
# Packages whose hooks read no results of a pass: they gather weights, or are ours.
KNOWN_HOOKS = frozenset({"accelerate", "deepspeed", "distca_hf", "peft", "torch", "transformers"})
# Replaces forward of a model by one that learns shift_labels, if they are given.
FUSED_HEADS = "liger_kernel."
# Shifted labels on their way, as numbers from the ignored label on: rows without a token then have that label.
SHIFTED = "distca_shift_labels"


class PlacedLoss:
    """Decides pass by pass whether one model's head and loss run on placed rows.

    Args:
        model: a Transformers model.
        root: the module that was enabled, which may be around it.

    Attributes:
        is_placed: whether they do in the pass that runs.
        is_unlogged: whether they did in a pass since the last log.
    """

    def __init__(self, model: PreTrainedModel, root: nn.Module) -> None:
        self._model, self._root = model, root
        self._is_multimodal = text_decoder(model) is not model
        self._reads_more = READER_UNKNOWN
        self._said: set[str] = set()
        self.is_placed = self.is_unlogged = False

    @contextmanager
    def read_as_sum(self, unless: str) -> Iterator[None]:
        """Runs passes of which nothing is read but the sum of their losses over ranks.

        Args:
            unless: why more is read; empty if it is not.
        """
        before, self._reads_more = self._reads_more, unless
        try:
            yield
        finally:
            self._reads_more, self.is_placed = before, False

    def _of_batch(self, batch: Batch) -> str:
        tokens, labels, shifted = tokens_of(batch), batch.get("labels"), batch.get("shift_labels")
        if not isinstance(labels, torch.Tensor) or labels.shape != tokens.shape:
            return "the batch has no label for each token"
        if shifted is not None and shifted.shape != tokens.shape:
            return "shift_labels have another shape than tokens"
        if batch.get("num_items_in_batch") is None:
            return "the model is given no num_items_in_batch, and divides by the labels of its rank"
        for name in ("output_router_logits", "logits_to_keep"):
            if isinstance(given := batch.get(name), torch.Tensor) or given:
                return f"{name} is set"
        others = {name: value for name, value in batch.items() if name not in OF_DOCUMENTS and name != "position_ids"}
        shapes = {name: value.shape for name, value in others.items() if isinstance(value, torch.Tensor)}
        unknown = [name for name, shape in shapes.items() if shape.numel() > 1 and shape[:2] != tokens.shape]
        return f"the batch has {unknown[0]}, which is not of single tokens" if unknown else ""

    def _of_model(self) -> str:
        model = self._model
        name = type(model).__name__
        if self._is_multimodal:
            return f"{name} puts images between tokens"
        if getattr(model.config, "output_router_logits", False):
            return "the model adds a loss of its routers (output_router_logits)"
        if any(getattr(model, factor, 0) for factor in MEANS_OVER_ROWS) or not _is_plain(type(model)):  # type: ignore[arg-type]
            return f"the loss of {name} is more than a sum over labels"
        if model.loss_function is not ForCausalLMLoss or next(refused_loss(model), None) is not None:
            return f"{name} has a loss of its own"
        runs = inspect.unwrap(vars(model).get("forward", type(model).forward))
        runs = getattr(runs, "__func__", runs)
        is_replaced = runs is not inspect.unwrap(type(model).forward) and not runs.__module__.startswith(FUSED_HEADS)
        if is_replaced and "shift_labels" not in inspect.signature(runs).parameters:
            return f"forward of this {name} was replaced, and has no parameter shift_labels"
        return self._of_hooks()

    def _of_hooks(self) -> str:
        for part in (self._root, self._model, self._model.get_output_embeddings()):
            hooks = [] if part is None else [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
            for hook in hooks:
                function = getattr(hook, "func", hook)  # of a partial
                module = getattr(function, "__module__", None) or type(function).__module__
                if module.partition(".")[0] not in KNOWN_HOOKS:
                    return f"a hook of {module} may read logits or the loss"
        return ""

    def begin(self, batch: Batch | None) -> str:
        """Begins a pass on a batch that was not placed before.

        Args:
            batch: None if it does not train, or its rows cannot move.

        Returns:
            Why its results must return to this rank; empty if they need not.
        """
        return ROWS_STAY if batch is None else self._reads_more or self._of_batch(batch) or self._of_model()

    def decide(self, returning: str, reason: str) -> None:
        """Decides as all ranks do; rank 0 logs once which way is taken, and why.

        Args:
            returning: ranks whose results must return; empty if there are none.
            reason: of this rank.
        """
        self.is_placed = not returning
        if reason == ROWS_STAY:
            return
        why = "nobody reads logits, and losses are averaged over ranks before they are logged"
        if returning:
            why = reason or f"rank {returning} reads them, or has a batch that needs them (at level DEBUG it says why)"
        if why in self._said:
            return
        self._said.add(why)
        if returning:
            log.info("hidden states return to the ranks of their batches, for head and loss: %s", why)
            log.debug("this rank: %s", reason or "needs no results")  # rank 0 alone writes information
        else:
            log.info("head and loss run on placed rows, and only the loss returns: %s", why)

    def place(self, batch: Batch, plan: LivePlan, borders: DecoderBorders) -> Batch:
        """Returns the placed rows of a batch with their labels; the batch itself if its rows stay. A collective call.

        Labels are shifted in the rows of the batch, as the model's loss would shift them.
        """
        shifted = batch.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED_LABEL)[..., 1:]
        moving = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        placed = borders.move_in(plan, {**moving, SHIFTED: shifted - IGNORED_LABEL})
        borders.end()  # nothing moves at the decoder
        if placed is None:
            return batch
        labels = placed.pop(SHIFTED) + IGNORED_LABEL
        return {**placed, "labels": labels, "shift_labels": labels}

    def end(self, output: Any) -> Any:
        """Ends a pass; returns its output, without anything but the loss if its rows were placed: whoever reads more
        finds nothing, not results of other tokens."""
        if not self.is_placed:
            return output
        self.is_placed, self.is_unlogged = False, True
        return output[:1] if isinstance(output, tuple) else type(output)(loss=output["loss"])


@lru_cache(maxsize=1024)
def _is_plain(model_class: Hashable) -> bool:
    """Returns whether forward adds nothing to what `self.loss_function` returns, but for losses of routers."""
    for node in syntax_of(getattr(model_class, "forward", None)):
        if isinstance(node, ast.Assign):
            is_changed = "loss" in map(ast.unparse, node.targets) and isinstance(node.value, ast.BinOp)
        else:
            is_changed = isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "loss"
        if is_changed and "aux_loss" not in ast.unparse(node):
            return False
    return True
