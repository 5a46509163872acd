"""Packs: batches that were packed before they get here. Their tokens stay, their attention tasks move.

lengths of this rank ── gather ──▶ live plan ┈┈┈┈┈┈┈┈▶ layout of all packs ──▶ plan, routing
from cu_seq_lens_q, position_ids or rows     of one pass   when a layer attends     moving tasks

Ranks meet before the pass. The plan is made when the first layer attends: the device then computes what comes before.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import torch

from distca_hf.arrays import IntArray
from distca_hf.batches.batch_documents import Batch, document_lengths, media_of, tokens_of
from distca_hf.batches.taking import order_plan, shared_facts
from distca_hf.comm.agreement import Agreement, Occasion, by_value, labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.served_transport import ServedTransport
from distca_hf.comm.transport import Gather, Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, TokenBytes
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.data.media import MEDIA
from distca_hf.errors import PackingError, PlanMismatchError
from distca_hf.layout import Layout, as_int_array
from distca_hf.planning.plan import Plan, PlanFacts, PlanTotals
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.served import Servers, plan_served
from distca_hf.runtime.layer_kinds import PinnedKinds, Planned, PutOff
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import REMEMBERED_MICRO_BATCHES, LoaderTimes, get_logger
from distca_hf.topology import Topology


log = get_logger(__name__)

# Name of the number by which tensor ranks compare their batches.
CHECKSUM = "checksum of tokens, labels and lengths"


@dataclass(frozen=True)
class GatheredPacks:
    """Packs of all ranks on their way to this one.

    Attributes:
        micro_batch: its number.
        trains: whether it is trained on, and counted.
        device: where its tokens are.
        servers: attention servers that compute some of its tasks; None if there are none.
        counts: `[ranks]` documents of each rank.
        gather: brings their lengths, filled up with zeros to those of the rank with the most documents.
        seconds: that have been spent on it.
    """

    micro_batch: int
    trains: bool
    device: torch.device
    servers: Servers | None
    counts: list[int]
    gather: Gather
    seconds: float

    def layout(self) -> Layout:
        """Waits for the lengths; returns the layout of all packs.

        Raises:
            PeerLostError: a rank was lost.
            PackingError: a document is too long.
        """
        where, rows = _where(self.micro_batch), self.gather.wait()
        return Layout.from_packs(
            [as_int_array(row[:count], where) for row, count in zip(rows, self.counts, strict=True)]
        )


class PackPlanner:
    """Plans one model's packs, micro-batch after micro-batch. Every rank plans the same one at the same time.

    Args:
        servers: attention servers behind the ranks, for micro-batches that are trained on; then `transport` reaches
            them. None if there are none.
        layer_masks: masks that the model's layers attend with, each with the number of its layers.
        lengths: returns `[documents]` lengths of a batch, or None if it is padded.

    Attributes:
        history: facts of the latest micro-batches.
        totals, times: sums over micro-batches that a model was trained on, and how long planning them took.
    """

    def __init__(
        self,
        config: DistCAConfig,
        transport: Transport,
        head_groups: int = 1,
        token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
        servers: Servers | None = None,
        layer_masks: LayerMasks = CAUSAL_LAYERS,
        lengths: Callable[[Batch], IntArray | None] = document_lengths,
    ) -> None:
        self.totals = PlanTotals()
        self.history: deque[PlanFacts] = deque(maxlen=REMEMBERED_MICRO_BATCHES)
        self.times = LoaderTimes()
        self._config = config
        self._transport = transport
        self._alone = transport.among_trainers if isinstance(transport, ServedTransport) else transport
        self._topology = config.topology(transport.world_size)
        self._head_groups = head_groups
        self._token_bytes = token_bytes
        self._servers, self._layer_masks, self._lengths_of = servers, layer_masks, lengths
        self._warned_of_padding = False
        self._next_number = 0

    def bookmark(self) -> Callable[[], None]:
        """Returns a function that forgets all micro-batches planned since this call: they are planned again, under
        their numbers."""
        number, totals, times = self._next_number, self.totals, replace(self.times)

        def go_back() -> None:
            for _ in range(self.totals.micro_batches - totals.micro_batches):
                self.history.pop()
            self._next_number, self.totals, self.times = number, totals, replace(times)

        return go_back

    def plan(self, batch: Batch, trains: bool = True, images_wait: bool = False) -> LivePlan | None:
        """Plans a batch, on the device of its tokens. A collective call.

        The plan is made at the first look, when the first layer attends. With attention servers it is made here: it is
        posted to them before any layer runs.

        Args:
            trains: whether it is trained on, and counted.
            images_wait: whether a rank with an image waits for the others: for weights or gradients of towers.

        Returns:
            The plan; None where some rank's batch is padded: then every rank attends to its own batch.

        Raises:
            PackingError: the batch holds something else than whole documents, or no rank has any; or only some
                ranks hold images, and would wait for the others.
            PlanMismatchError, PeerLostError: other ranks are doing something else, could not do their part, or hold
                another batch although they share the data.
        """
        began = time.perf_counter()
        number, self._next_number = self._next_number, self._next_number + 1
        lengths, tokens = self._lengths(batch, number), tokens_of(batch)
        flags = self._flags(batch, lengths, is_first=number == 0)
        numbers = self._numbers(lengths, number, flags, images_wait)
        if numbers is None:
            return None
        assert lengths is not None  # or this rank's batch would be padded
        counts, longest_tokens = numbers["documents"], max(numbers["longest document"])
        if not longest_tokens:
            raise PackingError(f"micro-batch {number}: no data on any rank; leave this batch out")
        filled_up = [*lengths.tolist(), *[0] * (max(counts) - len(lengths))]
        gather = self._transport.gather(filled_up, _where(number))
        servers = self._servers if trains else None  # evaluation uses none
        served = self._transport if isinstance(self._transport, ServedTransport) and trains else None
        if served is not None:
            servers = served.servers  # some may be lost
        seconds = time.perf_counter() - began
        packs = GatheredPacks(number, trains, tokens.device, servers, counts, gather, seconds)
        put_off = PutOff(longest_tokens, partial(self._planned, packs))
        return LivePlan(
            number,
            put_off if servers is None else put_off.make(),
            self._transport if trains else self._alone,
            self._config,
            stopwatch=None if served is None else served.speeds.stopwatch,
            document_tokens=lengths,
        )

    def _planned(self, packs: GatheredPacks) -> Planned:
        """Plans and routes packs, once they are there."""
        began = time.perf_counter()
        layout, servers = packs.layout(), packs.servers
        plan, topology = self._plan(layout, servers)
        num_chunks = self._config.num_chunks(topology)
        kinds = PinnedKinds.prepare(
            plan,
            self._transport.rank,
            num_chunks,
            self._layer_masks,
            layout.rank_work_of,
            pin=packs.device.type == "cuda",
            num_servers=0 if servers is None else servers.count,
        )
        self.history.append(kinds.facts)
        if packs.trains:
            self.totals = self.totals.plus(kinds.facts)
            self.times.micro_batches += 1  # padded micro-batches are in none of these
            self.times.plan_seconds += packs.seconds + time.perf_counter() - began
        posted = order_plan(self._transport, None if servers is None else plan, packs.micro_batch, num_chunks)
        return kinds.planned(packs.device, plan.fingerprint, posted)

    def _plan(self, layout: Layout, servers: Servers | None) -> tuple[Plan, Topology]:
        """Returns the plan of all packs, and the nodes of the ranks that it is of."""
        groups, trainers, token_bytes = self._head_groups, self._topology, self._token_bytes
        if servers is None:
            return plan_by_moving(layout, groups, topology=trainers, token_bytes=token_bytes), trainers
        plan = plan_served(layout, servers, groups, topology=trainers, token_bytes=token_bytes)
        return plan, servers.topology(trainers)

    def _lengths(self, batch: Batch, number: int) -> IntArray | None:
        """Returns document lengths of this rank; None if its batch is padded. Announces a failure to others."""
        try:
            return self._lengths_of(batch)
        except Exception:
            Agreement.announce_unable(self._transport, number, Occasion.PLAN)
            raise

    def _flags(self, batch: Batch, lengths: IntArray | None, is_first: bool) -> dict[str, int]:
        """Returns what ranks show each other of a batch beside its lengths."""
        flags = {
            "learns nothing": int(is_first and _learns_nothing(batch)),
            "holds images": int(bool(media_of(batch))),
        }
        if self._transport.grid.shape[2] > 1:
            flags[CHECKSUM] = _checksum(lengths, tokens_of(batch), batch)
        return flags

    def _numbers(
        self, lengths: IntArray | None, number: int, flags: dict[str, int], images_wait: bool
    ) -> dict[str, list[int]] | None:
        """Returns numbers of every rank about its batch, by name; None if some rank's batch is padded. Gathers of
        lengths are of equal size, so the number of documents comes first. Warns of ranks whose first batch holds no
        label to learn: most likely all their batches are like it."""
        agreement = Agreement.start(
            self._transport,
            Occasion.PLAN,
            number,
            shared_facts(self._config),
            {
                "documents": 0 if lengths is None else len(lengths),
                "longest document": 0 if lengths is None else int(lengths.max(initial=0)),
                "padded": int(lengths is None),
                **flags,
            },
        )
        numbers = agreement.wait(Scope.ROWS)
        if CHECKSUM in flags:
            self._check_same_batch(agreement, number)
        if images_wait:
            self._check_images(numbers["holds images"], number)
        if any(numbers["learns nothing"]):
            log.warning(
                "the first batch holds no label to learn on rank %s (all labels are %d): its loss is 0 or NaN. "
                "Look at the dataset's labels and masks",
                self._labels(numbers["learns nothing"]),
                IGNORED_LABEL,
            )
        if any(numbers["padded"]):
            self._warn_of_padding(self._labels(numbers["padded"]), number)
            return None
        return numbers

    def _check_same_batch(self, agreement: Agreement, number: int) -> None:
        """Checks that all tensor ranks of one data rank hold the same batch.

        Raises:
            PlanMismatchError: some do not; names the first ones.
        """
        grid, checksums = self._transport.grid, agreement.wait()[CHECKSUM]
        for places in grid.same_tokens(grid.members(agreement.scope)):
            seen = [f"{checksums[place]:08x}" for place in places]
            if len(set(seen)) > 1:
                shown = by_value(seen, [agreement.labels[place] for place in places])
                raise PlanMismatchError(
                    f"{grid.name}, micro-batch {number}: tensor ranks of one data rank hold different batches, "
                    f"nothing was sent: the {CHECKSUM} is {shown}. Give them the same "
                    f"rows, with a sampler that counts the {grid.shape[1]} data ranks and not all ranks"
                )

    def _check_images(self, flags: Sequence[int], number: int) -> None:
        """Checks that all ranks hold images, or none."""
        if len(set(flags)) > 1:
            holding, without = self._labels(flags), self._labels([1 - flag for flag in flags])
            raise PackingError(
                f"{self._transport.grid.name}, micro-batch {number}: rank {holding} holds images, videos or "
                f"sound, and rank {without} none. Ranks with images would wait for the others for ever: for weights "
                "of towers that are sharded, or for gradients of towers that train. Give every rank an image in every "
                "micro-batch (a blank one, say); or freeze the towers, leave them out of sharding (ignored parameters "
                "of FSDP), and with DDP set find_unused_parameters=True"
            )

    def _labels(self, flags: Sequence[int]) -> str:
        """Returns the ranks whose flag is 1, in words."""
        labels = labels_of(self._transport, Scope.ROWS)
        return ", ".join(label for label, flag in zip(labels, flags, strict=True) if flag)

    def _warn_of_padding(self, ranks: str, number: int) -> None:
        """Warns once that padded batches are not balanced."""
        if not self._warned_of_padding:
            self._warned_of_padding = True
            log.warning(
                "micro-batch %d is padded on rank %s, and cannot be made a pack there (images, labels that padding "
                "predicts, or a model without a head): every rank attends to this batch alone, and nothing is "
                "balanced. Pack documents instead where the trainer can (DataCollatorWithFlattening, packing=True)",
                number,
                ranks,
            )


def _where(micro_batch: int) -> str:
    return f"micro-batch {micro_batch}, document lengths"


def _checksum(lengths: IntArray | None, tokens: torch.Tensor, batch: Batch) -> int:
    """Returns a checksum of a batch; waits for the device. Images count by their sum, so that they need not be copied.
    A mask counts where the batch is padded: in packs lengths say the same."""
    names = ("labels", "shift_labels", "position_ids", *(["attention_mask"] if lengths is None else []))
    named = [batch.get(name) for name in names]
    media = [x.sum(dtype=torch.float64)[None] for x in map(batch.get, media_of(batch)) if isinstance(x, torch.Tensor)]
    values = [tokens, *(x for x in named if isinstance(x, torch.Tensor)), *media]
    parts = [x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in values]
    return crc32(b"".join([*parts, b"" if lengths is None else lengths.tobytes()]))


def _learns_nothing(batch: Batch) -> bool:
    """Returns whether a batch has labels and none of them is learnt; waits for the device."""
    labels = batch.get("labels")
    return isinstance(labels, torch.Tensor) and labels.numel() > 0 and bool((labels == IGNORED_LABEL).all())


def fill_empty(batch: Batch) -> dict[str, torch.Tensor | int | None]:
    """Returns inputs for a rank without tokens: one row of padding without a label, of loss 0. Empty for other
    ranks."""
    if tokens_of(batch).numel():
        return {}
    filled: dict[str, torch.Tensor | int | None] = (
        {"num_items_in_batch": 1} if batch.get("num_items_in_batch") is None else {}
    )
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor):
            continue
        if name.startswith("cu_seq_lens"):
            filled[name] = values.new_tensor([0, 1])
        elif name == "position_ids" and values.ndim == 3:  # several positions per token, as of images
            filled[name] = values.new_zeros((len(values), 1, 1))
        elif MEDIA.search(name) and not values.numel():
            filled[name] = None
        elif 0 in values.shape[:2]:
            is_mask = name == "attention_mask"  # 1: a mean over no token is NaN
            number = IGNORED_LABEL if name.endswith("labels") else int(is_mask)
            filled[name] = values.new_full((1, 1, *values.shape[2:]), number)
    return filled
