"""Weights check: ranks that should hold the same weights and buffers compare them, and an optimizer must hold the
weights that are trained.

Ranks compare in the 1st, 2nd, 4th, 8th ... pass of a model, and on request after some steps. A weight may be divided
between ranks in several ways at once. Ranks hold the same part of it if they are at the same place along every
dimension that divides it: replicas of HSDP, for example, or tensor ranks for weights that are not divided by heads.

    weight of a norm, 2 data x 2 tensor ranks, sharded by FSDP2     tensor 0   1
                                                            data 0     part 0  part 0     copies: compared
                                                            data 1     part 1  part 1

After a forward pass without backward (an evaluation), FSDP2 leaves the weights of its outermost modules whole. An
optimizer made at that time holds these, and no step changes the parts that the model continues with. From Transformers
5.24 on, Trainer divides them again. An attached Trainer does so with any version, and any other is stopped in time.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from distca_hf.comm.agreement import Agreement, Occasion, by_value
from distca_hf.comm.transport import Transport
from distca_hf.errors import ConfigError, PlanMismatchError
from distca_hf.runtime.forward_pass import BUFFERS, WEIGHTS
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import ignored_by_ddp, is_traceable_wrapper_subclass, sharded_by_fsdp2


log = get_logger(__name__)

# Number of 8-byte integers summed at once; their checksum needs 16 bytes each meanwhile.
CHUNK = 1 << 22
# Prime: equal chunks in another order then have another checksum.
BASE = 1_000_003
# Part number of a rank that holds all of a weight.
WHOLE = 0
# Shown in place of a buffer's checksum.
CHANGED = "another one than in the first pass"


def is_due(passes: int) -> bool:
    """Returns whether to run checks that cost some milliseconds in this pass: the 1st, 2nd, 4th, 8th and so on."""
    return passes & (passes - 1) == 0


class SharedState:
    """Weights and buffers that all ranks hold, in the passes in which they are compared.

    An optimizer step on gradients that are not averaged leaves different weights on every rank. So does a step that
    one rank skips, or a start from different weights. Checkpoints do not contain buffers like rotary frequencies: each
    rank computes them. Later they must be as in the first pass, or must have changed on all ranks, as counts do. With
    `with_weights` all ranks hold the same weights, except those that FSDP or DeepSpeed divides.
    """

    def __init__(self, model: nn.Module, with_weights: bool) -> None:
        self._model, self._with_weights = model, with_weights
        self._passes = 0
        self._first_buffers: dict[str, str] = {}

    def now(self) -> dict[str, dict[str, str]]:
        """Counts a pass; returns checksums of weights and of buffers, by name. In most passes it returns none."""
        self._passes += 1
        if not is_due(self._passes):
            return {}
        buffers = _checksums(dict(held_buffers(self._model)))
        if self._passes == 1:
            self._first_buffers = buffers
        first = self._first_buffers
        shown = {name: bits if first.get(name) == bits else CHANGED for name, bits in buffers.items()}
        if not self._with_weights:
            return {WEIGHTS: {}, BUFFERS: shown}
        sharded, ignored = sharded_by_fsdp2(self._model) or {}, ignored_by_ddp(self._model)
        weights = {
            name: weight
            for name, weight in replicated_parameters(self._model)
            if weight not in sharded and name not in ignored
        }
        return {WEIGHTS: _checksums(weights), BUFFERS: shown}


class WeightsCheck:
    """Compares the parameters and buffers of a model over the ranks that hold the same part of them.

    A flipped bit, a missed reduction, or an optimizer that sees different gradients on one rank changes no message and
    raises no error: losses drift. So ranks compare checksums from time to time, which show whether all bits are equal.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._places_seen: list[int] | None = None
        self._copies: dict[str, list[list[int]]] = {}

    def compare(self, model: nn.Module, step: int) -> None:
        """Compares checksums among ranks that run the same layers. A collective call: all ranks make it after the same
        step. Raises PlanMismatchError if weights differ; names the first one that does, and ranks by checksum."""
        held: dict[str, torch.Tensor] = {**dict(held_parameters(model)), **dict(held_buffers(model))}
        places = [place_of(parameter) for parameter in held.values()]
        facts, numbers = {"parameters and buffers": len(held)}, {"places": _combine(places)}
        agreement = Agreement.start(self._transport, Occasion.COMPARE, step, facts, numbers)
        seen = agreement.wait()["places"]
        if seen != self._places_seen:  # the same on all ranks
            by_rank = self._transport.gather(places, f"step {step}, parts of weights", agreement.scope).wait()
            self._copies = dict(_copies(list(held), by_rank))
            self._places_seen = seen
            parameters = [name for name, _ in model.named_parameters()]
            sharded = [name for name in parameters if name not in self._copies]
            if sharded:
                log.warning(
                    "debug.check_weights_every_steps: %d of %d parameters are sharded (FSDP, ZeRO-3) so that every "
                    "rank holds another part: there is nothing to compare them with",
                    len(sharded),
                    len(parameters),
                )
        local = (held[name] for name in self._copies)
        sums = bits_checksums(x.to_local() if isinstance(x, DTensor) else x for x in local)
        by_rank = self._transport.gather(sums, f"step {step}, checksums", agreement.scope).wait()
        of_parameters = zip(self._copies.items(), zip(*by_rank, strict=True), strict=True)
        different = [
            (name, copies, values)
            for (name, groups), values in of_parameters
            for copies in groups
            if len({values[rank] for rank in copies}) > 1
        ]
        if not different:
            return
        name, copies, values = different[0]
        shown = by_value([_digits(values[rank]) for rank in copies], [agreement.labels[rank] for rank in copies])
        names = {name for name, _, _ in different}
        raise PlanMismatchError(
            f"{self._transport.grid.name}, step {step}: weights or buffers differ between ranks: {len(names)} of "
            f"{len(sums)}, first {name}, whose checksum is {shown}. Go on from a checkpoint before it; "
            "if it happens again, look for a rank with a broken device or a layer whose gradients are not reduced"
        )


