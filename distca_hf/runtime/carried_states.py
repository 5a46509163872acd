"""Carried states: what layers with a state exchange for cut documents, on the device.

    rows of a rank    | d0[40:90] | d1 | d0[0:8] | d2 |      a layer is called once for all
    halo              tokens just before each segment, from any rank; zeros before a document
    summary           (M, B) of a fragment, sent to the ranks that fold it (`planning.folds`)
    chain             S = B0, then M1 S + B1, ... in document order, in fp64; several fragments may follow one
    state             sent to the rank of the next fragment if ranks divide heads; nothing hides this exchange

Every rank, even without fragments, starts the same exchanges in every layer, and the mirrored ones in backward. An
exchange is two functions of autograd. What runs between them hides it in both directions:

    forward     Dispatch ──▶ whole documents ──▶ Arrive ──▶ chain ──▶ output
    backward    Dispatch ◀── whole documents ◀── Arrive ◀── chain ◀── output
                   waits                           starts
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from distca_hf.comm.transport import AllToAll, Exchange
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.planning.folds import Route
from distca_hf.planning.fragments import GROUPS, Fragments, GroupName
from distca_hf.runtime.device_fragments import DeviceFold, DeviceFragments
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import among_trainers
from distca_hf.runtime.regions import current_run, is_saved, outputs_in
from distca_hf.torch_private import backward_number, hidden_from_dynamo


# Returns states after fragments, `[n, ...]`, from their summaries and the states before them; None means zero.
After = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class CarriedRows:
    """The rows of one forward pass, as layers with a state see them.

    This is not a tuple, mapping or dataclass: wrappers copy these if they are arguments of a model.
    """

    def __init__(self, plan: LivePlan) -> None:
        self._plan = plan
        self._transport = among_trainers(plan.transport)

    @cached_property
    def on_device(self) -> DeviceFragments:
        """The fragments of this rank; one object for all passes with a plan."""
        fragments = self._plan.planned.fragments
        if fragments is None:
            raise PlanError(
                f"{self._transport.grid.name}, micro-batch {self._plan.micro_batch}: the batch was planned without "
                "this model, whose layers carry a state from token to token; make batches with "
                "plugin.dataloader(model=...)"
            )
        return fragments()

    @property
    def on_host(self) -> Fragments:
        return self.on_device.on_host

    @property
    def is_cut(self) -> bool:
        """Whether any document of the micro-batch is cut, or continues another one; the same on all ranks."""
        return self.on_host.is_cut

    def split(self, x: torch.Tensor) -> dict[GroupName, torch.Tensor]:
        """Splits `[1, T, ...]` into the rows of each group that has any."""
        runs = self.on_host.runs
        if len({run.group for run in runs}) == 1:
            return {runs[0].group: x}
        parts = list(zip(runs, x.split(self.on_host.run_tokens, dim=1), strict=True))
        of_groups = {name: [part for run, part in parts if run.group == name] for name in GROUPS}
        return {name: torch.cat(found, dim=1) for name, found in of_groups.items() if found}

    def joined(self, groups: Mapping[GroupName, torch.Tensor]) -> torch.Tensor:
        """Undoes `split`."""
        if len(groups) == 1:
            return next(iter(groups.values()))
        runs = self.on_host.runs
        parts = {
            name: iter(x.split([run.tokens for run in runs if run.group == name], dim=1)) for name, x in groups.items()
        }
        return torch.cat([next(parts[run.group]) for run in runs], dim=1)

    def convolved(
        self, x_1CT: torch.Tensor, convolve: Callable[[torch.Tensor], torch.Tensor], where: str
    ) -> torch.Tensor:
        """Returns a causal convolution `[1, C, T]` in which segments see earlier tokens of their documents only.
        `convolve` takes `[N, C, L]`, and sees at most one token more than halos hold."""
        held, on_host = self.on_device, self.on_host
        if not on_host.halo.tokens:  # it sees one token
            return convolve(x_1CT)
        x_TC, edges = _Picked.apply(x_1CT[0].t(), held.edges, held.edge_rows, held.edge_numbers)
        taken, sent = edges.split([len(on_host.halo.taken), len(on_host.halo.route.sent)])
        halos = self._start(sent, on_host.halo.route, f"{where}, halos") if self.is_cut else None
        out_1CT = convolve(x_TC.t()[None])  # a segment's first tokens see the segment above; replaced below
        received = [] if halos is None else [halos.wait()]
        rows = torch.cat([taken, *received, x_TC.new_zeros(1, x_TC.shape[1])])
        segments = sum(map(len, on_host.groups.values()))
        windows_SLC = rows.index_select(0, held.windows).view(segments, -1, x_TC.shape[1])
        first_SLC = convolve(windows_SLC.transpose(1, 2)).transpose(1, 2)[:, on_host.halo.tokens :]
        first_NC = first_SLC.flatten(0, 1).index_select(0, held.kept)
        return out_1CT.index_copy(2, held.rows, first_NC.t()[None])

    def send_summaries(self, summaries: torch.Tensor, where: str) -> "SentSummaries":
        """Starts to send summaries of this rank's followed fragments; a collective call. They are `[n, H, ...]` in row
        order, and require gradients, even if empty, if another rank's may."""
        heads = summaries.shape[1]
        head_bytes = summaries.element_size() * math.prod(summaries.shape[2:])
        fold = self.on_device.fold(heads, head_bytes)
        units = summaries if fold.on_host.heads is None else summaries.flatten(0, 1)
        units, picked = _picked(units, fold.gathered)
        sent = self._start(picked, fold.on_host.gathered, f"{where}, summaries")
        send_states = partial(self._start, route=fold.on_host.returned, where=f"{where}, states")
        return SentSummaries(fold, units, sent, send_states)

    def _start(self, items: torch.Tensor, route: Route, where: str) -> "Sent":
        travel = _Travel(self._plan, route, where, items.requires_grad)
        return Sent(travel, _Dispatch.apply(travel, items))


