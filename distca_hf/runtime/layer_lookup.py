"""Layer lookup: what a layer finds in the plan of its micro-batch, by its tensors and by how it attends.

The first of alike layers looks everything up, and the others find what it has found (`alike_layers`).
"""

import torch

from distca_hf.comm.speeds import Stopwatch
from distca_hf.config import KernelName
from distca_hf.kernels.interface import AttentionSpec, Kernel, MeasuredKernel
from distca_hf.kernels.registry import Operands, choose_kernel, kernel_name
from distca_hf.runtime.alike_layers import AlikeLayers, LayerKey
from distca_hf.runtime.layer_kinds import LayerKinds


class LayerLookup:
    """Kinds of layers, kernels and alike layers of one planned micro-batch.

    Args:
        kinds: the layers by their masks.
        kernel: setting of this name.
        rank_name: for messages.
        stopwatch: measures this rank's kernels; None where nobody asks for their times.
    """

    def __init__(
        self, kinds: LayerKinds, kernel: KernelName, rank_name: str, stopwatch: Stopwatch | None = None
    ) -> None:
        self.kinds = kinds
        self._kernel, self._rank_name, self._stopwatch = kernel, rank_name, stopwatch
        self._alike: dict[LayerKey, AlikeLayers] = {}
        self._kernels: dict[torch.dtype, Kernel] = {}

    def alike(
        self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, where: str
    ) -> AlikeLayers:
        """Returns the layers that are like one with these tensors, once these are known to fit the plan.

        Raises:
            PlanError, UnsupportedAttentionError: as `kernel`; or the batch was planned without their mask.
        """
        q, k, v = q_TNH, k_TGH, v_TGV
        shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
        key = q.dtype, k.dtype, v.dtype, shapes, strides, q.device, k.device, v.device, spec
        layers = self._alike.get(key)
        if layers is None:
            spec = self.kinds.spec(spec)
            kernel = self.kernel(q, k, v, spec, where)
            layers = self._alike[key] = AlikeLayers.of(k, v, spec, kernel, self.kinds.of(spec))
        return layers

    def kernel(
        self,
        q_TNH: torch.Tensor,
        k_TGH: torch.Tensor,
        v_TGV: torch.Tensor,
        spec: AttentionSpec,
        where: str = "no layer yet",
    ) -> Kernel:
        """Returns the kernel for these tensors, once they are known to fit the plan.

        Raises:
            PlanError: they do not fit.
            UnsupportedAttentionError: there is no kernel for them.
        """
        q, k, v = q_TNH, k_TGH, v_TGV
        for x in (q, k, v):
            self.kinds.check_fit(x, f"{self._rank_name}, {where}")
        kernel = choose_kernel(self._kernel, Operands.of(q, k, v), spec)
        self._kernels.setdefault(q.dtype, kernel)
        if self._stopwatch is None or spec.window_tokens:  # servers take no part in layers with windows
            return kernel
        return MeasuredKernel(kernel, self._stopwatch.kernel)

    @property
    def attention_dtype(self) -> torch.dtype | None:
        """Dtype that attention computes in; None before the first call."""
        return next(iter(self._kernels), None)

    @property
    def kernel_name(self) -> str:
        """Name of the kernel that attends; "none" before the first call."""
        return next((kernel_name(kernel) for kernel in self._kernels.values()), "none")
