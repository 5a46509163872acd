"""Finite: looks for what is no number, for those who debug. Waits for the device."""

import torch

from distca_hf.errors import NotFiniteError
from distca_hf.runtime.plans import LivePlan


def check_finite(plan: LivePlan, where: str, **tensors: torch.Tensor) -> None:
    """Looks at `[T, ...]` tensors, unless the settings leave it.

    Raises:
        NotFiniteError: names the tensor and the document of the first row that is wrong.
    """
    if not plan.config.check_finite:
        return
    for name, rows in tensors.items():
        wrong = ~torch.isfinite(rows).flatten(1).all(dim=1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise NotFiniteError(
                f"rank {plan.transport.rank}, {where}: {name} is not finite in row {row}, {plan.maps.name_of(row)}; "
                f"{int(wrong.sum())} of {len(rows)} rows are not"
            )
