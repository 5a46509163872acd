"""Registry: the table of kernels with their capabilities, and the choice among them.

`Capabilities` are the limits of a kernel, `Operands` the kind of tensors that a call has. Shape legend in
`kernels.interface`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from distca_hf.config import KernelName
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Room, Saved, Spans
from distca_hf.kernels.varlen import (
    CpuKernel,
    Flash2Kernel,
    Flash3Kernel,
    Flash4Kernel,
    ReferenceKernel,
    TorchVarlenKernel,
)
from distca_hf.telemetry import OF_THIS_RANK, get_logger


# Options of attention that a kernel need not have: fields of `AttentionSpec`, and sinks.
OPTIONS = ("window_tokens", "softcap", "sinks")


@dataclass(frozen=True)
class Capabilities:
    """Limits of a kernel; `refusal` says why it cannot compute for given tensors.

    Attributes:
        device_type: "cpu", "cuda", or None for any.
        dtypes: input dtypes.
        max_head_dim, head_dim_multiple: limits of both head dimensions (None: no limit).
        equal_dims: value and key dimension must be the same.
        compute_capability: GPU generations (major version), None for any.
        options: names of the `OPTIONS` that are computed.
    """

    device_type: str | None
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    equal_dims: bool = False
    compute_capability: tuple[int, ...] | None = None
    options: frozenset[str] = frozenset()

    def refusal(self, operands: "Operands", spec: AttentionSpec) -> str | None:
        """Returns why the kernel cannot attend with these operands as `spec` says, or None if it can."""
        if self.device_type not in (None, operands.device_type):
            return f"runs on {self.device_type}, tensors are on {operands.device_type}"
        if self.compute_capability is not None and operands.compute_capability not in self.compute_capability:
            return f"needs compute capability {self.compute_capability}, the GPU has {operands.compute_capability}"
        if operands.dtype not in self.dtypes:
            return f"computes {', '.join(str(dtype) for dtype in self.dtypes)}, tensors are {operands.dtype}"
        largest = max(operands.head_dim, operands.value_dim)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            return f"has head dimensions up to {self.max_head_dim}, the model has {largest}"
        if operands.head_dim % self.head_dim_multiple or operands.value_dim % self.head_dim_multiple:
            dims = f"{operands.head_dim} and {operands.value_dim}"
            return f"needs head dimensions that are multiples of {self.head_dim_multiple}, the model has {dims}"
        if self.equal_dims and operands.head_dim != operands.value_dim:
            return f"needs equal key and value dimensions, the model has {operands.head_dim} and {operands.value_dim}"
        asked = {"window_tokens": spec.window_tokens, "softcap": spec.softcap, "sinks": operands.sinks}
        for option in OPTIONS:
            if asked[option] and option not in self.options:
                return f"does not compute {option}={asked[option]}"
        return None


@dataclass(frozen=True)
class Operands:
    """Queries, keys and values of a call, as far as the choice of a kernel depends on them.

    Attributes:
        sinks: whether every query head has a sink, a score without a key.
    """

    device_type: str
    compute_capability: int | None
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sinks: bool = False

    @classmethod
    def of(
        cls,
        q_TNH: torch.Tensor,
        k_SGH: torch.Tensor,
        v_SGV: torch.Tensor,
        sinks_N: torch.Tensor | None = None,
    ) -> "Operands":
        """Returns the operands of a call on these tensors."""
        capability = torch.cuda.get_device_capability(q_TNH.device)[0] if q_TNH.is_cuda else None
        return cls(
            device_type=q_TNH.device.type,
            compute_capability=capability,
            dtype=q_TNH.dtype,
            num_heads=q_TNH.shape[1],
            num_kv_heads=k_SGH.shape[1],
            head_dim=q_TNH.shape[2],
            value_dim=v_SGV.shape[2],
            sinks=sinks_N is not None,
        )


log = get_logger(__name__)

# Input dtypes of kernels of tensor cores, and of those that compute with torch's own functions.
HALF = (torch.bfloat16, torch.float16)
FLOATING = (*HALF, torch.float32, torch.float64)
# Tokens on which a kernel is tried: two tiles of 128, so that it loops over keys.
TRIED_TOKENS = 256
# Beginning of the reason for a kernel that is there and does not run: it may be so on one rank alone.
FAILS = "fails:"


@dataclass(frozen=True)
class Entry:
    """A kernel of the table: its module (None: always there), its capabilities, how it is made, and how its package is
    installed."""

    module: str | None
    capabilities: Capabilities
    make: Callable[[], Kernel]
    automatic: bool = True
    install: str = ""

    def missing(self) -> str | None:
        """Returns why the kernel cannot be imported, or None if it can, as far as is known before."""
        if self.module is None:
            return None
        try:
            found = importlib.util.find_spec(self.module) is not None
        except Exception as error:  # packages around a module run while it is looked for
            if not (isinstance(error, ModuleNotFoundError) and f"{self.module}.".startswith(f"{error.name}.")):
                return _failure(error)
            found = False
        how = f" ({self.install})" if self.install else ""
        return None if found else f"is not installed{how}"


# Of FlashAttention 2, which comes as a package and with torch.
FLASH2 = Capabilities(
    "cuda", HALF, max_head_dim=256, head_dim_multiple=8, equal_dims=True, compute_capability=(8, 9, 10, 11, 12)
)
# In order of preference: the fastest that can compute is taken. Dimensions and GPU generations are those of the
# packages.
KERNELS: dict[str, Entry] = {
    "flash4": Entry(
        "flash_attn.cute.interface",
        Capabilities("cuda", HALF, max_head_dim=256, head_dim_multiple=8, compute_capability=(9, 10, 11, 12)),
        lambda: Flash4Kernel(importlib.import_module("flash_attn.cute.interface")),
        install="pip install flash-attn-4",
    ),
    "flash3": Entry(
        "flash_attn_interface",
        Capabilities("cuda", HALF, max_head_dim=256, head_dim_multiple=8, equal_dims=True, compute_capability=(9,)),
        lambda: Flash3Kernel(importlib.import_module("flash_attn_interface")),
        install="from sources, the folder hopper of FlashAttention",
    ),
    "flash2": Entry(
        "flash_attn.flash_attn_interface",
        FLASH2,
        lambda: Flash2Kernel(importlib.import_module("flash_attn.flash_attn_interface")),
        install="pip install flash-attn --no-build-isolation",
    ),
    "torch_varlen": Entry(None, FLASH2, TorchVarlenKernel),
    "cpu": Entry(None, Capabilities("cpu", FLOATING, equal_dims=True), CpuKernel),
    "reference": Entry(
        None, Capabilities(None, FLOATING, options=frozenset({"softcap", "sinks"})), ReferenceKernel, automatic=False
    ),
}


# Names of the same classes, for messages about a kernel that was chosen before.
NAMES: dict[type, str] = {
    Flash4Kernel: "flash4",
    Flash3Kernel: "flash3",
    Flash2Kernel: "flash2",
    TorchVarlenKernel: "torch_varlen",
    CpuKernel: "cpu",
    ReferenceKernel: "reference",
}


def kernel_name(kernel: Kernel) -> str:
    """Returns a kernel's name in the table; that of its class if it is not of the table."""
    return NAMES.get(type(kernel), type(kernel).__name__)


