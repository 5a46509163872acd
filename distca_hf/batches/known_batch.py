"""Known batches: finds the documents of tokens that a program passes to a model again, or to another model.

Placed rows hold parts of documents, and packs hold several documents in a row. Only a plan, positions or offsets tell
them apart, and a program that calls a model again often passes only some entries of its batch. So the storages of a
batch's tensors are marked, and each mark leads to the whole batch:

    batch ──marks──▶ storages of input_ids, position_ids, labels, ...       views and slices share them
    input_ids[:, :-1] ──▶ its storage ──▶ KnownBatch ──▶ plan, position_ids, ...

A copy has another storage. Copied token ids or positions are compared with the batches in use, and embeddings are
recognised by their shape. This is state of the process: entries of a batch reach models that know nothing of each
other.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch.utils.weak import TensorWeakRef

from distca_hf.batches.batch_documents import POSITIONS_WITH_TEXT, Batch, cache_of
from distca_hf.errors import DistCAError, PackingError, PlanError
from distca_hf.runtime.live_plan import LivePlan


# Attribute of a storage: a function that returns its `KnownBatch`, or None if that is gone.
MARK = "_distca_batch"
TOKENS = ("input_ids", "inputs_embeds")
# Entries that tell documents apart. A pass that gets one of these two needs no others.
TELLING = ("position_ids", "cu_seq_lens_q")
OF_DOCUMENTS = (*TELLING, "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Other entries that passes need.
NEEDED = ("attention_mask", "shift_labels")
# Entries by which to look for a batch, in this order.
LEADING = ("input_ids", "position_ids", "attention_mask", "inputs_embeds", "shift_labels", "labels")


class KnownBatch:
    """A placed batch, or a pack whose entries tell its documents apart. It lives as long as its tokens or its labels.

    Args:
        plan: of a placed batch; None for a pack.
        is_loaded: whether the tensors are the loader's. Others may be reused for another batch later.
    """

    def __init__(self, batch: Batch, plan: LivePlan | None = None, is_loaded: bool = False) -> None:
        self.plan = plan
        tensors = _plain_tensors(batch)
        tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
        self._shape, self._strides, self._begin = tokens.shape[:2], tokens.stride(), tokens.data_ptr()
        # A storage that kept a tensor on itself alive would never be freed. So the storages of tensors that this
        # object keeps do not keep this object.
        kept = {name: tensors[name] for name in (*OF_DOCUMENTS, *NEEDED) if name in tensors}
        kept = {name: tensor for name, tensor in kept.items() if not _share_storage(tensor, tokens)}
        numbers = {name: batch[name] for name in OF_DOCUMENTS if isinstance(batch.get(name), int)}
        self._kept: dict[str, Any] = numbers | kept
        self._others = {name: TensorWeakRef(tensor) for name, tensor in tensors.items() if name not in kept}
        self._memory: list[tuple[int, int]] = []
        self._mark(tensors)
        self._loaded = [*self._memory] if is_loaded else []
        _in_use[id(self)] = self

    def _mark(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Lets tensors lead to this batch."""
        for tensor in tensors.values():
            is_kept = any(isinstance(one, torch.Tensor) and _share_storage(tensor, one) for one in self._kept.values())
            setattr(tensor.untyped_storage(), MARK, weakref.ref(self) if is_kept else lambda: self)
            self._memory.append((tensor.data_ptr(), tensor.nbytes))

    def entry(self, name: str) -> Any:
        """Returns an entry; None if the batch has no entry of this name, or it is gone."""
        return self._others[name]() if name in self._others else self._kept.get(name)

    def holds(self, tensor: torch.Tensor, batch: Batch) -> bool:
        """Returns whether a tensor is an entry, or a part of one.

        A storage may hold several packs. One that the loader did not make may have been filled with another batch
        since; the plan of a pass shows it.
        """
        plan = batch.get("distca_plan")
        is_here = _is_in(tensor, self._memory)
        return is_here and (not isinstance(plan, LivePlan) or self._is_of(plan) or _is_in(tensor, self._loaded))

    def _is_of(self, plan: LivePlan) -> bool:
        """Returns whether a plan belongs to this batch: its own plan, or the one for another part of the model."""
        mine = self.plan
        if mine is None or plan is mine:
            return plan is mine
        return plan.part != mine.part and (plan.micro_batch, plan.transport) == (mine.micro_batch, mine.transport)

    def is_copied_in(self, batch: Batch) -> bool:
        """Returns whether some rows of a pass's token ids equal this batch, and hold several documents or the end of
        one. Without ids, compares positions. Waits for the device."""
        name = "position_ids" if batch.get("input_ids") is None else "input_ids"
        given, mine = batch.get(name), self.entry(name)
        if not _has_storage(given) or mine is None or mine.ndim != 2 or given.ndim != 2:
            return False
        if given.shape[1] != mine.shape[1] or not len(given) or len(given) % len(mine):
            return False
        copies = (given.unflatten(0, (-1, len(mine))) == mine.to(given.device)).flatten(1).all(dim=1)
        positions = self._positions_in({})
        return bool(copies.any()) and (positions is None or bool(positions[:, 0].any()) or _restart(positions, None))

    def check_embeddings(self, embeddings: torch.Tensor, batch: Batch) -> None:
        """Refuses a pass on embeddings in the shape of this batch that tells no documents apart.

        Raises:
            PackingError: names the shape of the embeddings.
        """
        if embeddings.shape[:2] == self._shape and not self.tells_documents(batch) and self.is_packed(batch):
            kind = "a pack" if self.plan is None else f"placed micro-batch {self.plan.micro_batch}"
            raise PackingError(
                f"a model got embeddings of shape {tuple(embeddings.shape)} and nothing that tells their documents, "
                f"and {kind} has as many tokens: documents would see each other. Pass attention_mask or position_ids "
                "of the batch with them; for other tokens give your own position_ids, or delete the batch before"
            )

    def is_packed(self, batch: Batch) -> bool:
        """Returns whether some row of a pass on tokens of this batch holds several documents, or parts of documents.
        Waits for the device if the batch is a pack."""
        if self.plan is not None:
            return True
        positions = self._positions_in(batch)
        return positions is None or _restart(positions, self.entry("attention_mask"))

    def _positions_in(self, batch: Batch) -> torch.Tensor | None:
        """Returns the positions of a pass's tokens, which may be part of a pack; None if they are not known."""
        positions, offsets = (self.entry(name) for name in TELLING)
        if offsets is not None:  # positions of images need not restart with documents
            token = torch.arange(self._shape.numel(), device=offsets.device)
            begins = offsets.flatten()[torch.searchsorted(offsets.flatten(), token, right=True) - 1]
            positions = (token - begins).view(self._shape)
        ids = batch.get("input_ids")
        if positions is None or ids is None or ids.shape == self._shape:
            return positions
        place = (ids.data_ptr() - self._begin) // ids.element_size()
        if positions.shape != self._shape or ids.stride() != self._strides or not 0 <= place < self._shape.numel():
            return None
        row, column = divmod(place, self._shape[1])
        return positions[row : row + ids.shape[0], column : column + ids.shape[1]]

    def tells_documents(self, batch: Batch) -> bool:
        """Returns whether a pass on tokens of this batch gets offsets, or positions that restart."""
        positions = batch.get("position_ids")
        if positions is None or batch.get("cu_seq_lens_q") is not None:
            return batch.get("cu_seq_lens_q") is not None
        return _marked(positions, batch) is self or _restart(positions, batch.get("attention_mask"))

    def missing(self, batch: Batch, model_name: str) -> Batch:
        """Returns the missing entries that an enabled model needs for a pass on tokens of this batch.

        Raises:
            PlanError: the batch was placed, and the pass gets a part of its tokens, a cache, or another plan.
            PackingError: nothing tells the documents of a pack apart.
        """
        tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
        shape = self._shape if tokens is None else tokens.shape[:2]
        if self.plan is not None:
            return self._missing_of_placed(self.plan, batch, shape, model_name)
        if any(batch.get(name) is not None for name in TELLING) or not self.is_packed(batch):
            return {}
        found = {name: entry for name in OF_DOCUMENTS if (entry := self.entry(name)) is not None}
        if shape != self._shape:
            positions = self._positions_in(batch)
            found = {} if positions is None or positions.shape != shape else {"position_ids": positions}
        if found.keys().isdisjoint(TELLING):
            raise self.refusal(model_name)
        return found

    def _missing_of_placed(self, plan: LivePlan, batch: Batch, shape: torch.Size, model_name: str) -> Batch:
        where, given = f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}", batch.get("distca_plan")
        if isinstance(given, LivePlan) and not self._is_of(given):
            raise PlanError(
                f"{where}: {model_name} got entries of this batch with the plan of micro-batch {given.micro_batch}; "
                "pass the distca_plan of the same batch"
            )
        if given is None and all(_marked(batch.get(name), batch) is None for name in LEADING):
            raise PlanError(
                f"{where}: {model_name} got a copy of tokens of this placed batch, without its plan. Pass the tensors "
                "of the batch themselves, or distca_plan and position_ids with the copy"
            )
        if shape != self._shape or cache_of(batch) is not None:
            cache = " and a cache" if cache_of(batch) is not None else ""
            raise PlanError(
                f"{where}: {model_name} got tokens of shape {tuple(shape)}{cache}, taken from a placed batch of shape "
                f"{tuple(self._shape)}. Its rows hold parts of documents, so a pass needs all of them. For a document "
                "that you know to be whole, pass a copy (clone) of its tokens"
            )
        # A program may have replaced the token ids, for example by noisy ones: from now on they belong to this batch.
        tensors = {name: tensor for name, tensor in _plain_tensors(batch).items() if name in TOKENS}
        self._mark({name: tensor for name, tensor in tensors.items() if _marked(tensor, batch) is None})
        needed = ["position_ids", "attention_mask"]
        if _marked(batch.get("labels"), batch) is self:
            needed.append("shift_labels")
        found = {name: self.entry(name) for name in needed if batch.get(name) is None}
        return found | ({"distca_plan": plan} if given is None else {})

    def refusal(self, model_name: str) -> DistCAError:
        """Returns the error to raise for a pass that does not get the documents of this batch."""
        if self.plan is not None:
            return placed_in_another_model(self.plan, model_name)
        return PackingError(
            f"{model_name} got tokens of a pack of shape {tuple(self._shape)} without anything that tells it their "
            "documents apart: they would see each other. Pass it position_ids (or cu_seq_lens_q) of the batch. A "
            "model whose attention is not distca also needs use_cache=False, and no attention_mask"
        )


