"""Operators of torch made of functions: compiled graphs, checkpointing and autograd all know them by name.

`torch.library.custom_op` with `register_autograd` does the same for twice the time of the host: 40 µs in each layer,
half of which are generic (keyword arguments, mutated arguments, aliases). And where the dispatcher would call
nothing else, there is no dispatching.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_autograd_keyset,
    _AutoDispatchBelowAutograd,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _len_torch_function_stack,
)
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad, profiler

from distca_hf.errors import UnsupportedAttentionError


_library = torch.library.Library("distca", "FRAGMENT")

# What operators of ours are given; a subclass of Tensor has its own idea of what an operator does.
_ARGUMENTS = frozenset([torch.Tensor, torch.nn.Parameter, int, float, bool, str, list, type(None)])
# Keys with which the dispatcher calls every operator of a thread in which no mode listens.
_NO_MODE = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()


def define_op(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> Callable[..., Any]:
    """Defines the operator `distca::<name of the function>` of tensors, numbers and lists of numbers. It writes to
    none of them, and its outputs share no memory with them.

    Args:
        function: no argument has a default: the dispatcher leaves out last arguments that equal their defaults.
        fake: shapes and dtypes of what it returns.
        backward, save: `backward(ctx, *gradients)`, and `save(ctx, inputs, output)` in forward; without them the
            operator cannot be differentiated.

    Returns:
        A function of the operator's arguments, without names, that does what a call of the operator does. What others
        register for the operator (a dtype under autocast, say) is heard only where calls are dispatched.
    """
    name = function.__name__.removeprefix("_")
    # They run on the host: a CUDA graph would replay the kernels of one batch, and no exchange.
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
    _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
    operator: torch._ops.OpOverload = getattr(torch.ops.distca, name).default
    # torch.compile does not look into it, also where it runs beside compiled code.
    _library.impl(name, _disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"distca::{name}", fake, lib=_library)
    recorded = _recorded(name, backward, save)

    def dispatched(keyset: DispatchKeySet, *given: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in given):
            raise UnsupportedAttentionError(
                f"distca::{name} has no forward-mode derivatives (torch.func.jvp, forward_ad), and they would be lost "
                "here; use backward, or load the model with another attn_implementation"
            )

        def below_autograd(*given: Any) -> Any:
            with _AutoDispatchBelowAutograd():
                return operator.redispatch(keyset & _after_autograd_keyset, *given)

        return recorded(below_autograd, *given)

    _library.impl(name, dispatched, "Autograd", with_keyset=True)

    def call(*given: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _is_plain(given):
            return operator(*given)
        return recorded(function, *given)

    return call


def _recorded(
    name: str,
    backward: Callable[..., Any] | None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None,
) -> Callable[..., Any]:
    """Returns a function that calls its first argument with the others. Autograd records that as one step if one of
    them needs gradients. Nothing within is recorded: autograd's own functions run without, and where no tensor needs
    gradients there is nothing to record."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, below: Callable[..., Any], *given: Any) -> Any:
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
        return below(*given)

    return call


def _has_tangent(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and forward_ad.unpack_dual(given).tangent is not None


def _is_plain(given: tuple[Any, ...]) -> bool:
    """Returns whether the dispatcher would call autograd and the function alone. Then there is no mode (selective
    checkpointing, counting), no transformation (vmap, functionalisation, forward derivatives), no tracing, no
    profiler, no compiler that looks for frames, no tensor of another kind or device, and none that is still to be
    negated. Each question is one that costs the host little."""
    return (
        get_eval_frame_callback() is None
        and _dispatch_tls_local_include_set().raw_repr() == _NO_MODE
        and not _len_torch_function_stack()
        and not profiler._is_profiler_enabled
        and forward_ad._current_level < 0
        and _ARGUMENTS.issuperset(map(type, given))
        and (given[0].is_cuda or given[0].is_cpu)
        and not any([isinstance(x, torch.Tensor) and x.is_neg() for x in given])
        and not (torch.is_grad_enabled() and _dispatch_tls_local_exclude_set().has(DispatchKey.AutogradFunctionality))
    )