def held_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters, with names, of which a rank holds a known part or all: none that FSDP1 or ZeRO-3 divides."""
    sharded = {
        parameter
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        # ds_id: DeepSpeed's mark of a parameter that ZeRO-3 divides.
        if parameter not in sharded and not hasattr(parameter, "ds_id"):
            yield name, parameter


def held_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers with their names, except buffers in which a layer counts what its own rank has seen."""
    ignored = ignored_by_ddp(model)
    for of_module, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            continue
        for name, buffer in module.named_buffers(prefix=of_module, recurse=False):
            if name not in ignored:
                yield name, buffer


def replicated_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters that every rank holds as a whole, with their names."""
    for name, parameter in held_parameters(model):
        if not isinstance(parameter, DTensor):
            yield name, parameter


def place_of(parameter: torch.Tensor) -> int:
    """Returns a number for the part of a parameter that this rank holds: ranks with equal numbers hold the same."""
    if not isinstance(parameter, DTensor):
        return WHOLE
    at = parameter.device_mesh.get_coordinate() or [0] * parameter.device_mesh.ndim
    sizes = parameter.device_mesh.shape
    divided = [
        (repr(placement), place, size)
        for placement, place, size in zip(parameter.placements, at, sizes, strict=True)
        if not isinstance(placement, Replicate) and size > 1
    ]
    return zlib.crc32(repr(divided).encode()) if divided else WHOLE


def _copies(names: list[str], places_by_rank: list[list[int]]) -> Iterator[tuple[str, list[list[int]]]]:
    """Yields parameters of which several ranks hold the same part, each with sets of these ranks. Also yields a
    parameter that is not divided if there is only one rank."""
    for name, places in zip(names, zip(*places_by_rank, strict=True), strict=True):
        ranks_of: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            ranks_of.setdefault(place, []).append(rank)
        if len(ranks_of) < len(places) or WHOLE in ranks_of:
            yield name, list(ranks_of.values())


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns checksums in hexadecimal digits, of tensors that hold their elements."""
    held = {
        name: tensor
        for name, tensor in tensors.items()
        if not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)
    }
    return dict(zip(held, map(_digits, bits_checksums(held.values())), strict=True))


def _digits(checksum: int) -> str:
    return f"{checksum & (1 << 64) - 1:016x}"


def bits_checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns checksums of the bits of tensors, computed on their devices. One changed element always changes its
    tensor's checksum. Waits for the device once, not once per tensor."""
    sums = [_bits_sums(tensor) for tensor in tensors]
    numbers = iter(torch.cat([one.to(sums[0].device) for one in sums]).tolist() if sums else ())
    return [_combine([*islice(numbers, len(one))]) for one in sums]


def _bits_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `[chunks]` int64 sums of the bits of a tensor."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if bits.storage_offset() % 8 or len(bits) % 8:
        bits = nn.functional.pad(bits, (0, -len(bits) % 8))
    bits = bits.view(torch.int64)
    if not len(bits):
        return bits
    weights = torch.arange(1, 2 * min(CHUNK, len(bits)), 2, device=tensor.device)  # odd: products keep every bit
    return torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in bits.split(CHUNK)])


def _combine(sums: list[int]) -> int:
    """Combines several numbers, in order, into one signed 64-bit number."""
    total = 0
    for value in sums:
        total = (total * BASE + value) % (1 << 64)
    return total - (1 << 64) if total >= 1 << 63 else total


# Lowest Transformers whose Trainer divides weights again before it makes its optimizer.
LOWEST_DIVIDES_AGAIN = "5.24"


def divide_again(model: nn.Module) -> bool:
    """Divides all weights of a model that FSDP2 has left whole. Returns whether FSDP2 divides any of its weights."""
    from torch.distributed.fsdp import FSDPModule  # slow to import, and not every training needs it

    divided = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in divided:
        module.reshard()
    return bool(divided)


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Checks when a training begins that an optimizer holds the weights to which FSDP2 gives gradients. Raises
    ConfigError if it holds other weights; says how many, and what to do."""
    if not divide_again(model):
        return
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    here = set(model.parameters())
    strangers = [weight for weight in held if weight not in here]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of {len(held)} weights of the optimizer, the first of shape "
            f"{tuple(strangers[0].shape)}, are none that FSDP2 trains: the model ran before training (an evaluation, "
            f"for example), and Transformers {transformers.__version__} made its optimizer of weights that were whole "
            f"then. Call plugin.attach(trainer), update Transformers to {LOWEST_DIVIDES_AGAIN}, or run the model once "
            "training has begun (eval_on_start=True)"
        )
