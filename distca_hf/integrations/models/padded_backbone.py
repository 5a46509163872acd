"""Padded backbone: the layers of a model see padded rows as one pack, all around them sees the rows.

    model(input_ids [B, L], attention_mask [B, L])
      backbone  ──▶ [1, T] tokens with positions, no mask ──▶ layers ──▶ hidden states [1, T, D]
      ◀── [B, L, D], zeros in padding
    head, loss, pooling: as they are

So trainers that pad their batches (of preferences, rewards, policies) keep their losses.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from distca_hf.batches.batch_documents import Batch
from distca_hf.batches.padded import PaddedRows, padded_rows_of
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.hooks import Hook
from distca_hf.integrations.models.structure import names_by_position
from distca_hf.torch_private import hidden_from_dynamo


class PaddedBackbone:
    """Hooks around the backbone of a model, its `base_model`. They do nothing in a pass whose batch is not padded.

    Args:
        model: a model with a head of its own. Without one nothing stands around the layers, and its padded batches
            stay padded.
        has_position_table: whether it looks positions up in a table.
    """

    def __init__(self, model: PreTrainedModel, has_position_table: bool) -> None:
        backbone = model.base_model
        self._backbone = None if backbone is model else backbone
        self._names = [] if self._backbone is None else names_by_position(backbone)
        self._class_name, self._has_position_table = type(model).__name__, has_position_table
        self._handles: list[RemovableHandle] = []
        self._rows: PaddedRows | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "PaddedBackbone":
        """Returns itself: a copied model is not enabled, and its passes are none of these."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Returns how None is made: a model that is stored, or sent to another process, is not enabled there."""
        return type(None), ()

    def enter(self) -> None:
        """Adds the hooks."""
        if self._backbone is not None:
            self._handles = [
                self._backbone.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
                self._backbone.register_forward_hook(Hook(self._after), with_kwargs=True),
            ]

    def leave(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def row_tokens(self) -> int:
        """Places of a row in a pass whose batch is padded; 0 in other passes."""
        return 0 if self._rows is None else self._rows.shape[1]

    def begin(self, batch: Batch) -> Batch:
        """Begins a pass whose batch may be padded; waits for the device.

        Returns:
            The batch as the layers will see it: a pack, or the batch itself.

        Raises:
            PackingError: as for `padded_rows_of`.
            UnsupportedAttentionError: rows begin with padding, and the model's positions would count it.
        """
        self._rows = None if self._backbone is None else padded_rows_of(batch)
        if self._rows is None:
            return batch
        if self._has_position_table and self._rows.is_left_padded and not self._rows.has_own_positions:
            raise UnsupportedAttentionError(
                f"{self._class_name} looks positions up in a table, and rows are padded on the left: Transformers "
                "would count their padding, too. Pad on the right (tokenizer.padding_side), or give position_ids "
                "that begin at 0 in every row"
            )
        return _packed(batch, self._rows) | {"position_ids": None, "cu_seq_lens_q": self._rows.offsets}

    def end(self) -> None:
        """Ends a pass, or leaves its batch padded."""
        self._rows = None

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        """Hides the padding from the layers. A compiler looks in here, and finds nothing to do without padding."""
        if self._rows is None or kwargs.get("distca_plan") is None:
            return None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        return args[len(self._names) :], _packed(given, self._rows) | {"position_ids": self._rows.positions}

    def _after(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object) -> object:
        """Puts hidden states, and scores of routers, back into the rows."""
        if self._rows is None or kwargs.get("distca_plan") is None:
            return None
        return _unpacked(output, self._rows)


@hidden_from_dynamo
def _packed(given: Batch, rows: PaddedRows) -> dict[str, Any]:
    """Returns keywords that hold a value per token as those of a pack, and others as they are. Outside of compiled
    graphs, because every batch has another number of tokens."""
    packed = {
        name: rows.pack(value) if isinstance(value, torch.Tensor) and value.shape[:2] == rows.shape else value
        for name, value in given.items()
    }
    return packed | {"attention_mask": None}


@hidden_from_dynamo
def _unpacked(output: Any, rows: PaddedRows) -> Any:
    """Returns an output with all tensors of the tokens put back: `[1, T, D]` and `[T, D]`."""
    if isinstance(output, torch.Tensor):
        tokens = len(rows.token_places)
        of_tokens = output.shape[:-1] in ((1, tokens), (tokens,))
        return rows.unpack(output) if of_tokens else output
    if isinstance(output, dict):  # Transformers' outputs are dictionaries, and keep their class
        for name, value in output.items():
            output[name] = _unpacked(value, rows)
        return output
    if isinstance(output, tuple | list):
        return type(output)(_unpacked(value, rows) for value in output)
    return output