class Sent(NamedTuple):
    """Items on their way to other ranks."""

    travel: "_Travel"
    ticket: torch.Tensor

    def wait(self) -> torch.Tensor:
        items: torch.Tensor = _Arrive.apply(self.travel, self.ticket)
        return items


class SentSummaries:
    """Summaries on their way, and the states that follow from them."""

    def __init__(
        self, fold: DeviceFold, units: torch.Tensor, sent: Sent, send_states: Callable[[torch.Tensor], Sent]
    ) -> None:
        self._fold, self._units, self._sent, self._send_states = fold, units, sent, send_states

    def states(self, after: After) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for the summaries of other ranks, and for states if ranks divide heads; a collective call.

        Chains are computed in fp64, which neither autocast nor TF32 changes. They cost next to nothing.

        Returns:
            `[n, H, ...]` states before this rank's middle and last fragments; and what arrived, for `tied`.
        """
        arrived = self._sent.wait()
        fold, heads = self._fold, self._fold.on_host.heads
        summaries = torch.cat([self._units, arrived]).index_select(0, fold.placed).double()
        first, *later = summaries.split(list(fold.on_host.steps) or [0])
        computed = [after(first, None)]
        for step, rows in zip(later, fold.before.split([*map(len, later)]), strict=True):
            before = computed[-1]
            before = _picked(before, rows)[1] if fold.on_host.branches else before[: len(step)]
            computed.append(after(step, before))
        states = torch.cat(computed).to(self._units.dtype)
        if heads is not None:
            states, picked = _picked(states, fold.returned)
            arrived = self._send_states(picked).wait()
            states = torch.cat([states, arrived])
        states = _picked(states, fold.states)[1]
        return states if heads is None else states.unflatten(0, (-1, heads)), arrived


class _Travel:
    """Items of this rank on their way to other ranks, and their gradients on the way back."""

    def __init__(self, plan: LivePlan, route: Route, where: str, needs_gradients: bool) -> None:
        self._needs_gradients, self._fingerprint = needs_gradients, plan.fingerprint
        self._pass, self._transport = plan.forward_pass, among_trainers(plan.transport)
        counts = route.sent_counts, route.received_counts
        # Attention servers come last and have no rows.
        self._sent_counts, self._received_counts = (x[: self._transport.world_size].tolist() for x in counts)
        self._layer, self._micro_batch = where, plan.micro_batch
        self._under_way: Exchange | None = None
        self._is_nested = backward_number() >= 0  # reentrant checkpointing differentiates within backward

    def start(self, items: torch.Tensor) -> None:
        """Starts to send items of this rank, unless a checkpointed region has saved what arrived in forward."""
        if is_saved(current_run(), of_states=True):
            return
        exchange = f"{self._layer} {items.dtype} {[*items.shape[1:]]}"
        self._pass.begin_exchange_of_states(exchange, self._needs_gradients, self._fingerprint)
        self._exchange(items, self._sent_counts, self._received_counts, "forward")

    def received(self) -> torch.Tensor:
        """Returns the items of other ranks, by rank."""
        (items,) = outputs_in(current_run(), lambda: (self.wait(),), of_states=True)
        return items

    def start_back(self, gradients: torch.Tensor) -> None:
        """Starts to send gradients of received items to their source ranks."""
        self._pass.begin_backward_of_rows(goes_on=self._is_nested)
        self._exchange(gradients.contiguous(), self._received_counts, self._sent_counts, "backward")

    def _exchange(self, items: torch.Tensor, sent: list[int], received: list[int], phase: str) -> None:
        where = f"micro-batch {self._micro_batch}, {self._layer}, {phase}"
        self._under_way = self._transport.exchange(AllToAll(items, sent, received, where))

    def wait(self) -> torch.Tensor:
        """Returns what arrives by the exchange that was started last: items in forward, gradients in backward."""
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        return under_way.wait()


class _Picked(torch.autograd.Function):
    """Picks rows of a tensor, perhaps several times, and returns the tensor and these. Backward adds up all gradients
    in max(fp32, their dtype), in a fixed order.

    Args:
        rows: int64, the picked rows.
        distinct: int64, each picked row once, to add up only these in that dtype; None for all rows of the tensor.
        numbers: int64, places of `rows` in `distinct`, or in the tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, distinct: torch.Tensor | None, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.distinct, ctx.numbers = distinct, numbers
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor, of_rows: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        added_to = gradients.clone() if ctx.distinct is None else gradients.index_select(0, ctx.distinct)
        total = added_to.to(accumulation_dtype(gradients.dtype))
        of_rows = of_rows.to(total.dtype)
        if total.is_cuda:
            total.index_put_((ctx.numbers,), of_rows, accumulate=True)  # sorts, unlike index_add_
        else:
            total.index_add_(0, ctx.numbers, of_rows)  # in order, unlike index_put_
        total = total.to(gradients.dtype)
        return total if ctx.distinct is None else gradients.index_copy(0, ctx.distinct, total), None, None, None


