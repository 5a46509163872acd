"""State rules: how a layer's function takes a state through rows, and through fragments that begin without a state.

    gated delta rules, KDA    S_out = M S_in + B, M is [K, K] for each head
    Mamba2                    S_out = m S_in + B, m is one number for each head
    Mamba1                    S_out = m S_in + B, m is one number for each channel and state

Outputs are also affine in S_in. So followed fragments run from a zero state, which gives B, and the contribution of
S_in to their outputs is added when it arrives. For delta rules it is r S_in: a second run with values 0 from the state
I has outputs r and the final state M. This needs only the function's own gradients. Last fragments of documents send
no summary, so they wait for S_in and run from it.

In shapes: T rows, H heads, K and V dimensions of keys and values, P of Mamba2's heads, S of its states, G groups of
heads that share B and C, C channels of Mamba1.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from distca_hf.planning.folds import MOST_HEADS
from distca_hf.runtime.device_fragments import DeviceFragments, DeviceGroup


# Returns keywords that make a function keep the parts of a group apart.
Packed = Callable[[DeviceGroup], dict[str, Any]]
Tensors = Sequence[torch.Tensor]
# Most last fragments that get a call each, for which rows need not be gathered.
FEW_FRAGMENTS = 4
# Step of tokens that add a state's entries to Mamba1's scan. It is small, so that entries hardly decay, and a power of
# two, so that division by it is exact.
ENTRY_STEP = 2.0**-20


class Begun(NamedTuple):
    """Followed fragments that ran from a zero state."""

    outputs: torch.Tensor  # `[1, T, ...]`
    summaries: torch.Tensor  # `[fragments, H, ...]`
    kept: list[Tensors]  # for each middle fragment, what `StateRule.added` needs in addition to the state


class StateRule(ABC):
    """A call of a function that takes a state through rows `[1, T, ...]`."""

    # `packed` returns the keywords of packed rows; None if the function does not support them.
    def __init__(self, rows: Tensors, packed: Packed | None) -> None:
        self.rows, self.packed = rows, packed
        self.dtype = torch.promote_types(rows[0].dtype, torch.float32)  # dtype of summaries and states

    @abstractmethod
    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        """Returns outputs of documents, `[N, T, ...]`."""

    @abstractmethod
    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """Runs followed fragments from a zero state; this completes first fragments of documents."""

    @abstractmethod
    def no_summaries(self) -> torch.Tensor:
        """Returns empty summaries, which need gradients if any tensor of this call does. They are joined with the
        others: whether backward exchanges summaries must not depend on the fragments of a rank."""

    @abstractmethod
    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Returns states after fragments, see `runtime.carried_states.After`."""

    @abstractmethod
    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """Adds the contribution of a fragment's state `[H, ...]` to its output, and returns the sum."""

    @abstractmethod
    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """Returns outputs of last fragments, `[1, T, ...]`, from their states `[fragments, H, ...]`."""

    def continued(self, begun: Begun, states: torch.Tensor, held: DeviceFragments) -> torch.Tensor:
        """Returns outputs of followed fragments, `[1, T, ...]`, from the states of middle ones."""
        outputs = list(begun.outputs.split(held.followed.tokens, dim=1))
        for number, kept, state in zip(held.on_host.middle_numbers, begun.kept, states, strict=True):
            with torch.autocast(state.device.type, enabled=False):
                outputs[number] = self.added(outputs[number], kept, state)
        return torch.cat(outputs, dim=1)

    def _empty(self, shape: tuple[int, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
        """Returns `[0, *shape]`, which needs gradients if any of these tensors does."""
        return torch.cat([x.reshape(-1)[:0].to(self.dtype) for x in tensors if x is not None]).view(0, *shape)


def _each(rows: Tensors, group: DeviceGroup) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the tensors of each part of a group."""
    return zip(*(x.split(group.tokens, dim=1) for x in rows), strict=True)


class DeltaRule(StateRule):
    """A gated delta rule, or Kimi's.

    Args:
        function: of Transformers' signature.
        rows: queries and keys `[1, T, key heads, K]`, values `[1, T, H, V]`, decays and betas.
        normalizes: whether the function normalizes queries and keys.
    """

    def __init__(self, function: Callable[..., Any], rows: Tensors, packed: Packed | None, normalizes: bool) -> None:
        super().__init__(rows, packed)
        self._function, self._normalizes = function, normalizes
        self._heads, self._value_dim, self._key_dim = *rows[2].shape[2:], rows[1].shape[3]

    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        return self._run(rows, **packed)[0]

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """See `StateRule`. M of a first fragment is not needed."""
        outputs, add = self._run_group(rows, held.followed, None, output_final_state=True)
        times, kept = add.new_zeros(*add.shape[:3], self._key_dim), list[Tensors]()
        if middle := held.on_host.middle_numbers:
            parts = list(_each(rows, held.followed))
            of_middle = zip(*(parts[number] for number in middle), strict=True)
            q, k, v, *of_decays = (torch.cat(of_x, dim=1) for of_x in of_middle)
            zeros = v.new_zeros(*v.shape[:3], self._key_dim)
            eye = torch.eye(self._key_dim, dtype=self.dtype, device=v.device).expand(len(middle), self._heads, -1, -1)
            reads, found = self._run_group((q, k, zeros, *of_decays), held.middle, eye, output_final_state=True)
            times = times.index_copy(0, held.middle_numbers, found)
            kept = [(read,) for read in reads.split(held.middle.tokens, dim=1)]
        return Begun(outputs, torch.cat([add, times], dim=3).to(self.dtype), kept)

    def no_summaries(self) -> torch.Tensor:
        return self._empty((self._heads, self._key_dim, self._value_dim + self._key_dim), *self.rows)

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        add, times = summary.split((self._value_dim, self._key_dim), dim=-1)
        return add if state is None else add + times @ state

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`. Outputs have this dtype, so states are rounded to it here."""
        out_HTV, read_HTK = output[0].transpose(0, 1), kept[0][0].transpose(0, 1)
        return torch.baddbmm(out_HTV, read_HTK, state.to(output.dtype)).transpose(0, 1)[None]

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        return self._run_group(rows, last, states, output_final_state=False)[0]

    def _run_group(
        self, rows: Tensors, group: DeviceGroup, states: torch.Tensor | None, output_final_state: bool
    ) -> tuple[torch.Tensor, Any]:
        """Returns outputs of a group, and final states of its parts; None if not requested."""
        more: dict[str, Any] = {"output_final_state": output_final_state}
        if len(group.tokens) == 1:
            return self._run(rows, initial_state=states, **more)
        if self.packed is not None:
            return self._run(rows, initial_state=states, **more, **self.packed(group))
        before = [None] * len(group.tokens) if states is None else states.split(1)
        pairs = zip(_each(rows, group), before, strict=True)
        made = [self._run(part, initial_state=state, **more) for part, state in pairs]
        outputs = torch.cat([out for out, _ in made], dim=1)
        return outputs, torch.cat([state for _, state in made]) if output_final_state else None

    def _run(self, rows: Tensors, **more: Any) -> tuple[torch.Tensor, Any]:
        q, k, v, g, beta = rows
        more |= {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": self._normalizes}
        outputs, states = self._function(q, k, v, **more)
        return outputs, states


class Scan(StateRule):
    """Mamba2's scan. Its kernels take a state for each row of a batch, and have no gradients of states after packed
    rows, so each followed fragment is one call, and many last ones run in batches."""

    def __init__(
        self,
        function: Callable[..., Any],  # takes the rows and further keywords, like Transformers'
        rows: Tensors,  # x `[1, T, H, P]`, steps `[1, T, H]`, B and C `[1, T, G, S]`
        packed: Packed | None,
        A: torch.Tensor,  # `[H]`, as D
        D: torch.Tensor | None,
        step_options: dict[str, Any],  # keywords dt_bias, dt_softplus and dt_limit
    ) -> None:
        super().__init__(rows, packed)
        self._function, self._A, self._D, self._step_options = function, A, D, step_options
        self._heads, self._head_dim, self._state_dim = *rows[0].shape[2:], rows[2].shape[3]

    def outputs(self, rows: Tensors, **more: Any) -> Any:
        x, dt, B, C = rows
        return self._function(x, dt, self._A, B, C, D=self._D, **self._step_options, **more)

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        bias, (least, most) = self._step_options["dt_bias"], self._step_options["dt_limit"]
        step_1TH = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        step_1TH = functional.softplus(step_1TH) if self._step_options["dt_softplus"] else step_1TH
        decay_1TH = self._A.to(self.dtype) * step_1TH.clamp(least, most)
        sums = [part_1TH.cumsum(1) for part_1TH in decay_1TH.split(held.followed.tokens, dim=1)]
        made = [self.outputs(part, return_final_states=True) for part in _each(rows, held.followed)]
        states = torch.cat([state for _, state in made]).to(self.dtype).flatten(2)
        factors = torch.cat([sum_1TH[:, -1] for sum_1TH in sums]).exp()
        C = rows[3].split(held.followed.tokens, dim=1)
        kept: list[Tensors] = [(sums[number], C[number]) for number in held.on_host.middle_numbers]
        outputs = torch.cat([out for out, _ in made], dim=1)
        return Begun(outputs, torch.cat([states, factors[..., None]], dim=2), kept)

    def no_summaries(self) -> torch.Tensor:
        shape = self._heads, self._head_dim * self._state_dim + 1
        return self._empty(shape, *self.rows, self._A, self._D, self._step_options["dt_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        add = summary[..., :-1].unflatten(-1, (self._head_dim, self._state_dim))
        return add if state is None else torch.addcmul(add, summary[..., -1:, None], state)

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`. Heads of a group have one C: [G, T, S] @ [G, S, heads of a group * P]."""
        sum_1TH, C_1TGS = kept
        of_groups = state.to(C_1TGS.dtype).reshape(C_1TGS.shape[2], -1, self._state_dim).transpose(1, 2)
        more_THP = (C_1TGS[0].transpose(0, 1) @ of_groups).transpose(0, 1).reshape(-1, self._heads, self._head_dim)
        return (output + sum_1TH.exp()[..., None] * more_THP).to(output.dtype)

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        return _in_batches(lambda part, before: self.outputs(part, initial_states=before), rows, states, last)


class SelectiveScan(StateRule):
    """Mamba1's scan. Its kernels take no state and have no gradients of the last one. So S tokens before the rows of a
    fragment add the entries of its state, and S tokens after them read the state out."""

    def __init__(
        self,
        function: Callable[..., Any],  # takes the rows transposed, `[N, C, T]`, and keywords, like Transformers'
        rows: Tensors,  # x, steps `[1, T, C]`, B and C `[1, T, S]`, and gates `[1, T, C]` if there are any
        A: torch.Tensor,  # `[C, S]`; D: `[C]`
        D: torch.Tensor | None,
        step_options: dict[str, Any],  # keywords delta_bias and delta_softplus
    ) -> None:
        super().__init__(rows, None)
        self._function, self._A, self._D, self._step_options = function, A, D, step_options
        # Groups of channels are its heads.
        self._heads = math.gcd(len(A), MOST_HEADS)

    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        x, dt, B, C, *z = (one.transpose(1, 2) for one in rows)
        output: torch.Tensor = self._function(
            x, dt, self._A, B, C, D=self._D, z=z[0] if z else None, **self._step_options, **packed
        )
        return output.transpose(1, 2)

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        parts = list(_each(rows, held.followed))
        made = [self._run(part, reads_state=True) for part in parts]
        add = torch.cat([state for _, state in made])
        steps = torch.cat([self._steps(part).sum(1) for part in parts])
        summaries = torch.cat([add, (self._A.to(self.dtype) * steps[..., None]).exp()], dim=2)
        kept: list[Tensors] = [parts[number][1:] for number in held.on_host.middle_numbers]
        outputs = torch.cat([out for out, _ in made], dim=1).to(rows[0].dtype)
        return Begun(outputs, summaries.unflatten(1, (self._heads, -1)), kept)

    def _steps(self, rows: Tensors) -> torch.Tensor:
        """Returns steps of rows, `[N, T, C]`."""
        bias = self._step_options["delta_bias"]
        step_NTC = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        return functional.softplus(step_NTC) if self._step_options["delta_softplus"] else step_NTC

    def _run(
        self, rows: Tensors, states_NCS: torch.Tensor | None = None, reads_state: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the function in `self.dtype`, so that states are not rounded. Returns outputs `[N, T, C]`, and states
        after the rows, `[N, C, S]`, empty unless they are read; of `self.dtype`."""
        with torch.autocast(rows[0].device.type, enabled=False):
            A, step_NTC = self._A.to(self.dtype), self._steps(rows)
            state_dim = A.shape[1]
            x_NTC, B_NTS, C_NTS, *gate = (rows[at].to(self.dtype) for at in (0, *range(2, len(rows))))
            before = 0 if states_NCS is None else state_dim
            padding = 0, 0, before, state_dim if reads_state else 0  # of channels, then of tokens
            x, step, B, C = (functional.pad(one, padding) for one in (x_NTC, step_NTC, B_NTS, C_NTS))
            one_each = torch.eye(state_dim, dtype=self.dtype, device=x.device)
            if states_NCS is not None:
                # Entry s decays while the tokens of entries s + 1, ..., S - 1 follow.
                later_S = torch.arange(state_dim - 1, -1, -1, device=x.device)
                entries_NCS = states_NCS * (A * (-ENTRY_STEP * later_S)).exp() / ENTRY_STEP
                x = torch.cat([entries_NCS.transpose(1, 2), x[:, before:]], dim=1)
                step = torch.cat([torch.full_like(step[:, :before], ENTRY_STEP), step[:, before:]], dim=1)
                B = torch.cat([one_each.expand(len(B), -1, -1), B[:, before:]], dim=1)
            if reads_state:  # steps of 0 keep it
                C = torch.cat([C[:, :-state_dim], one_each.expand(len(C), -1, -1)], dim=1)
            x_NCT, step_NCT, B_NST, C_NST = (one.transpose(1, 2) for one in (x, step, B, C))
            found_NTC = self._function(x_NCT, step_NCT, A, B_NST, C_NST, D=self._D).transpose(1, 2)
            output_NTC, ended_NSC = found_NTC[:, before:].tensor_split((x_NTC.shape[1],), dim=1)
            if gate:
                output_NTC = output_NTC * functional.silu(gate[0])
            return output_NTC, ended_NSC.transpose(1, 2)

    def no_summaries(self) -> torch.Tensor:
        channels, state_dim = self._A.shape
        shape = self._heads, channels // self._heads, 2 * state_dim
        return self._empty(shape, *self.rows, self._A, self._D, self._step_options["delta_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        add, times = summary.chunk(2, dim=-1)
        return add if state is None else torch.addcmul(add, times, state)

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`. Rows whose x is 0 add nothing to the state."""
        more, _ = self._run((torch.zeros_like(output), *kept), state.flatten(0, 1)[None])
        return (output + more).to(output.dtype)

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        states_FCS, dtype = states.flatten(1, 2), rows[0].dtype
        return _in_batches(lambda part, before: self._run(part, before)[0].to(dtype), rows, states_FCS, last)


def _in_batches(
    function: Callable[[Tensors, torch.Tensor], torch.Tensor], rows: Tensors, states: torch.Tensor, last: DeviceGroup
) -> torch.Tensor:
    """Runs a function on last fragments and their states, a call for each if they are few. Returns outputs `[1, T,
    ...]`.

    Args:
        function: takes rows `[N, T, ...]` and states `[N, ...]`, returns outputs `[N, T, ...]`.
        states: `[fragments, ...]`.
    """
    if len(last.tokens) <= FEW_FRAGMENTS:
        pairs = zip(_each(rows, last), states.split(1), strict=True)
        return torch.cat([function(part, state) for part, state in pairs], dim=1)

    buckets = last.buckets
    batches = zip(*(buckets.gathered(x[0]) for x in rows), strict=True)
    before = (states.index_select(0, numbers) for numbers in buckets.numbers)
    outputs = [function(batch, of_batch) for batch, of_batch in zip(batches, before, strict=True)]
    return buckets.joined(outputs, rows[0].shape[1])[None]
