"""The attention function of `attn_implementation="distca"`.

Transformers calls it once per attention layer. With a plan (the keyword `distca_plan`, which models pass on to their
layers) ranks attend together. Without one, a layer attends locally, within each document of its own rank. The function
refuses calls that it cannot compute, and names the layer, the argument and its value.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.finding import name_of
from distca_hf.integrations.mask import RowMask
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.parallel_context import job_size
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.local_attention import flash_attn_local
from distca_hf.runtime.op import flash_attn
from distca_hf.telemetry import warn
from distca_hf.torch_private import backward_number


# Attribute of attention layers whose model was enabled.
LAYER_SETTINGS = "_distca_layer_settings"
# Keywords that do not affect attention. Any other keyword that is set is refused: ignoring it would change the result.
HARMLESS_KEYWORDS = frozenset(
    {
        "cache_position",
        "distca_documents",
        "ignore_index",
        "labels",
        "logits_to_keep",
        "margin",  # of TRL's RewardTrainer, for its loss
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",  # for positions; a mask made from it is refused as a mask
        "num_items_in_batch",
        "output_attentions",
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


class Tempered:
    """False as an attribute of layers: attention tempers their queries by position instead. Pickles as True."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "Tempered()"

    def __deepcopy__(self, memo: dict[int, object]) -> "Tempered":
        return self

    def __reduce__(self) -> tuple[type[bool], tuple[int]]:
        return bool, (1,)


class LayerSettings(NamedTuple):
    """Settings of an attention layer in an enabled model."""

    kernel: str  # kernel of local attention; a plan has its own
    deterministic: bool
    number: torch.Tensor  # number of the layer in its model; `runtime.op.flash_attn` says why it is a tensor
    in_forward_pass: Callable[[], bool]  # returns whether the enabled model is in a forward pass, which is watched

    def __deepcopy__(self, memo: dict[int, object]) -> "LayerSettings":
        """Returns itself: copies of a model attend as the original does."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickles as None: a model that is stored, or sent to another process, is not enabled there."""
        return type(None), ()


