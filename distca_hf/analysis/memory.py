"""Memory: the most bytes that torch has allocated on a GPU at once during a training step, and bytes that wait on the
host, by their parts.

Pure arithmetic over numbers of weights, tokens and heads; no model is built here. For a rank with T tokens:

    peak = state + max(head, layer), or the optimizer's step if that is more

    state   weights and AdamW's state of this rank's share: with FSDP2 (4 + 8) P / R bytes for P weights on R ranks, in
            fp32; with ZeRO-3 (6 + 8) P / R. And gradients: those held when the last micro-step's backward begins
            (`gradient_bytes`), and under FSDP2 4 bytes / R for every weight of a layer whose backward is over
    head    the loss: T (kept + 12 V) bytes, V: vocabulary. Log-softmax, two gradients in fp32. Liger's fused loss
            holds the numbers of a chunk instead, about T x hidden
    layer   a layer's backward: T (kept + computed) bytes, its gathered weights, their gradient and the weights of the
            layer before, and keys and values of other ranks. From the last layer to the first, kept bytes shrink and
            gradients grow, so one of the two has most
    optimizer's step   weights, AdamW's state and a rank's share of fp32 gradients, without activations

*Kept* is the input of every checkpointed layer, attention's output and log-sum-exps with
`checkpointed_attention="save"`, and what mixers receive for cut documents. *Computed* is what one layer holds while
its backward runs: in the MLP's backward or in attention's, whichever is more. Inside the MLP it grows with the tokens
of a tile (`mlp_tokens`), not with T. Attention holds only the heads of a tile (`attention_kv_heads`), also of other
ranks' keys and values. Sizes of tensors are from Transformers' layers in bf16. An RMS norm saves an fp32 copy of its
input, the normalized numbers and its output, in all 8 bytes (`LlamaRMSNorm`); Liger's saves input and output.
Attention kernels sum gradients in fp32 first.

"offloaded" (`checkpointed_attention="offload"`): inputs and outputs of all layers wait on the host. A GPU keeps those
of two layers: the one whose backward runs, and the one before, which is fetched. With the state on the host
(`fsdp_offload_params`) a GPU has gathered layers and one layer's gradients on their way. The host of a rank holds

    activations   T x kept of all layers, in pieces of 64 MiB
    state         4 + 4 + 8 bytes / R per weight: weights and gradients, both pinned, and AdamW's state

Torch rounds pinned memory up to a power of two: the last piece of a tensor, and a rank's part of each matrix.

Transformers' tensor ranks divide heads, MLPs and weights. Hidden states, norms and logits are whole on each of them,
and the embedding's weights are not gathered in backward.

The memory of CUDA and NCCL, and memory that torch reserves without using it, are left out. So are data and processes
on the host: a process on an H200 takes 4 GiB. Measured peaks next to these estimates: `docs/benchmarks/training.md`.
ZeRO-3, experts and mixers were not measured.
"""

from dataclasses import dataclass, replace
from typing import Literal

from distca_hf.analysis.decoder_size import (
    HALF_BYTES,
    LIGER_NORM_BYTES,
    NORM_BYTES,
    SINGLE_BYTES,
    DecoderSize,
    LayerSize,
)
from distca_hf.analysis.training_setup import Sharding, TrainingSetup