def choose_kernel(name: KernelName, operands: Operands, spec: AttentionSpec) -> Kernel:
    """Returns the kernel called `name`; for "auto" the first of the table that can compute them.

    "auto" tries each on a few tokens, and takes the reference only on a CPU.

    Args:
        spec: how to attend; all kernels take any scale, and can be deterministic.

    Raises:
        UnsupportedAttentionError: the kernel, or with "auto" every kernel, cannot compute them; says why.
    """
    return chosen_kernel(name, operands, _of_any_scale(spec))


@lru_cache(maxsize=256)
def _of_any_scale(spec: AttentionSpec) -> AttentionSpec:
    """Returns the one spec that stands for all that every kernel computes if it computes this one."""
    return spec._replace(scale=1.0, deterministic=False)


@lru_cache(maxsize=64)
def chosen_kernel(name: KernelName, operands: Operands, spec: AttentionSpec) -> Kernel:
    """Returns the kernel that was chosen before, or chooses it: its first use may compile it."""
    if operands.num_heads % operands.num_kv_heads:
        raise UnsupportedAttentionError(
            f"{operands.num_heads} query heads are no multiple of {operands.num_kv_heads} KV heads"
        )
    if name != "auto":
        named, reason = None, KERNELS[name].capabilities.refusal(operands, spec)
        if reason is None:
            named, reason = _made(KERNELS[name], operands, spec)
        if named is None:
            raise UnsupportedAttentionError(
                f"kernel={name!r} cannot be used: {name} {reason}; kernel='auto' takes one that can"
            )
        return named
    reasons: list[str] = []
    better: list[str] = []  # kernels that could compute, were they there
    for candidate, entry in KERNELS.items():
        reason = entry.capabilities.refusal(operands, spec)
        if reason is None and not entry.automatic and operands.device_type != "cpu":
            reason = "is exact but slow, and only taken when asked for by name"
        if reason is None:
            kernel, reason = _made(entry, operands, spec)
            if kernel is not None:
                if better:
                    # A package that is missing is missing on all ranks; a kernel may fail on this GPU alone.
                    extra = OF_THIS_RANK if any(FAILS in words for words in better) else None
                    words = "using attention kernel %s, not a faster one: %s"
                    log.warning(words, candidate, "; ".join(better), extra=extra)
                log.debug("attention kernel %s for %s", candidate, operands)
                return kernel
            better.append(f"{candidate} {reason}")
        reasons.append(f"{candidate} {reason}")
    raise UnsupportedAttentionError(f"no attention kernel for {operands}: " + "; ".join(reasons))


