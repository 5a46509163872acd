"""Trial: a kernel computes a few random tokens, and its results are compared with those of the reference.

Kernels are compiled when first used, and some are wrong for some masks, head dimensions or GPUs. A wrong mask, or an
option that is ignored, changes results by a fifth and more. Rounding in bf16 changes them by a hundredth.

Shape legend in `kernels.interface`.
"""

from itertools import accumulate

import torch

from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Saved, Spans
from distca_hf.kernels.reference import ReferenceKernel


# Query and key rows of the tasks: two tiles of 128, so that kernels loop over keys, and a task of one tile. Without a
# causal mask one task has fewer keys than queries.
CAUSAL_TASKS = (256, 256), (40, 200)
OTHER_TASKS = (256, 200), (40, 200)
# Window of all trials: shorter than every task.
WINDOW_TOKENS = 40
# Largest standard deviation of scores: kernels approximate tanh to a thousandth, which is an error of these scores.
LARGEST_SPREAD = 12.0
# Largest distance from the reference, as a share of its length.
LARGEST_ERROR = 0.05


def describe_error(
    kernel: Kernel, spec: AttentionSpec, heads: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns which of a kernel's results is wrong and how much, None if all are right.

    Args:
        spec: its scale is not used. Scores are so large that a softcap matters.
        heads: query heads, KV heads, head dimension, value dimension.
    """
    num_heads, num_kv_heads, head_dim, value_dim = heads
    tasks = CAUSAL_TASKS if spec.causal else OTHER_TASKS
    spec = spec._replace(scale=min(max(1.0, spec.softcap / 4), LARGEST_SPREAD) * head_dim**-0.5)
    queries, keys = (sum(rows) for rows in zip(*tasks, strict=True))
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    q, dout = tensor(queries, num_heads, head_dim), tensor(queries, num_heads, value_dim)
    inputs = Inputs(q, tensor(keys, num_kv_heads, head_dim), tensor(keys, num_kv_heads, value_dim))
    spans = _spans(tasks, device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        got, expected = (_results(one, inputs, dout, spans, spec) for one in (kernel, ReferenceKernel()))
        for name, right in expected.items():
            error = float((got[name].double() - right.double()).norm() / right.double().norm())
            if not error <= LARGEST_ERROR:  # NaN, too
                return (
                    f"its {name} is {error:.2g} of the right one's length away from that, on {queries} random tokens"
                )
    return None


def _spans(tasks: tuple[tuple[int, int], ...], device: torch.device) -> Spans:
    queries, keys = zip(*tasks, strict=True)
    of_queries, of_keys = (
        torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device=device) for rows in (queries, keys)
    )
    return Spans(of_queries, of_keys, max(queries), max(keys))


def _results(
    kernel: Kernel, inputs: Inputs, dout: torch.Tensor, spans: Spans, spec: AttentionSpec
) -> dict[str, torch.Tensor]:
    """Returns output, log-sum-exp and gradients by name."""
    out, lse = kernel.forward(inputs, spans, spec)
    gradients = Gradients(*(torch.empty_like(x) for x in inputs))
    kernel.backward(dout, Saved(*inputs, out, lse), gradients, spans, spec)
    names = "output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values"
    return dict(zip(names, (out, lse, *gradients), strict=True))
