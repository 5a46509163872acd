"""The trial of kernels: right ones pass with every mask and option, wrong ones are named."""

from collections.abc import Callable

import pytest
import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.kernels.reference import WINDOW_TOKENS, ReferenceKernel, describe_error
from distca_hf.kernels.varlen import CpuKernel


FULL = AttentionSpec(1.0)
SPECS = {
    "full": FULL,
    "no mask": FULL._replace(causal=False),
    "window": FULL._replace(window_tokens=WINDOW_TOKENS),
    "one side": FULL._replace(window_tokens=WINDOW_TOKENS, causal=False),
    "softcap": FULL._replace(softcap=50.0),
    "small softcap": FULL._replace(softcap=1.0),
    "window and softcap": FULL._replace(window_tokens=WINDOW_TOKENS, softcap=30.0),
}
HEADS = 4, 2, 64, 64
CPU = torch.device("cpu")


class Changed:
    """The reference, with another spec or other results."""

    def __init__(
        self,
        spec: Callable[[AttentionSpec], AttentionSpec] = lambda spec: spec,
        gradients: Callable[[Gradients], object] = lambda gradients: None,
    ) -> None:
        self._spec, self._gradients, self._kernel = spec, gradients, ReferenceKernel()

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        return self._kernel.forward(inputs, spans, self._spec(spec), room)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        self._kernel.backward(dout_TNV, saved, gradients, spans, self._spec(spec))
        self._gradients(gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("heads", [HEADS, (4, 1, 192, 128)], ids=str)
def test_right_kernels_pass(heads: tuple[int, int, int, int], spec: AttentionSpec, dtype: torch.dtype) -> None:
    assert describe_error(ReferenceKernel(), spec, heads, dtype, CPU) is None


@pytest.mark.parametrize("name", ["full", "no mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_right_kernel_passes(name: str, dtype: torch.dtype) -> None:
    """It rounds otherwise than the reference."""
    assert describe_error(CpuKernel(), SPECS[name], HEADS, dtype, CPU) is None


class Stale(Changed):
    """A kernel that goes on attending with the first call's tensors."""

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        self._inputs: Inputs = getattr(self, "_inputs", inputs)
        return super().forward(self._inputs, spans, spec, room)


WRONG = {
    "tensors of the first call": ("full", Stale(), "output"),
    "no causal mask": ("full", Changed(lambda spec: spec._replace(causal=False)), "output"),
    "no window": ("window", Changed(lambda spec: spec._replace(window_tokens=0)), "output"),
    "no window on one side": ("one side", Changed(lambda spec: spec._replace(window_tokens=0)), "output"),
    "one key more": ("window", Changed(lambda spec: spec._replace(window_tokens=WINDOW_TOKENS + 1)), "output"),
    "one key less": ("one side", Changed(lambda spec: spec._replace(window_tokens=WINDOW_TOKENS - 1)), "output"),
    "no softcap": ("softcap", Changed(lambda spec: spec._replace(softcap=0.0)), "output"),
    "no small softcap": ("small softcap", Changed(lambda spec: spec._replace(softcap=0.0)), "output"),
    "queries of zero": ("full", Changed(gradients=lambda x: x.dq_TNH.zero_()), "gradient of queries"),
    "keys of another head": (
        "full",
        Changed(gradients=lambda x: x.dk_SGH.copy_(x.dk_SGH.flip(1))),
        "gradient of keys",
    ),
    "values that are not finite": ("full", Changed(gradients=lambda x: x.dv_SGV[-1].fill_(torch.nan)), "gradient of"),
}


@pytest.mark.parametrize(("name", "kernel", "told"), WRONG.values(), ids=WRONG)
def test_wrong_kernels_are_told_by_their_first_wrong_result(name: str, kernel: Kernel, told: str) -> None:
    error = describe_error(kernel, SPECS[name], HEADS, torch.bfloat16, CPU)

    assert error is not None
    assert error.startswith(f"its {told}")
    assert error.endswith("random tokens")


def test_trials_leave_random_numbers_as_they_are() -> None:
    before = torch.get_rng_state()
    describe_error(ReferenceKernel(), FULL, HEADS, torch.bfloat16, CPU)

    assert torch.equal(torch.get_rng_state(), before)