def _made(entry: Entry, operands: Operands, spec: AttentionSpec) -> tuple[Kernel | None, str | None]:
    """Returns the kernel of an entry, or why there is none: not installed, or it does not import, compile or run."""
    missing = entry.missing()
    if missing is not None:
        return None, missing
    try:
        kernel = entry.make()
        try_out(kernel, operands, spec)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may raise
        return None, _failure(error)
    return kernel, None


def _failure(error: Exception) -> str:
    return f"{FAILS} {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def try_out(kernel: Kernel, operands: Operands, spec: AttentionSpec) -> None:
    """Attends to a few tokens on the GPU, forward and backward: kernels are compiled when first used."""
    if operands.device_type != "cuda" or not torch.cuda.is_available():
        return

    def tensor(*shape: int, dtype: torch.dtype = operands.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    tokens = TRIED_TOKENS
    q, k, v = (
        tensor(tokens, heads, dim)
        for heads, dim in (
            (operands.num_heads, operands.head_dim),
            (operands.num_kv_heads, operands.head_dim),
            (operands.num_kv_heads, operands.value_dim),
        )
    )
    out, lse = (
        tensor(tokens, operands.num_heads, operands.value_dim),
        tensor(operands.num_heads, tokens, dtype=torch.float32),
    )
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    spans = Spans(offsets, offsets, tokens, tokens)
    inputs = Inputs(q, k, v, tensor(operands.num_heads) if operands.sinks else None)
    kernel.forward(inputs, spans, spec, Room(out, lse))
    kernel.backward(out, Saved(q, k, v, out, lse), Gradients(*(torch.empty_like(x) for x in (q, k, v))), spans, spec)
    torch.cuda.synchronize()
