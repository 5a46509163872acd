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
    """One attention call."""

    part: PassPart
    layer: int  # number of the layer among those that attend; of the call, if layers make several
    window_tokens: int  # length of its sliding window; 0 without one
    begin_us: float  # microseconds from the beginning of the pass
    # Uses of time in their order, and microseconds of each. In forward and backward calls every chunk of an exchange
    # has a span of waiting.
    spans: tuple[tuple[Spent, float], ...]

    @property
    def us(self) -> float:
        return sum(us for _, us in self.spans)


@dataclass(frozen=True)
class LayersTrace:
    """The layers that attend with one mask, on one rank."""

    window_tokens: int  # length of their sliding window; 0 without one
    layers: int  # how many there are
    # Tasks of this rank in each of these layers: queries, keys before the first query, and 1 if it computes only one
    # group of heads. None if they were not known when the pass began.
    tasks: tuple[tuple[int, int, int], ...] | None
    chunked: bool = False  # whether the window is a chunk of a document (`Mask`)


@dataclass(frozen=True)
class HeadSizes:
    """Heads of a layer, all tensor ranks together."""

    window_tokens: int  # sliding window of the layers with these heads; 0 without one
    # Numbers of heads.
    query: int
    key_value: int
    # Numbers of one head of a query or key, and of a value.
    dim: int
    value_dim: int
    groups: int  # number of groups into which plans divide the heads


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, or of the part of it that a rank runs, as far as seconds of its layers depend on them."""

    heads: tuple[HeadSizes, ...]  # heads of each kind of layers
    hidden_size: int  # numbers of a token between layers
    layers: int  # number of all layers, including those that do not attend
    layer_weights: int  # weights that a token passes in all layers; of experts only those that it is sent to
    head_weights: int  # weights of the last matrix; 0 without one
    backward_share: float  # operations of backward over those of a model without frozen weights
    liger: bool  # whether layers have Liger's kernels
    # Whether layers, and their attention, run forward again in backward.
    recomputes_layers: bool
    recomputes_attention: bool
    tensor_ranks: int  # ranks that divide every layer between them


@dataclass(frozen=True)
class PredictedCosts:
    """Seconds of a token and of an attended pair, all layers together, by the rates of a GPU."""

    rates: str  # name of the GPU that has these rates
    token_seconds: float  # seconds of a token without attention, forward and backward
    # Seconds of a pair of a query and a key. Backward includes recomputation.
    pair_forward_seconds: float
    pair_backward_seconds: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank."""

    kind: str  # "GPU", as torch counts it; or "process", the resident set of a process on CPUs
    peak_bytes: int  # most bytes in use at once since the process began
    reserved_bytes: int  # GPU memory that torch holds; for a process, `peak_bytes`
    device_bytes: int  # memory of the GPU, or of the host


@dataclass(frozen=True)
class RankTrace:
    """One rank in one micro-batch."""

    step: int  # optimizer step, from 1
    micro_batch: int  # number of the micro-batch, counted by the loader
    written: float  # seconds since 1970, when the pass began
    rank: int  # number of the rank among those that share documents, or of an attention server after them
    num_ranks: int  # number of ranks that share documents
    servers: tuple[int, ...]  # numbers of the attention servers that take part, in the order of their ranks
    # Place among stages of a pipeline, part of the model on this stage, and place among tensor ranks; 0 without them.
    stage: int
    chunk: int
    tensor_rank: int
    device: str  # name of the GPU, or "cpu"
    ranks_per_node: int
    placed: bool  # whether batches are placed; otherwise they were given
    places_rows: bool  # whether rows of given batches are placed inside the model; else attention tasks move
    # Fingerprint of the plan, in hexadecimal digits. Equal on all ranks that share documents.
    fingerprint: str
    # Documents and tokens of all ranks together.
    documents: int
    num_tokens: int
    longest_document_tokens: int
    tokens: int  # tokens that this rank holds
    kinds: tuple[LayersTrace, ...]
    # `[ranks]` attended pairs in one layer, mean over layers: of documents in the order of the data, or as packs came,
    # and as planned. The first has no servers, the second has them after all others.
    work_before: tuple[float, ...]
    work: tuple[float, ...]
    # `[ranks]` tokens of each rank, likewise; without servers.
    tokens_before: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    # `[ranks]` operations of a step likewise: layers, attention, head and loss; without servers, and empty if
    # operations of the model are not known.
    step_work_before: tuple[float, ...]
    step_work: tuple[float, ...]
    # `[ranks]` relative speeds of the ranks of `work`, 0 for one that attends to nothing; empty if all are equal.
    speeds: tuple[float, ...]
    # (rank, bytes) of one layer's forward pass, mean over layers.
    sent_bytes: tuple[tuple[int, int], ...]
    received_bytes: tuple[tuple[int, int], ...]
    calls: tuple[CallTrace, ...]  # in the order in which they were made
    # Seconds from the beginning of the forward pass to the end of the last attention call, including backward.
    pass_seconds: float
    # Seconds of the host from the beginning of this pass to the beginning of the next; None if none followed.
    step_seconds: float | None
    is_complete: bool  # whether all calls of backward were made and had ended
    memory: MemoryUse
    costs: PredictedCosts | None  # None on CPUs, or if operations of the model are not known
    model: ModelSizes | None  # None if its sizes are not known
    profile: str  # file of the setting `kernel_times`; empty without one

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
        return sum(kind.layers for kind in self.kinds)

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_ranks

    def name_of(self, rank: int) -> str:
        """Returns text for a rank, or for an attention server after the ranks."""
        return f"rank {rank}" if rank < self.num_ranks else f"server {self.servers[rank - self.num_ranks]}"

    def line(self) -> str:
        """Returns the trace as one line of JSON."""
        return json.dumps({"kind": KIND, "version": VERSION, **asdict(self)}, separators=(",", ":"))
