"""Mixers of a benchmark step whose states stay on one rank."""

from collections.abc import Sequence

import torch

from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.layout import Layout
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan


def rows_on_one_device(
    segments: Sequence[tuple[int, int, int]], halo_tokens: int, device: torch.device
) -> CarriedRows:
    """Returns the rows of the only rank: segments (document, start, stop) of all tokens of all documents, in row
    order. Mixers see `halo_tokens` before a token."""
    tokens = [0] * (1 + max(document for document, _, _ in segments))
    for document, _, stop in segments:
        tokens[document] = max(tokens[document], stop)
    plan = plan_in_place(Layout.from_segments(tokens, [segments]))
    kinds = PinnedKinds.prepare(RoutedKinds.of(plan, 0), device.type == "cuda", halo_tokens)
    return CarriedRows(LivePlan(0, kinds.planned(device, plan.fingerprint), LocalTransport(), DistCAConfig()))
