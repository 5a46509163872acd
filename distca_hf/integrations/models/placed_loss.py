"""Placed loss: runs head and loss on the rows that layers computed, as evenly divided as the layers.

    model(batch of this rank, [B, L])
      ──▶ tokens and shifted labels placed on this rank, [1, T] ──▶ embedding, layers, head, loss
      ◀── the loss, or numbers of single tokens, [B, L]

A pass returns one of three things, the same on all ranks (`Returning`):

- LOSS: a model that computes its own loss returns nothing else. The loss of a rank then covers other tokens than its
  batch. The sum over ranks stays the same if all divide by the same number of labels. So this is only for passes from
  which only that sum is read.
- TOKEN_VALUES: fused heads of TRL return log probabilities and other numbers of single tokens, a few bytes each. They
  return to the row of their token, so programs may read them.
- STATES: hidden states return, and head and loss run on the rows of each rank's batch, as without this module.

Every rank says what its pass must return. Unless all say the same, hidden states return.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import Batch, shifted_labels, tokens_of
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.integrations.models.check import loses_shift_labels
from distca_hf.integrations.models.counted_rows import MEANS_OVER_ROWS
from distca_hf.integrations.models.decoder_borders import DecoderBorders
from distca_hf.integrations.models.decoder_columns import REPLACED_BY_PLAN
from distca_hf.integrations.models.hooks import KNOWN_HOOKS, hooks_of, unknown_hook
from distca_hf.integrations.models.structure import syntax_of, text_decoder
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.row_moves import PassRows
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

READER_UNKNOWN = "the program may read logits, or the loss of its rank (plugin.attach knows what a Trainer reads)"
# Reason for a pass that does not train, or a model whose rows stay where they are.
ROWS_STAY = "rows stay"
# Packages whose wrappers of functions do not read results, either.
KNOWN_WRAPPERS = KNOWN_HOOKS | {"contextlib", "functools", "liger_kernel"}
# Modules that replace a model's forward by one that trains on shift_labels if they are given.
FUSED_HEADS = "liger_kernel."
# The same with a flag; a pass then returns numbers of single tokens.
TOKEN_HEADS, TOKEN_FLAG = "trl.trainer.utils", "fused_lm_head"


class PlacedLoss:
    """Decides for each pass of one model whether its head and loss run on placed rows. `root` was enabled, and may
    wrap the model."""

    def __init__(self, model: PreTrainedModel, root: nn.Module) -> None:
        self._model, self._root = model, root
        self._is_multimodal = text_decoder(model) is not model
        self._reads_more = READER_UNKNOWN
        self._said: set[str] = set()
        self.is_unlogged = False  # whether a pass since the last log returned a loss of placed rows
        self._returning = Returning.STATES
        self._rows: PassRows | None = None
        self._shifted: tuple[object, torch.Tensor] | None = None
        self._label_count: Any = None
        self._shifts = False
        # The head, and modules whose hooks may read its results; found when the model had these parts.
        self._head: nn.Module | None = None
        self._around, self._parts_then = list[nn.Module](), list[nn.Module | None]()
        # Hooks and functions that were inspected last, and what was found (empty if nothing): the Python module of an
        # unknown hook, and why the loss of these functions cannot be placed.
        self._hooks, self._hooked = list[object](), ""
        self._functions, self._of_functions = tuple[object, ...](), ""

    @property
    def is_placed(self) -> bool:
        """Whether the head of the running pass is on placed rows."""
        return self._returning != Returning.STATES

    @contextmanager
    def read_as_sum(self, unless: str) -> Iterator[None]:
        """Runs passes from which only the sum of their losses over ranks is read. `unless` says why more is read;
        empty if it is not."""
        before, self._reads_more = self._reads_more, unless
        try:
            yield
        finally:
            self._reads_more, self._returning = before, Returning.STATES

    # These methods return why hidden states must return, or nothing.

    def _of_batch(self, batch: Batch) -> str:
        tokens, labels, shifted = tokens_of(batch), batch.get("labels"), batch.get("shift_labels")
        if not isinstance(labels, torch.Tensor) or labels.shape != tokens.shape:
            return "the batch has no label for each token"
        if shifted is not None and shifted.shape != tokens.shape:
            return "shift_labels have another shape than tokens"
        for name in ("output_router_logits", "logits_to_keep"):
            if (given := batch.get(name)) is not None and (isinstance(given, torch.Tensor) or given):
                return f"{name} is set"
        for name, x in batch.items():
            if name in REPLACED_BY_PLAN or name == "position_ids" or not isinstance(x, torch.Tensor):
                continue
            if x.shape[:2] != tokens.shape and x.numel() > 1:
                return f"the batch has {name}, which is not of single tokens"
        return ""

    def _of_model(self) -> str:
        if self._is_multimodal:
            return f"{type(self._model).__name__} may put features of images among the tokens"
        if getattr(self._model.config, "output_router_logits", False):
            return "the model adds a loss of its routers (output_router_logits)"
        parts = [*self._model._modules.values()]
        if parts != self._parts_then or self._head not in parts:  # quicker than asking for the head in every pass
            self._head, self._parts_then = self._model.get_output_embeddings(), parts
            around = dict.fromkeys((self._root, self._model, self._head))
            self._around = [part for part in around if part is not None]
        # Inspecting hooks takes long, and most passes have those of the pass before.
        hooks = [hook for part in self._around for hook in hooks_of(part)]
        if hooks != self._hooks:
            self._hooks, self._hooked = hooks, next(filter(None, map(unknown_hook, self._around)), "")
        return f"a hook of {self._hooked} may read logits or the loss" if self._hooked else ""

    def _of_loss(self, batch: Batch) -> str:
        if batch.get("num_items_in_batch") is None:
            return "the model is given no num_items_in_batch, and divides by the labels of its rank"
        model = self._model
        # Asked of the model, because its class or Transformers' table of losses may have changed, too.
        now = (
            type(model).forward,
            model.__dict__.get("forward"),
            model.loss_function,
            *map(getattr, repeat(model), MEANS_OVER_ROWS, repeat(0)),
        )
        if now != self._functions:  # inspecting them takes long
            self._functions, self._of_functions = now, self._inspected()
        return self._of_functions

    def _inspected(self) -> str:
        model, name = self._model, type(self._model).__name__
        if any(getattr(model, factor, 0) for factor in MEANS_OVER_ROWS) or not _is_plain(type(model).forward):
            return f"the loss of {name} is more than a sum over labels"
        if model.loss_function is not ForCausalLMLoss or loses_shift_labels(model):
            return f"{name} has its own loss"
        runs = vars(model).get("forward", type(model).forward)
        if written := _unknown_wrapper(runs):
            return f"forward of this {name} is wrapped by {written}, which may read logits or the loss"
        runs = inspect.unwrap(runs)
        runs = getattr(runs, "__func__", runs)
        is_replaced = runs is not inspect.unwrap(type(model).forward) and not runs.__module__.startswith(FUSED_HEADS)
        if is_replaced and "shift_labels" not in inspect.signature(runs).parameters:
            return f"forward of this {name} was replaced, and has no parameter shift_labels"
        return ""

    def begin(self, batch: Batch | None) -> tuple[Returning, str]:
        """Begins a pass on a given batch. `batch` is None if it does not train, or its rows cannot move. Returns what
        must return to this rank, and why if it is hidden states, otherwise empty."""
        # The previous pass may have raised.
        self._rows, self._shifted, self._returning = None, None, Returning.STATES
        if batch is None:
            return Returning.STATES, ROWS_STAY
        if batch.get(TOKEN_FLAG) is True and _returns_token_values(self._model):
            reason = self._of_batch(batch) or self._of_model()
            return Returning.STATES if reason else Returning.TOKEN_VALUES, reason
        reason = self._reads_more or self._of_batch(batch) or self._of_model() or self._of_loss(batch)
        return Returning.STATES if reason else Returning.LOSS, reason

    def decide(self, returning: Returning, needing: str, reason: str) -> None:
        """Decides in the same way as all ranks; rank 0 logs each decision once, with the reason.

        Args:
            returning: what passes of all ranks return.
            needing: ranks that need hidden states, for the log.
            reason: why this rank needs them; empty if it does not.
        """
        self._returning = returning
        if reason == ROWS_STAY:
            return
        others = f"rank {needing} reads them, or has a batch that needs them (at level DEBUG it says why)"
        why = reason or (others if needing else "some ranks return their loss, others values of tokens")
        said = {
            Returning.LOSS: "head and loss run on placed rows, and only the loss returns: nobody reads logits, and "
            "losses are averaged over ranks before they are logged",
            Returning.TOKEN_VALUES: "the head runs on placed rows, and log probabilities of tokens return to the "
            "ranks of their batches",
            Returning.STATES: f"hidden states return to the ranks of their batches, for head and loss: {why}",
        }[returning]
        if said not in self._said:
            self._said.add(said)
            log.info("%s", said)
            if not self.is_placed:
                log.debug("this rank: %s", reason or "needs no hidden states")  # only rank 0 writes information

    def prepare(self, batch: Batch, planned: Planned | None, borders: DecoderBorders) -> None:
        """Does a part of `place` while this rank waits for the others, if rows are likely to move. `planned` is the
        plan that was made ahead, None if there is none."""
        if planned is None:
            self._shift(batch)
        elif (moves := planned.rows_to_move) is not None:
            borders.pack(moves, self._moving(batch))

    def _moving(self, batch: Batch) -> Batch:
        """Returns a batch with shifted labels."""
        return {name: value for name, value in batch.items() if name != "labels"} | {
            "shift_labels": self._shift(batch)
        }

    def _shift(self, batch: Batch) -> torch.Tensor:
        """Returns labels of a batch, shifted in its rows as the model's loss would shift them. Keeps them for the next
        call."""
        labels = batch["labels"]
        if self._shifted is None or self._shifted[0] is not labels:
            shifted = shifted_labels(batch)
            assert shifted is not None  # the batch has labels
            self._shifted = labels, shifted
        return self._shifted[1]

    def place(self, batch: Batch, plan: LivePlan, borders: DecoderBorders) -> Batch:
        """Returns placed rows of a batch with their labels; the batch itself if its rows stay. A collective call."""
        moves = plan.planned.rows_to_move
        placed = None if moves is None else borders.move_in(plan, moves, self._moving(batch))
        self._rows, self._shifted = borders.take_rows(), None
        if placed is None or self._rows is None:
            return batch
        self._label_count, self._shifts = batch.get("num_items_in_batch"), batch.get("shift_labels") is None
        labels = placed["shift_labels"]
        if self._rows.num_tokens < self._rows.num_placed:
            labels[:, self._rows.num_tokens :] = IGNORED_LABEL
        return {**placed, "labels": labels}

    def end(self, output: Any) -> Any:
        """Ends a pass; returns its output, with values of this rank's own tokens. If only the loss returns, drops
        everything else from the output, because it would be of other tokens. A collective call."""
        returning, self._returning = self._returning, Returning.STATES
        rows, self._rows = self._rows, None
        if returning == Returning.LOSS:
            self.is_unlogged = True
            return output[:1] if isinstance(output, tuple) else type(output)(loss=output["loss"])
        if returning == Returning.STATES or rows is None:
            return output
        # `[1, T]` values of placed tokens move home, `[B, L - 1]`, or `[B, L]` if labels were shifted before.
        names = [name for name, value in output.items() if value.ndim == 2]
        homes = rows.move_home([output[name][..., None] for name in names])
        for name, home in zip(names, homes, strict=True):
            output[name] = home[:, : -1 if self._shifts else None, 0]
        count = output["label_mask"].sum().clamp(min=1) if self._label_count is None else self._label_count
        output["loss"] = -output["log_probs"].sum() / count
        return output


def _unknown_wrapper(function: Any) -> str:
    """Returns the Python module of a wrapper of a function that may read or change results; empty if there is none."""
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        wrapper = getattr(function, "__func__", function)
        wrapper = getattr(wrapper, "func", wrapper)  # of a partial
        # Wrappers take the name of the module over from what they wrap.
        module: str = getattr(wrapper, "__globals__", {}).get("__name__") or type(wrapper).__module__
        if module.partition(".")[0] not in KNOWN_WRAPPERS:
            return module
        function = wrapped
    return ""


def _returns_token_values(model: PreTrainedModel) -> bool:
    """Returns whether a model's forward was replaced by a head that returns numbers of single tokens, even if that was
    wrapped since."""
    function = vars(model).get("forward")
    while function is not None:
        function = getattr(function, "__func__", function)
        if getattr(function, "__globals__", {}).get("__name__") == TOKEN_HEADS:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@lru_cache(maxsize=1024)
def _is_plain(forward: Callable[..., object]) -> bool:
    """Returns whether a model's forward adds nothing to what `self.loss_function` returns, except losses of
    routers."""
    for node in syntax_of(forward):
        if isinstance(node, ast.Assign):
            is_changed = "loss" in map(ast.unparse, node.targets) and isinstance(node.value, ast.BinOp)
        else:
            is_changed = isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "loss"
        if is_changed and "aux_loss" not in ast.unparse(node):
            return False
    return True


def label_count(batch: Batch, plan: LivePlan) -> dict[str, torch.Tensor]:
    """Returns `num_items_in_batch`: the caller's, or this rank's share of all labels of the micro-batch if they were
    counted. Never 0: a step without labels has loss 0, not 0 / 0."""
    count, labels = batch.get("num_items_in_batch"), batch.get("labels")
    if count is not None:
        return {"num_items_in_batch": count + (count == 0)}
    if labels is None or plan.label_tokens is None:
        return {}
    share = max(1, plan.label_tokens) / plan.transport.world_size
    return {"num_items_in_batch": labels.new_tensor(share, dtype=torch.float32)}
