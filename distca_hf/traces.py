"""Traces: the measurements of one rank in one micro-batch of a reported step, as training writes them and `distca
report` reads them.

Every rank writes its own file, `rank-00003.jsonl`, with a line of JSON for each micro-batch. So does every attention
server, `server-00000.jsonl`. Ranks exchange nothing for this.
"""

import enum
import json
from dataclasses import asdict, dataclass


# What a line is, and the version of its fields.
KIND, VERSION = "distca-trace", 3
# Name of a folder of traces, unless a setting names another one; and of the files in it.
FOLDER = "distca_report"
FILES, SERVER_FILES = "rank-*.jsonl", "server-*.jsonl"


def file_name(number: int, is_server: bool = False) -> str:
    """Returns the name of the file of a rank, by its number in the job; or of an attention server, by its own."""
    return f"{'server' if is_server else 'rank'}-{number:05d}.jsonl"


class PassPart(enum.StrEnum):
    """Part of a pass that an attention call belongs to."""

    FORWARD = "forward"
    RECOMPUTED = "recomputed"
    BACKWARD = "backward"


class Spent(enum.StrEnum):
    """The use of a span of time within an attention call."""

    SEND = "send"  # rows are gathered, and their exchange is started
    LOCAL = "local"  # kernels on own keys
    WAIT = "wait"  # for rows of other ranks
    REMOTE = "remote"  # kernels on keys and queries of other ranks
    COMBINE = "combine"  # results and gradients of other ranks are merged


@dataclass(frozen=True)
class CallTrace:
    """One attention call.

    Attributes:
        layer: number of the layer among those that attend; of the call, if layers make several.
        window_tokens: of its sliding window; 0 without one.
        begin_us: microseconds from the beginning of the pass.
        spans: uses of time in their order, and microseconds of each. In forward and backward calls every chunk of an
            exchange has a span of waiting.
    """

    part: PassPart
    layer: int
    window_tokens: int
    begin_us: float
    spans: tuple[tuple[Spent, float], ...]

    @property
    def us(self) -> float:
        """Microseconds of the whole call."""
        return sum(us for _, us in self.spans)


@dataclass(frozen=True)
class LayersTrace:
    """The layers that attend with one mask, on one rank.

    Attributes:
        window_tokens: of their sliding window; 0 without one.
        layers: how many there are.
        tasks: of this rank, in each of these layers: queries, keys before the first query, and 1 if it computes only
            one group of heads. None if they were not known when the pass began.
        chunked: whether the window is a chunk of a document (`Mask`).
    """

    window_tokens: int
    layers: int
    tasks: tuple[tuple[int, int, int], ...] | None
    chunked: bool = False


