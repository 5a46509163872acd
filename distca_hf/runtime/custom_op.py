"""Makes torch operators from functions: compiled graphs, checkpointing and autograd find them by name.

`torch.library.custom_op` with `register_autograd` does the same in twice the host time, 40 µs in each layer. Half of
this is generic (keyword arguments, mutated arguments, aliases). If the dispatcher would call nothing else, we bypass
it.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

import torch
from torch.autograd import forward_ad

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.runtime.regions import TileRegion, current_run, outputs_in
from distca_hf.torch_private import below_autograd, hidden_from_dynamo, in_dual_level, is_plain


# Kept as long as the process: torch removes a library's operators when it is collected.
_library = torch.library.Library("distca", "FRAGMENT")


# Arguments and results of an operator, and its own context: `SavedForBackward` with its attributes.
Inputs = TypeVarTuple("Inputs")
Output = TypeVar("Output")
Context = TypeVar("Context", bound="SavedForBackward")


class SavedForBackward(Protocol):
    """The part of an operator's autograd context (`torch.autograd.function.FunctionCtx`) that is used here."""

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def define_op(
    function: Callable[[*Inputs], Output],
    fake: Callable[[*Inputs], Output],
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None,
    save: Callable[[Context, tuple[*Inputs], Output], None] | None = None,
) -> Callable[[*Inputs], Output]:
    """Defines the operator `distca::<name of the function>` on tensors, numbers and lists of numbers. It writes to
    none of them, and its outputs share no memory with them.

    Args:
        function: must have no defaults: the dispatcher leaves out last arguments that equal their defaults.
        backward, save: `backward(ctx, *gradients)`, and `save(ctx, inputs, output)` in forward; without them the
            operator is not differentiable. Of several outputs only the first is.

    Returns:
        A function of the operator's positional arguments, with the results of the operator. Functions that others
        register for the operator (a dtype under autocast, say) are called only where calls are dispatched.
    """
    name = function.__name__.removeprefix("_")

    def contiguous(*given: *Inputs) -> Output:
        # As `fake` returns them: graphs are compiled for these strides. Without dispatch they may differ.
        output: Any = function(*given)
        if isinstance(output, torch.Tensor):
            return cast(Output, output.contiguous())
        return cast(Output, tuple(x.contiguous() for x in output))

    # Operators run on the host: a CUDA graph would replay one batch's kernels, and no exchange.
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
    _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
    operator = getattr(torch.ops.distca, name).default
    _library.impl(name, hidden_from_dynamo(contiguous), "CompositeExplicitAutograd")
    torch.library.register_fake(f"distca::{name}", fake, lib=_library)
    setup = None if save is None else _of_first_output(save)
    recorded, below = _recorded(name, backward, setup), below_autograd(operator)

    def call(*given: *Inputs) -> Output:
        if torch.compiler.is_dynamo_compiling() or not is_plain(given):
            return operator(*given)
        return recorded(function, *given)

    if below is None:
        if backward is not None:
            torch.library.register_autograd(f"distca::{name}", backward, setup_context=setup, lib=_library)

        def checked(*given: *Inputs) -> Output:
            if not torch.compiler.is_dynamo_compiling():
                _refuse_tangents(name, given)
            return call(*given)

        return checked

    def dispatched(keyset: object, *given: *Inputs) -> Output:
        _refuse_tangents(name, given)
        return recorded(lambda *inputs: below(keyset, *inputs), *given)

    _library.impl(name, dispatched, "Autograd", with_keyset=True)
    return call


def kept_in_regions(function: Callable[[*Inputs], Any]) -> Callable[[*Inputs], Any]:
    """Returns an operator's function that takes its outputs from the recomputed region, if there is one."""

    @functools.wraps(function)
    def call(*given: *Inputs) -> Any:
        run = current_run()
        return function(*given) if run is None else outputs_in(run, functools.partial(function, *given))

    return call


def noted_in_tiles(call: Callable[[*Inputs], Output]) -> Callable[[*Inputs], Output]:
    """Wraps an operator: the region of a tile, if one runs, notes its outputs. It is the outermost wrapper because
    selective checkpointing may return outputs that it kept, without running the operator."""

    def noting(*given: *Inputs) -> Output:
        if torch.compiler.is_dynamo_compiling():
            return call(*given)
        output, run = call(*given), current_run()
        if run is not None and isinstance(run.region, TileRegion) and not run.recomputes:
            run.region.note(cast(Any, output))
        return output

    return noting


def _of_first_output(
    save: Callable[[Context, tuple[*Inputs], Output], None],
) -> Callable[[Context, tuple[*Inputs], Output], None]:
    """Returns `save` for an operator with gradients of only its first output; a gradient of zeros may be None."""

    def setup(ctx: Context, inputs: tuple[*Inputs], output: Output) -> None:
        ctx.set_materialize_grads(False)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, output)

    return setup


def _recorded(
    name: str,
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None,
    setup: Callable[[Context, tuple[*Inputs], Output], None] | None,
) -> Callable[[Callable[[*Inputs], Output], *Inputs], Output]:
    """Returns a function that calls its first argument with the others as arguments.

    Autograd records the call as one step if one of them needs gradients. Nothing inside is recorded: autograd is off
    in its own functions, and without tensors that need gradients there is nothing to record.
    """

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, below: Callable[[*Inputs], Output], *given: *Inputs) -> Output:
            output = below(*given)
            if setup is not None:
                setup(ctx, given, output)
            return output

        @staticmethod
        def backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            if backward is None:
                raise NotImplementedError(f"distca::{name} cannot be differentiated: no gradients of gradients")
            return None, *backward(ctx, *gradients)

    def call(below: Callable[[*Inputs], Output], *given: *Inputs) -> Output:
        if torch.is_grad_enabled() and any([isinstance(x, torch.Tensor) and x.requires_grad for x in given]):
            return Recorded.apply(below, *given)
        return below(*given)

    return call


def _refuse_tangents(name: str, given: tuple[object, ...]) -> None:
    """Refuses forward-mode derivatives. Raises UnsupportedAttentionError if an argument has one."""
    tensors = (x for x in given if isinstance(x, torch.Tensor))
    if in_dual_level() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedAttentionError(
            f"distca::{name} has no forward-mode derivatives (torch.func.jvp, forward_ad), and they would be lost "
            "here; use backward, or run this model without distca_hf"
        )
