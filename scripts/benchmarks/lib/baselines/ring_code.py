"""Context parallelism of others: the package ring-flash-attn, its own code, on the kernel and wires of all modes.

    zigzag   a rank has two chunks of every document; keys and values go round, rank by rank ── kernel ── merge
    llama3   k v ── all-gather, some heads after the other ── kernel ── out; dk dv by reduce-scatters

The package (tried: 0.1.8) calls FlashAttention 2 by names of `flash_attn.flash_attn_interface`, and torch.distributed.
Each of its modules gets stand-ins for both: functions with these names and arguments call the kernel that other modes
call, and collectives are counted; their group overtakes kernels, as the product's. Nothing else is replaced. Modules
are imported one by one, because the package's own import needs names that Transformers 5 no longer has.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distca_hf.config import KernelName
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Saved, Spans
from distca_hf.kernels.registry import Operands, choose_kernel
from lib.wires import Wires


PACKAGE = "ring_flash_attn"
INTERFACE = "flash_attn.flash_attn_interface"
SPANS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# What no mode asks for.
LEFT_OUT = {"dropout_p": 0, "window_size_left": -1, "window_size_right": -1, "window_size": (-1, -1)}


class RingWork(Protocol):
    """Attention of a micro-batch on this rank by the package ring-flash-attn."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns `[T, N, H]` outputs of `[T, N, H]` queries and `[T, G, H]` keys and values of this rank."""
        ...


class ZigzagWork:
    """`zigzag_ring_flash_attn_varlen_func`: of every document a rank has two chunks, one after the other."""

    def __init__(self, wires: Wires, kernel: KernelName, lengths: Sequence[int], device: torch.device) -> None:
        self._function = _load(f"{PACKAGE}.zigzag_ring_flash_attn_varlen", wires, kernel)
        held = [tokens // wires.world_size for tokens in lengths]
        self._offsets, self._longest, self._group = offsets_of(held, device), max(held), wires.group

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        attend = self._function.zigzag_ring_flash_attn_varlen_func
        out: torch.Tensor = attend(
            q, k, v, self._offsets, self._longest, softmax_scale=scale, causal=True, group=self._group
        )
        return out


class Llama3Work:
    """`llama3_flash_attn_varlen_func`: ranks have consecutive tokens. Half of the KV heads are gathered at a time, as
    in the package's own benchmark of 8 of them."""

    def __init__(self, wires: Wires, kernel: KernelName, lengths: Sequence[int], device: torch.device) -> None:
        self._function = _load(f"{PACKAGE}.llama3_flash_attn_varlen", wires, kernel)
        prepare = self._function.llama3_flash_attn_prepare_cu_seqlens
        *self._spans, self._keys = prepare(offsets_of(lengths, device), True, wires.rank, wires.world_size)
        self._group = wires.group

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        heads, half = k.shape[1], k.shape[1] // 2
        at_once = half if half and heads % half == 0 else 1
        attend = self._function.llama3_flash_attn_varlen_func
        given = (q, k, v, *self._spans, at_once, self._keys)
        out: torch.Tensor = attend(*given, softmax_scale=scale, causal=True, group=self._group)
        return out


def offsets_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns int32 `[documents + 1]`: first rows of documents, one after the other, and the end of the last one."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _load(name: str, wires: Wires, kernel: KernelName) -> Any:
    """Returns a new module of the package that calls this kernel, and sends through these wires."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None, "modes are refused if the package is missing"
    package = ModuleType(PACKAGE)
    package.__path__ = list(found.submodule_search_locations or ())
    with _only_meanwhile({PACKAGE: package, INTERFACE: interface_of(kernel)}):
        module: Any = importlib.import_module(name)
        utilities: Any = sys.modules[f"{PACKAGE}.utils"]
    module.dist = utilities.dist = _Collectives(wires)
    return module


@contextmanager
def _only_meanwhile(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Lets modules be imported by these names, and forgets them and all of the package afterwards. What the package
    imports of others stays."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name in modules or name.startswith(f"{PACKAGE}.")]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def interface_of(name: KernelName) -> Any:
    """Returns a module with functions of FlashAttention 2 that packages call; they call the kernel of a name."""
    module: Any = ModuleType(INTERFACE)

    def chosen(*operands: torch.Tensor, **given: Any) -> tuple[Kernel, Spans, AttentionSpec]:
        """Returns the kernel for q, k and v, and what it takes, from FlashAttention's keywords."""
        assert all(given.get(word, value) == value for word, value in LEFT_OUT.items()), f"asked for {given}"
        spec = AttentionSpec(given["softmax_scale"], given["causal"], deterministic=given.get("deterministic", False))
        return choose_kernel(name, Operands.of(*operands), spec), Spans(*(given[word] for word in SPANS)), spec

    def _flash_attn_varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[Any, ...]:
        kernel, spans, spec = chosen(q, k, v, **given)
        return *kernel.forward(Inputs(q, k, v), spans, spec), None, None

    def _flash_attn_varlen_backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        **given: Any,
    ) -> None:
        kernel, spans, spec = chosen(q, k, v, **given)
        kernel.backward(dout, Saved(q, k, v, out, softmax_lse), Gradients(dq, dk, dv), spans, spec)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]
        ) -> torch.Tensor:
            out, lse, *_ = _flash_attn_varlen_forward(q, k, v, **given)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.given = given
            return out

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            saved = ctx.saved_tensors  # checkpointing lets them be read once
            gradients = [torch.empty_like(x) for x in saved[:3]]
            _flash_attn_varlen_backward(dout.contiguous(), *saved, *gradients, **ctx.given)
            return *gradients, None

    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *spans: object, **given: Any
    ) -> torch.Tensor:
        out: torch.Tensor = Attention.apply(q, k, v, dict(zip(SPANS, spans, strict=True)) | given)
        return out

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return module


class _Collectives:
    """torch.distributed as the package sees it: what it sends is counted."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        arriving = sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        self._wires.count(sum(each.tensor.nbytes for each in operations) - arriving, arriving)
        return dist.batch_isend_irecv(operations)

    def all_gather_into_tensor(self, gathered: torch.Tensor, rows: torch.Tensor, **given: Any) -> dist.Work:
        others_bytes = gathered.nbytes - rows.nbytes
        self._wires.count(others_bytes, others_bytes)
        return dist.all_gather_into_tensor(gathered, rows, **given)

    def reduce_scatter_tensor(self, summed: torch.Tensor, rows: torch.Tensor, **given: Any) -> None:
        others_bytes = rows.nbytes - summed.nbytes
        self._wires.count(others_bytes, others_bytes)
        dist.reduce_scatter_tensor(summed, rows, **given)