def distca_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | RowMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    distca_plan: LivePlan | None = None,
    distca_positions: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention inside documents; `transformers.AttentionInterface` describes the arguments.

    Args:
        query, key, value: `[B, N, T, H]`, `[B, G, S, H]`, `[B, G, S, V]`; made contiguous per token if they are not.
        attention_mask: None, or the `RowMask` of `document_mask`; other masks are refused.
        s_aux: `[N]` scores of the heads' sinks.
        distca_plan: the plan of the batch.
        distca_positions: `[B, T]` positions to temper queries by (`integrations.models.counted_rows`).

    Returns:
        `[B, T, N, V]` and None, in the dtype of the inputs; under autocast in autocast's dtype, as flash-attention
        does.

    Raises:
        UnsupportedAttentionError: the layer asks for something unsupported; names layer, argument and value.
    """
    _check_call(module, dropout, is_causal, kwargs)
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise UnsupportedAttentionError(
            f"{name_of(module)}: s_aux has shape {tuple(s_aux.shape)}, and there are {query.shape[1]} query heads; "
            "distca computes one sink for each. Run this model without distca_hf"
        )
    mask = _row_mask(module, attention_mask, query.shape[2], key.shape[2])
    window_tokens, chunked = _window(module, sliding_window, mask)
    if distca_positions is not None and not module.attn_temperature_tuning:  # else the layer does so itself
        steps_BT = torch.floor((distca_positions.float() + 1.0) / module.floor_scale)  # as of `Llama4TextAttention`
        scales_BT = torch.log1p(steps_BT) * module.attn_scale + 1.0
        query = (query * scales_BT[:, None, :, None]).to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = _one_dtype(module, query, key, value)
    settings: LayerSettings | None = getattr(module, LAYER_SETTINGS, None)
    deterministic = settings is not None and settings.deterministic
    spec = AttentionSpec(scale, True, window_tokens, softcap or 0.0, deterministic, chunked)
    if distca_plan is not None:
        if settings is None:
            raise PlanError(
                f"{name_of(module)}: a batch with a plan arrived in a model that was not enabled, or in a layer "
                "that is new since then: its loss would be wrong. Call distca_hf.enable(model, plugin) before the "
                "model is wrapped (DDP, FSDP, accelerator.prepare), and again when layers were replaced"
            )
        q_TNH, k_TGH, v_TGV = (_rows(x) for x in (query, key, value))
        out_TNV, *_ = flash_attn(q_TNH, k_TGH, v_TGV, spec, distca_plan.handle, settings.number, s_aux)
        return out_TNV.unflatten(0, (query.shape[0], query.shape[2])), None

    if mask is None:
        shape = query.shape[0], 1, query.shape[2], key.shape[2]
        mask = RowMask(shape, query.device, q_offset=key.shape[2] - query.shape[2])
    documents = mask.documents(position_ids, cu_seq_lens_q, cu_seq_lens_k, window_tokens if chunked else None)
    kernel = "auto" if settings is None else settings.kernel
    if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
        _warn_of_forgetting(module, settings, len(documents.cu_seqlens_q) - 1 > query.shape[0])
    if chunked:  # documents are cut at the beginnings of chunks
        spec = AttentionSpec(scale, True, 0, softcap or 0.0, deterministic)
    out_TNV, _ = flash_attn_local(_rows(query), _rows(key), _rows(value), documents, spec, kernel, s_aux)
    return out_TNV.unflatten(0, (query.shape[0], query.shape[2])), None


def _check_call(module: nn.Module, dropout: float, is_causal: bool | None, keywords: Mapping[str, object]) -> None:
    """Checks an attention call. Warns if it asks for attention weights, which are not computed."""
    asked = {
        name: given
        for name, given in keywords.items()
        if given is not None and given is not False and name not in HARMLESS_KEYWORDS
    }
    if dropout:
        raise UnsupportedAttentionError(
            f"{name_of(module)}: attention dropout {dropout} is not computed; set it to 0 in the config"
        )
    if asked:
        named = ", ".join(
            f"{name}=tensor{tuple(given.shape)}" if isinstance(given, torch.Tensor) else f"{name}={given!r}"
            for name, given in asked.items()
        )
        raise UnsupportedAttentionError(
            f"{name_of(module)}: {named} is not computed by distca, and ignoring it would change the result; run this "
            "model without distca_hf"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError(
            f"{name_of(module)}: is not causal (is_causal={is_causal}, module.is_causal="
            f"{getattr(module, 'is_causal', None)}); distca computes causal attention only. If it belongs to a tower "
            'of a multimodal model, call model.NAME_OF_THE_TOWER.set_attn_implementation("sdpa"), as enable and '
            "attach do"
        )
    if keywords.get("output_attentions") and not torch.compiler.is_compiling():
        warn("distca computes no attention weights: with output_attentions=True they are None", stacklevel=3)


def _window(module: nn.Module, of_layer: int | None, mask: RowMask | None) -> tuple[int, bool]:
    """Returns the window of a layer, 0 if it has none; and whether it is the length of chunks.

    Some models pass a window to their layers, others only put it in the mask.
    """
    of_mask = None if mask is None else mask.window_tokens
    if mask is not None and of_mask is not None and of_layer is None:
        chunk_tokens = getattr(getattr(module, "config", None), "attention_chunk_size", None)
        if mask.chunked or chunk_tokens == of_mask:
            return of_mask, True
    window_tokens = min([window for window in (of_layer, of_mask) if window is not None], default=None)
    if window_tokens is not None and window_tokens < 1:
        raise UnsupportedAttentionError(
            f"{name_of(module)}: sliding window {window_tokens} holds no token; it counts the token itself, so 1 is "
            "the shortest. Leave it out of the config for full attention"
        )
    return window_tokens or 0, False


def _row_mask(module: nn.Module, mask: torch.Tensor | RowMask | None, queries: int, keys: int) -> RowMask | None:
    """Returns the mask of an attention call, checked; None if there is none."""
    if mask is None:
        return None
    if not isinstance(mask, RowMask):
        raise UnsupportedAttentionError(
            f"{name_of(module)}: got an attention mask of shape {tuple(mask.shape)} of the caller's own; distca "
            "computes causal attention inside documents. Give attention_mask as zeros and ones of shape [batch, "
            "tokens], or position_ids that begin at 0 in every document; or run this model without "
            "distca_hf"
        )
    if mask.refusal is not None or mask.shape[2:] != (queries, keys):
        raise mask.error(module, queries, keys)
    return mask


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns `[B, N, T, D]` as `[B * T, N, D]`, contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _one_dtype(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns all three in one dtype. Autocast brings its dtype: rotary embeddings leave queries and keys in fp32."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    raise UnsupportedAttentionError(
        f"{name_of(module)}: queries, keys and values are "
        f"{query.dtype}, {key.dtype} and {value.dtype}; load the model in one dtype, or train under autocast"
    )


def _warn_of_forgetting(module: nn.Module, settings: LayerSettings | None, packed: bool) -> None:
    """Warns if a model trains without `enable` and this changes the result."""
    if settings is not None and (settings.in_forward_pass() or backward_number() >= 0):
        return
    ranks = job_size()
    consequence = "each attends only to its own batch, and nothing is balanced" if ranks > 1 else "nothing is checked"
    model = f"a model with {type(module).__name__} trains with distca on {ranks} rank(s)"
    if settings is None:
        message = (
            f"{model}, but was not enabled: {consequence}. Call plugin.attach(trainer), or in your own loop "
            "distca_hf.enable(model, plugin); or give Trainer a DistCACallback(plugin)"
        )
    elif ranks == 1 and not packed:
        return
    else:
        message = (
            f"{model}, outside of a forward pass of the model that was enabled: {consequence}. Call that model, and "
            "no module inside of it (model.model); enable one again that lost its adapters"
        )
    warn(message, stacklevel=3)
