"""Documents apart: mixers of an enabled model never see two documents in one row.

    rows of the pack      | d0 d0 d0 d0 d0 | d1 d1 | d2 d2 d2 d2 d2 d2 | padding |
    batches of a mixer    | d0 d0 d0 d0 d0  · |       | d1 d1 |
                          | d2 d2 d2 d2 d2 d2 |

Documents of about the same length are gathered into a batch that is padded on the right. The mixer runs on it, and
its rows are scattered back. No token depends on later ones, so padding after a document changes nothing. That is
exact for every mixer and needs no kernel. Offsets for kernels that know packed rows are not passed on: Transformers
leaves an argument out that an installed kernel does not have, and documents would see each other.

The documents of a pass travel to the layers as a keyword, so that a recomputed layer has those of its own pass.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import Cache

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges
from distca_hf.errors import PlanError
from distca_hf.torch_private import hidden_from_dynamo


# Keyword of models and layers that holds the `DocumentRows` of a pass.
KEYWORD = "distca_documents"
# Shorter documents share one batch: padding costs less than a call.
SHORT_TOKENS = 64


class _Bucket(NamedTuple):
    """Documents of about the same length.

    Attributes:
        documents, longest_tokens: sizes of the padded batch.
        rows: int64 `[tokens]` rows of the pack.
        places: int64 `[tokens]` their places in the padded batch, counted row after row.
    """

    documents: int
    longest_tokens: int
    rows: torch.Tensor
    places: torch.Tensor


class DocumentRows:
    """Rows of the documents in `[batch_size, row_tokens]` tokens.

    Wrappers look into tuples, mappings and dataclasses of a model's arguments, and copy them; this is none of these.

    Args:
        document_tokens: `[documents]` lengths.
        rows: `[tokens]` row of each token of these documents, counted over the batch; None: one after the other.
        device: where the tokens are.
    """

    def __init__(
        self,
        document_tokens: IntArray,
        batch_size: int,
        row_tokens: int,
        device: torch.device,
        rows: IntArray | None = None,
    ) -> None:
        self.batch_size, self.row_tokens = batch_size, row_tokens
        starts = exclusive_cumsum(document_tokens)
        power = np.ceil(np.log2(np.maximum(document_tokens, SHORT_TOKENS)))
        self._buckets = []
        for of_bucket in np.unique(power):
            chosen = np.flatnonzero(power == of_bucket)
            tokens = document_tokens[chosen]
            longest = int(tokens.max())
            at = ranges(starts[chosen], tokens)
            places = ranges(np.arange(len(chosen)) * longest, tokens)
            indices = (_to(at if rows is None else rows[at], device), _to(places, device))
            self._buckets.append(_Bucket(len(chosen), longest, *indices))

    @hidden_from_dynamo
    def mix(self, mixer: Callable[..., object], args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        """Runs a mixer on every document alone. Outside of compiled graphs: every batch has other numbers of documents
        and tokens, and mixers of Transformers fail in graphs of such dynamic shapes.

        Args:
            mixer: returns a tensor of its tokens, or a tuple that begins with one.
            args, keywords: its arguments. Tensors of one row per token are gathered. A cache is left out: it has one
                state for every row of the batch. Others are passed as they are.

        Returns:
            `[batch_size, row_tokens, ...]` the mixer's output; 0 in rows of no document. In a tuple None follows:
            states of single documents are of no use to the layer.
        """
        joined: torch.Tensor | None = None
        in_tuple = 0
        for bucket in self._buckets:
            given = [self._gathered(value, bucket) for value in args]
            named = {name: self._gathered(value, bucket) for name, value in keywords.items()}
            mixed: Any = mixer(*given, **named)
            in_tuple = len(mixed) if isinstance(mixed, tuple) else 0
            out = (mixed[0] if in_tuple else mixed).flatten(0, 1)
            if joined is None:
                joined = out.new_zeros(self.batch_size * self.row_tokens, *out.shape[1:])
            joined = joined.index_copy(0, bucket.rows, out.index_select(0, bucket.places))
        assert joined is not None
        whole = joined.unflatten(0, (self.batch_size, self.row_tokens))
        return (whole, *[None] * (in_tuple - 1)) if in_tuple else whole

    def _gathered(self, value: Any, bucket: _Bucket) -> object:
        """Returns the tokens of a bucket as a batch, padded with zeros; None for a cache; other values as they are."""
        if isinstance(value, Cache):
            return None
        if isinstance(value, tuple):
            return tuple(self._gathered(part, bucket) for part in value)
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] != self.row_tokens:
            return value
        if value.shape[0] not in (1, self.batch_size):
            return value
        flat = value.expand(self.batch_size, *value.shape[1:]).flatten(0, 1)
        padded = flat.new_zeros(bucket.documents * bucket.longest_tokens, *flat.shape[1:])
        padded = padded.index_copy(0, bucket.places, flat.index_select(0, bucket.rows))
        return padded.unflatten(0, (bucket.documents, bucket.longest_tokens))


def _to(numbers: IntArray, device: torch.device) -> torch.Tensor:
    """Copies indices to a device; the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class _Apart:
    """The forward function of a mixer that is run on every document alone.

    Attributes:
        documents: of the layer's present call; None if every row of the batch is a document.
        before: the forward function that was set on the module before; None if that of its class counts.
    """

    def __init__(self, mixer: nn.Module) -> None:
        self.documents: DocumentRows | None = None
        self.before = vars(mixer).get("forward")
        self._mixer, self._known = mixer, _names_of_arguments(mixer)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, **keywords: object) -> object:
        """Runs the mixer. Keywords that it does not name are left out: they are meant for attention, or say where
        documents begin in a way that it may not follow."""
        forward = self.before or type(self._mixer).forward.__get__(self._mixer)
        known = {name: value for name, value in keywords.items() if name in self._known}
        return forward(*args, **known) if self.documents is None else self.documents.mix(forward, args, known)


