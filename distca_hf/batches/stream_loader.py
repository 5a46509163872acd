"""Stream loader: makes placed micro-batches of a stream. Readers, buffer and exchanges are in `stream_feed`.

The loader's position is after the last micro-batch that it handed out, however far the background thread is ahead.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from distca_hf.batches.agreement import shared_facts
from distca_hf.batches.base_loader import BaseLoader
from distca_hf.batches.meter import Meter
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import HostPlans, Prefetcher
from distca_hf.batches.stream_feed import StreamBatch, StreamFeed, StreamPosition
from distca_hf.comm.agreement import Agreement, Announced, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.data.positions import check_checksum, check_identity, whole_number, with_checksum
from distca_hf.data.rows import Reading
from distca_hf.data.stream_buffer import MOST_READERS, BufferPosition, StreamBuffer
from distca_hf.data.streams import StreamSource
from distca_hf.errors import ConfigError, PackingError
from distca_hf.parallel_context import shown_to_accelerate
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Version of `state_dict`.
STATE_VERSION = 2
# Fields of a position within its optimizer step.
OF_STEP = ("into_step", "micro_batches", "step_batches")
# Micro-batches in a buffer by default, in addition to an optimizer step: enough to fill gaps.
BUFFER_BATCHES = 3
# Least micro-batches, share of time and seconds of waiting for a warning.
WAITING_BATCHES, WAITING_SHARE, WAITING_SECONDS = 16, 0.1, 1.0


class StreamLoader(BaseLoader):
    """Iterates over placed micro-batches of a stream, like `PlacedLoader`.

    One iteration is one pass through the stream, or its rest: every document exactly once. The loader has no length.
    The next iteration goes on where the last one stopped, which it ends if it is still held. If the loader repeats, an
    iteration has no end: pass follows pass, and a step that one pass cannot fill is filled from the next.

    Args:
        stream: a `datasets.IterableDataset`, the whole one on every rank; or another iterable of rows with
            `state_dict` and `load_state_dict`, which gives this rank's rows.
        planner: settings and facts about the model.
        transport: see `BaseLoader`.
        reading_transport: connects the same ranks; used only by this loader's background thread.
        device: device of the batches.
        seed: seed of the order of documents in the buffer.
        shuffle: False keeps the stream's order, as far as readers alternate.
        prefetch: micro-batches to prepare ahead, the same number on all ranks; by default the setting of this name.
        micro_steps: micro-batches of an optimizer step; within a step, long documents train together.
        reading: which columns of rows count, and how.
        repeats: whether an iteration goes on with the next pass.

    Attributes:
        documents_truncated: documents of the micro-batches so far that lost their end to `overlong="truncate"`.

    Raises:
        ConfigError: the buffer is too small, or the planner shapes steps.
        PackingError: the stream's position cannot be saved.
    """

    def __init__(
        self,
        stream: object,
        planner: PlacedPlanner,
        transport: Transport,
        reading_transport: Transport,
        device: torch.device,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int | None = None,
        micro_steps: int = 1,
        reading: Reading = Reading(),  # noqa: B008 (immutable)
        repeats: bool = False,
    ) -> None:
        config = planner.config
        super().__init__(planner, transport, device, micro_steps, prefetch or config.prefetch)
        if planner.step_shape is not None:
            raise ConfigError(
                "a stream has no whole optimizer steps at its end, which a pipeline needs: save it once, for example "
                "with datasets.Dataset.from_generator(lambda: iter(stream)), and train on that"
            )
        least = (micro_steps + 1) * planner.capacity_tokens
        self._buffer_tokens = config.stream_buffer_tokens or least + (BUFFER_BATCHES - 1) * planner.capacity_tokens
        if self._buffer_tokens < least:
            raise ConfigError(
                f"stream_buffer_tokens={self._buffer_tokens} is less than {least}: {micro_steps} micro-batches of an "
                f"optimizer step and one more, of {planner.capacity_tokens} tokens each (ranks x tokens_per_rank). "
                "Raise it, or leave it out"
            )
        planner.kernel_times  # noqa: B018  raises here if the table cannot be read
        planner.check_kernel_times(planner.longest_tokens)
        self.dataset = stream
        self._seed, self._shuffle, self._repeats = seed, shuffle, repeats
        self._source = StreamSource(
            stream,
            reading,
            planner.longest_tokens,
            config.overlong,
            stay_whole=planner.whole_documents,
            shuffle=shuffle,
            skips_bad_rows=config.skip_bad_rows,
        )
        self._reading_transport = reading_transport
        self.preparer = HostPlans(planner=planner, rank=transport.rank, device=device)
        self._warned_of_waiting = self._logged_division = False
        self._read_seconds = [0.0] * transport.world_size
        self.documents_truncated = 0
        self._ahead: Generator[StreamBatch, None, None] | None = None  # of the latest iteration
        self.restart()

    def restart(self) -> None:
        """Begins the stream anew at the next iteration."""
        self._source.longest_tokens = self._planner.longest_tokens
        self._position = StreamPosition(BufferPosition.beginning(0, self._transport.world_size))

    @property
    def pass_number(self) -> int:
        """Number of the current pass through the stream, counted from 0."""
        return self._position.buffer.pass_number

    def state_dict(self) -> dict[str, object]:
        """Returns the position after the micro-batches handed out so far: numbers and text, the same on all ranks."""
        at = self._position
        numbers = {name: getattr(at, name) for name in OF_STEP}
        return with_checksum({**self._identity(), **self._all_sizes, **numbers, **at.buffer.fields()}, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position. With another number of ranks or tokens the documents
        that are left are packed anew: none is lost, and none comes twice.

        Raises:
            ConfigError: a field is missing, wrong or changed; or the state is from another stream or seed, or from the
                middle of an optimizer step of other sizes; or each rank gives its own part of the stream, and the
                number of ranks has changed; or documents were cut to more tokens than ranks hold now.
        """
        num_readers = self._position.buffer.num_readers
        if isinstance(state, Mapping) and self._source.is_divided_here and "readers" in state:
            num_readers = whole_number("readers", state.get("readers"), least=1, most=MOST_READERS)
        identity = self._identity(num_readers)
        longest_tokens = self._planner.longest_tokens
        if isinstance(state, Mapping) and identity["cut_tokens"] and type(cut := state.get("cut_tokens")) is int:
            # The rest of a pass is cut as its beginning was, for fewer ranks or tokens.
            if 0 < cut <= longest_tokens or (cut and state.get("refills") == 0):
                identity["cut_tokens"] = cut
        check_identity(state, identity)
        buffer = BufferPosition.read(state, num_readers)
        at = StreamPosition(buffer, **{name: whole_number(name, state.get(name)) for name in OF_STEP})
        sizes = {name: whole_number(name, state.get(name), least=1) for name in self._all_sizes}
        fields = {**identity, **sizes, **dict.fromkeys(OF_STEP), **buffer.fields()}
        check_checksum(state, fields, 0)
        into_step = at.into_step + (sizes["micro_steps"] - at.step_batches if at.step_batches else 0)
        if into_step and sizes != self._all_sizes:
            raise ConfigError(
                f"the position was saved after {into_step} of {sizes['micro_steps']} micro-batches of an optimizer "
                f"step, with {sizes}; this loader has {self._all_sizes}. Save at the end of a step, or resume with "
                "the same sizes"
            )
        if buffer.is_beginning:  # readers may still be as many as ranks
            at = replace(at, buffer=BufferPosition.beginning(buffer.pass_number, self._transport.world_size))
        elif num_readers != self._transport.world_size:
            log.info(
                "the stream goes on with its %d readers, dealt to %d ranks%s",
                num_readers,
                self._transport.world_size,
                "; some ranks read nothing until the next pass" if num_readers < self._transport.world_size else "",
            )
        self._position = at
        self._source.longest_tokens = longest_tokens
        if identity["cut_tokens"] and not buffer.is_beginning:
            self._source.longest_tokens = whole_number("cut_tokens", state["cut_tokens"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields micro-batches from the loader's position to the end of the pass, or without end if it repeats."""
        yield from self._of_pass()
        while self._repeats:
            yield from self._of_pass()

    def _of_pass(self) -> Iterator[dict[str, Any]]:
        if self._ahead is not None:  # an iteration that is still held: two threads would mix their exchanges
            self._ahead.close()
        begin = self._position
        # In the training thread, so that the others name a rank that begins no pass.
        with Announced(self._transport, begin.micro_batches, Occasion.BEGIN):
            if not self._logged_division:
                self._logged_division = True
                self._source.log_division(begin.buffer.num_readers)
            facts = {
                **shared_facts(self._planner.config),
                **self._settings,
                "position in the stream": begin.in_words(),
                **self._source.facts(),
            }
        Agreement.start(self._transport, Occasion.BEGIN, begin.micro_batches, facts, {}).wait()
        meter = Meter(self._transport, self._device, None)
        meter.begin(self)
        planner, of_order = self._planner, (self._seed, self._shuffle)
        with Announced(self._transport, begin.micro_batches, Occasion.TAKE):
            buffer = StreamBuffer(begin.buffer, planner.capacity_tokens, self._buffer_tokens, *of_order, planner.fits)
            of_feed = self._source, begin, buffer, self._reading_transport, self.preparer, self._micro_steps
            feed = StreamFeed(*of_feed)
        ahead_of = Prefetcher(feed.micro_batches, self._prefetch, self.times, in_step=True)
        use = None
        self._ahead = ahead_of.__iter__()
        with closing(self._ahead) as ahead, shown_to_accelerate(self):
            while True:
                if self._ahead is not ahead:
                    raise ConfigError(
                        f"rank {self._transport.rank}, micro-batch {self._position.micro_batches}: a later iteration "
                        "of this loader has begun, and only the latest can go on; make a loader for each"
                    )
                number = self._position.micro_batches
                with Announced(self._transport, number, Occasion.TAKE):
                    fed = next(ahead, None)
                    facts = {**self._settings, "contents of documents": fed and fed.contents}
                if fed is None:
                    break
                batch = self._deliver(fed.prepared, fed.data, number, facts)
                self._position = fed.after
                self.end_of_dataloader = fed.is_last and not self._repeats
                if fed.is_last:
                    beginning = BufferPosition.beginning(begin.buffer.pass_number + 1, self._transport.world_size)
                    owed = fed.owed if self._repeats else 0
                    self._source.longest_tokens = self._planner.longest_tokens
                    self._position = StreamPosition(beginning, 0, fed.after.micro_batches, owed)
                self.documents_truncated += fed.truncated
                self._note_waiting(fed)
                use = batch["distca_plan"].use
                yield batch
            if self.writes_epochs and use is not None and use.trained:
                log.info("%s", meter.read_here(self).in_words(f"pass {begin.buffer.pass_number} of the stream"))
        if use is None and begin.buffer.is_beginning:
            number = begin.buffer.pass_number
            remedy = "Iterating over it again must begin it anew" if number else "Look at its filters, or at its files"
            raise PackingError(f"pass {number}: the stream gave no document. {remedy}")

    @property
    def _settings(self) -> dict[str, object]:
        """Returns settings of the data that ranks must share."""
        return {**self._identity(), "prefetch": self._prefetch, "repeats": self._repeats, **self._all_sizes}

    def _identity(self, num_readers: int | None = None) -> dict[str, object]:
        return {
            "version": STATE_VERSION,
            **self._source.identity(num_readers or self._position.buffer.num_readers),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "whole_documents": self._planner.whole_documents,
        }

    @property
    def _all_sizes(self) -> dict[str, int]:
        """Sizes that decide which documents are in a micro-batch."""
        return {**self._sizes, "buffer_tokens": self._buffer_tokens}

    def _note_waiting(self, fed: StreamBatch) -> None:
        """Warns, once, if training waits for the stream; names the rank that reads longest."""
        self._read_seconds = [sum(pair) for pair in zip(self._read_seconds, fed.read_seconds, strict=True)]
        times = self.times
        if self._warned_of_waiting or times.micro_batches < WAITING_BATCHES:
            return
        if times.wait_share < WAITING_SHARE or times.wait_seconds < WAITING_SECONDS:
            return
        self._warned_of_waiting = True
        slowest = max(range(len(self._read_seconds)), key=self._read_seconds.__getitem__)
        log.warning(
            "the stream is slower than training, which waited for it in %.0f%% of the first %d micro-batches. Rank %d "
            "reads longest, %.3g s per micro-batch: read from faster storage, tokenise before, or read in worker "
            "processes (a StatefulDataLoader of torchdata)",
            *(100 * times.wait_share, times.micro_batches, slowest),
            self._read_seconds[slowest] / times.micro_batches,
        )
