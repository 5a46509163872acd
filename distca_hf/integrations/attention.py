"""The attention function behind `attn_implementation="distca"`.

Transformers calls it once per attention layer. A batch of ours carries its plan in the keyword `distca_plan`, which
models pass on to their layers unseen; without a plan the layer attends locally, each document (or each row of the
batch) alone.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.local_documents import Documents, documents_at, given_documents, whole_rows
from distca_hf.integrations.mask import RowMask
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
    mask = attention_mask if isinstance(attention_mask, RowMask) else None
    refused = _asked_for(attention_mask=attention_mask if mask is None else None, **kwargs)
    if refused or dropout or is_causal is False or getattr(module, "is_causal", True) is False:
        _refuse(module, refused, dropout, is_causal)
    if mask is not None:
        _check_mask(module, mask, query, key)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = _one_dtype(module, query, key, value)
    if distca_plan is not None:
        enabled: LocalSettings | None = getattr(module, ENABLED, None)
        if enabled is None:
            raise PlanError(
                "a batch of plugin.dataloader arrived in a model that was not enabled: its loss would be wrong. Call "
                "distca_hf.enable(model, plugin) before the model is wrapped (DDP, FSDP, accelerator.prepare)"
            )
        _check_windows(module, sliding_window, mask, distca_plan.facts.longest_document_tokens)
        q_TNH, k_TGH, v_TGV = (_rows(x) for x in (query, key, value))
        out_TNV, *_ = flash_attn(q_TNH, k_TGH, v_TGV, scale, distca_plan.handle, enabled.layer)
        return out_TNV.unflatten(0, (query.shape[0], query.shape[2])), None

    documents = _local_documents(query, key, mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    _check_windows(module, sliding_window, mask, documents.longest_keys)
    return _attend_locally(query, key, value, documents, scale, getattr(module, ENABLED, LocalSettings())), None


def _local_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: RowMask | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
) -> Documents:
    """Returns what, in this order, `cu_seq_lens_q`, the mask and the rows of the batch say."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if cu_seq_lens_q is not None:
        return given_documents(cu_seq_lens_q, cu_seq_lens_k, batch * queries, batch * keys, query.device)
    if mask is not None:
        return mask.documents(position_ids)
    if queries == keys > 1 and position_ids is not None and position_ids.ndim == 2:
        if position_ids.shape[-1] != queries:
            raise PackingError(f"position_ids has {position_ids.shape[-1]} positions for {queries} tokens")
        return documents_at(position_ids.expand(batch, queries))
    return whole_rows(batch, queries, keys, query.device)


def _attend_locally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    settings: LocalSettings,
) -> torch.Tensor:
    """`[B, T, N, V]`, zero where there is padding."""
    q_TNH, k_SGH, v_SGV = _rows(query), _rows(key), _rows(value)
    *spans, query_rows, key_rows = documents
    if key_rows is not None:
        k_SGH, v_SGV = k_SGH.index_select(0, key_rows), v_SGV.index_select(0, key_rows)
    if query_rows is not None:
        q_TNH = q_TNH.index_select(0, query_rows)
    out_TNV, _ = flash_attn_local(q_TNH, k_SGH, v_SGV, *spans, scale, settings.kernel, settings.deterministic)
    batch, _, queries, _ = query.shape
    if query_rows is not None:
        out_TNV = out_TNV.new_zeros((batch * queries, *out_TNV.shape[1:])).index_copy(0, query_rows, out_TNV)
    return out_TNV.unflatten(0, (batch, queries))


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
    layer = _name(module)
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


def _check_mask(module: nn.Module, mask: RowMask, query: torch.Tensor, key: torch.Tensor) -> None:
    """Refuses a mask that is not causal, or was made for other queries and keys."""
    if mask.refusal is not None:
        raise UnsupportedAttentionError(f"{_name(module)}: {mask.refusal}")
    if mask.shape[2:] != (query.shape[2], key.shape[2]):
        raise UnsupportedAttentionError(
            f"{_name(module)}: has {query.shape[2]} queries and {key.shape[2]} keys per row, but the model made its "
            f"mask for {mask.shape[2]} and {mask.shape[3]}; load it with another attn_implementation"
        )


def _check_windows(module: nn.Module, sliding_window: int | None, mask: RowMask | None, longest_tokens: int) -> None:
    """A window as long as every document changes nothing; a shorter one is not computed. Some models say theirs to
    the layer, some in the mask alone."""
    for window in (sliding_window, None if mask is None else mask.window_tokens):
        if window is not None and window < longest_tokens:
            raise UnsupportedAttentionError(
                f"{_name(module)}: sliding window {window} is shorter than a document of {longest_tokens} tokens, and "
                "windows are not computed; split documents at the window, or disable it in the config"
            )


def _name(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


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
        f"{_name(module)}: queries, keys and values are "
        f"{query.dtype}, {key.dtype} and {value.dtype}; load the model in one dtype, or train under autocast"
    )
