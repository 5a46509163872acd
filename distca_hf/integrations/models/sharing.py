"""Sharing: decides whether layers may compute equal beginnings of documents once.

They may if hidden states are equal there. They may not if something is drawn at random for each row, if a batch has
more than tokens, positions and images, or if unknown functions run on rows. Equal images have equal features.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from types import NoneType

import torch
from torch import nn

from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.beginnings import OF_ITEMS, VALUES, Placeholders
from distca_hf.batches.document_gather import begin_alike, saved_share, say_unshared, to_share
from distca_hf.batches.given import LEARNT
from distca_hf.batches.read_documents import DocumentReader, ReadDocuments, Reading, reading_of
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError
from distca_hf.integrations.models.decoder_columns import REPLACED_BY_PLAN
from distca_hf.integrations.models.hooks import KNOWN_HOOKS, unknown_hook
from distca_hf.integrations.models.mixer_calls import MixerWatch
from distca_hf.integrations.models.mixers import OVER_ROWS
from distca_hf.integrations.models.structure import backbone_of, text_decoder, towers, transformers_model
from distca_hf.integrations.models.weights_check import is_due
from distca_hf.prefixes import LEAST_SAVED, never_shared
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Names of settings that are probabilities of dropping something, or amounts of noise; and of settings of heads.
RANDOM, OF_HEADS = re.compile(r"drop|jitter"), re.compile(r"^(summary|classifier)")
# Module of PEFT's layers with noise (PVeRA).
NOISY_ADAPTER = "peft.tuners.pvera.layer"
# Columns of tokens that hashes include, or that only a loss reads.
KNOWN_COLUMNS = REPLACED_BY_PLAN | {"input_ids", "position_ids", "mm_token_type_ids", "labels", "shift_labels"}
# Further entries of multimodal batches: images, and a number for all rows.
OF_IMAGES = {*VALUES, *OF_ITEMS, "num_items_in_batch"}
# Types of entries that are for all rows.
SINGLE = (bool, int, float, str, torch.dtype, NoneType)
# Why documents of one rank share nothing, without the share that they would save.
FEW_SAVED = f"on one rank rows move only to save {LEAST_SAVED:.0%} of a batch's tokens, and this saves "
# Packages whose forward functions pass tokens to layers unchanged, and names of such functions.
KNOWN_FORWARDS = KNOWN_HOOKS | {"liger_kernel"}
FORWARDS = ("forward", "get_image_features", "get_video_features", "get_placeholder_mask")


class Sharing:
    """Decides whether documents of a model's batches may share prefixes."""

    def __init__(self, root: nn.Module, config: DistCAConfig, mixers: MixerWatch) -> None:
        self._root, model = root, transformers_model(root)
        self._towers, self._is_multimodal = towers(model), text_decoder(model) is not model
        before = model, backbone_of(model), text_decoder(model), model.get_input_embeddings(), *self._towers.values()
        self._before_layers, self._mixers = dict.fromkeys(before), mixers
        self._configs = model.config.get_text_config(), model.config
        self._refusal = never_shared(config.shared_prefix_tokens, mixers.need_whole)
        self.following: Sequence[Reading | None] = ()  # readings of the batches that are known when a step begins
        self.has_paid = False  # whether an earlier batch of one rank shared enough; then batches are read ahead
        self._least_tokens, self._looks = config.shared_prefix_tokens, 0
        self._passes, self._said = 0, set[str]()
        self._modules, self._children = list[nn.Module](), list[nn.Module | None]()
        self._latest_refusal: Callable[[], str] = lambda: self._refusal

    def refusal(self, batch: Batch, is_training: bool, is_noisy: bool) -> str:
        """Returns why documents of a batch must not share prefixes; empty if they may.

        Args:
            is_training: whether values may be dropped, and embeddings get noise.
            is_noisy: whether embeddings get noise (NEFTune) in training.
        """
        return self.why_unshared(batch, is_training, lambda: is_noisy)()

    def why_unshared(self, batch: Batch, is_training: bool, has_noise: Callable[[], bool]) -> Callable[[], str]:
        """Returns `refusal` as a function that looks at modules when it is first called, because that takes longer
        than all else. The function does not hold the batch."""
        known = self._refusal or _of_batch(batch, self._is_multimodal) or None

        def refusal() -> str:
            nonlocal known
            known = self._of_modules(is_training, has_noise()) if known is None else known
            return known

        self._latest_refusal = refusal
        return refusal

    def read_ahead(self) -> None:
        """Reads the batches that follow, if documents of the latest one were allowed to share prefixes."""
        following, self.following = self.following, ()
        for reading in following:
            if reading is not None and not self._latest_refusal():
                reading.documents  # noqa: B018 (remembered from here on)

    def found_on_one_rank(
        self, batch: Batch, reader: DocumentReader, is_noisy: bool, returning: Returning
    ) -> ReadDocuments | None:
        """Returns what was read of a batch that trains on one rank; None if its documents share no prefixes.

        They share none if that saves less than a tenth of the tokens, because rows would have to move, which takes
        memory. They share none, either, if installed kernels cannot begin from a state.

        Reading a batch without a reading waits for the device. So until a batch has paid, this happens only in passes
        1, 2, 4, 8 ..., and never only to log why nothing is shared.
        """
        self._passes += 1
        refusal = (
            "use_cache=True keeps keys of every row" if batch.get("use_cache") else self.refusal(batch, True, is_noisy)
        )
        if refusal:
            may_say = self._least_tokens and refusal not in self._said and is_due(self._passes)
            if may_say and (reading := reading_of(batch)) is not None:
                self._say(reading.documents, None, refusal)
            return None
        reading = reading_of(batch)
        read = None if reading is None else reading.documents
        if read is None:
            self._looks += 1
            if not self.has_paid and not is_due(self._looks):
                return None
            try:
                read = reader.read(batch)
            except PackingError as error:  # one rank attends to more kinds of batches, and says what is wrong
                log.debug("documents of this batch share nothing: %s", error)
                return None
        if read.lengths is None or read.unshared:
            return None
        shared = to_share(read, True, returning is not Returning.STATES, self._least_tokens)
        if not begin_alike(shared, self._least_tokens):
            if shared is not read and LEARNT not in self._said and is_due(self._passes):
                self._say(read, shared, LEARNT)
            return None
        saved = saved_share(shared, self._least_tokens)
        self.has_paid |= saved >= LEAST_SAVED
        if not self.has_paid and FEW_SAVED not in self._said:
            self._say(read, None, FEW_SAVED, f"{saved:.1%}")
        if saved < LEAST_SAVED:
            return None
        if not self._mixers.take_states():
            self._say(read, None, "the installed kernels of a mixer begin from no state")
            return None
        return read

    def _say(self, read: ReadDocuments | None, shown_as: ReadDocuments | None, why: str, numbers: str = "") -> None:
        """Logs once for each reason why documents of one rank that begin alike do not share their prefix."""
        if read is not None and say_unshared(read, shown_as, f"{why}{numbers}", self._least_tokens):
            self._said.add(why)

    def _of_modules(self, is_training: bool, is_noisy: bool) -> str:
        """Returns which module or setting may compute different numbers for equal tokens; empty if none. Modules may
        have changed since the last pass."""
        if refusal := self._of_forwards():
            return refusal
        children = [child for module in self._modules for child in module._modules.values()]
        if not self._modules or children != self._children:  # quicker than listing all in every pass
            self._modules = list(self._root.modules())
            self._children = [child for module in self._modules for child in module._modules.values()]
        for module in self._modules:
            forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
            if (forward or backward or module._backward_pre_hooks) and (written := unknown_hook(module)):
                return f"a hook of {written} on a {type(module).__name__} may compute something of each row"
            if is_training and module.training and type(module).__module__ == NOISY_ADAPTER:
                return f"a {type(module).__name__} of {NOISY_ADAPTER} adds noise to every token"
            if is_training and module.training and isinstance(module, OVER_ROWS):
                return f"a {type(module).__name__} computes from all rows or images of the batch"
            if not is_training or not module.training or "drop" not in type(module).__name__.lower():
                continue
            share = max(vars(module).get(name, 0.0) for name in ("p", "drop_prob"))
            if share > 0:
                name = next(name for name, one in self._root.named_modules() if one is module)
                return f"{name} drops {share:g} of its values at random"
        if is_training and is_noisy:
            return "embeddings get noise (NEFTune)"
        return self._of_settings() if is_training else ""

    def _of_forwards(self) -> str:
        """Returns which function that runs before the layers may change tokens; empty if none."""
        for part in self._before_layers:
            for name in FORWARDS:
                if (runs := vars(part).get(name, getattr(type(part), name, None))) is None:
                    continue
                runs = inspect.unwrap(runs)
                runs = getattr(runs, "__func__", runs)
                written = getattr(runs, "__module__", None) or type(runs).__module__
                if written.partition(".")[0] not in KNOWN_FORWARDS:
                    return f"{name} of {type(part).__name__}, of {written}, may change tokens before layers see them"
        return ""

    def _of_settings(self) -> str:
        """Returns which setting makes rows random in training; empty if none."""
        of_towers = (tower.config for tower in self._towers.values() if tower.training)
        settings = (item for config in (*self._configs, *of_towers) for item in vars(config).items())
        for name, value in settings:
            is_random = RANDOM.search(name) and not OF_HEADS.search(name)
            if is_random and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
                return f"{name}={value:g} in the model's config makes rows random"
        return ""


