"""Mixer watch: in every forward pass of an enabled model with mixers, the documents that they keep apart.

Documents must be whole: the state at their first token is that of nothing before. A plan that cuts documents is
refused, and so is a batch that is trained on and does not say where its documents begin.
"""

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from distca_hf.arrays import exclusive_cumsum
from distca_hf.batches.batch_documents import Batch, cache_of, document_lengths, tokens_of
from distca_hf.batches.stated_documents import lengths_and_rows, stated_lengths
from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.models.documents_apart import KEYWORD, DocumentRows, keep_apart, mix_rows_again
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger


log = get_logger(__name__)


class MixerWatch:
    """Watches the mixers of one model; does nothing where there are none.

    Attributes:
        mixers: by name.
        lengths: returns lengths of the documents of a batch, and checks them.
    """

    def __init__(self, model: PreTrainedModel, accepts_use_cache: bool) -> None:
        self._model, self._accepts_use_cache = model, accepts_use_cache
        self.mixers = mixers_of(model)
        self.lengths = stated_lengths if self.mixers else document_lengths
        classes = sorted({type(mixer).__name__ for mixer in self.mixers.values()})
        self._named = f"{len(self.mixers)} parts of {type(model).__name__} ({', '.join(classes)})"

    def enter(self) -> None:
        """Lets mixers keep documents apart, and logs it."""
        if self.mixers:
            keep_apart(self._model, self.mixers)
            log.info(
                "%s carry a state from token to token, so no document is cut, and each is a row of its own there. "
                "Attention is balanced by computing parts of it on other ranks. Tokens of your own batches stay: give "
                "every rank about as many",
                self._named,
            )

    def leave(self, module: nn.Module) -> None:
        """Undoes `enter`, in the model or in a copy."""
        if self.mixers:
            mix_rows_again(module)

    def with_plan(self, batch: Batch, plan: LivePlan) -> dict[str, object]:
        """Returns what a pass with a plan needs besides, as keywords.

        Raises:
            UnsupportedAttentionError: ZeRO-3 divides the weights of mixers.
            PlanError: the plan cuts documents.
            PackingError: a cache is asked for.
        """
        if not self.mixers:
            return {}
        self._check_weights()
        facts, transport = plan.facts, plan.transport
        if facts.cut_documents:
            raise PlanError(
                f"{transport.grid.name}, micro-batch {plan.micro_batch}: {facts.cut_documents} of "
                f"{facts.num_documents} documents are cut, and {self._named} need whole ones, because they carry a "
                "state from token to token. Make batches with plugin.dataloader(model=...)"
            )
        assert plan.document_tokens is not None
        batch_size, row_tokens = tokens_of(batch).shape
        lengths = plan.document_tokens
        if not len(lengths) or (len(lengths) == batch_size and np.all(lengths == row_tokens)):
            return {KEYWORD: None}
        self._check_no_cache(batch)
        return {KEYWORD: DocumentRows(lengths, batch_size, row_tokens, tokens_of(batch).device)}

    def alone(self, batch: Batch, trains: bool) -> dict[str, object]:
        """Returns what a pass of this rank alone needs besides, as keywords.

        Raises:
            UnsupportedAttentionError: ZeRO-3 divides the weights of mixers.
            PackingError: nothing says where documents begin, sources disagree, or a cache is asked for.
        """
        if not self.mixers:
            return {}
        tokens, cached = tokens_of(batch), cache_of(batch)
        goes_on = cached is not None and cached.get_seq_length() > 0
        if goes_on or not tokens.numel():
            return {KEYWORD: None}
        if trains:
            self._check_weights()
            stated_lengths(batch)
        batch_size, row_tokens = tokens.shape
        lengths, rows = lengths_and_rows(batch)
        starts = exclusive_cumsum(lengths)
        row_of_document = (starts if rows is None else rows[starts]) // row_tokens
        if len(np.unique(row_of_document)) == len(lengths):  # Transformers masks the padding of rows
            return {KEYWORD: None}
        self._check_no_cache(batch)
        found = DocumentRows(lengths, batch_size, row_tokens, tokens.device, rows)
        return {KEYWORD: found} | ({"use_cache": False} if self._accepts_use_cache else {})

    def _check_weights(self) -> None:
        """Checks that the weights of mixers are there as long as a layer runs.

        Raises:
            UnsupportedAttentionError: ZeRO-3 gathers them for each part of a mixer. Ranks run the parts unequally
                often, once for documents of about one length, and would wait for each other.
        """
        # ds_id: DeepSpeed's mark of a parameter that ZeRO-3 divides.
        if any(hasattr(parameter, "ds_id") for mixer in self.mixers.values() for parameter in mixer.parameters()):
            raise UnsupportedAttentionError(
                f"{self._named} run once for documents of about one length, unequally often on every rank, and ZeRO-3 "
                "gathers their weights in every run: ranks would wait for each other. Train with ZeRO-1, ZeRO-2, FSDP "
                "or DDP"
            )

    def _check_no_cache(self, batch: Batch) -> None:
        """Checks that no cache is to be filled by packed documents.

        Raises:
            PackingError: it is.
        """
        if cache_of(batch) is not None or batch.get("use_cache"):
            raise PackingError(
                f"rows hold several documents, and {self._named} would leave the state of one of them in a cache; set "
                "use_cache=False, or give every document a row of its own"
            )