def _picked(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor, and some of its rows. Backward casts and adds up all rows."""
    picked: tuple[torch.Tensor, torch.Tensor] = _Picked.apply(x, rows, None, rows)
    return picked


class _Dispatch(torch.autograd.Function):
    """Starts an exchange; backward waits for the gradients. Returns a ticket for `_Arrive`."""

    @staticmethod
    def forward(ctx: Any, travel: _Travel, items: torch.Tensor) -> torch.Tensor:
        ctx.travel = travel
        travel.start(items)
        return items.new_empty(0)

    @staticmethod
    @hidden_from_dynamo
    @once_differentiable
    def backward(ctx: Any, ticket: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.travel.wait()


class _Arrive(torch.autograd.Function):
    """Waits for an exchange; backward starts the one of gradients."""

    @staticmethod
    def forward(ctx: Any, travel: _Travel, ticket: torch.Tensor) -> torch.Tensor:
        ctx.travel = travel
        return travel.received()

    @staticmethod
    @hidden_from_dynamo
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.travel.start_back(gradients)
        return None, gradients.new_zeros(0)


class _Tied(torch.autograd.Function):
    """Returns the first tensor. The second one gets no gradient, but its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients, None


def tied(output: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """Returns the output, whose backward pass runs the exchange's, too. Otherwise autograd would not run that on a
    rank without later fragments, which reads nothing that arrived."""
    tied_output: torch.Tensor = _Tied.apply(output, arrived)
    return tied_output