def placeholders_of(root: nn.Module) -> Placeholders:
    """Returns the tokens of a model whose embeddings features of images and videos replace."""
    config = transformers_model(root).config
    image, video = (
        next(
            (token for end in ("id", "index") if (token := getattr(config, f"{kind}_token_{end}", None)) is not None),
            None,
        )
        for kind in ("image", "video")
    )
    vision = getattr(config, "vision_config", None)
    return Placeholders(image, video, has_sizes=getattr(vision, "model_type", "") == "pixtral")


def _of_batch(batch: Batch, is_multimodal: bool) -> str:
    """Returns which unknown entry of a batch layers may compute from; empty if there is none."""
    tokens = tokens_of(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return f"{name} needs gradients, which differ from row to row"
        if is_multimodal and name not in KNOWN_COLUMNS:
            is_tensor = isinstance(value, torch.Tensor)
            is_of_all = value.ndim == 0 or value.numel() == 0 if is_tensor else isinstance(value, SINGLE)
            if is_of_all or (is_tensor and name in OF_IMAGES):
                continue
            return f"the batch has {name}, and it is not known to which tokens it belongs"
        if name in KNOWN_COLUMNS or not isinstance(value, torch.Tensor):
            continue
        if value.shape[:2] == tokens.shape and value.numel() > 1:
            return f"the batch has {name}, which may differ for equal tokens"
    return ""
