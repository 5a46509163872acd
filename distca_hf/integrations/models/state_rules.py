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
from torch.utils.checkpoint import checkpoint

from distca_hf.planning.folds import MOST_HEADS
from distca_hf.runtime.buckets import Bucket
from distca_hf.runtime.device_fragments import DeviceFragments, DeviceGroup


# Returns keywords that make a function keep the parts of a group apart.
Packed = Callable[[DeviceGroup], dict[str, Any]]
Tensors = Sequence[torch.Tensor]
# Most last fragments that get a call each, for which rows need not be gathered.
FEW_FRAGMENTS = 4
# Number of Mamba1's tokens whose decays, `[T, C, S]`, exist at once.
DECAY_TOKENS = 256


class Begun(NamedTuple):
    """Followed fragments that ran from a zero state.

    Attributes:
        outputs: `[1, T, ...]`.
        summaries: `[fragments, H, ...]`.
        kept: for each middle fragment, what `StateRule.added` needs in addition to the state.
    """

    outputs: torch.Tensor
    summaries: torch.Tensor
    kept: list[Tensors]


class StateRule(ABC):
    """A call of a function that takes a state through rows.

    Attributes:
        rows: its tensors `[1, T, ...]`.
        packed: None if the function does not support packed rows.
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
        """Runs followed fragments from a zero state; this completes first fragments of documents."""

    @abstractmethod
    def nothing(self) -> torch.Tensor:
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

    def _no_summaries(self, shape: tuple[int, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
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
        """See `StateRule`."""
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

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        return self._no_summaries((self._heads, self._key_dim, self._value_dim + self._key_dim), *self.rows)

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add, times = summary.split((self._value_dim, self._key_dim), dim=-1)
        return add if state is None else add + times @ state

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`. Outputs have this dtype, so states are rounded to it here."""
        out_HTV, read_HTK = output[0].transpose(0, 1), kept[0][0].transpose(0, 1)
        return torch.baddbmm(out_HTV, read_HTK, state.to(output.dtype)).transpose(0, 1)[None]

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
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
    rows, so each followed fragment is one call, and many last ones run in batches.

    Args:
        function: of the rows and further keywords, like Transformers'.
        rows: x `[1, T, H, P]`, steps `[1, T, H]`, B and C `[1, T, G, S]`.
        A, D: `[H]`.
        of_steps: keywords dt_bias, dt_softplus and dt_limit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Tensors,
        packed: Packed | None,
        A: torch.Tensor,
        D: torch.Tensor | None,
        of_steps: dict[str, Any],
    ) -> None:
        super().__init__(rows, packed)
        self._function, self._A, self._D, self._of_steps = function, A, D, of_steps
        self._heads, self._head_dim, self._state_dim = *rows[0].shape[2:], rows[2].shape[3]

    def outputs(self, rows: Tensors, **more: Any) -> Any:
        """See `StateRule`."""
        x, dt, B, C = rows
        return self._function(x, dt, self._A, B, C, D=self._D, **self._of_steps, **more)

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """See `StateRule`."""
        bias, (least, most) = self._of_steps["dt_bias"], self._of_steps["dt_limit"]
        step_1TH = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        step_1TH = functional.softplus(step_1TH) if self._of_steps["dt_softplus"] else step_1TH
        decay_1TH = self._A.to(self.dtype) * step_1TH.clamp(least, most)
        sums = [part_1TH.cumsum(1) for part_1TH in decay_1TH.split(held.followed.tokens, dim=1)]
        made = [self.outputs(part, return_final_states=True) for part in _each(rows, held.followed)]
        states = torch.cat([state for _, state in made]).to(self.dtype).flatten(2)
        factors = torch.cat([sum_1TH[:, -1] for sum_1TH in sums]).exp()
        C = rows[3].split(held.followed.tokens, dim=1)
        kept: list[Tensors] = [(sums[number], C[number]) for number in held.on_host.middle_numbers]
        outputs = torch.cat([out for out, _ in made], dim=1)
        return Begun(outputs, torch.cat([states, factors[..., None]], dim=2), kept)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        shape = self._heads, self._head_dim * self._state_dim + 1
        return self._no_summaries(shape, *self.rows, self._A, self._D, self._of_steps["dt_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add = summary[..., :-1].unflatten(-1, (self._head_dim, self._state_dim))
        return add if state is None else torch.addcmul(add, summary[..., -1:, None], state)

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`. Heads of a group have one C: [G, T, S] @ [G, S, heads of a group * P]."""
        sum_1TH, C_1TGS = kept
        of_groups = state.to(C_1TGS.dtype).reshape(C_1TGS.shape[2], -1, self._state_dim).transpose(1, 2)
        more_THP = (C_1TGS[0].transpose(0, 1) @ of_groups).transpose(0, 1).reshape(-1, self._heads, self._head_dim)
        return (output + sum_1TH.exp()[..., None] * more_THP).to(output.dtype)

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        if len(last.tokens) <= FEW_FRAGMENTS:
            pairs = zip(_each(rows, last), states.split(1), strict=True)
            return torch.cat([self.outputs(part, initial_states=state) for part, state in pairs], dim=1)

        def run(bucket: Bucket) -> Any:
            before = states.index_select(0, bucket.numbers)
            return self.outputs([bucket.gathered(x[0]) for x in rows], initial_states=before)

        return last.buckets.run(run, rows[0].shape[1])[None]


class SelectiveScan(StateRule):
    """Mamba1's scan. Its kernels take no state and have no gradients of the last one. So this class computes B, and
    adds the contribution of a state also to last fragments.

    Args:
        function: of the rows transposed, `[1, C, T]`, and further keywords, like Transformers'.
        rows: x, steps `[1, T, C]`, B and C `[1, T, S]`, and gates `[1, T, C]` if there are any.
        A: `[C, S]`; D: `[C]`.
        of_steps: keywords delta_bias and delta_softplus.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Tensors,
        A: torch.Tensor,
        D: torch.Tensor | None,
        of_steps: dict[str, Any],
    ) -> None:
        super().__init__(rows, None)
        self._function, self._A, self._D, self._of_steps = function, A, D, of_steps
        # Groups of channels are its heads.
        self._heads = math.gcd(len(A), MOST_HEADS)

    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        """See `StateRule`."""
        x, dt, B, C, *z = (one.transpose(1, 2) for one in rows)
        output: torch.Tensor = self._function(
            x, dt, self._A, B, C, D=self._D, z=z[0] if z else None, **self._of_steps, **packed
        )
        return output.transpose(1, 2)

    def begin(self, rows: Tensors, held: DeviceFragments) -> Begun:
        """See `StateRule`."""
        parts = list(_each(rows, held.followed))
        steps = [self._steps(part) for part in parts]
        sums = [step_1TC.cumsum(1) for step_1TC in steps]
        add, times = [], []
        for (x_1TC, _, B_1TS, *_), step_1TC, sum_1TC in zip(parts, steps, sums, strict=True):
            rest_TC = sum_1TC[0, -1] - sum_1TC[0]
            x_TC = step_1TC[0] * x_1TC[0].to(self.dtype)
            with torch.autocast(x_TC.device.type, enabled=False):
                found = _in_chunks(self._sum_of_inputs, rest_TC, x_TC, B_1TS[0].to(self.dtype))
            add.append(torch.stack(found).sum(0))
            times.append((self._A.to(self.dtype) * sum_1TC[0, -1, :, None]).exp())
        kept: list[Tensors] = [(sums[number], *parts[number][3:]) for number in held.on_host.middle_numbers]
        summaries = torch.cat([torch.stack(add), torch.stack(times)], dim=2)
        outputs = torch.cat([self.outputs(part) for part in parts], dim=1)
        return Begun(outputs, summaries.unflatten(1, (self._heads, -1)), kept)

    def _steps(self, rows: Tensors) -> torch.Tensor:
        """Returns steps of rows, `[1, T, C]`."""
        bias = self._of_steps["delta_bias"]
        step_1TC = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        return functional.softplus(step_1TC) if self._of_steps["delta_softplus"] else step_1TC

    def _sum_of_inputs(self, rest_TC: torch.Tensor, x_TC: torch.Tensor, B_TS: torch.Tensor) -> torch.Tensor:
        """Returns what these tokens add to the state after the fragment, `[C, S]`."""
        decay_TCS = (self._A.to(self.dtype) * rest_TC[..., None]).exp()
        return torch.einsum("tcs,tc,ts->cs", decay_TCS, x_TC, B_TS)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        channels, state_dim = self._A.shape
        shape = self._heads, channels // self._heads, 2 * state_dim
        return self._no_summaries(shape, *self.rows, self._A, self._D, self._of_steps["delta_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add, times = summary.chunk(2, dim=-1)
        return add if state is None else torch.addcmul(add, times, state)

    def added(self, output: torch.Tensor, kept: Tensors, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule`."""
        sum_1TC, C_1TS, *gate = kept
        state_CS = state.flatten(0, 1)

        def read(sum_TC: torch.Tensor, C_TS: torch.Tensor) -> torch.Tensor:
            decay_TCS = (self._A.to(self.dtype) * sum_TC[..., None]).exp()
            return torch.einsum("tcs,cs,ts->tc", decay_TCS, state_CS, C_TS)

        more_TC = torch.cat(_in_chunks(read, sum_1TC[0], C_1TS[0].to(self.dtype)))
        gate_1TC = functional.silu(gate[0].to(self.dtype)) if gate else 1
        return (output + more_TC * gate_1TC).to(output.dtype)

    def ended(self, rows: Tensors, states: torch.Tensor, last: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        outputs = []
        for part, state in zip(_each(rows, last), states, strict=True):
            sum_1TC, output = self._steps(part).cumsum(1), self.outputs(part)
            with torch.autocast(state.device.type, enabled=False):
                outputs.append(self.added(output, (sum_1TC, *part[3:]), state))
        return torch.cat(outputs, dim=1)


def _in_chunks(function: Callable[..., torch.Tensor], *of_rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns results for a few tokens each. Backward recomputes them, because their operands are `[T, C, S]`."""
    pieces = zip(*(x.split(DECAY_TOKENS) for x in of_rows), strict=True)
    return [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
