"""The attention function behind `attn_implementation="distca"`.

Transformers calls it once per attention layer. A batch of ours carries its plan in the keyword `distca_plan`, which
models pass on to their layers unseen; without a plan the layer attends locally, each document (or each row of the
batch) alone.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.mask import PackedRows, PaddedRows, RowMask, check_beginnings, offsets_of
from distca_hf.layout import check_cu_seqlens
from distca_hf.runtime.local import flash_attn_local
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.plans import LivePlan


# Attribute of attention layers whose model was enabled: how they attend to batches without a plan.
ENABLED = "_distca_enabled"
# Keywords that say nothing about how to attend. Any other one that is set is refused: ignoring it would change the
# numbers.
HARMLESS_KEYWORDS = frozenset(
    {
        "cache_position",
        "ignore_index",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "skip_logits",
        "use_cache",
    }
)


class LocalSettings(NamedTuple):
    """Kernel and determinism of a layer that attends without a plan, and its number in the model."""

    kernel: str = "auto"
    deterministic: bool = False
    layer: torch.Tensor | None = None


def distca_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | RowMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    distca_plan: LivePlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside documents; `transformers.AttentionInterface` gives the arguments.

    Args:
        query, key, value: `[B, N, T, H]`, `[B, G, S, H]`, `[B, G, S, V]`; made contiguous per token if they are not.
        attention_mask: None, or what `document_mask` found; anything else is padding or a mask of the user's own.
        distca_plan: the plan of the batch.

    Returns:
        `[B, T, N, V]` and None, in the dtype of the inputs; under autocast in autocast's dtype, as flash-attention
        does.

    Raises:
        UnsupportedAttentionError: the layer asks for something that is not computed; names layer, argument and value.
    """
    padded = attention_mask if isinstance(attention_mask, PaddedRows) else None
    packed = attention_mask if isinstance(attention_mask, PackedRows) else None
    refused = _asked_for(attention_mask=attention_mask if padded is None and packed is None else None, **kwargs)
    if refused or dropout or is_causal is False or getattr(module, "is_causal", True) is False:
        _refuse(module, refused, dropout, is_causal)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = _one_dtype(module, query, key, value)
    if distca_plan is not None:
        enabled: LocalSettings | None = getattr(module, ENABLED, None)
        if enabled is None:
            raise PlanError(
                "a batch of plugin.dataloader arrived in a model that was not enabled: its loss would be wrong. Call "
                "distca_hf.enable(model, plugin) before the model is wrapped (DDP, FSDP, accelerator.prepare)"
            )
        _check_window(module, sliding_window, distca_plan.facts.longest_document_tokens)
        q_TNH, k_TGH, v_TGV = (_rows(x) for x in (query, key, value))
        out_TNV, *_ = flash_attn(q_TNH, k_TGH, v_TGV, scale, distca_plan.handle, enabled.layer)
        return out_TNV.unflatten(0, (query.shape[0], query.shape[2])), None

    settings: LocalSettings = getattr(module, ENABLED, LocalSettings())
    if padded is not None:
        _check_window(module, sliding_window, padded.keys[2])
        return _attend_padded(query, key, value, padded, scale, settings), None
    queries, keys, longest_q, longest_k = (
        _offset_documents(query, key, cu_seq_lens_q, cu_seq_lens_k)
        if cu_seq_lens_q is not None
        else _local_documents(query, key, position_ids, packed)
    )
    _check_window(module, sliding_window, longest_k)
    how = queries, keys, longest_q, longest_k, scale, settings.kernel, settings.deterministic
    out_TNV, _ = flash_attn_local(_rows(query), _rows(key), _rows(value), *how)
    return out_TNV.unflatten(0, (query.shape[0], query.shape[2])), None


