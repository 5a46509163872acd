"""Weights check: compares weights that all ranks should hold alike.

A flipped bit, a missed reduction, or an optimizer that sees other gradients on one rank changes no message and raises
no error: losses drift. Now and then a checksum of every replicated parameter is compared, bit by bit equal or not.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from distca_hf.comm.agreement import Agreement, Occasion, by_value
from distca_hf.comm.transport import Transport
from distca_hf.errors import PlanMismatchError
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Elements that are summed at once; their checksum takes 16 bytes each meanwhile.
CHUNK = 1 << 22
# Prime, so that equal chunks in another order have another checksum.
BASE = 1_000_003


class WeightsCheck:
    """Compares the replicated parameters of a model over ranks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._warned = False

    def compare(self, model: nn.Module, step: int) -> None:
        """Compares checksums. A collective call: all ranks make it after the same step.

        Raises:
            PlanMismatchError: weights differ; names the first parameter that does, and ranks by checksum.
        """
        parameters = dict(replicated_parameters(model))
        self._warn_of_sharded(model, len(parameters))
        sums = [checksum(parameter) for parameter in parameters.values()]
        numbers = Agreement.start(
            self._transport, Occasion.COMPARE, step, {"parameters": len(sums)}, {"checksum": _combine(sums)}
        ).wait()
        if len(set(numbers["checksum"])) == 1:
            return
        by_rank = self._transport.gather(sums, f"step {step}, checksums").wait()
        of_parameters = zip(parameters, zip(*by_rank, strict=True), strict=True)
        different = [(name, values) for name, values in of_parameters if len(set(values)) > 1]
        name, values = different[0]
        raise PlanMismatchError(
            f"rank {self._transport.rank}, step {step}: weights differ between ranks in {len(different)} of "
            f"{len(sums)} parameters, first in {name}, whose checksum is "
            f"{by_value([f'{value & (1 << 64) - 1:016x}' for value in values])}. Go on from a checkpoint before it; "
            "if it happens again, look for a rank with a broken device or a layer whose gradients are not reduced"
        )

    def _warn_of_sharded(self, model: nn.Module, replicated: int) -> None:
        everything = sum(1 for _ in model.parameters())
        if not self._warned and replicated < everything:
            log.warning(
                "debug.check_weights_every_steps: %d of %d parameters are sharded (FSDP, ZeRO-3): every rank holds "
                "another part, and there is nothing to compare",
                everything - replicated,
                everything,
            )
        self._warned = True


def replicated_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters that every rank holds as a whole, with their names."""
    sharded = {
        parameter
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        # ds_id: DeepSpeed's mark of a parameter that ZeRO-3 divides.
        if parameter not in sharded and not isinstance(parameter, DTensor) and not hasattr(parameter, "ds_id"):
            yield name, parameter


def checksum(tensor: torch.Tensor) -> int:
    """Returns a checksum of the bits, computed on the tensor's device: one changed element always changes it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(integers)
    if not len(bits):
        return 0
    weights = torch.arange(1, 2 * min(CHUNK, len(bits)), 2, device=tensor.device)  # odd: no bit is multiplied away
    sums = [(chunk.to(torch.int64) * weights[: len(chunk)]).sum() for chunk in bits.split(CHUNK)]
    return _combine(torch.stack(sums).tolist())


def _combine(sums: list[int]) -> int:
    """Returns one signed 64-bit number of several, in their order."""
    total = 0
    for value in sums:
        total = (total * BASE + value) % (1 << 64)
    return total - (1 << 64) if total >= 1 << 63 else total
