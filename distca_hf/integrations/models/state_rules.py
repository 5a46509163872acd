"""State rules: how a layer's function takes a state through rows, and through fragments that begin without theirs.

    gated delta rules, KDA    S_out = M S_in + B, M [K, K] a head
    Mamba2                    S_out = m S_in + B, m a number a head
    Mamba1                    S_out = m S_in + B, m a number a channel and state

Outputs are affine in S_in, too. So followed fragments run from a zero state, which gives B, and what S_in adds to
their outputs is added when it arrives. For delta rules that is r S_in: a second run with values 0 from the state I has
outputs r and the final state M. The function's own gradients are all that is needed. Last fragments of documents have
no summary, so they wait for S_in and run from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from distca_hf.runtime.device_fragments import DeviceFragments, DeviceGroup


# Returns keywords by which a function keeps the parts of a group apart.
Packed = Callable[[DeviceGroup], dict[str, Any]]
Tensors = Sequence[torch.Tensor]
# Tokens whose decays, a number a channel and state, are made at once.
DECAY_TOKENS = 256


class Begun(NamedTuple):
    """Followed fragments that ran from a zero state.

    Attributes:
        held: all fragments of the rank.
        outputs: `[1, T, ...]`.
        summaries: `[fragments, H, ...]`.
        kept: what `StateRule.added` needs of each middle fragment besides the state.
    """

    held: DeviceFragments
    outputs: torch.Tensor
    summaries: torch.Tensor
    kept: list[Tensors]


class StateRule(ABC):
    """A call of a function that takes a state through rows.

    Attributes:
        rows: its tensors `[1, T, ...]`.
        packed: None if the function knows nothing of packed rows.
        dtype: of summaries and states, at least fp32.
    """

    def __init__(self, rows: Tensors, packed: Packed | None) -> None:
        self.rows, self.packed = rows, packed
        self.dtype = torch.promote_types(rows[0].dtype, torch.float32)

    @abstractmethod
    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        """Returns outputs of documents, `[N, T, ...]`."""

    @abstractmethod
    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """Runs followed fragments from a zero state; first fragments of documents are complete with that."""

    @abstractmethod
    def nothing(self) -> torch.Tensor:
        """Returns summaries of no fragment. They need gradients if any of this call's tensors does: whether backward
        exchanges summaries must not depend on the fragments of a rank. If only a decay is trained, for example,
        summaries need gradients, and values do not."""

    @abstractmethod
    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Returns states after fragments, see `runtime.carried_states.After`."""

    @abstractmethod
    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """Returns the output of a fragment with what its state `[H, ...]` adds to it."""

    @abstractmethod
    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """Returns outputs of last fragments, `[1, T, ...]`, from their states `[fragments, H, ...]`."""

    def continued(self, begun: Begun, states: torch.Tensor) -> torch.Tensor:
        """Returns outputs of followed fragments, `[1, T, ...]`, from the states of middle ones."""
        outputs = list(begun.outputs.split(begun.held.followed.tokens, dim=1))
        for number, kept, state in zip(begun.held.on_host.middle.tolist(), begun.kept, states, strict=True):
            with torch.autocast(state.device.type, enabled=False):
                outputs[number] = self.added(outputs[number], kept, state)
        return torch.cat(outputs, dim=1)

    def _no_summaries(self, shape: tuple[int, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([x.reshape(-1)[:0].to(self.dtype) for x in tensors if x is not None]).view(0, *shape)


def _each(rows: Tensors, group: DeviceGroup) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the tensors of each part of a group."""
    return zip(*(x.split(group.tokens, dim=1) for x in rows), strict=True)


class DeltaRule(StateRule):
    """A gated delta rule, or Kimi's.

    Args:
        function: of Transformers' signature.
        rows: queries and keys `[1, T, H, K]`, values `[1, T, H, V]`, decays and betas.
        normalizes: whether the function normalizes queries and keys.
    """

    def __init__(self, function: Callable[..., Any], rows: Tensors, packed: Packed | None, normalizes: bool) -> None:
        super().__init__(rows, packed)
        self._function, self._normalizes = function, normalizes
        self._heads, self._value_dim, self._key_dim = *rows[2].shape[2:], rows[1].shape[3]

    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        """See `StateRule`."""
        output: torch.Tensor = self._run(rows, **packed)[0]
        return output

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """See `StateRule`. M of a first fragment is not needed."""
        outputs, add = self._run_group(rows, held.followed, None, output_final_state=True)
        times, kept = [add.new_zeros(1, self._heads, self._key_dim, self._key_dim)] * len(add), list[Tensors]()
        if middle := held.on_host.middle.tolist():
            parts = list(_each(rows, held.followed))
            q, k, v, *of_decays = (
                torch.cat(x, dim=1) for x in zip(*(parts[number] for number in middle), strict=True)
            )
            zeros = v.new_zeros(*v.shape[:3], self._key_dim)
            eye = torch.eye(self._key_dim, dtype=self.dtype, device=v.device).expand(len(middle), self._heads, -1, -1)
            reads, found = self._run_group((q, k, zeros, *of_decays), held.middle, eye, output_final_state=True)
            kept = [(read,) for read in reads.split(held.middle.tokens, dim=1)]
            for number, of_part in zip(middle, found.split(1), strict=True):
                times[number] = of_part
        return Begun(held, outputs, torch.cat([add, torch.cat(times)], dim=3).to(self.dtype), kept)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        return self._no_summaries((self._heads, self._key_dim, self._value_dim + self._key_dim), *self.rows[1:])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add, times = summary.split((self._value_dim, self._key_dim), dim=-1)
        return add if state is None else add + times @ state

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`."""
        out_HTV, read_HTK = output[0].transpose(0, 1), kept[0][0].transpose(0, 1)
        return torch.baddbmm(out_HTV, read_HTK, state.to(output.dtype)).transpose(0, 1)[None]

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        return self._run_group(rows, last, states, output_final_state=False)[0]

    def _run_group(
        self, rows: Tensors, group: DeviceGroup, states: torch.Tensor | None, output_final_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns outputs of a group, and final states of its parts; of none unless they are asked for."""
        more: dict[str, Any] = {"output_final_state": output_final_state}
        if len(group.tokens) == 1 or self.packed is None:
            before = [None] * len(group.tokens) if states is None else states.split(1)
            pairs = zip(_each(rows, group), before, strict=True)
            made = [self._run(part, initial_state=state, **more) for part, state in pairs]
        else:
            made = [self._run(rows, initial_state=states, **more, **self.packed(group))]
        outputs = torch.cat([out for out, _ in made], dim=1)
        return outputs, torch.cat([state for _, state in made]) if output_final_state else outputs[:0]

    def _run(self, rows: Tensors, **more: Any) -> Any:
        q, k, v, g, beta = rows
        return self._function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=self._normalizes, **more)


class Scan(StateRule):
    """Mamba2's scan. Its kernels take a state for each row of a batch, and have no gradients of states after packed
    rows, so each fragment is one call.

    Args:
        function: of the rows and further keywords, like Transformers'.
        rows: x `[1, T, H, P]`, steps `[1, T, H]`, B and C `[1, T, groups, N]`.
        A: `[H]`.
        of_steps: keywords dt_bias, dt_softplus and dt_limit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Tensors,
        packed: Packed | None,
        A: torch.Tensor,
        of_steps: dict[str, Any],
    ) -> None:
        super().__init__(rows, packed)
        self._function, self._A, self._of_steps = function, A, of_steps
        self._heads, self._head_dim, self._state_dim = *rows[0].shape[2:], rows[2].shape[3]

    def outputs(self, rows: Tensors, **more: Any) -> Any:
        """See `StateRule`."""
        x, dt, B, C = rows
        return self._function(x, dt, self._A, B, C, **self._of_steps, **more)

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """See `StateRule`."""
        bias, (least, most) = self._of_steps["dt_bias"], self._of_steps["dt_limit"]
        step_1TN = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        step_1TN = functional.softplus(step_1TN) if self._of_steps["dt_softplus"] else step_1TN
        decay_1TN = self._A.to(self.dtype) * step_1TN.clamp(least, most)
        sums = [part_1TN.cumsum(1) for part_1TN in decay_1TN.split(held.followed.tokens, dim=1)]
        made = [self.outputs(part, return_final_states=True) for part in _each(rows, held.followed)]
        states = torch.cat([state for _, state in made]).to(self.dtype).flatten(2)
        factors = torch.cat([sum_1TN[:, -1] for sum_1TN in sums]).exp()
        C = rows[3].split(held.followed.tokens, dim=1)
        kept: list[Tensors] = [(sums[number], C[number]) for number in held.on_host.middle.tolist()]
        outputs = torch.cat([out for out, _ in made], dim=1)
        return Begun(held, outputs, torch.cat([states, factors[..., None]], dim=2), kept)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        x, dt, B, _ = self.rows
        shape = self._heads, self._head_dim * self._state_dim + 1
        return self._no_summaries(shape, x, dt, self._A, B, self._of_steps["dt_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add = summary[..., :-1].unflatten(-1, (self._head_dim, self._state_dim))
        return add if state is None else torch.addcmul(add, summary[..., -1:, None], state)

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`. Heads of a group have one C: [G, T, S] x [G, S, heads of a group x H]."""
        sum_1TN, C_1TGS = kept
        of_groups = state.to(C_1TGS.dtype).reshape(C_1TGS.shape[2], -1, self._state_dim).transpose(1, 2)
        more_TNH = (C_1TGS[0].transpose(0, 1) @ of_groups).transpose(0, 1).reshape(-1, self._heads, self._head_dim)
        return (output + sum_1TN.exp()[..., None] * more_TNH).to(output.dtype)

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        pairs = zip(_each(rows, last), states.split(1), strict=True)
        return torch.cat([self.outputs(part, initial_states=state) for part, state in pairs], dim=1)


class SelectiveScan(StateRule):
    """Mamba1's scan, which takes no state: what it adds is added to last fragments, too.

    Args:
        function: of the rows transposed, `[1, D, T]`, and further keywords, like Transformers'.
        rows: x, steps `[1, T, D]`, B and C `[1, T, N]`, and gates `[1, T, D]` if there are any.
        A: `[D, N]`.
        of_steps: keywords delta_bias and delta_softplus.
    """

    def __init__(self, function: Callable[..., Any], rows: Tensors, A: torch.Tensor, of_steps: dict[str, Any]) -> None:
        super().__init__(rows, None)
        self._function, self._A, self._of_steps = function, A, of_steps

    def outputs(self, rows: Tensors, **more: Any) -> Any:
        """See `StateRule`."""
        x, dt, B, C, *z = (one.transpose(1, 2) for one in rows)
        mixed = self._function(x, dt, self._A, B, C, z=z[0] if z else None, **self._of_steps, **more)
        return (mixed[0].transpose(1, 2), mixed[1]) if more else mixed.transpose(1, 2)

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """See `StateRule`."""
        parts = list(_each(rows, held.followed))
        sums = [self._step_sums(part) for part in parts]
        made = [self.outputs(part, return_last_state=True) for part in parts]
        states = torch.cat([state for _, state in made]).to(self.dtype)
        factors = (self._A.to(self.dtype) * torch.cat([sum_1TD[:, -1] for sum_1TD in sums])[..., None]).exp()
        kept: list[Tensors] = [(sums[number], *parts[number][3:]) for number in held.on_host.middle.tolist()]
        outputs = torch.cat([out for out, _ in made], dim=1)
        return Begun(held, outputs, torch.cat([states, factors], dim=2), kept)

    def _step_sums(self, rows: Tensors) -> torch.Tensor:
        """Returns sums of steps from the beginning of a fragment to each token, `[1, T, D]`."""
        bias = self._of_steps["delta_bias"]
        step_1TD = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        return (functional.softplus(step_1TD) if self._of_steps["delta_softplus"] else step_1TD).cumsum(1)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        x, dt, B, *_ = self.rows
        channels, state_dim = self._A.shape
        return self._no_summaries((channels, 2 * state_dim), x, dt, self._A, B, self._of_steps["delta_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add, times = summary.chunk(2, dim=-1)
        return add if state is None else torch.addcmul(add, times, state)

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`."""
        more, A_DS = [], self._A.to(self.dtype)
        sum_1TD, C_1TS, *gate = kept
        for sum_TD, C_TS in zip(
            sum_1TD[0].split(DECAY_TOKENS), C_1TS[0].to(self.dtype).split(DECAY_TOKENS), strict=True
        ):
            more.append(torch.einsum("tds,ds,ts->td", (A_DS * sum_TD[..., None]).exp(), state, C_TS))
        gate_1TD = functional.silu(gate[0].to(self.dtype)) if gate else 1
        return (output + torch.cat(more) * gate_1TD).to(output.dtype)

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        outputs = []
        for part, state in zip(_each(rows, last), states, strict=True):
            sums, output = self._step_sums(part), self.outputs(part)
            with torch.autocast(state.device.type, enabled=False):
                outputs.append(self.added(output, (sums, *part[3:]), state))
        return torch.cat(outputs, dim=1)
