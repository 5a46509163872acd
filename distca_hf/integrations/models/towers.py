"""Towers: parts of a multimodal model beside its text decoder, which see images, videos or sound alone.

Their attention goes both ways, and is not computed by distca: every tower gets one of Transformers. No document is cut
in a tower, so nothing in it is checked. A tower must be a model with a configuration of its own. Otherwise its
attention could not be told from the decoder's, and the model is refused.
"""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from distca_hf.batches.batch_documents import Batch
from distca_hf.integrations.models.structure import looks_attention_up, text_decoder, text_modules
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Attention of towers that were loaded with distca.
OF_TOWERS = "sdpa"
# Arguments that number the kinds of tokens: 0 is text.
KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")


def towers(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Returns the outermost Transformers models beside the text part, by name; none in a model for text."""
    text, found = text_modules(model), dict[str, PreTrainedModel]()
    for name, module in model.named_modules():  # outer ones come first
        is_inside = any(name.startswith(f"{tower}.") for tower in found)
        if name not in text and not is_inside and isinstance(module, PreTrainedModel):
            found[name] = module
    return found


def undivided(model: PreTrainedModel) -> Iterator[str]:
    """Yields why the text decoder of a multimodal model cannot be told from its towers."""
    text = model.config.get_text_config()
    is_divided = text is model.config or text_decoder(model) is not model
    if not is_divided and not getattr(model.config, "is_encoder_decoder", False):
        yield "its text decoder cannot be told from its towers: get_decoder() returns no part with the text's config"
        return
    in_towers = {module for tower in towers(model).values() for module in tower.modules()}
    for name, layer in _attention_beside(model).items():
        config = getattr(layer, "config", text)
        if layer not in in_towers or config is text or config is model.config:
            yield (
                f"{name} attends outside the text decoder and belongs to no tower with a config of its own: it would "
                "attend through distca as well"
            )
            return


def give_own_attention(model: PreTrainedModel) -> None:
    """Gives towers that were loaded with distca an attention of their own, and logs it.

    Args:
        model: a model that was checked, or one that is not enabled, such as a reference model.
    """
    distca = text_decoder(model).config._attn_implementation
    for name, tower in towers(model).items():
        layers = (layer for layer in tower.modules() if looks_attention_up(layer))
        if any(getattr(layer, "config", tower.config)._attn_implementation == distca for layer in layers):
            own = OF_TOWERS if tower._supports_sdpa else "eager"
            tower.set_attn_implementation(own)
            log.info("%s: %s attends with %s, on each rank separately", type(model).__name__, name, own)


def without_kinds_of_text(batch: Batch) -> Batch:
    """Returns a batch without kinds of tokens that say text of all: a model would make a mask for images of them.
    Returns the batch itself if there are none; waits for the device if there are."""
    of_text = {
        name
        for name in KINDS_OF_TOKENS
        if isinstance(kinds := batch.get(name), torch.Tensor) and not bool(kinds.any())
    }
    return {name: given for name, given in batch.items() if name not in of_text} if of_text else batch


def _attention_beside(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns attention layers outside of the text part, by name."""
    text = text_modules(model)
    return {name: module for name, module in model.named_modules() if name not in text and looks_attention_up(module)}
