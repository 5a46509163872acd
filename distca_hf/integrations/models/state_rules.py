"""State rules: how a layer's function takes a state through rows, and through fragments that begin without theirs.

    gated delta rules, KDA    S_out = M S_in + B, M [K, K] a head
    Mamba2                    S_out = m S_in + B, m a number a head
    Mamba1                    S_out = m S_in + B, m a number a channel and state

Outputs are affine in S_in, too. So fragments run from a zero state first, and what S_in adds to them follows. For
delta rules one run gives all: with values [v | 0] and initial state [0 | I], outputs are [o | r], the final state is
[B | M], and outputs from S_in are o + r S_in. The kernel's own gradients are all that is needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from distca_hf.runtime.device_fragments import DeviceGroup


# Returns keywords by which a function keeps the parts of a group apart.
Packed = Callable[[DeviceGroup], dict[str, Any]]
Tensors = Sequence[torch.Tensor]
# Tokens whose decays, a number a channel and state, are made at once.
DECAY_TOKENS = 256


class Begun(NamedTuple):
    """Fragments that ran from a zero state.

    Attributes:
        outputs: `[1, T, ...]`.
        summaries: `[followed, H, ...]`.
        kept: what `StateRule.continued` needs besides.
    """

    outputs: torch.Tensor
    summaries: torch.Tensor
    kept: Any


class StateRule(ABC):
    """A call of a function that takes a state through rows.

    Attributes:
        rows: its tensors `[1, T, ...]`.
        packed: None if the function knows nothing of packed rows.
        dtype: of summaries, at least fp32.
    """

    def __init__(self, rows: Tensors, packed: Packed | None) -> None:
        self.rows, self.packed = rows, packed
        self.dtype = torch.promote_types(rows[0].dtype, torch.float32)

    @abstractmethod
    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        """Returns outputs of rows of documents, `[N, T, ...]`."""

    @abstractmethod
    def begin(self, rows: Tensors, group: DeviceGroup, is_later: bool) -> Begun:
        """Runs fragments from a zero state; first ones are complete with that."""

    @abstractmethod
    def nothing(self) -> torch.Tensor:
        """Returns summaries of no fragment. They need gradients if any of this call's tensors does: whether backward
        exchanges summaries must not depend on the fragments of a rank. If only a decay is trained, for example,
        summaries need gradients, and values do not."""

    @abstractmethod
    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Returns states after fragments, see `runtime.carried_states.After`."""

    @abstractmethod
    def continued(self, begun: Begun, states: torch.Tensor, rows: Tensors, group: DeviceGroup) -> torch.Tensor:
        """Returns outputs of later fragments from the states before them, `[fragments, H, ...]`."""

    def _no_summaries(self, shape: tuple[int, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([x.reshape(-1)[:0].to(self.dtype) for x in tensors if x is not None]).view(0, *shape)


def _parts(x: torch.Tensor, group: DeviceGroup) -> tuple[torch.Tensor, ...]:
    """Returns the rows of each part of a group, `[1, T, ...]`."""
    return x.split(group.on_host.tokens.tolist(), dim=1)


def _each(rows: Tensors, group: DeviceGroup) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the tensors of each part of a group."""
    return zip(*(_parts(x, group) for x in rows), strict=True)


def _followed(of_parts: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
    """Returns those of followed parts of `[parts, ...]`."""
    return of_parts if len(group.on_host.followed) == len(of_parts) else of_parts.index_select(0, group.followed)


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

    def _run(self, rows: Tensors, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, g, beta = rows
        mixed: tuple[torch.Tensor, torch.Tensor | None] = self._function(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=self._normalizes, **more
        )
        return mixed

    def outputs(self, rows: Tensors, **packed: Any) -> torch.Tensor:
        """See `StateRule`."""
        return self._run(rows, **packed)[0]

    def begin(self, rows: Tensors, group: DeviceGroup, is_later: bool) -> Begun:
        """See `StateRule`."""
        q, k, v, g, beta = rows
        parts = len(group.on_host.tokens)
        more: dict[str, Any] = {"output_final_state": len(group.on_host.followed) > 0}
        if is_later:
            eye = torch.eye(self._key_dim, dtype=self.dtype, device=v.device).expand(1, self._heads, -1, -1)
            more["initial_state"] = functional.pad(eye, (self._value_dim, 0))
            v = functional.pad(v, (0, self._key_dim))
        rows = (q, k, v, g, beta)
        if parts == 1 or self.packed is None:
            of_parts = [self._run(part, **more) for part in _each(rows, group)]
        else:
            if is_later:
                more["initial_state"] = more["initial_state"].expand(parts, -1, -1, -1)
            of_parts = [self._run(rows, **more, **self.packed(group))]
        outputs = torch.cat([out for out, _ in of_parts], dim=1)
        if not more["output_final_state"]:
            return Begun(outputs, self.nothing(), None)
        summaries = _followed(torch.cat([state for _, state in of_parts if state is not None]).to(self.dtype), group)
        # M of a first fragment is not needed.
        return Begun(outputs, summaries if is_later else functional.pad(summaries, (0, self._key_dim)), None)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        return self._no_summaries((self._heads, self._key_dim, self._value_dim + self._key_dim), *self.rows[1:])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add, times = summary.split((self._value_dim, self._key_dim), dim=-1)
        return add if state is None else add + times @ state

    def continued(self, begun: Begun, states: torch.Tensor, rows: Tensors, group: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        out, read = begun.outputs.split((self._value_dim, self._key_dim), dim=-1)
        with torch.autocast(out.device.type, enabled=False):
            more = [
                torch.baddbmm(out_1THV[0].transpose(0, 1), read_1THK[0].transpose(0, 1), state_HKV).transpose(0, 1)
                for (out_1THV, read_1THK), state_HKV in zip(
                    _each((out, read), group), states.to(read.dtype), strict=True
                )
            ]
        return torch.cat(more)[None]


class Scan(StateRule):
    """Mamba2's scan.

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

    def begin(self, rows: Tensors, group: DeviceGroup, is_later: bool) -> Begun:
        """See `StateRule`. Kernels know no gradients of the states of packed rows, so each part is one call."""
        bias, (least, most) = self._of_steps["dt_bias"], self._of_steps["dt_limit"]
        step_1TN = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        step_1TN = functional.softplus(step_1TN) if self._of_steps["dt_softplus"] else step_1TN
        decay_1TN = self._A.to(self.dtype) * step_1TN.clamp(least, most)
        sums = [part.cumsum(1) for part in _parts(decay_1TN, group)]
        ran = [self.outputs(part, return_final_states=True) for part in _each(rows, group)]
        states = torch.cat([state for _, state in ran]).to(self.dtype).flatten(2)
        factors = torch.stack([of_part[0, -1] for of_part in sums]).exp()
        summaries = _followed(torch.cat([states, factors[..., None]], dim=2), group)
        return Begun(torch.cat([out for out, _ in ran], dim=1), summaries, sums)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        x, dt, B, _ = self.rows
        return self._no_summaries(
            (self._heads, self._head_dim * self._state_dim + 1), x, dt, self._A, B, self._of_steps["dt_bias"]
        )

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add = summary[..., :-1].unflatten(-1, (self._head_dim, self._state_dim))
        return add if state is None else torch.addcmul(add, summary[..., -1:, None], state)

    def continued(self, begun: Begun, states: torch.Tensor, rows: Tensors, group: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        more = []
        with torch.autocast(states.device.type, enabled=False):
            for sum_1TN, C_1TGS, state_NHS in zip(begun.kept, _parts(rows[3], group), states, strict=True):
                # Heads of a group have one C: [G, T, S] x [G, S, heads of a group x H].
                of_groups = state_NHS.to(C_1TGS.dtype).reshape(C_1TGS.shape[2], -1, self._state_dim).transpose(1, 2)
                more_TNH = (C_1TGS[0].transpose(0, 1) @ of_groups).transpose(0, 1)
                more.append(sum_1TN[0].exp()[..., None] * more_TNH.reshape(-1, self._heads, self._head_dim))
            return (begun.outputs + torch.cat(more)).to(begun.outputs.dtype)


class SelectiveScan(StateRule):
    """Mamba1's scan.

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

    def begin(self, rows: Tensors, group: DeviceGroup, is_later: bool) -> Begun:
        """See `StateRule`."""
        bias = self._of_steps["delta_bias"]
        step_1TD = rows[1].to(self.dtype) + (0 if bias is None else bias.to(self.dtype))
        step_1TD = functional.softplus(step_1TD) if self._of_steps["delta_softplus"] else step_1TD
        sums = [part.cumsum(1) for part in _parts(step_1TD, group)]
        ran = [self.outputs(part, return_last_state=True) for part in _each(rows, group)]
        states = torch.cat([state for _, state in ran]).to(self.dtype)
        factors = (self._A.to(self.dtype) * torch.stack([of_part[0, -1] for of_part in sums])[..., None]).exp()
        summaries = _followed(torch.cat([states, factors], dim=2), group)
        return Begun(torch.cat([out for out, _ in ran], dim=1), summaries, sums)

    def nothing(self) -> torch.Tensor:
        """See `StateRule`."""
        x, dt, B, *_ = self.rows
        channels, state_dim = self._A.shape
        return self._no_summaries((channels, 2 * state_dim), x, dt, self._A, B, self._of_steps["delta_bias"])

    def after(self, summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """See `StateRule`."""
        add, times = summary.chunk(2, dim=-1)
        return add if state is None else torch.addcmul(add, times, state)

    def continued(self, begun: Begun, states: torch.Tensor, rows: Tensors, group: DeviceGroup) -> torch.Tensor:
        """See `StateRule`."""
        more, A_DS = [], self._A.to(self.dtype)
        with torch.autocast(states.device.type, enabled=False):
            for sum_1TD, C_1TS, state_DS in zip(begun.kept, _parts(rows[3], group), states, strict=True):
                for sum_TD, C_TS in zip(
                    sum_1TD[0].split(DECAY_TOKENS), C_1TS[0].to(self.dtype).split(DECAY_TOKENS), strict=True
                ):
                    decay_TDS = (A_DS * sum_TD[..., None]).exp()
                    more.append(torch.einsum("tds,ds,ts->td", decay_TDS, state_DS, C_TS))
            gate = functional.silu(rows[4].to(self.dtype)) if len(rows) == 5 else 1
            return (begun.outputs + torch.cat(more) * gate).to(begun.outputs.dtype)
