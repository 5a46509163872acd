"""Remote queries of a layer: queries that other ranks hold and this one computes, from their dispatch to their
combine.

Made only where queries move. Their exchanges follow those of the keys, chunk by chunk.

Shape legend in `kernels.interface`; rows as in `planning.pieces`.
"""

from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Transport
from distca_hf.kernels.interface import AttentionSpec, Kernel, empty_rows
from distca_hf.runtime.device_routing import ChunkRouting, QueryRouting
from distca_hf.runtime.exchanges import QueryDispatch, ResultCombine
from distca_hf.runtime.kernel_calls import BackwardCalls, ForwardCalls
from distca_hf.runtime.remote_kv import RemoteKV, RemoteKVGradients
from distca_hf.runtime.retention import Kept


class ForwardRemoteQueries:
    """Remote queries in forward.

    Args:
        received: `[remote-query rows, ...]` queries of an earlier dispatch; then none are sent.

    Attributes:
        kept: queries, outputs and log-sum-exps, `[remote-query rows, ...]`; complete after the last chunk.
    """

    def __init__(
        self,
        kernel: Kernel,
        q: torch.Tensor,
        v: torch.Tensor,
        moves: QueryRouting,
        spec: AttentionSpec,
        kv_heads: int,
        received: torch.Tensor | None,
    ) -> None:
        self._dispatch, remote_q = None, received
        if remote_q is None:
            self._dispatch = QueryDispatch([q], moves)
            remote_q = self._dispatch.tensors[0]
        out, lse = empty_rows(remote_q, v)
        self._calls = ForwardCalls(kernel, remote_q, out, lse, spec, kv_heads)
        self._combine = ResultCombine([out, lse], moves)
        self.kept = remote_q, out, lse

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the queries of a chunk to their servers."""
        if self._dispatch is not None:
            self._dispatch.start(chunk.queries, transport, where)

    def attend(self, chunk: ChunkRouting, remote_kv: RemoteKV, transport: Transport, where: str) -> None:
        """Waits for the remote queries of a chunk, attends, and sends the results to their owner ranks."""
        if self._dispatch is not None:
            self._dispatch.receive(chunk.queries)
        self._calls.attend(chunk.remote_queries, remote_kv.k, remote_kv.v)
        self._combine.start(chunk.queries, transport, where)

    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Waits for the results of local queries, and puts them into `out` and `lse`."""
        self._combine.finish([out, lse])


class BackwardRemoteQueries:
    """Remote queries in backward; rows of forward that were not kept are sent once more.

    Args:
        of_queries: `[rows, ...]` output gradients, queries, outputs and log-sum-exps of this rank.
    """

    def __init__(
        self,
        kernel: Kernel,
        of_queries: Sequence[torch.Tensor],
        kept: Kept | None,
        moves: QueryRouting,
        spec: AttentionSpec,
        kv_heads: int,
    ) -> None:
        self._dispatch = QueryDispatch(of_queries if kept is None else of_queries[:1], moves)
        dout, q, out, lse = self._dispatch.tensors if kept is None else (*self._dispatch.tensors, *kept.remote_queries)
        dq = torch.empty_like(q)
        self._calls = BackwardCalls(kernel, dout, q, out, lse, dq, spec, kv_heads)
        self._combine = ResultCombine([dq], moves)

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the rows of a chunk that backward needs to their servers."""
        self._dispatch.start(chunk.queries, transport, where)

    def derive(self, chunk: ChunkRouting, remote_kv: RemoteKV, gradients: RemoteKVGradients) -> None:
        """Waits for the remote queries of a chunk, and derives their gradients and those of the keys they read."""
        self._dispatch.receive(chunk.queries)
        self._calls.derive_remote_queries(chunk.remote_queries, remote_kv, gradients)

    def send_gradients(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the gradients of a chunk's queries to their owner ranks."""
        self._combine.start(chunk.queries, transport, where)

    def finish(self, dq: torch.Tensor) -> None:
        """Waits for the gradients of local queries, and puts them into `dq`."""
        self._combine.finish([dq])