def placed_in_another_model(plan: LivePlan, model_name: str) -> PlanError:
    """Returns the error to raise if a placed batch reaches a model that was not enabled."""
    return PlanError(
        f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}: a placed batch arrived in a model that was not "
        f"enabled ({model_name}). Its rows hold parts of documents, which only distca_plan explains, and the result "
        "would be wrong. Call distca_hf.enable(model, plugin) with the plugin of the batch before that model is "
        "wrapped, and pass it the batch. Call the enabled model itself, neither its forward nor a module inside of it"
    )


def note_batch(batch: Batch) -> None:
    """Makes a batch known if it has a plan, or if its entries tell its documents apart; does nothing for others.

    Trainer or a program may have copied the tensors of a placed batch. The latest entries of a pack count.
    """
    plan = batch.get("distca_plan")
    if plan is None and not _may_tell(batch):
        return
    tensors = _plain_tensors(batch)
    telling = [tensors[name] for name in TELLING if name in tensors]
    if tensors.keys().isdisjoint(TOKENS) or not (isinstance(plan, LivePlan) or (plan is None and telling)):
        return
    known = known_batch(batch)
    if known is None or (known.plan is None and all(_marked(tensor, batch) is not known for tensor in telling)):
        KnownBatch(batch, plan)


def known_batch(batch: Batch) -> KnownBatch | None:
    """Returns the batch that entries of a pass belong to; None if they belong to none."""
    if not _in_use:
        return None
    found = (_marked(batch.get(name), batch) for name in LEADING)
    return next((known for known in found if known is not None), None)


