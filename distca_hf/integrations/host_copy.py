"""A tensor that waits in host memory."""

import torch


# Torch rounds pinned memory up to a power of two. In pieces of one, hardly any is wasted.
PIECE_BYTES = 2**26


class HostCopy:
    """A copy of a tensor in host memory, pinned if it comes from a GPU.

    Copies to the host and back run on the stream that is the current one then. If it is another one than that of
    kernels, these have to wait for it.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._like, self._shape = x.new_empty(0), x.shape
        self._pieces = [_to_host(piece) for piece in _pieces(x.contiguous())]

    def on_device(self) -> torch.Tensor:
        """Returns a tensor with the same numbers, on the device of the first one."""
        x = self._like.new_empty(self._shape)
        for piece, host in zip(_pieces(x), self._pieces, strict=True):
            piece.copy_(host, non_blocking=True)
        return x


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(-1).split(PIECE_BYTES // x.element_size())


def _to_host(piece: torch.Tensor) -> torch.Tensor:
    host = torch.empty(piece.shape, dtype=piece.dtype, device="cpu", pin_memory=piece.is_cuda)
    return host.copy_(piece, non_blocking=piece.is_cuda)