SHARDING_NAMES: dict[str, str] = {"fsdp2": "FSDP2", "fsdp2_synced": "FSDP2 synced", "zero3": "ZeRO-3"}
# Bytes of a token and word of the vocabulary: logarithms of probabilities, and two gradients, in fp32.
LOGIT_BYTES = 12
# Bytes of a token and number of the hidden state in Liger's fused loss: its gradient, and a chunk of logits in bf16
# and fp32. A chunk has about T x hidden numbers (`liger_kernel.ops.fused_linear_cross_entropy`).
FUSED_LOSS_BYTES = 8
# Bytes of a weight under ZeRO-3, without AdamW's state: of a rank's share (in 16 and 32 bits), and of the largest
# layer while gathered, by DeepSpeed's own estimate (`deepspeed.runtime.zero.stage3`).
ZERO3_BYTES, ZERO3_LAYER_BYTES = 6, 4
# Share of a GPU's memory that torch may allocate; CUDA, NCCL and torch's reserve need the rest.
USABLE_SHARE = 0.9
# Sets of a layer's weights held at once under FSDP2: its own, their gradients, and the next layer's.
GATHERED_LAYERS = 3
# Layers whose kept activations are on the GPU if they wait on the host, and bytes of a piece there, as in training.
LAYERS_ON_GPU, PIECE_BYTES = 2, 2**26


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a training step, or at another moment of backward.

    Attributes:
        parameters, optimizer: its share of weights, and of the optimizer's state.
        gradients: of earlier micro-steps (`gradient_bytes`), and of layers whose backward is over.
        gathered: whole weights and gradients of weights of the layers that are computed at that time.
        kept: activations that wait for backward on the GPU.
        layer, head: activations and gradients of one layer, and of the loss with the last norm; the smaller one is 0.
        received: keys and values of other ranks, and their gradients.
        optimizer_step: its share when the optimizer runs, including gradients, and nothing else.
        host_kept, host_state: activations, and weights, gradients and the optimizer's state, on the host.
    """

    gradients: int
    gathered: int
    received: int
    kept: int
    layer: int = 0
    head: int = 0
    parameters: int = 0
    optimizer: int = 0
    optimizer_step: int = 0
    host_kept: int = 0
    host_state: int = 0

    @property
    def state(self) -> int:
        return self.parameters + self.optimizer + self.gradients

    @property
    def computed(self) -> int:
        """Activations of the head or of one layer while its backward runs, whichever needs more."""
        return self.layer + self.head

    @property
    def backward(self) -> int:
        return self.state + self.gathered + self.kept + self.computed + self.received

    @property
    def total(self) -> int:
        """Peak of a step: in backward, or in the optimizer if a rank has few tokens."""
        return max(self.backward, self.optimizer_step)

    @property
    def host(self) -> int:
        return self.host_kept + self.host_state

    def as_json(self) -> dict[str, int]:
        parts = ("parameters", "optimizer", "gradients", "gathered", "kept", "layer", "head", "received")
        sums = ("state", "computed", "optimizer_step", "total", "host_kept", "host_state", "host")
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

    of_layers = sum(layer.count * layer.received_bytes(received_bytes, setup.tensor_ranks) for layer in size.layers)
    waits = of_layers <= setup.kv_budget_bytes
    moments = [_head_moment(size, setup, rank_tokens, head_tokens or rank_tokens, of_layers if waits else 0)]
    for layer in size.layers:
        of_layer = layer.received_bytes(received_bytes, setup.tensor_ranks)
        of_tile = round(of_layer * layer.heads_share(setup))
        received = (of_layers if waits else of_tile) + of_tile
        for layers_left in {size.num_layers, min(LAYERS_ON_GPU, size.num_layers), 1}:
            moments.append(_layer_moment(layer, size, setup, rank_tokens, received, layers_left))
    peak = max(moments, key=lambda moment: moment.backward)
    share, is_zero = size.parameters // setup.num_ranks, setup.sharding == "zero3"
    parameters, optimizer = (ZERO3_BYTES if is_zero else SINGLE_BYTES) * share, setup.optimizer_bytes * share
    # DeepSpeed casts gradients to fp32, and its buffer stays. FSDP2 has summed whole gradients by then.
    optimizer_step = parameters + optimizer + SINGLE_BYTES * share + (peak.gradients if is_zero else 0)
    on_gpu = not setup.state_on_host
    return replace(
        peak,
        parameters=parameters * on_gpu,
        optimizer=optimizer * on_gpu,
        kept=peak.kept + state_bytes,
        optimizer_step=optimizer_step * on_gpu,
        host_kept=_host_kept_bytes(size, setup, rank_tokens),
        host_state=0 if on_gpu else optimizer + _pinned_weight_bytes(size, setup.num_ranks),
    )


def _head_moment(size: DecoderSize, setup: TrainingSetup, rank_tokens: int, head_tokens: int, received: int) -> Memory:
    """Returns the bytes of the loss, without weights and the optimizer's state: embedding and head are gathered, and
    no layer is."""
    gradients, kept = _gradients_at(size, setup, size.num_layers), _kept_at(size, setup, rank_tokens, size.num_layers)
    if not size.vocabulary:
        return Memory(gradients, 0, received, kept)
    norm = (LIGER_NORM_BYTES if setup.liger else NORM_BYTES) * size.hidden_size
    loss = FUSED_LOSS_BYTES * size.hidden_size if setup.liger else LOGIT_BYTES * size.vocabulary
    gathered = ZERO3_LAYER_BYTES * size.head_parameters
    if setup.sharding != "zero3":
        gathered = HALF_BYTES * (
            size.embedding_parameters if setup.tensor_ranks == 1 else size.head_parameters // setup.tensor_ranks
        )
    return Memory(gradients, gathered, received, kept, head=round(head_tokens * (norm + loss)))


def _layer_moment(
    layer: LayerSize, size: DecoderSize, setup: TrainingSetup, rank_tokens: int, received: int, layers_left: int
) -> Memory:
    """Returns the bytes of one layer's backward, `layers_left` layers with it before the end. Embedding, head and the
    head's gradient are whole under FSDP2. Gradients that are added to earlier micro-steps' are counted there."""
    gathered = ZERO3_LAYER_BYTES * max(layer.parameters, size.head_parameters)
    if setup.sharding != "zero3":
        added = setup.sharding == "fsdp2" and setup.micro_steps > 1
        root = size.embedding_parameters + (0 if added else size.head_parameters)
        if setup.tensor_ranks > 1:
            root = (1 if added else 2) * (size.head_parameters // setup.tensor_ranks)
        gathered = HALF_BYTES * (root + (GATHERED_LAYERS - added) * layer.parameters // setup.tensor_ranks)
    if setup.state_on_host:  # gradients on their way
        gathered += SINGLE_BYTES * layer.parameters // setup.num_ranks
    share = setup.mlp_share(rank_tokens) if layer.tiles_mlp else 1.0
    if setup.checkpointing != "none":
        computed = layer.computed_bytes(size.hidden_size, setup, share)
    else:
        of_mlp = share * layer.mlp_bytes(setup) if share < 1 else 0.0
        has_tiles = layer.heads_share(setup) < 1
        computed = max(of_mlp, layer.attending_bytes(size.hidden_size, setup) if has_tiles else 0.0)
    return Memory(
        _gradients_at(size, setup, layers_left),
        gathered,
        received,
        _kept_at(size, setup, rank_tokens, layers_left),
        layer=round(rank_tokens * computed),
    )


def _kept_at(size: DecoderSize, setup: TrainingSetup, rank_tokens: int, layers_left: int) -> int:
    """Returns the bytes of activations that wait on the GPU for the backward of so many layers."""
    each: list[float] = []
    for layer in size.layers:
        kept = layer.kept_bytes(size.hidden_size, setup)
        if setup.checkpointing == "none":
            kept += layer.saved_bytes(size.hidden_size, setup)
            if setup.mlp_share(rank_tokens) == 1 or not layer.tiles_mlp:
                kept += layer.mlp_bytes(setup)
        each.append(kept)
    of_all = sum(layer.count * kept for layer, kept in zip(size.layers, each, strict=True))
    on_gpu = min(LAYERS_ON_GPU, layers_left) if setup.checkpointing == "offloaded" else layers_left
    return round(rank_tokens * min(of_all, on_gpu * max(each, default=0.0)))


def _gradients_at(size: DecoderSize, setup: TrainingSetup, layers_left: int) -> int:
    """Returns the bytes of gradients on the GPU, without the layers that are being computed, while backward of so
    many layers is not over."""
    share, whole = size.parameters // setup.num_ranks, size.parameters // setup.tensor_ranks
    before = gradient_bytes(setup.sharding, whole, share, setup.micro_steps)
    if setup.sharding == "zero3":
        return before
    if before and setup.sharding == "fsdp2_synced":  # room for these is there from the first micro-step on
        return 0 if setup.state_on_host else before
    over = (size.parameters - size.embedding_parameters) * (size.num_layers - layers_left) // max(1, size.num_layers)
    summed = 0 if setup.state_on_host else SINGLE_BYTES * (over // setup.num_ranks)
    return summed + (before - HALF_BYTES * (over // setup.tensor_ranks) if before else 0)


def pinned_bytes(num_bytes: int) -> int:
    """Returns the bytes of a pinned tensor, which torch rounds up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _host_kept_bytes(size: DecoderSize, setup: TrainingSetup, rank_tokens: int) -> int:
    """Returns the bytes on the host of what all layers keep, in pieces."""
    if setup.checkpointing != "offloaded":
        return 0
    total = 0
    for layer in size.layers:
        for token_bytes in layer.kept_tensors(size.hidden_size, setup):
            pieces, rest = divmod(round(rank_tokens * token_bytes), PIECE_BYTES)
            total += layer.count * (pieces * PIECE_BYTES + pinned_bytes(rest))
    return total


