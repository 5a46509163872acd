"""Registry: the table of kernels with their capabilities, and the choice among them.

`Capabilities` are the limits of a kernel, `Operands` the kind of tensors of a call. Shape legend in
`kernels.interface`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from distca_hf.config import KernelName
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.flash4 import FfpaKernel, Flash4Kernel
from distca_hf.kernels.interface import AttentionSpec, Kernel, before_queries
from distca_hf.kernels.reference import WINDOW_TOKENS, ReferenceKernel, describe_error
from distca_hf.kernels.varlen import CpuKernel, Flash2Kernel, Flash3Kernel, TorchVarlenKernel
from distca_hf.telemetry import OF_THIS_RANK, get_logger


# Options of attention that a kernel need not have: fields of `AttentionSpec`. A one-sided window has no causal mask,
# and ends only on the left.
OPTIONS = ("window_tokens", "one_sided_window", "softcap")
WINDOWS = frozenset({"window_tokens", "one_sided_window"})


@dataclass(frozen=True)
class Lack:
    """Options that a kernel does not compute on some GPUs for large head dimensions."""

    options: frozenset[str]
    compute_capability: tuple[int, ...]  # GPU generations (major version)
    above_head_dim: int  # largest dimension for which it computes them


@dataclass(frozen=True)
class Capabilities:
    """Limits of a kernel; `refusal` says why it cannot compute for given tensors."""

    device_type: str | None  # "cpu", "cuda", or None for any
    dtypes: tuple[torch.dtype, ...]
    # Limits of both head dimensions (max_head_dim None: no limit).
    min_head_dim: int = 1
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    equal_dims: bool = False
    compute_capability: tuple[int, ...] | None = None  # GPU generations (major version), None for any
    options: frozenset[str] = frozenset()  # names of the `OPTIONS` that it computes
    lacks: tuple[Lack, ...] = ()  # exceptions to `options`

    def refusal(self, operands: "Operands", spec: AttentionSpec) -> str | None:
        """Returns why the kernel cannot attend with these operands as `spec` says, or None if it can."""
        if self.device_type not in (None, operands.device_type):
            return f"runs on {self.device_type}, tensors are on {operands.device_type}"
        if self.compute_capability is not None and operands.compute_capability not in self.compute_capability:
            return f"needs compute capability {self.compute_capability}, the GPU has {operands.compute_capability}"
        if operands.dtype not in self.dtypes:
            return f"computes {', '.join(str(dtype) for dtype in self.dtypes)}, tensors are {operands.dtype}"
        largest = max(operands.head_dim, operands.value_dim)
        if min(operands.head_dim, operands.value_dim) < self.min_head_dim:
            smallest = min(operands.head_dim, operands.value_dim)
            return f"has head dimensions from {self.min_head_dim}, the model has {smallest}"
        if self.max_head_dim is not None and largest > self.max_head_dim:
            return f"has head dimensions up to {self.max_head_dim}, the model has {largest}"
        if operands.head_dim % self.head_dim_multiple or operands.value_dim % self.head_dim_multiple:
            dims = f"{operands.head_dim} and {operands.value_dim}"
            return f"needs head dimensions that are multiples of {self.head_dim_multiple}, the model has {dims}"
        if self.equal_dims and operands.head_dim != operands.value_dim:
            return f"needs equal key and value dimensions, the model has {operands.head_dim} and {operands.value_dim}"
        if spec.chunked:
            return "computes whole tasks: layers cut them where chunks begin"
        asked = options_of(spec)
        missing = [option for option in asked if option not in self.options]
        if missing:
            return f"does not compute {' and '.join(missing)}"
        for lack in self.lacks:
            missing = [option for option in asked if option in lack.options]
            if missing and operands.compute_capability in lack.compute_capability and largest > lack.above_head_dim:
                where = f"head dimension {largest} on compute capability {operands.compute_capability}"
                return f"does not compute {' and '.join(missing)} with {where}"
        return None


@dataclass(frozen=True)
class Operands:
    """Queries, keys and values of a call, as far as the choice of a kernel depends on them."""

    device_type: str
    compute_capability: int | None
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor) -> "Operands":
        capability = torch.cuda.get_device_capability(q_TNH.device)[0] if q_TNH.is_cuda else None
        return cls(
            device_type=q_TNH.device.type,
            compute_capability=capability,
            dtype=q_TNH.dtype,
            num_heads=q_TNH.shape[1],
            num_kv_heads=k_SGH.shape[1],
            head_dim=q_TNH.shape[2],
            value_dim=v_SGV.shape[2],
        )


def options_of(spec: AttentionSpec) -> list[str]:
    """Returns the names of the `OPTIONS` that a call asks for."""
    window = "window_tokens" if spec.causal else "one_sided_window"
    asked = {window: spec.window_tokens, "softcap": spec.softcap}
    return [option for option in OPTIONS if asked.get(option)]


log = get_logger(__name__)

# Input dtypes of kernels of tensor cores, and of those that compute with torch's own functions.
HALF = (torch.bfloat16, torch.float16)
FLOATING = (*HALF, torch.float32, torch.float64)
# Beginnings of the reason for a kernel that is there, and does not run or is wrong: it may be so only on one rank.
FAILS, IS_WRONG = "fails:", "is wrong:"


@dataclass(frozen=True)
class Entry:
    """A kernel of the table: the module of its package (None: always there), its capabilities, what makes it of that
    module, and how the package is installed."""

    module: str | None
    capabilities: Capabilities
    make: Callable[..., Kernel]
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


# Limits of FlashAttention 2 as it comes with torch, which has no softcap.
FLASH2_OF_TORCH = Capabilities(
    "cuda",
    HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    equal_dims=True,
    compute_capability=(8, 9, 10, 11, 12),
    options=WINDOWS,
)
FLASH2 = replace(FLASH2_OF_TORCH, options=WINDOWS | {"softcap"})
# In order of preference: the fastest that can compute is taken. Dimensions, GPU generations and options are from
# the packages.
KERNELS: dict[KernelName, Entry] = {
    "flash4": Entry(
        "flash_attn.cute.interface",
        Capabilities(
            "cuda",
            HALF,
            max_head_dim=256,
            head_dim_multiple=8,
            compute_capability=(9, 10, 11, 12),
            options=WINDOWS | {"softcap"},
            lacks=(Lack(WINDOWS | {"softcap"}, compute_capability=(10, 11), above_head_dim=192),),
        ),
        Flash4Kernel,
        install="pip install flash-attn-4",
    ),
    "flash3": Entry(
        "flash_attn_interface",
        replace(FLASH2, compute_capability=(9,)),
        Flash3Kernel,
        install="from sources, the folder hopper of FlashAttention",
    ),
    "flash2": Entry(
        "flash_attn.flash_attn_interface",
        FLASH2,
        Flash2Kernel,
        install="pip install flash-attn --no-build-isolation",
    ),
    "torch_varlen": Entry(None, FLASH2_OF_TORCH, TorchVarlenKernel),
    "ffpa": Entry(
        "ffpa_attn.cute",
        Capabilities(
            "cuda",
            HALF,
            min_head_dim=320,
            max_head_dim=512,
            head_dim_multiple=64,
            equal_dims=True,
            # Other GPUs, and wider heads, get the package's functions for Ampere. Their backward leaves gradients of
            # causal tasks with more keys than queries zero, and compiles for each length of a document.
            compute_capability=(9,),
        ),
        FfpaKernel,
        install="pip install ffpa-attn",
    ),
    "cpu": Entry(None, Capabilities("cpu", FLOATING, equal_dims=True), CpuKernel),
    "reference": Entry(
        None, Capabilities(None, FLOATING, options=frozenset(OPTIONS)), ReferenceKernel, automatic=False
    ),
}


# For messages about a kernel that was chosen before.
NAMES = {entry.make: name for name, entry in KERNELS.items()}


def kernel_name(kernel: Kernel) -> str:
    """Returns a kernel's name in the table, or its class's name if it is not in the table."""
    return NAMES.get(type(kernel), type(kernel).__name__)


def choose_kernel(name: KernelName, operands: Operands, spec: AttentionSpec) -> Kernel:
    """Returns the kernel called `name`; for "auto" the first of the table that can compute the operands.

    A kernel is tried on a few tokens when it is first chosen. "auto" takes the reference only on a CPU. All kernels
    take any scale, can be deterministic, and take all windows or none.

    Raises:
        UnsupportedAttentionError: the kernel, or with "auto" every kernel, cannot compute them; names the options with
            their values, and what each kernel lacks.
    """
    try:
        return chosen_kernel(name, operands, _kind_of(spec))
    except UnsupportedAttentionError as refused:
        options = [f"{name}={value}" for name, value in spec._asdict().items() if value and name in OPTIONS]
        raise UnsupportedAttentionError(": ".join([*filter(None, [", ".join(options)]), str(refused)])) from None


@lru_cache(maxsize=256)
def _kind_of(spec: AttentionSpec) -> AttentionSpec:
    """Returns a spec that stands for all specs that a kernel can compute if it can compute this one."""
    return spec._replace(scale=1.0, window_tokens=spec.window_tokens and WINDOW_TOKENS, deterministic=False)


@lru_cache(maxsize=64)
def chosen_kernel(name: KernelName, operands: Operands, spec: AttentionSpec) -> Kernel:
    """Chooses the kernel, or returns the earlier choice: its first use may compile it."""
    if operands.num_heads % operands.num_kv_heads:
        raise UnsupportedAttentionError(
            f"{operands.num_heads} query heads are not a multiple of {operands.num_kv_heads} KV heads"
        )
    if name != "auto":
        named, reason = None, _refusal(KERNELS[name], operands, spec)
        if reason is None:
            named, reason = _made(KERNELS[name], operands, spec)
        if named is None:
            raise UnsupportedAttentionError(
                f"kernel={name!r} cannot be used: {name} {reason}; kernel='auto' takes one that can"
            )
        return named
    reasons: list[str] = []
    better: list[str] = []  # kernels that could compute them if they were installed and ran
    for candidate, entry in KERNELS.items():
        reason = why_not(candidate, operands, spec)
        if reason is None:
            kernel, reason = _made(entry, operands, spec)
            if kernel is not None:
                if better:
                    # A missing package is missing on all ranks; a kernel may fail only on this GPU.
                    extra = OF_THIS_RANK if any(FAILS in reason or IS_WRONG in reason for reason in better) else None
                    message = "using attention kernel %s, not a faster one: %s"
                    log.warning(message, candidate, "; ".join(better), extra=extra)
                log.debug("attention kernel %s for %s", candidate, operands)
                return kernel
            better.append(f"{candidate} {reason}")
        reasons.append(f"{candidate} {reason}")
    raise UnsupportedAttentionError(f"no attention kernel for {operands}: " + "; ".join(reasons))


def why_not(name: KernelName, operands: Operands, spec: AttentionSpec) -> str | None:
    """Returns why "auto" does not take a kernel for a layer; None if it takes it once it is installed and runs. The
    device of `operands` need not be there."""
    reason = _refusal(KERNELS[name], operands, spec)
    if reason is None and operands.num_heads % operands.num_kv_heads:
        return f"has {operands.num_heads} query heads, which are not a multiple of {operands.num_kv_heads} KV heads"
    if reason is None and not KERNELS[name].automatic and operands.device_type != "cpu":
        return "is exact but slow, and only taken when asked for by name"
    return reason


def _refusal(entry: Entry, operands: Operands, spec: AttentionSpec) -> str | None:
    """Returns why a kernel cannot compute a layer, or None if it can. If documents are cut, it must also compute calls
    on the keys before the queries."""
    able = entry.capabilities
    return able.refusal(operands, spec) or able.refusal(operands, before_queries(spec, spec.window_tokens))


def _made(entry: Entry, operands: Operands, spec: AttentionSpec) -> tuple[Kernel | None, str | None]:
    """Returns the kernel of an entry, or the reason for none: it is not installed, does not import, compile or run, or
    is wrong."""
    missing = entry.missing()
    if missing is not None:
        return None, missing
    try:
        kernel = entry.make(*[importlib.import_module(entry.module)] if entry.module else [])
        wrong = try_out(kernel, operands, spec)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may raise
        return None, _failure(error)
    return (kernel, None) if wrong is None else (None, f"{IS_WRONG} {wrong}")


def _failure(error: Exception) -> str:
    return f"{FAILS} {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def try_out(kernel: Kernel, operands: Operands, spec: AttentionSpec) -> str | None:
    """Returns which result of a kernel is wrong on this GPU; None if all are right or there is no GPU."""
    if operands.device_type != "cuda" or not torch.cuda.is_available():
        return None
    heads = operands.num_heads, operands.num_kv_heads, operands.head_dim, operands.value_dim
    for one in (spec, before_queries(spec, spec.window_tokens)):
        wrong = describe_error(kernel, one, heads, operands.dtype, torch.device("cuda"))
        if wrong is not None:
            return wrong
    return None
