"""The mask function behind "distca": instead of building a mask, it finds out which documents there are.

Transformers calls it once per forward pass (and kind of layer), with everything the mask would depend on. What cannot
be said as causal documents is refused here or, with the layer's name, in the attention function.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from distca_hf.errors import PackingError, UnsupportedAttentionError


MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]


class RowMask:
    """Stands in for an attention mask. Nothing is computed until a layer asks: with a plan none does."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this when something computes with the mask: a layer that does not attend through distca.

        Compiled checkpointing calls it, too, but only passes the mask on to the layer.
        """
        if function is torch.ops.higher_order.tag_activation_checkpoint:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise UnsupportedAttentionError(
            f"a layer computed {getattr(function, '__name__', function)} with the mask of a packed or padded batch "
            "instead of attending through distca; it would see tokens it must not see, and no step was taken"
        )


class PaddedRows(RowMask):
    """Rows that are padded: each is one document, of the tokens whose mask is set."""

    def __init__(self, mask: torch.Tensor, q_length: int) -> None:
        self.shape = tuple(mask.shape)
        self._mask = mask
        self._q_length = q_length

    @cached_property
    def queries(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Rows that are tokens, offsets of the documents (int32) and their longest length: of the queries."""
        return _unpadded(self._mask[:, -self._q_length :])

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The same of the keys."""
        return _unpadded(self._mask)


def _unpadded(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    lengths = mask.sum(dim=1, dtype=torch.int32)
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return mask.flatten().nonzero().flatten(), offsets, int(lengths.max())


class PackedRows(RowMask):
    """Rows that hold several documents."""

    def __init__(self, mask_function: MaskFunction, batch_size: int, rows: int, device: torch.device) -> None:
        self._mask_function = mask_function
        self._shape = batch_size, rows
        self._device = device
        self._beginnings_checked = False

    @cached_property
    def documents(self) -> tuple[torch.Tensor, int]:
        """Offsets of the documents, rows of the batch one after the other (int32), and the longest length.

        Raises:
            UnsupportedAttentionError: some token attends to a later one.
        """
        batch_size, rows = self._shape
        row = torch.arange(batch_size, device=self._device)[:, None]
        query = torch.arange(1, rows, device=self._device)[None, :]
        if self._mask_function(row, 0, query - 1, query).any():
            raise UnsupportedAttentionError(
                "the model's mask lets some tokens attend to later ones; distca computes causal attention only"
            )
        goes_on = self._mask_function(row, 0, query, query - 1).expand(batch_size, rows - 1)
        begins = torch.nn.functional.pad(~goes_on, (1, 0), value=True)
        return offsets_of(begins)

    def documents_at(self, position_ids: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """The same, for tokens at these positions.

        Raises:
            PackingError: a document does not begin at position 0.
        """
        offsets, longest = self.documents
        if position_ids is not None and position_ids.ndim == 2 and not self._beginnings_checked:
            check_beginnings(position_ids.expand(self._shape).flatten()[offsets[:-1]])
            self._beginnings_checked = True
        return offsets, longest


def check_beginnings(positions: torch.Tensor) -> None:
    """Refuses documents that do not begin at position 0: they are parts of documents that were cut.

    Raises:
        PackingError: names the position.
    """
    if positions.any():
        raise PackingError(
            f"position_ids begin a document at position {int(positions.max())} instead of 0: part of it is missing. A "
            "batch of plugin.dataloader must be passed on with its distca_plan"
        )


def offsets_of(begins: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Offsets (int32) and longest length of documents, from bool `[B, T]` that is True where one begins."""
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([begins.numel()])]).to(torch.int32)
    return offsets, int(offsets.diff().max())


def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | RowMask | None:
    """What layers get as their attention mask; `transformers.AttentionMaskInterface` gives the arguments.

    Returns:
        None if every row is one causal document; `PackedRows` if positions restart inside of rows; `PaddedRows` if
        there is padding.

    Raises:
        UnsupportedAttentionError: a cache with free places, or a mask of the model's own.
    """
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if attention_mask.shape[1] != kv_length:
            return attention_mask
        if not attention_mask.all():
            return PaddedRows(attention_mask.bool(), q_length)
    if use_vmap:
        raise UnsupportedAttentionError(
            "the model combines its causal mask with one of its own (for images, prefixes or blocks), which distca "
            "does not compute; load it with another attn_implementation"
        )
    if kv_offset + kv_length > q_offset + q_length:
        raise UnsupportedAttentionError(
            f"the cache hands over {kv_length} places of keys, of which {int(q_offset) + q_length - kv_offset} are "
            'filled; static caches are not computed, use the default cache (cache_implementation="dynamic")'
        )
    packed = not allow_is_causal_skip and q_length == kv_length and q_length > 1 and mask_function is not None
    if packed and not torch.compiler.is_compiling():
        return PackedRows(mask_function, batch_size, q_length, torch.device(device))  # type: ignore[arg-type]
    return None
