"""Memory: the most bytes that torch has allocated on a GPU at once during a training step, by its parts.

Pure arithmetic over numbers of weights, tokens and heads; no model is built here. For a rank with T tokens:

    peak = state + max(head, layer), or the optimizer's step if that is more

    state   weights and AdamW's state of this rank's share: with FSDP2 (4 + 8) P / R bytes for P weights on R ranks, in
            fp32; with ZeRO-3 (6 + 8) P / R. And gradients held when the last micro-step's backward begins
            (`gradient_bytes`)
    head    the loss: T (kept + 12 V) bytes, V: vocabulary. Log-softmax, two gradients in fp32. Liger's fused loss
            holds the numbers of a chunk instead, about T x hidden
    layer   when backward of the last layer begins: T (kept + computed) bytes, its gathered weights, their gradient and
            the weights of the layer before, and keys and values of other ranks
    optimizer's step   weights, AdamW's state and a rank's share of fp32 gradients, without activations

*Kept* is the input of every checkpointed layer, attention's output and log-sum-exps with
`checkpointed_attention="save"`, and what mixers receive for cut documents. *Computed* is what one layer holds while
its backward runs. Sizes of tensors are from Transformers' layers in bf16. An RMS norm saves an fp32 copy of its input,
the normalized numbers and its output, in all 8 bytes (`LlamaRMSNorm`); Liger's saves input and output.

Transformers' tensor ranks divide heads, MLPs and weights. Hidden states, norms and logits are whole on each of them,
and the embedding's weights are not gathered in backward.

The memory of CUDA and NCCL, and memory that torch reserves without using it, are left out. Measured peaks next to
these
estimates: `docs/benchmarks/training.md`. ZeRO-3, experts and mixers were not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from distca_hf.cost import Heads
from distca_hf.errors import ConfigError


# "fsdp2_synced": FSDP2 with `sync_each_batch` of Accelerate's GradientAccumulationPlugin.
Sharding = Literal["fsdp2", "fsdp2_synced", "zero3"]
SHARDING_NAMES: dict[str, str] = {"fsdp2": "FSDP2", "fsdp2_synced": "FSDP2 synced", "zero3": "ZeRO-3"}
Checkpointing = Literal["saved", "recomputed", "none"]
GIB = 2**30
ADAM_BYTES = 8  # of AdamW's state per weight: two fp32 numbers
# Bytes of a number in bf16 and in fp32.
HALF_BYTES, SINGLE_BYTES = 2, 4
# Bytes of a token and word of the vocabulary: logarithms of probabilities, and two gradients, in fp32.
LOGIT_BYTES = 12
# Bytes of a token and number of the hidden state in Liger's fused loss: its gradient, and a chunk of logits in bf16
# and fp32. A chunk has about T x hidden numbers (`liger_kernel.ops.fused_linear_cross_entropy`).
FUSED_LOSS_BYTES = 8
# Bytes of a number that a norm saves, without and with Liger's kernels.
NORM_BYTES, LIGER_NORM_BYTES = 8, 4
# Bytes of a weight under ZeRO-3, without AdamW's state: of a rank's share (in 16 and 32 bits), and of the largest
# layer while gathered, by DeepSpeed's own estimate (`deepspeed.runtime.zero.stage3`).
ZERO3_BYTES, ZERO3_LAYER_BYTES = 6, 4
# Share of a GPU's memory that torch may allocate; CUDA, NCCL and torch's reserve need the rest.
USABLE_SHARE = 0.9
# Sets of a layer's weights held at once under FSDP2: its own, their gradients, and the next layer's.
GATHERED_LAYERS = 3


def check_checkpointing(name: str) -> None:
    """Raises ConfigError if a way of activation checkpointing is not one of the known ones."""
    if name not in get_args(Checkpointing):
        raise ConfigError(f"--checkpointing {name} must be one of {', '.join(get_args(Checkpointing))}")


@dataclass(frozen=True)
class LayerSize:
    """The sizes of one kind of decoder layers that decide memory.

    Attributes:
        count: layers of this kind.
        parameters: weights of one layer, including all experts.
        mlp_size: width of a gated MLP with as many weights as a token passes besides attention; of experts only those
            that it is sent to. A mixer counts as a part of it.
        heads: heads of attention; None for a layer without attention.
        window_tokens: the window; None for full attention.
    """

    count: int
    parameters: int
    mlp_size: float
    heads: Heads | None
    window_tokens: int | None = None

    def kept_bytes(self, hidden_size: int, saved: bool, tensor_ranks: int = 1) -> float:
        """Returns bytes of a token that a checkpointed layer keeps until backward."""
        return HALF_BYTES * hidden_size + (self.output_bytes / tensor_ranks if saved else 0)

    def computed_bytes(self, hidden_size: int, saved: bool, liger: bool, tensor_ranks: int = 1) -> float:
        """Returns bytes of a token that a checkpointed layer holds while its backward runs."""
        mlp, attention = self.mlp_size / tensor_ranks, 0.0 if saved else self.output_bytes
        if self.heads is not None:
            queries = self.heads.query * self.heads.dim
            attention += HALF_BYTES * (queries + self.heads.key_value * (self.heads.dim + self.heads.value_dim))
        attention /= tensor_ranks
        if liger:  # two norms' outputs, the sum between them; gate, up, their product; gradients of two of these
            return attention + HALF_BYTES * (3 * hidden_size + 3 * mlp) + HALF_BYTES * (2 * hidden_size + mlp)
        norms = 2 * NORM_BYTES * hidden_size
        return attention + norms + HALF_BYTES * 4 * mlp + HALF_BYTES * (2 * hidden_size + 2 * mlp)

    @property
    def output_bytes(self) -> int:
        """Bytes of a token's attention output, and of the log-sum-exp of each head."""
        if self.heads is None:
            return 0
        return HALF_BYTES * self.heads.query * self.heads.value_dim + SINGLE_BYTES * self.heads.query

    def received_bytes(self, received_bytes: int, tensor_ranks: int = 1) -> int:
        """Returns bytes of keys and values that a rank receives, if a layer of full attention receives that many: a
        window needs only its halos, of the document before each of a rank's two parts."""
        if self.heads is None:
            return 0
        if self.window_tokens is None:
            return received_bytes
        halo = 2 * (self.window_tokens - 1) * self.heads.token_bytes(HALF_BYTES).key_value
        return min(received_bytes, halo // tensor_ranks)


@dataclass(frozen=True)
class DecoderSize:
    """Numbers of weights of a model.

    Attributes:
        hidden_size: numbers of a token's vector between layers.
        vocabulary: size of the vocabulary; 0 for a model without a head.
        embedding_parameters: weights outside the layers, which FSDP2 gathers for the whole step: of the embedding, and
            of the head if it has its own weights.
    """

    hidden_size: int
    vocabulary: int
    parameters: int
    embedding_parameters: int
    layers: tuple[LayerSize, ...]

    @property
    def head_parameters(self) -> int:
        """Weights of the last matrix product."""
        return self.vocabulary * self.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(layer.count for layer in self.layers)

    @property
    def largest_layer_parameters(self) -> int:
        """Weights of the largest layer, including all experts."""
        return max((layer.parameters for layer in self.layers), default=0)


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    Attributes:
        num_ranks: ranks that share weights, gradients and the optimizer's state.
        sharding: FSDP2, with or without `sync_each_batch`, or DeepSpeed ZeRO-3.
        checkpointing: layers keep their input and attention's output ("saved"), their input ("recomputed"), or all.
        liger: Liger's kernels and its fused loss, which holds no logits.
        optimizer_bytes: bytes of the optimizer's state per weight.
        kv_budget_bytes: most bytes of received rows that all layers keep (`kv_budget_gib`).
        tensor_ranks: number of these ranks that divide every layer, and hold the same tokens.
        micro_steps: micro-steps of an optimizer step, as Trainer accumulates them.
    """

    num_ranks: int
    sharding: Sharding = "fsdp2"
    checkpointing: Checkpointing = "saved"
    liger: bool = False
    optimizer_bytes: int = ADAM_BYTES
    kv_budget_bytes: float = 4 * GIB
    tensor_ranks: int = 1
    micro_steps: int = 1

    @property
    def saves_attention(self) -> bool:
        """Whether attention's outputs wait for backward."""
        return self.checkpointing == "saved"


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a training step.

    Attributes:
        parameters, optimizer: its share of weights, and of the optimizer's state.
        gradients: held when the last micro-step's backward begins (`gradient_bytes`).
        gathered: whole weights and gradients of weights of the layers that are computed at that time.
        kept: activations that all layers keep until backward.
        layer: activations and gradients of one layer while its backward runs; 0 if the head needs more.
        head: logits, their gradients and the last norm; 0 if a layer needs more.
        received: keys and values of other ranks, and their gradients.
        optimizer_step: its share when the optimizer runs, including gradients, and nothing else.
    """

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    kept: int
    layer: int
    head: int
    received: int
    optimizer_step: int

    @property
    def state(self) -> int:
        """Weights, the optimizer's state, and gradients of earlier micro-steps."""
        return self.parameters + self.optimizer + self.gradients

    @property
    def computed(self) -> int:
        """Activations of the head or of one layer while its backward runs, whichever needs more."""
        return self.layer + self.head

    @property
    def backward(self) -> int:
        """Bytes when backward begins."""
        return self.state + self.gathered + self.kept + self.computed + self.received

    @property
    def total(self) -> int:
        """Peak of a step: in backward, or in the optimizer if a rank has few tokens."""
        return max(self.backward, self.optimizer_step)

    def as_json(self) -> dict[str, int]:
        """Returns all parts, their sums and the peak, in bytes."""
        parts = ("parameters", "optimizer", "gradients", "gathered", "kept", "layer", "head", "received")
        sums = ("state", "computed", "optimizer_step", "total")
        return {name: getattr(self, name) for name in (*parts, *sums)}


def estimate_memory(
    size: DecoderSize,
    setup: TrainingSetup,
    rank_tokens: int,
    received_bytes: int = 0,
    head_tokens: int = 0,
    state_bytes: int = 0,
) -> Memory:
    """Estimates the peak memory of the rank with most tokens.

    Args:
        size: size of the model; a size without vocabulary is a model without a head.
        rank_tokens: tokens that the rank holds in a micro-step, as its tensor ranks do.
        received_bytes: keys and values that it receives in the forward pass of one layer of full attention.
        head_tokens: most tokens that a head computes; 0: the rank's.
        state_bytes: states of cut documents that all mixers receive, and keep until backward.
    """

    def kept_bytes(layer: LayerSize) -> float:
        kept = layer.kept_bytes(size.hidden_size, setup.saves_attention, setup.tensor_ranks)
        if setup.checkpointing != "none":
            return kept
        return kept + layer.computed_bytes(size.hidden_size, setup.saves_attention, setup.liger, setup.tensor_ranks)

    kept = sum(layer.count * kept_bytes(layer) for layer in size.layers)
    of_layers = sum(layer.count * layer.received_bytes(received_bytes, setup.tensor_ranks) for layer in size.layers)
    waits = of_layers <= setup.kv_budget_bytes
    moments = [_head_moment(size, setup, head_tokens or rank_tokens, of_layers if waits else 0)]
    for layer in size.layers:
        of_layer = layer.received_bytes(received_bytes, setup.tensor_ranks)
        received = (of_layers if waits else of_layer) + of_layer
        moments.append(_layer_moment(layer, size, setup, rank_tokens, received))
    peak = max(moments, key=lambda moment: moment.total)
    share = size.parameters // setup.num_ranks
    is_zero = setup.sharding == "zero3"
    parameters, optimizer = (ZERO3_BYTES if is_zero else SINGLE_BYTES) * share, setup.optimizer_bytes * share
    gradients = gradient_bytes(setup.sharding, size.parameters // setup.tensor_ranks, share, setup.micro_steps)
    # DeepSpeed casts gradients to fp32, and its buffer stays. FSDP2 has summed whole gradients by then.
    optimizer_gradients = SINGLE_BYTES * share + (gradients if is_zero else 0)
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        gradients=gradients,
        gathered=peak.gathered,
        kept=round(rank_tokens * kept) + state_bytes,
        layer=peak.layer,
        head=peak.head,
        received=peak.received,
        optimizer_step=parameters + optimizer + optimizer_gradients,
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes held at a moment of backward, besides state and kept activations."""

    gathered: int
    received: int
    layer: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return self.gathered + self.received + self.layer + self.head


def _head_moment(size: DecoderSize, setup: TrainingSetup, rank_tokens: int, received: int) -> _Moment:
    """Returns the bytes of the loss: embedding and head are gathered, and no layer is."""
    if not size.vocabulary:
        return _Moment(0, received)
    norm = (LIGER_NORM_BYTES if setup.liger else NORM_BYTES) * size.hidden_size
    loss = FUSED_LOSS_BYTES * size.hidden_size if setup.liger else LOGIT_BYTES * size.vocabulary
    gathered = ZERO3_LAYER_BYTES * size.head_parameters
    if setup.sharding != "zero3":
        gathered = HALF_BYTES * (
            size.embedding_parameters if setup.tensor_ranks == 1 else size.head_parameters // setup.tensor_ranks
        )
    return _Moment(gathered, received, head=round(rank_tokens * (norm + loss)))


def _layer_moment(
    layer: LayerSize, size: DecoderSize, setup: TrainingSetup, rank_tokens: int, received: int
) -> _Moment:
    """Returns the bytes of one layer's backward. Embedding, head and the head's gradient are whole under FSDP2.
    Gradients that are added to earlier micro-steps' are counted there."""
    gathered = ZERO3_LAYER_BYTES * max(layer.parameters, size.head_parameters)
    if setup.sharding != "zero3":
        added = setup.sharding == "fsdp2" and setup.micro_steps > 1
        root = size.embedding_parameters + (0 if added else size.head_parameters)
        if setup.tensor_ranks > 1:
            root = (1 if added else 2) * (size.head_parameters // setup.tensor_ranks)
        gathered = HALF_BYTES * (root + (GATHERED_LAYERS - added) * layer.parameters // setup.tensor_ranks)
    computed = 0.0
    if setup.checkpointing != "none":
        computed = layer.computed_bytes(size.hidden_size, setup.saves_attention, setup.liger, setup.tensor_ranks)
    return _Moment(gathered, received, layer=round(rank_tokens * computed))


def shardings(micro_steps: int, whole_documents: bool) -> list[Sharding]:
    """Returns the ways to shard weights that a training can use: `sync_each_batch` matters if micro-steps are
    accumulated, and ZeRO-3 cannot train models whose documents stay whole."""
    ways: dict[Sharding, bool] = {"fsdp2": True, "fsdp2_synced": micro_steps > 1, "zero3": not whole_documents}
    return [way for way, is_there in ways.items() if is_there]


def gradient_bytes(way: Sharding | Literal["zero2", "ddp"], parameters: int, share: int, micro_steps: int) -> int:
    """Returns the bytes of gradients that a rank holds when the last micro-step's backward begins, in bf16 training.

    Trainer runs all micro-steps except the last under `no_sync`. FSDP2 then keeps whole gradients in bf16 on every
    rank; with `sync_each_batch` it sums them over ranks in each micro-step, as DeepSpeed always does. The optimizer's
    step frees gradients, except for the buffer that ZeRO-3 allocates once.

    Args:
        parameters, share: numbers of weights whose gradients a rank computes, and that it updates.
    """
    if way == "zero3":
        return HALF_BYTES * share
    if micro_steps == 1:
        return 0
    kept = {
        "fsdp2": HALF_BYTES * parameters,
        "fsdp2_synced": SINGLE_BYTES * share,
        "zero2": HALF_BYTES * share,
        "ddp": SINGLE_BYTES * parameters,
    }
    return kept[way]


def largest_tokens(
    size: DecoderSize,
    setup: TrainingSetup,
    rank_tokens: int,
    received_bytes: int,
    room_bytes: float,
    choices: Sequence[int],
    state_bytes: int = 0,
) -> int:
    """Returns the largest of some numbers of tokens per rank that fits a GPU; 0 if none fits.

    Args:
        size, setup, rank_tokens, received_bytes, state_bytes: see `estimate_memory`; received bytes grow with the
            tokens, states do not.
        room_bytes: bytes that torch may allocate.
    """

    def total(tokens: int) -> int:
        received = received_bytes * tokens // max(1, rank_tokens)
        return estimate_memory(size, setup, tokens, received, state_bytes=state_bytes).total

    return max((tokens for tokens in choices if total(tokens) <= room_bytes), default=0)