def _attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padded: PaddedRows,
    scale: float,
    settings: LocalSettings,
) -> torch.Tensor:
    """`[B, T, N, V]`, zero where there is padding."""
    (query_rows, queries, longest_q), (key_rows, keys, longest_k) = padded.queries, padded.keys
    q_TNH = _rows(query).index_select(0, query_rows)
    k_SGH, v_SGV = (_rows(x).index_select(0, key_rows) for x in (key, value))
    out_TNV, _ = flash_attn_local(q_TNH, k_SGH, v_SGV, queries, keys, longest_q, longest_k, scale, *settings[:2])
    shape = query.shape[0], query.shape[2], *out_TNV.shape[1:]
    return out_TNV.new_zeros((shape[0] * shape[1], *shape[2:])).index_copy(0, query_rows, out_TNV).view(shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[B, N, T, D]` as `[B * T, N, D]`, contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _asked_for(**keywords: Any) -> dict[str, Any]:
    """Keywords that ask for something: not harmless, and not None or False."""
    return {
        name: given
        for name, given in keywords.items()
        if given is not None and given is not False and name not in HARMLESS_KEYWORDS
    }


def _refuse(module: nn.Module, refused: dict[str, Any], dropout: float, is_causal: bool | None) -> None:
    layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    if "attention_mask" in refused:
        raise UnsupportedAttentionError(
            f"{layer}: got a padding or custom attention mask of shape {tuple(refused['attention_mask'].shape)}; "
            "training packs documents instead of padding them: use plugin.attach(trainer), plugin.dataloader, or a "
            "collator that packs (DataCollatorWithFlattening)"
        )
    if dropout:
        raise UnsupportedAttentionError(
            f"{layer}: attention dropout {dropout} is not computed; set it to 0 in the config"
        )
    if refused:
        told = ", ".join(f"{name}={_short(given)}" for name, given in refused.items())
        raise UnsupportedAttentionError(
            f"{layer}: {told} is not computed by distca, and ignoring it would change the result; load the model "
            "with another attn_implementation"
        )
    raise UnsupportedAttentionError(
        f"{layer}: is not causal (is_causal={is_causal}, module.is_causal={getattr(module, 'is_causal', None)}); "
        "distca computes causal attention only"
    )


def _short(given: Any) -> str:
    return f"tensor{tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)


def _check_window(module: nn.Module, sliding_window: int | None, longest_tokens: int) -> None:
    """A window as long as every document changes nothing; a shorter one is not computed."""
    if sliding_window is not None and sliding_window < longest_tokens:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}: sliding window {sliding_window} "
            f"is shorter than a document of {longest_tokens} tokens, and windows are not computed; split documents "
            "at the window, or disable it in the config"
        )


def _one_dtype(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Under autocast all three in its dtype: rotary embeddings and norms leave queries and keys in fp32."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    raise UnsupportedAttentionError(
        f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}: queries, keys and values are "
        f"{query.dtype}, {key.dtype} and {value.dtype}; load the model in one dtype, or train under autocast"
    )


def _offset_documents(
    query: torch.Tensor, key: torch.Tensor, cu_seq_lens_q: torch.Tensor, cu_seq_lens_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets and longest lengths of queries and keys, as somebody else packed them."""
    offsets, longest, tokens = [], [], []
    for given, x in ((cu_seq_lens_q, query), (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k, key)):
        offsets.append(given.to(device=x.device, dtype=torch.int32).flatten())
        lengths = check_cu_seqlens(offsets[-1].cpu().numpy(), x.shape[0] * x.shape[2])
        longest.append(int(lengths.max(initial=0)))
        tokens.append(lengths)
    if len(offsets[0]) != len(offsets[1]):
        raise PackingError(
            f"cu_seq_lens_q holds {len(offsets[0]) - 1} documents, cu_seq_lens_k {len(offsets[1]) - 1}; give the same "
            "documents for queries and keys"
        )
    short = np.flatnonzero(tokens[0] > tokens[1])
    if len(short):
        document = int(short[0])
        raise PackingError(
            f"document {document} has {tokens[0][document]} queries (cu_seq_lens_q) but {tokens[1][document]} keys "
            "(cu_seq_lens_k): its first queries could attend to nothing; give at least as many keys"
        )
    return offsets[0], offsets[1], longest[0], longest[1]


def _local_documents(
    query: torch.Tensor, key: torch.Tensor, position_ids: torch.Tensor | None, packed: PackedRows | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets and longest lengths of queries and keys: packed documents, or one document per row of the batch."""
    batch, _, rows, _ = query.shape
    key_rows = key.shape[2]
    device = query.device
    if packed is not None:
        offsets, longest = packed.documents_at(position_ids)
        return offsets, offsets, longest, longest
    if rows == key_rows and rows > 1 and position_ids is not None and position_ids.ndim == 2:
        if position_ids.shape[-1] != rows:
            raise PackingError(f"position_ids has {position_ids.shape[-1]} positions for {rows} tokens")
        begins = torch.ones((batch, rows), dtype=torch.bool, device=device)
        begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
        check_beginnings(position_ids.expand(batch, rows)[begins])
        offsets, longest = offsets_of(begins)
        return offsets, offsets, longest, longest
    queries = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device)
    keys = torch.arange(0, (batch + 1) * key_rows, key_rows, dtype=torch.int32, device=device)
    return queries, keys, rows, key_rows