def copied_batch(batch: Batch) -> KnownBatch | None:
    """Returns the batch of which a pass without a plan gets copies; None if there is none.

    Raises:
        PackingError: it gets embeddings in the shape of a known batch, and nothing that tells documents apart.
    """
    for reference in reversed(_in_use.valuerefs()):
        known = reference()
        if known is None:
            continue
        if known.is_copied_in(batch):
            return known
        if batch.get("input_ids") is None and _has_storage(batch.get("inputs_embeds")):
            known.check_embeddings(batch["inputs_embeds"], batch)
    return None


def completed(batch: Batch, model_name: str) -> dict[str, Any]:
    """Returns the batch of an enabled model's pass, completed with the entries of a known batch that it needs. The
    batch is known from now on.

    Raises:
        PlanError, PackingError: as for `copied_batch` and `KnownBatch.missing`.
    """
    if not _in_use and batch.get("distca_plan") is None and not _may_tell(batch):
        return {**batch}  # quicker: the steps below would find nothing
    known = known_batch(batch)
    if known is None and batch.get("distca_plan") is None and not _may_tell(batch):
        known = copied_batch(batch)
    note_batch(batch)
    return {**batch, **({} if known is None else known.missing(batch, model_name))}


def any_known() -> bool:
    """Returns whether any known batch is in use."""
    return len(_in_use) > 0


