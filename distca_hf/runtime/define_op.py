"""Operators of torch made of functions: compiled graphs, checkpointing and autograd all know them by name.

`torch.library.custom_op` with `register_autograd` does the same for twice the time of the host: 40 µs in each layer,
half of which are generic (keyword arguments, mutated arguments, aliases).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _AutoDispatchBelowAutograd,
)
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo


_library = torch.library.Library("distca", "FRAGMENT")


def define_op(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> torch._ops.OpOverload:
    """The operator `distca::<name of the function>` of tensors and numbers; it writes to none of them, and
    what it returns shares no memory with them.

    Args:
        fake: shapes and dtypes of what it returns.
        backward, save: `backward(ctx, *gradients)`, and `save(ctx, inputs, output)` in forward; without them the
            operator cannot be differentiated.
    """
    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    operator: torch._ops.OpOverload = getattr(torch.ops.distca, name).default
    # torch.compile does not look into it, also where it runs beside compiled code.
    _library.impl(name, _disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"distca::{name}", fake, lib=_library)
    _library.impl(name, _differentiable(operator, function, backward, save), "Autograd", with_keyset=True)
    return operator


def _differentiable(
    operator: torch._ops.OpOverload,
    function: Callable[..., Any],
    backward: Callable[..., Any] | None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None,
) -> Callable[..., Any]:
    """What autograd calls in the operator's place."""

    def below_autograd(keyset: Any, *given: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            if _is_device_next(keyset.raw_repr()) and get_eval_frame_callback() is None:
                return function(*given)
            return operator.redispatch(keyset & _after_autograd_keyset, *given)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *given: Any) -> Any:
            output = below_autograd(keyset, *given)
            if save is not None:
                save(ctx, given, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            if backward is None:
                raise NotImplementedError(f"{operator} cannot be differentiated: no gradients of gradients")
            return None, *backward(ctx, *gradients)

    def call(keyset: Any, *given: Any) -> Any:
        if torch.is_grad_enabled() and any([isinstance(x, torch.Tensor) and x.requires_grad for x in given]):
            return Recorded.apply(keyset, *given)
        return below_autograd(keyset, *given)

    return call


@cache
def _is_device_next(keyset: int) -> bool:
    """Whether below autograd no mode and no transformation wants to know of a call: then it need not be dispatched on,
    which takes the host as long as a launch."""
    below = DispatchKeySet.from_raw_repr(keyset) & _after_ADInplaceOrView_keyset
    return below.highestPriorityTypeId() in (DispatchKey.CPU, DispatchKey.CUDA)
