"""The mask function of "distca": instead of building a mask, it keeps everything a mask would depend on.

Transformers calls it once per forward pass (and kind of layer). With a plan, layers only check whether the mask can be
computed at all. If a batch is attended to locally, the first layer finds its documents.

This module also notices models that were not enabled, with any attention and wherever a program keeps them. The mask
functions of all implementations search their callers for entries of a batch in use. They refuse tokens of a placed
batch, and of a pack if nothing tells its documents apart. In a compiled pass they check nothing.
"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from distca_hf.batches.batch_documents import documents_at
from distca_hf.batches.known_batch import (
    LEADING,
    TOKENS,
    any_known,
    copied_batch,
    known_batch,
    placed_in_another_model,
)
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.finding import Given, all_places, find_documents, find_in_graph, in_chunks, name_of
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.local_attention import Documents
from distca_hf.torch_private import without_torch_functions


# Attribute of an enabled model, and of the Transformers model inside it, that holds its `ForwardWatch`.
WATCH = "_distca_watch"


MaskFunction = Callable[..., torch.Tensor]
# Names of Transformers' causal mask functions: the plain one, and one that hides more (windows, packed documents).
# A function that shows more (blocks, images) is an `or_mask`.
CAUSAL_MASKS = frozenset({"causal_mask_function", "and_mask"})
OURS = "distca"
# Modules of Transformers' functions that ask for masks, and of wrappers around them that rename arguments.
ASKING, DEPRECATION = "transformers.masking_utils", "transformers.utils.deprecation"
# Arguments of models that tell which batch they were given, and names of their dicts of other keywords.
ARGUMENTS = (*LEADING, "cu_seq_lens_q", "distca_plan")
KEYWORDS = ("kwargs", "flash_attn_kwargs")


class RowMask:
    """Stands in for an attention mask. Computes nothing until a layer asks; with a plan, none does."""

    ndim = 4

    def __init__(
        self,
        shape: tuple[int, int, int, int],  # shape of the mask that it replaces, `[B, 1, T, S]`
        device: torch.device,
        # Places of the first query and the first key in their row, tokens in a cache included.
        q_offset: int | torch.Tensor = 0,
        kv_offset: int = 0,
        # False (or 0) for each place of a row that is padding; None if no mask was given.
        padding: torch.Tensor | None = None,
        # The mask as given to the model, before it was made bool; None if unknown.
        numbers: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,  # positions of queries as given to Transformers; None if unknown
        # A function that lets a token see the one before it if both are in one document; None if there is none.
        packed: MaskFunction | None = None,
        window_tokens: int | None = None,  # the most keys that a query sees; None if it sees all of its document
        chunked: bool = False,  # whether documents are known to be divided into chunks of `window_tokens` instead
        refusal: str | None = None,  # why the mask is more than causal documents; None if it is not
    ) -> None:
        self.shape, self.window_tokens, self.chunked, self.refusal = shape, window_tokens, chunked, refusal
        self._device, self._q_offset, self._kv_offset = device, q_offset, kv_offset
        self._padding, self._numbers, self._positions, self._packed = padding, numbers, positions, packed
        self._compiled = torch.compiler.is_compiling()
        self._documents: Documents | None = None
        self._given: tuple[torch.Tensor | None, ...] = ()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Refuses to compute with the mask. Torch calls this for a layer that does not attend through distca.

        Compiled checkpointing also calls it, but only passes the mask on to the layer.
        """
        if function is torch.ops.higher_order.tag_activation_checkpoint:
            with without_torch_functions():
                return function(*args, **(kwargs or {}))
        raise UnsupportedAttentionError(
            f"a layer computed {getattr(function, '__name__', function)} with the mask of a packed or padded batch "
            "instead of attending through distca; it would see tokens it must not see, and no step was taken"
        )

    def error(self, layer: nn.Module, queries: int, keys: int) -> UnsupportedAttentionError:
        """Returns the error to raise if the mask does not fit a layer; it names the layer."""
        if self.refusal is not None:
            return UnsupportedAttentionError(f"{name_of(layer)}: {self.refusal}")
        return UnsupportedAttentionError(
            f"{name_of(layer)}: has {queries} queries and {keys} keys per row, but the model made its mask for "
            f"{self.shape[2]} and {self.shape[3]}; run this model without distca_hf"
        )

    def contiguous(self) -> "RowMask":
        """Returns itself: `generate` calls this when it makes the mask of a static cache."""
        return self

    def __getitem__(self, places: tuple[slice, ...]) -> "RowMask":
        """Returns the mask of the last queries: layers of Gemma 4 that share keys leave out the others if nobody asks
        for their logits. Raises UnsupportedAttentionError if something else is asked for, or rows hold several
        documents."""
        batch_size, _, queries, keys = self.shape
        first, *rest = places[2].indices(queries)
        if places != (slice(None), slice(None), places[2], slice(None))[: len(places)] or rest != [queries, 1]:
            raise UnsupportedAttentionError(f"the model took {places} of an attention mask; run it without distca_hf")
        if not first:
            return self
        if self._packed is not None:
            raise UnsupportedAttentionError(
                f"the model left out the first {first} of {queries} queries of packed rows; run it without distca_hf"
            )
        return RowMask(
            (batch_size, 1, queries - first, keys),
            self._device,
            self._q_offset + first,
            self._kv_offset,
            self._padding,
            self._numbers,
            None if self._positions is None else self._positions[..., first:],
            window_tokens=self.window_tokens,
            chunked=self.chunked,
            refusal=self.refusal,
        )

    def documents(
        self,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> Documents:
        """Returns the documents that a layer attends to.

        They are found once for all layers with the same arguments. In a compiled graph every layer finds them.

        Args:
            position_ids: positions given to the layer. They count only if Transformers was given none.
            cu_seq_lens_q, cu_seq_lens_k: offsets given to the layer. They override everything else.
            chunk_tokens: length of the chunks within which these layers attend; None: they see whole documents.

        Raises:
            PackingError: a document does not begin at position 0, or a mask, positions or offsets do not fit.
            UnsupportedAttentionError: nothing says whether rows hold several documents.
        """
        given = position_ids, cu_seq_lens_q, cu_seq_lens_k
        if not torch.compiler.is_compiling():
            if self._documents is None or any(now is not then for now, then in zip(given, self._given, strict=True)):
                all_given = self._all_given(*given)
                found = find_documents(self._device, all_given)
                self._documents, self._given = in_chunks(found, all_given, chunk_tokens), given
            return self._documents
        # Graphs of layers, and checkpointed regions of graphs, cannot share results.
        there = torch.empty(0, device=self._device)
        found = Documents(*find_in_graph(there, *self._all_given(*given), chunk_tokens))
        _, _, queries, keys = self.shape
        all_tokens = isinstance(self._q_offset, int) and self._q_offset + queries >= self._kv_offset + keys
        if cu_seq_lens_q is not None or (self._padding is None and all_tokens):
            return found._replace(query_rows=None, key_rows=None)
        return found

    def _all_given(
        self, position_ids: torch.Tensor | None, cu_seq_lens_q: torch.Tensor | None, cu_seq_lens_k: torch.Tensor | None
    ) -> Given:
        """Returns everything that the mask and a layer were given."""
        batch_size, _, queries, keys = self.shape
        first, goes_on = self._q_offset, None
        positions = position_ids if self._positions is None else self._positions
        if self._positions is None and self._packed is not None:
            row = torch.arange(batch_size, device=self._device)[:, None]
            token = torch.arange(1, queries, device=self._device)
            goes_on = self._packed(row, 0, token, token - 1)
        offset, cached = (0, first) if isinstance(first, torch.Tensor) else (first, None)
        return Given(
            batch_size=batch_size,
            queries=queries,
            keys=keys,
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
            q_offset=offset,
            kv_offset=self._kv_offset,
            cached=cached,
            padding=self._padding,
            numbers=self._numbers,
            positions=positions,
            goes_on=goes_on,
            unseen=self._compiled,
        )


def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | RowMask | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    **kwargs: object,
) -> RowMask | None:
    """Returns the attention mask that layers get; `transformers.AttentionMaskInterface` describes the arguments.

    Args:
        local_size: number of tokens in a window or a chunk.
        kwargs: contain `allow_is_bidirectional_skip` if the mask is not causal.

    Returns:
        None if a row has one query, which sees all keys.
    """
    if isinstance(attention_mask, RowMask):  # made by `generate`, and given to the model
        return attention_mask
    is_causal = "allow_is_bidirectional_skip" not in kwargs
    asking = None if torch.compiler.is_compiling() else sys._getframe(1)
    if asking is not None:
        check_callers(OURS, asking, is_causal)
    name = getattr(mask_function, "__name__", "causal_mask_function")
    refusal = _refusal(is_causal, _is_combined(name, use_vmap, asking), attention_mask)
    if attention_mask is not None and attention_mask.ndim != 2:
        attention_mask = None
    if attention_mask is not None and q_length == kv_length == 1 and isinstance(q_offset, int) and not q_offset:
        # MiniMax's cache asks its first layer for its length, which carries a state and counts no tokens.
        kv_length = attention_mask.shape[1]
        q_offset = kv_length - 1
    if isinstance(q_offset, torch.Tensor):  # a static cache counts on in it
        q_offset = q_offset.clone()
        if attention_mask is not None:  # one graph for all tokens that are generated
            attention_mask = all_places(attention_mask, kv_offset + kv_length)
    filled = isinstance(q_offset, int) and q_offset + q_length >= kv_offset + kv_length
    if q_length == 1 and filled and attention_mask is None and refusal is None and local_size is None:
        return None
    # Transformers passes the length of chunks as a window's. In a compiled pass the layer's config tells them apart.
    is_chunk = asking is not None and asking.f_code.co_name == "create_chunked_causal_mask"
    # One token per row belongs to the document before it. A graph for it would depend on the mask's growing length.
    positions, numbers = (None, None) if asking is None or q_length == 1 else _read_from_callers(asking)
    # Transformers finds packed documents if there is neither a mask nor a cache.
    packed = name == "and_mask" and attention_mask is None and not allow_is_causal_skip and q_length == kv_length > 1
    return RowMask(
        (batch_size, 1, q_length, kv_length),
        torch.device(device),
        q_offset,
        kv_offset,
        padding=attention_mask,
        numbers=numbers,
        positions=positions,
        packed=mask_function if packed else None,
        window_tokens=local_size,
        chunked=local_size is not None and is_chunk,
        refusal=refusal,
    )