def _may_tell(batch: Batch) -> bool:
    """Returns whether a batch has an entry that tells its documents apart."""
    positions, offsets = map(batch.get, TELLING)
    return positions is not None or offsets is not None


def _marked(tensor: object, batch: Batch) -> KnownBatch | None:
    """Returns the batch that a tensor belongs to, by its storage."""
    if not _has_storage(tensor):
        return None
    get: Callable[[], KnownBatch | None] | None = getattr(tensor.untyped_storage(), MARK, None)
    known = None if get is None else get()
    return known if known is not None and known.holds(tensor, batch) else None


def _is_in(tensor: torch.Tensor, memory: Iterable[tuple[int, int]]) -> bool:
    return any(begin <= tensor.data_ptr() < begin + size for begin, size in memory)


def _plain_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the entries of a batch that are tensors with a storage."""
    return {name: value for name, value in batch.items() if _has_storage(value)}


def _has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is a plain tensor with memory: neither sparse nor inside a transform of torch.func."""
    if type(value) is not torch.Tensor or value.is_meta:
        return False
    try:
        value.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage() is other.untyped_storage()


def _restart(positions: torch.Tensor, mask: object) -> bool:
    """Returns whether positions restart inside a row, ignoring padding; waits for the device.

    Args:
        positions: `[B, T]`, or several of them, positions of text first.
        mask: `[B, T]`, 0 in padding; or no tensor.
    """
    if positions.ndim == 3 and len(positions) != POSITIONS_WITH_TEXT:
        return False  # of images; offsets tell documents then
    text = positions[0] if positions.ndim == 3 else positions
    restarts = text.diff(dim=-1) <= 0
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[-1] == text.shape[-1]:
        restarts = restarts & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(restarts.any())


# By `id`, newest last. Entries vanish with their batches.
_in_use: "weakref.WeakValueDictionary[int, KnownBatch]" = weakref.WeakValueDictionary()