class _GiveDocuments:
    """A hook of a layer: gives the documents of the pass to the layer's mixers."""

    def __init__(self, layer_name: str, mixers: list[_Apart]) -> None:
        self._layer_name, self._mixers = layer_name, mixers

    @hidden_from_dynamo
    def __call__(self, layer: nn.Module, args: tuple[object, ...], keywords: dict[str, Any]) -> None:
        if KEYWORD not in keywords:
            self._check_rows(layer, keywords)
        for mixer in self._mixers:
            mixer.documents = keywords.get(KEYWORD)

    def _check_rows(self, layer: nn.Module, keywords: Mapping[str, Any]) -> None:
        """Checks that a layer which runs outside of its enabled model has one document in every row."""
        positions, mask = keywords.get("position_ids"), keywords.get("attention_mask")
        is_padded = isinstance(mask, torch.Tensor) and mask.ndim == 2
        is_packed = keywords.get("cu_seq_lens_q") is not None or (
            not is_padded
            and isinstance(positions, torch.Tensor)
            and positions.ndim == 2
            and bool((positions[:, 1:] < positions[:, :-1]).any())
        )
        if is_packed or (layer.training and torch.is_grad_enabled()):
            raise PlanError(
                f"{self._layer_name} was called without {KEYWORD}, by which its mixers keep documents apart: call the "
                "model that was given to distca_hf.enable, not a part of it; it must pass its keywords on to layers"
            )


def keep_apart(model: nn.Module, mixers: Mapping[str, nn.Module]) -> None:
    """Lets mixers of a model run on every document alone.

    Args:
        mixers: by name in the model.
    """
    of_layers: dict[str, list[_Apart]] = {}
    for name, mixer in mixers.items():
        apart = _Apart(mixer)
        mixer.forward = apart
        of_layers.setdefault(name.rpartition(".")[0], []).append(apart)
    for name, of_layer in of_layers.items():
        model.get_submodule(name).register_forward_pre_hook(_GiveDocuments(name, of_layer), with_kwargs=True)


def mix_rows_again(model: nn.Module) -> None:
    """Undoes `keep_apart`, also in a copy of the model."""
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _GiveDocuments):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        apart = vars(module).get("forward")
        if isinstance(apart, _Apart):
            del module.forward
            if apart.before is not None:
                module.forward = apart.before


def _names_of_arguments(mixer: nn.Module) -> frozenset[str]:
    """Returns the arguments that a mixer names."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(mixer.forward).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind in kinds)
