"""Operators of torch made of functions: compiled graphs, checkpointing and autograd all know them by name.

`torch.library.custom_op` with `register_autograd` does the same for twice the time of the host: 40 µs in each layer,
half of which are generic (keyword arguments, mutated arguments, aliases). And where the dispatcher would find nobody
who wants to know of a call, there is no dispatching.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _AutoDispatchBelowAutograd,
    _dispatch_keys,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo


_library = torch.library.Library("distca", "FRAGMENT")

# What operators of ours are given; a subclass of Tensor has its own idea of what an operator does.
_ARGUMENTS = frozenset([torch.Tensor, torch.nn.Parameter, int, float, bool, str])
# Keys that are always there, or while mixed precision casts: they leave our operators alone.
_IDLE_KEYS = DispatchKey.BackendSelect, DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA


def define_op(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> Callable[..., Any]:
    """The operator `distca::<name of the function>` of tensors and numbers; it writes to none of them, and
    what it returns shares no memory with them.

    Args:
        fake: shapes and dtypes of what it returns.
        backward, save: `backward(ctx, *gradients)`, and `save(ctx, inputs, output)` in forward; without them the
            operator cannot be differentiated.

    Returns:
        A function that does what a call of the operator does.
    """
    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    operator: torch._ops.OpOverload = getattr(torch.ops.distca, name).default
    # torch.compile does not look into it, also where it runs beside compiled code.
    _library.impl(name, _disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"distca::{name}", fake, lib=_library)
    recorded = _recorded(name, backward, save)

    def dispatched(keyset: DispatchKeySet, *given: Any) -> Any:
        return recorded(partial(operator.redispatch, keyset & _after_autograd_keyset), *given)

    _library.impl(name, dispatched, "Autograd", with_keyset=True)

    def call(*given: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain(given):
            return operator(*given)
        return recorded(function, *given)

    return call


def _recorded(
    name: str,
    backward: Callable[..., Any] | None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None,
) -> Callable[..., Any]:
    """Calls what is below autograd, its first argument, with the others, as autograd does."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, below: Callable[..., Any], *given: Any) -> Any:
            with _AutoDispatchBelowAutograd():
                output = below(*given)
            if save is not None:
                save(ctx, given, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            if backward is None:
                raise NotImplementedError(f"distca::{name} cannot be differentiated: no gradients of gradients")
            return None, *backward(ctx, *gradients)

    def call(below: Callable[..., Any], *given: Any) -> Any:
        if torch.is_grad_enabled() and any([isinstance(x, torch.Tensor) and x.requires_grad for x in given]):
            return Recorded.apply(below, *given)
        with _AutoDispatchBelowAutograd():
            return below(*given)

    return call


def _is_plain(given: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would call autograd, then the function, and nobody else: there is no mode (selective
    checkpointing, counting, tracing), no transformation (vmap, functionalisation), no profiler, no compiler that looks
    for frames, and no tensor of another kind or device."""
    somebody = get_eval_frame_callback() is not None or _len_torch_function_stack() or _profiler_enabled()
    if somebody or not _ARGUMENTS.issuperset(map(type, given)):
        return False
    tensor, more, less = _dispatch_keys(given[0]), _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    return _has_autograd_alone(tensor.raw_repr(), more.raw_repr(), less.raw_repr())


@cache
def _has_autograd_alone(of_tensor: int, included: int, excluded: int) -> bool:
    """Whether of these dispatch keys autograd's comes first, and a device's own next."""
    tensor, more, less = (DispatchKeySet.from_raw_repr(keys) for keys in (of_tensor, included, excluded))
    called = (tensor | more) - less
    for key in _IDLE_KEYS:
        called = called.remove(key)
    first, last = called.highestPriorityTypeId(), (called & _after_ADInplaceOrView_keyset).highestPriorityTypeId()
    return (first, last) in ((DispatchKey.AutogradCPU, DispatchKey.CPU), (DispatchKey.AutogradCUDA, DispatchKey.CUDA))
