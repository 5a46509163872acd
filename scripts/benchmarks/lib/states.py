"""Mixers of a benchmark step: states that stay on one rank, and states as the package axolotl-ringmaster passes them.

The package (tried: 0.2.7) gives every rank an equal interval of all tokens. Its own functions run in place of those
that mixers call: flash-linear-attention's with a context over all ranks for delta rules, loops over documents and
gathered states for Mamba2. Its group has all ranks. It calls NCCL itself, so its bytes are not counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.mixer_calls import Apart
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.integrations.models.structure import transformers_model
from distca_hf.layout import Layout
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from lib.baselines.peers import ringmaster_runtime
from lib.documents import Segment


def rows_on_one_device(segments: Sequence[Segment], halo_tokens: int, device: torch.device) -> CarriedRows:
    """Returns the rows of the only rank: segments of all tokens of all documents, in row order. Mixers see
    `halo_tokens` before a token."""
    tokens = [0] * (1 + max(document for document, _, _ in segments))
    for document, _, stop in segments:
        tokens[document] = max(tokens[document], stop)
    plan = plan_in_place(Layout.from_segments(tokens, [segments]))
    kinds = PinnedKinds.prepare(RoutedKinds.of(plan, 0), device.type == "cuda", halo_tokens)
    return CarriedRows(LivePlan(0, kinds.planned(device, plan.fingerprint), LocalTransport(), DistCAConfig()))


@contextmanager
def passed_by_package(model: nn.Module, lengths: Sequence[int], device: torch.device) -> Iterator[None]:
    """Lets axolotl-ringmaster pass states of an enabled model between all ranks, and convolutions see the tokens
    before them. Documents of these lengths follow each other over the ranks, which have equally many tokens. Exits if
    the package knows none of the model's mixers."""
    from ringmaster.mamba import mamba2_mixers, wire_mamba2
    from ringmaster.recurrent import gated_delta_mixers, kda_mixers, wire_gated_delta, wire_kda
    from ringmaster.runtime import set_runtime

    inner = transformers_model(model)
    apart = {mixer: vars(mixer).pop("forward") for mixer in mixers_of(inner).values()}
    group = dist.group.WORLD
    restore: Callable[[], None] | None = None
    for find, wire in ((gated_delta_mixers, wire_gated_delta), (kda_mixers, wire_kda), (mamba2_mixers, wire_mamba2)):
        if restore is None and (found := find(inner)):
            restore = wire(found, group)
    if restore is None:
        raise SystemExit(f"ringmaster knows no mixer of {type(inner).__name__}: leave this mode out")
    set_runtime(ringmaster_runtime(lengths, device, cp_group=group))
    for mixer, own in apart.items():
        assert isinstance(own, Apart)
        own.before, mixer.forward = vars(mixer).get("forward"), own
    try:
        yield
    finally:
        for mixer, own in apart.items():
            vars(mixer).pop("forward")
            if own.before is not None:
                mixer.forward, own.before = own.before, None
        restore()
        for mixer, own in apart.items():
            mixer.forward = own
        set_runtime(None)