def _pinned_weight_bytes(size: DecoderSize, num_ranks: int) -> int:
    """Returns the bytes on the host of a rank's weights and their gradients, each part of a matrix on its own."""
    matrices = list(size.matrices())
    vectors = max(0, size.parameters - sum(matrices))
    parts = [SINGLE_BYTES * -(-weights // num_ranks) for weights in matrices]
    return 2 * (sum(map(pinned_bytes, parts)) + SINGLE_BYTES * (vectors // num_ranks))


def shardings(micro_steps: int, whole_documents: bool, state_on_host: bool = False) -> list[Sharding]:
    """Returns the ways to shard weights that are estimated for a training: `sync_each_batch` matters if micro-steps
    are accumulated, and ZeRO-3 cannot train models whose documents stay whole."""
    is_zero = not whole_documents and not state_on_host
    ways: dict[Sharding, bool] = {"fsdp2": True, "fsdp2_synced": micro_steps > 1, "zero3": is_zero}
    return [way for way, is_there in ways.items() if is_there]


def gradient_bytes(way: Sharding | Literal["zero2", "ddp"], parameters: int, share: int, micro_steps: int) -> int:
    """Returns the bytes of gradients that a rank holds when the last micro-step's backward begins, in bf16 training.
    `parameters`, `share`: weights whose gradients it computes, and that it updates.

    Trainer runs all micro-steps except the last under `no_sync`. FSDP2 then keeps whole gradients in bf16 on every
    rank; with `sync_each_batch` it sums them over ranks in each micro-step, as DeepSpeed always does. The
    optimizer's step frees gradients, except for the buffer that ZeRO-3 allocates once.
    """
    if micro_steps == 1 and way != "zero3":
        return 0
    kept = {
        "zero3": HALF_BYTES * share,
        "fsdp2": HALF_BYTES * parameters,
        "fsdp2_synced": SINGLE_BYTES * share,
        "zero2": HALF_BYTES * share,
        "ddp": SINGLE_BYTES * parameters,
    }
    return kept[way]