@dataclass(frozen=True)
class HeadSizes:
    """Heads of a layer, all tensor ranks together.

    Attributes:
        window_tokens: sliding window of the layers with these heads; 0 without one.
        query, key_value: numbers of heads.
        dim, value_dim: numbers of one head of a query or key, and of a value.
        groups: into which plans divide the heads.
    """

    window_tokens: int
    query: int
    key_value: int
    dim: int
    value_dim: int
    groups: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, or of the part of it that a rank runs, as far as seconds of its layers depend on them.

    Attributes:
        heads: of each kind of layers.
        hidden_size: numbers of a token between layers.
        layers: number of all layers, including those that do not attend.
        layer_weights: weights that a token passes in all layers; of experts only those that it is sent to.
        head_weights: of the last matrix; 0 without one.
        backward_share: operations of backward over those of a model without frozen weights.
        liger: whether layers have Liger's kernels.
        recomputes_layers, recomputes_attention: whether they run forward again in backward.
        tensor_ranks: ranks that divide every layer between them.
    """

    heads: tuple[HeadSizes, ...]
    hidden_size: int
    layers: int
    layer_weights: int
    head_weights: int
    backward_share: float
    liger: bool
    recomputes_layers: bool
    recomputes_attention: bool
    tensor_ranks: int


@dataclass(frozen=True)
class PredictedCosts:
    """Seconds of a token and of an attended pair, all layers together, by the rates of a GPU.

    Attributes:
        rates: the GPU.
        token_seconds: of a token without attention, forward and backward.
        pair_forward_seconds, pair_backward_seconds: of a pair of a query and a key, including recomputation in
            backward.
    """

    rates: str
    token_seconds: float
    pair_forward_seconds: float
    pair_backward_seconds: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank.

    Attributes:
        kind: "GPU", as torch counts it; or "process", the resident set of a process on CPUs.
        peak_bytes: most bytes in use at once since the process began.
        reserved_bytes: GPU memory that torch holds; for a process, `peak_bytes`.
        device_bytes: memory of the GPU, or of the host.
    """

    kind: str
    peak_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class RankTrace:
    """One rank in one micro-batch.

    Attributes:
        step: optimizer step, from 1.
        micro_batch: number of the micro-batch, counted by the loader.
        written: seconds since 1970, when the pass began.
        rank: number of the rank among those that share documents, or of an attention server after them.
        num_ranks: number of ranks that share documents.
        servers: numbers of the attention servers that take part, in the order of their ranks.
        stage, chunk, tensor_rank: place among stages of a pipeline, part of the model on this stage, and place among
            tensor ranks; 0 without them.
        device: name of the GPU, or "cpu".
        placed: whether batches are placed; otherwise they were given.
        places_rows: whether rows of given batches are placed inside the model; else attention tasks move.
        fingerprint: of the plan, in hexadecimal digits. Equal on all ranks that share documents.
        documents, num_tokens, longest_document_tokens: of all ranks together.
        tokens: that this rank holds.
        work_before, work: `[ranks]` attended pairs in one layer, mean over layers: of documents in the order of the
            data, or as packs came, and as planned. The first has no servers, the second has them after all others.
        tokens_before, layer_tokens: `[ranks]` tokens of each rank, likewise; without servers.
        step_work_before, step_work: `[ranks]` operations of a step likewise: layers, attention, head and loss; without
            servers, and empty if operations of the model are not known.
        speeds: `[ranks]` relative speeds of the ranks of `work`, 0 for one that attends to nothing; empty if all are
            equal.
        sent_bytes, received_bytes: (rank, bytes) of one layer's forward pass, mean over layers.
        calls: in the order in which they were made.
        pass_seconds: from the beginning of the forward pass to the end of the last attention call, including backward.
        step_seconds: from the beginning of this pass to that of the next one, on the host; None if none followed.
        is_complete: whether all calls of backward were made and had ended.
        costs: None on CPUs, or if operations of the model are not known.
        model: None if its sizes are not known.
        profile: file of the setting `kernel_times`; empty without one.
    """

    step: int
    micro_batch: int
    written: float
    rank: int
    num_ranks: int
    servers: tuple[int, ...]
    stage: int
    chunk: int
    tensor_rank: int
    device: str
    ranks_per_node: int
    placed: bool
    places_rows: bool
    fingerprint: str
    documents: int
    num_tokens: int
    longest_document_tokens: int
    tokens: int
    kinds: tuple[LayersTrace, ...]
    work_before: tuple[float, ...]
    work: tuple[float, ...]
    tokens_before: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    step_work_before: tuple[float, ...]
    step_work: tuple[float, ...]
    speeds: tuple[float, ...]
    sent_bytes: tuple[tuple[int, int], ...]
    received_bytes: tuple[tuple[int, int], ...]
    calls: tuple[CallTrace, ...]
    pass_seconds: float
    step_seconds: float | None
    is_complete: bool
    memory: MemoryUse
    costs: PredictedCosts | None
    model: ModelSizes | None
    profile: str

    @property
    def before(self) -> str:
        """Text for the order of documents in `work_before`."""
        return "documents packed in order" if self.placed else "batches as they came"

    @property
    def after(self) -> str:
        """Text for the order of documents in `work`."""
        return "placed" if self.placed else "rows placed inside the model" if self.places_rows else "attention moved"

    @property
    def layers(self) -> int:
        """Layers that attend."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def is_server(self) -> bool:
        """Whether it is an attention server's trace."""
        return self.rank >= self.num_ranks

    def name_of(self, rank: int) -> str:
        """Returns text for a rank, or for an attention server after the ranks."""
        return f"rank {rank}" if rank < self.num_ranks else f"server {self.servers[rank - self.num_ranks]}"

    def line(self) -> str:
        """Returns the trace as one line of JSON."""
        return json.dumps({"kind": KIND, "version": VERSION, **asdict(self)}, separators=(",", ":"))