def _is_combined(name: str, use_vmap: bool, asking: FrameType | None) -> bool:
    """Returns whether a mask is combined with another one that shows more. Around blocks of images, packed documents
    hide the name of the function. Blocks of text are empty (Molmo2). Waits for the device if it gets blocks."""
    blocks = None if asking is None else asking.f_locals.get("block_sequence_ids")
    return use_vmap or (name not in CAUSAL_MASKS if blocks is None else bool((blocks >= 0).any()))


def _refusal(is_causal: bool, is_combined: bool, attention_mask: torch.Tensor | None) -> str | None:
    """Returns why a mask is more than causal documents; None if it is not."""
    if not is_causal:
        return "its mask lets tokens attend to later ones; distca computes causal attention only"
    if is_combined:
        return (
            "the model combines its causal mask with another one (for images, prefixes or blocks), which distca "
            "does not compute; run this model without distca_hf"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        return f"got an attention_mask of shape {shape}; give zeros and ones of shape [batch, tokens]"
    return None


def _read_from_callers(asking: FrameType) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns `position_ids` of Transformers' function that asks for a mask, and `attention_mask` of its caller.

    Transformers passes positions to no mask function, and some models pass them to no layer. It finds documents in
    positions, but not if there is a cache or a mask. It also makes the mask bool, which loses numbers of documents.
    """
    model = asking.f_back
    while model is not None and model.f_globals.get("__name__") == DEPRECATION:
        model = model.f_back
    if model is None or asking.f_globals.get("__name__") != ASKING:
        return None, None
    return asking.f_locals.get("position_ids"), model.f_locals.get("attention_mask")


def passes_on_a_plan(asking: FrameType) -> bool:
    """Returns whether the model that asks for a mask passes a plan on to layers that attend with it."""
    is_ours = getattr(asking.f_locals.get("config"), "_attn_implementation", None) == OURS
    frame: FrameType | None = asking if is_ours and any_known() else None
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            keywords = next((of for name in KEYWORDS if isinstance(of := frame.f_locals.get(name), dict)), None)
            if keywords is not None and isinstance(frame.f_locals.get("self"), nn.Module):
                return isinstance(keywords.get("distca_plan"), LivePlan)
        frame = frame.f_back
    return False


def checked_mask(implementation: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Checks which tokens a model was given, then calls its mask function."""
    if not torch.compiler.is_compiling():
        check_callers(implementation, sys._getframe(1), "allow_is_bidirectional_skip" not in kwargs)
    return original(*args, **kwargs)


def check_callers(implementation: str, asking: FrameType, is_causal: bool) -> None:
    """Checks that a model that asks for a mask knows the documents of its tokens. Skips passes of enabled models:
    their hooks have checked them. Raises PlanError if the tokens belong to a placed batch; PackingError if they belong
    to a pack, and nothing tells its documents apart."""
    if not any_known() or asking.f_globals.get("__name__") != ASKING:
        return
    frames: list[FrameType] = []
    frame = asking.f_back
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            model = frame.f_locals.get("self")
            if isinstance(model, nn.Module):
                watch = vars(model).get(WATCH)
                if watch is not None and watch.is_running():
                    return
                frames.append(frame)
        frame = frame.f_back
    given: dict[str, Any] = {}
    model_name = "a model"
    for frame in frames:
        variables, around = frame.f_locals, dict[str, Any]()
        for arguments in (*(variables.get(name) for name in reversed(KEYWORDS)), variables):
            if isinstance(arguments, dict):
                around |= {name: arguments[name] for name in ARGUMENTS if arguments.get(name) is not None}
        shapes = [
            next((tokens.shape[:2] for name in TOKENS if isinstance(tokens := batch.get(name), torch.Tensor)), None)
            for batch in (given, around)
        ]
        if None not in shapes and shapes[0] != shapes[1]:  # a program's module calls a model on other texts
            break
        given = around | given
        model = variables["self"]
        model_name = type(model).__name__ if hasattr(model, "config") else model_name
    model_name = f"{model_name} with attn_implementation={implementation!r}"
    if isinstance(plan := given.get("distca_plan"), LivePlan):
        if implementation == OURS:
            return  # its layers say what is wrong
        raise placed_in_another_model(plan, model_name)
    if not is_causal:  # embeddings of images, for example
        given.pop("inputs_embeds", None)
    found = known_batch(given)
    known = copied_batch(given) if found is None else found
    if known is None:
        return
    separates = not known.is_packed(given) or asking.f_locals.get("packed_sequence_mask") is not None
    # These find documents in positions. For others Transformers does, if there is neither a mask nor a cache.
    reads_positions = implementation == OURS or "flash" in implementation
    is_pack = known.plan is None or found is None
    if not is_pack or not (separates or (reads_positions and known.tells_documents(given))):
        raise known.refusal(model_name)
    positions = given.get("position_ids")
    if known.plan is not None and positions is not None and positions.ndim == 2:
        documents_at(positions)  # of a copy, which may begin with the end of a document
