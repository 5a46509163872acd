"""Loader: from a dataset to placed micro-batches, planned and read ahead of the training loop.

    dataset ── lengths ──▶ epochs ──▶ placement ──▶ plan, routing ──▶ rows of this rank ──▶ batch on the device
               once                   `────────── background thread ──────────────────'    main thread

Every rank computes the same layouts and plans from lengths alone and reads only the tokens it holds.
"""

import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError
from distca_hf.integrations.ahead import Ahead
from distca_hf.packing.collate import RankRows, collate, pad_rows
from distca_hf.packing.epochs import Epoch, EpochPacker
from distca_hf.packing.placement import fill_in_order, place
from distca_hf.packing.source import DocumentSource, Tokens
from distca_hf.planning.planner import plan_in_place
from distca_hf.planning.routing import key_transfers, route
from distca_hf.runtime.maps import HostMaps
from distca_hf.runtime.plans import LivePlan, PlanFacts
from distca_hf.telemetry import REMEMBERED_MICRO_BATCHES, LoaderTimes, get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

STATE_VERSION = 1


@dataclass(frozen=True)
class Cursor:
    """Position in the endless stream: the next micro-batch to hand out."""

    epoch: int = 0
    micro_batch: int = 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A micro-batch as the background thread leaves it: host tensors (pinned if they go to a GPU) and host maps."""

    cursor: Cursor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    shift_labels: torch.Tensor
    maps: HostMaps
    facts: PlanFacts
    fingerprint: int
    label_tokens: int
    plan_seconds: float


class PlacedLoader:
    """Iterates over placed micro-batches: dicts that a Transformers model takes as they are.

    `input_ids`, `position_ids`, `shift_labels`, `labels`: int64 `[1, rows]` on the device; `distca_plan`: the plan,
    opaque.

    One iteration is one epoch: `len(loader)` micro-batches, every document exactly once; the next iteration is the
    next epoch, in another order. It is no torch `DataLoader`, so that Accelerate leaves it alone: it is sharded
    already.

    Args:
        dataset: tokenised map-style `datasets.Dataset`; see `DocumentSource`.
        config: settings.
        transport: between the ranks that share each micro-batch.
        device: where batches go.
        seed, shuffle: order of documents, together with the epoch's number.
        prefetch: micro-batches to prepare ahead, if not as many as the settings say.

    Raises:
        PackingError: the dataset cannot be packed.
    """

    batch_size = 1

    def __init__(
        self,
        dataset: Any,
        config: DistCAConfig,
        transport: Transport,
        device: torch.device,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.times = LoaderTimes()
        self.history: deque[PlanFacts] = deque(maxlen=REMEMBERED_MICRO_BATCHES)
        self._config = config
        self._transport = transport
        self._device = device
        self._seed = seed
        self._shuffle = shuffle
        self._prefetch = prefetch or config.prefetch
        self._capacity_tokens = transport.world_size * config.tokens_per_rank
        self._source = DocumentSource(dataset, self._capacity_tokens, config.overlong)
        self._packer = EpochPacker(self._source.document_tokens, self._capacity_tokens, seed, shuffle)
        self._next = Cursor()
        self._loaded: Cursor | None = None
        self._position = Cursor()

    def __len__(self) -> int:
        """Micro-batches of an epoch; the same for every epoch."""
        return self._packer.num_micro_batches

    @property
    def num_documents(self) -> int:
        """Documents of an epoch, after splitting."""
        return len(self._source)

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self._source.document_tokens.sum())

    @property
    def longest_document_tokens(self) -> int:
        """Tokens of the longest document, after splitting or truncating."""
        return int(self._source.document_tokens.max())

    @property
    def documents_truncated(self) -> int:
        """Documents of an epoch that lost their end to `overlong="truncate"`."""
        return self._source.documents_truncated

    def documents(self, epoch: int, micro_batch: int) -> list[Tokens]:
        """The whole documents of one micro-batch, as they were before placement cut and ordered them."""
        chosen = self._packer.epoch(epoch).micro_batch(micro_batch).tolist()
        return [self._source.read(document, 0, int(self._source.document_tokens[document])) for document in chosen]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; a position given to `load_state_dict` goes first, once."""
        self._next = Cursor(epoch, self._next.micro_batch)

    def skip_batches(self, num_batches: int) -> "PlacedLoader":
        """The next iteration begins this many micro-batches into its epoch; a loaded position goes first, once."""
        self._next = Cursor(self._next.epoch, num_batches)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Position after the micro-batches handed out so far, and what it is a position in."""
        return {**self._identity(), **asdict(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position with the next iteration.

        Raises:
            ConfigError: the state is of another dataset, seed or batch size; names both values.
        """
        self.check_state(state)
        saved = Cursor(int(state["epoch"]), int(state["micro_batch"]))
        self._loaded = self._position = saved if saved.micro_batch < len(self) else Cursor(saved.epoch + 1)

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuses a saved position that means other micro-batches here, as `load_state_dict` does."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"the saved loader position is of {name}={state.get(name)!r}, this loader has {value!r}; resume "
                    "with the same dataset, seed and ranks x tokens_per_rank"
                )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin = self._next if self._loaded is None else self._loaded
        if begin.micro_batch > len(self):
            raise ConfigError(f"cannot begin at micro-batch {begin.micro_batch} of an epoch that has {len(self)}")
        self._loaded, self._next, self._position = None, Cursor(begin.epoch), begin
        with closing(Ahead(lambda: self._prepare_from(begin), self._prefetch, self.times).__iter__()) as ahead:
            for micro_batch in range(begin.micro_batch, len(self)):
                try:
                    prepared = next(ahead)
                except Exception:
                    Agreement.announce_unable(self._transport, self._number(Cursor(begin.epoch, micro_batch)))
                    raise
                batch = self._deliver(prepared)
                self._position = Cursor(begin.epoch, micro_batch + 1)
                if micro_batch + 1 == len(self):  # known now: nobody has to ask for one batch more
                    self._next = Cursor(begin.epoch + 1)
                yield batch
        self._next = self._position = Cursor(begin.epoch + 1)
        log.info(
            "epoch %d: the training loop waited %.2f %% of its time for data; preparing took %.1f ms per micro-batch",
            begin.epoch,
            100 * self.times.wait_share,
            1e3 * self.times.plan_seconds / max(1, self.times.micro_batches),
        )

    def _prepare_from(self, begin: Cursor) -> Iterator[Prepared]:
        """Micro-batches from `begin` to the end of its epoch. Runs in the background; touches no process group."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # or pinning would open a context on the first GPU
        epoch = self._packer.epoch(begin.epoch)
        for micro_batch in range(begin.micro_batch, len(self)):
            yield self.prepare(epoch, Cursor(begin.epoch, micro_batch))

    def prepare(self, epoch: Epoch, cursor: Cursor) -> Prepared:
        """Places, plans and reads one micro-batch."""
        began = time.perf_counter()
        documents = epoch.micro_batch(cursor.micro_batch)
        document_tokens = self._source.document_tokens[documents]
        num_ranks, rank = self._transport.world_size, self._transport.rank
        layout = pad_rows(
            place(document_tokens, num_ranks), self._config.pad_to_multiple_of, self._config.tokens_per_rank
        )
        plan = plan_in_place(layout)
        transfers = key_transfers(plan)
        pin = self._device.type == "cuda"
        maps = HostMaps.prepare(route(plan, rank, transfers), pin)
        facts = PlanFacts.of(plan, transfers, fill_in_order(document_tokens, num_ranks).rank_work)
        rows = collate(layout, rank, documents, self._source)
        input_ids, position_ids, labels, shift_labels = _host_tensors(rows, pin)
        return Prepared(
            cursor=cursor,
            input_ids=input_ids,
            position_ids=position_ids,
            labels=labels,
            shift_labels=shift_labels,
            maps=maps,
            facts=facts,
            fingerprint=plan.fingerprint,
            label_tokens=rows.num_labels,
            plan_seconds=time.perf_counter() - began,
        )

    def _deliver(self, prepared: Prepared) -> dict[str, Any]:
        """The batch on the device, its plan registered, and its agreement under way."""
        self.times.micro_batches += 1
        self.times.plan_seconds += prepared.plan_seconds
        self.history.append(prepared.facts)
        number = self._number(prepared.cursor)
        plan = LivePlan(
            micro_batch=number,
            maps=prepared.maps.to(self._device),
            facts=prepared.facts,
            transport=self._transport,
            config=self._config,
            fingerprint=prepared.fingerprint,
            agreement=Agreement.start(
                self._transport,
                Occasion.TAKE,
                number,
                {
                    "version": zlib.crc32(__version__.encode()),
                    **self._config.shared_settings(),
                    "seed": self._seed,
                    "number of documents": len(self._source),
                    "dataset": int(self._source.fingerprint, 16) >> 1,
                    "fingerprint": prepared.fingerprint,
                },
                {"label_tokens": prepared.label_tokens},
            ),
        )
        return {
            "input_ids": prepared.input_ids.to(self._device, non_blocking=True),
            "position_ids": prepared.position_ids.to(self._device, non_blocking=True),
            "shift_labels": prepared.shift_labels.to(self._device, non_blocking=True),
            "labels": prepared.labels.to(self._device, non_blocking=True),
            "distca_plan": plan,
        }

    def _number(self, cursor: Cursor) -> int:
        """Number of a micro-batch in the endless stream."""
        return cursor.epoch * len(self) + cursor.micro_batch

    def _identity(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "dataset": self._source.fingerprint,
            "documents": len(self._source),
            "capacity_tokens": self._capacity_tokens,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }


def _host_tensors(rows: RankRows, pin: bool) -> list[torch.Tensor]:
    """Input ids, position ids, labels and shifted labels as `[1, rows]`."""
    arrays = (rows.input_ids, rows.position_ids, rows.labels, rows.shift_labels)
    tensors = [torch.from_numpy(array).unsqueeze(0) for array in arrays]
    return [tensor.pin_memory() for tensor in tensors] if pin else tensors
