"""Carried mixers: mixers of Transformers whose documents may be cut, because their states travel.

A mixer's own forward function runs once on all rows of a rank. Some of the functions that it calls are replaced:

    causal_conv1d_fn                           the first tokens of each segment see those before it (`convolved`)
    torch_chunk_gated_delta_rule,
    chunk_kimi_delta_attention                 S_out = M S_in + B, M [K, K] a head
    mamba2_chunk_scan                          S_out = m S_in + B, m a number a head
    mamba_selective_scan                       S_out = m S_in + B, m a number a channel and state
    mamba2_split_conv1d_scan_combined          fuses the first one with a scan: runs if no document is cut

Outputs are affine in S_in, too. So fragments run from a zero state first, and what S_in adds to them follows. For
delta rules one run gives all: with values [v | 0] and initial state [0 | I], outputs are [o | r], the final state is
[B | M], and outputs from S_in are o + r S_in. The kernel's own gradients are all that is needed.

Whole documents run in one call if the function knows packed rows, otherwise in batches (`runtime.buckets`).
"""

import dis
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from distca_hf.runtime.buckets import Gather
from distca_hf.runtime.carried_states import CarriedRows, tied


# Returns the rows of a mixer's present call.
Rows = Callable[[], CarriedRows]
# Returns keywords by which a function keeps whole documents apart.
Packed = Callable[[CarriedRows], dict[str, Any]]
# Makes a function to call instead of one that a mixer calls, given that one, the rows and the mixer's name.
Replacing = Callable[[Callable[..., Any], Rows, str], Callable[..., Any]]
# Functions that may mix tokens, besides those of `REPLACED`: they run only for a token that goes on from a cache.
OF_CACHES = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "recurrent_kimi_delta_attention",
        "mamba2_selective_state_update",
        "mamba_selective_state_update",
    }
)
# Functions, and methods of mixers, that mix nothing between tokens.
OF_TOKENS = frozenset({"apply_mask_to_padding_states", "fix_query_key_value_ordering"})
# Tokens whose decays, a number a channel and state, are made at once.
DECAY_TOKENS = 256


def carries(mixer: nn.Module) -> bool:
    """Returns whether the states of a mixer can travel. It must be a class of Transformers, whose forward function
    calls the convolution and its rule as functions of its module, by names that are known here, and nothing else that
    may mix tokens. No other forward function may be set on it (`kernelize` does)."""
    own = vars(mixer).get("forward")
    if getattr(own, "before", own) is not None or not type(mixer).__module__.startswith("transformers.models."):
        return False  # ours knows the one before it
    forward = _forward_of(mixer)
    loaded: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "LOAD_ATTR": set(), "LOAD_METHOD": set()}
    for instruction in dis.get_instructions(forward):
        loaded.get(instruction.opname, set()).add(str(instruction.argval))
    of_module = {name: forward.__globals__.get(name) for name in loaded["LOAD_GLOBAL"]}
    functions = {name for name, value in of_module.items() if callable(value) and not inspect.isclass(value)}
    attributes = {*loaded["LOAD_ATTR"], *loaded["LOAD_METHOD"]} - {*dir(nn.Module)}
    methods = {name for name in attributes if inspect.isroutine(getattr(type(mixer), name, None))}
    inside = [type(part) for part in mixer.modules() if isinstance(part, nn.Conv1d | nn.Conv2d | nn.RNNBase)]
    return (
        CONVOLUTION in functions
        and functions <= {*REPLACED, *OF_CACHES, *OF_TOKENS}
        and methods <= OF_TOKENS
        and attributes.isdisjoint(REPLACED)
        and inside == [nn.Conv1d]
    )


def halo_tokens_of(mixer: nn.Module) -> int:
    """Returns how many tokens before a token its convolution sees."""
    return max(int(part.kernel_size[0]) for part in mixer.modules() if isinstance(part, nn.Conv1d)) - 1


def carried_forward(mixer: nn.Module, rows: Rows, name: str) -> Callable[..., Any]:
    """Returns the forward function of a mixer with functions that it calls replaced.

    Args:
        rows: returns those of the mixer's present call.
        name: of the mixer, for messages.
    """
    forward = _forward_of(mixer)
    names = forward.__globals__
    replaced = {key: replace(names[key], rows, name) for key, replace in REPLACED.items() if key in names}
    bound = FunctionType(
        forward.__code__, {**names, **replaced}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound.__get__(mixer)


def _forward_of(mixer: nn.Module) -> Any:
    return inspect.unwrap(type(mixer).forward)


def _convolution(original: Callable[..., torch.Tensor], rows: Rows, name: str) -> Callable[..., torch.Tensor]:
    def convolve(hidden_states: torch.Tensor, weight: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        known = {key: value for key, value in keywords.items() if key in ("bias", "activation")}
        return rows().convolved(hidden_states, lambda x: original(x, weight, *args, **known), name)

    return convolve


def _delta_rule(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., tuple[torch.Tensor, None]]:
    packed = _packed_by(original, "cu_seqlens")

    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        carried = rows()
        (heads, value_dim), key_dim = value.shape[2:], key.shape[3]
        dtype = _exact_dtype(query)

        def run(given: Sequence[torch.Tensor], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            *qkv, g, beta = given
            return original(*qkv, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **more)

        parts = _Parts(carried, (query, key, value, g, beta))
        eye = torch.eye(key_dim, dtype=dtype, device=value.device).expand(1, heads, key_dim, key_dim)
        begin = functional.pad(eye, (value_dim, 0))
        outputs, reads, summaries = [], [], []
        for of_run, fragment in parts.fragments:
            is_later = of_run.state is not None
            if is_later:
                fragment[2] = functional.pad(fragment[2], (0, key_dim))
            out, state = run(
                fragment, initial_state=begin if is_later else None, output_final_state=of_run.is_followed
            )
            if is_later:
                out, read = out.split((value_dim, key_dim), dim=-1)
                reads.append(read)
            outputs.append(out)
            if of_run.is_followed:  # of a first fragment M is not needed
                summary = state[0].to(dtype)
                summaries.append(summary if is_later else functional.pad(summary, (0, key_dim)))

        if not carried.is_cut:
            return parts.joined((), parts.run_whole(lambda given, **more: run(given, **more)[0], packed)), None
        nothing = _nothing(dtype, (0, heads, key_dim, value_dim + key_dim), key, value, g, beta)
        sent = carried.send_summaries(summaries, nothing, name)
        whole = parts.run_whole(lambda given, **more: run(given, **more)[0], packed)

        def after(summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
            add, times = summary.split((value_dim, key_dim), dim=-1)
            return add if state is None else torch.baddbmm(add, times, state)

        states, arrived = sent.states(after)
        later = [number for number, (of_run, _) in enumerate(parts.fragments) if of_run.state is not None]
        for number, read, state in zip(later, reads, states, strict=True):
            with torch.autocast(read.device.type, enabled=False):
                out_HTV, read_HTK = (x[0].transpose(0, 1) for x in (outputs[number], read))
                out_HTV = torch.baddbmm(out_HTV, read_HTK, state.to(read.dtype))
            outputs[number] = out_HTV.transpose(0, 1)[None]
        return tied(parts.joined(outputs, whole), arrived), None

    return apply


def _scan(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., torch.Tensor]:
    packed = _packed_by(original, "seq_idx")

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: None = None,
        return_final_states: bool = False,
        seq_idx: torch.Tensor | None = None,
        **keywords: Any,
    ) -> torch.Tensor:
        carried = rows()
        dtype = _exact_dtype(hidden_states)
        heads, head_dim, state_dim = *hidden_states.shape[2:], B.shape[3]

        def run(given: Sequence[torch.Tensor], **more: Any) -> Any:
            x, dt, B, C = given
            of_steps = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return original(x, dt, A, B, C, chunk_size=chunk_size, **of_steps, **keywords, **more)

        parts = _Parts(carried, (hidden_states, dt, B, C))
        outputs, decays, summaries = [], [], []
        for of_run, fragment in parts.fragments:
            out = run(fragment, return_final_states=of_run.is_followed)
            step_TN = fragment[1][0].to(dtype) + (0 if dt_bias is None else dt_bias.to(dtype))
            step_TN = (functional.softplus(step_TN) if dt_softplus else step_TN).clamp(*dt_limit)
            decay_TN = (A.to(dtype) * step_TN).cumsum(0)
            decays.append(decay_TN)
            if of_run.is_followed:
                out, state = out
                summaries.append(torch.cat([state[0].to(dtype).flatten(1), decay_TN[-1].exp()[:, None]], dim=1))
            outputs.append(out)

        if not carried.is_cut:
            return parts.joined((), parts.run_whole(run, packed))
        nothing = _nothing(dtype, (0, heads, head_dim * state_dim + 1), hidden_states, dt, A, B, dt_bias)
        sent = carried.send_summaries(summaries, nothing, name)
        whole = parts.run_whole(run, packed)

        def after(summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
            add = summary[:, :-1].unflatten(1, (head_dim, state_dim))
            return add if state is None else torch.addcmul(add, summary[:, -1:, None], state)

        states, arrived = sent.states(after)
        for number, (of_run, (_, _, _, C_1TGS)) in enumerate(parts.fragments):
            if of_run.state is None:
                continue
            out, groups = outputs[number], C_1TGS.shape[2]
            with torch.autocast(out.device.type, enabled=False):
                # Heads of a group have one C: [G, T, S] x [G, S, heads of a group x H].
                of_groups = states[of_run.state].to(C_1TGS.dtype).reshape(groups, -1, state_dim).transpose(1, 2)
                more_TNH = (C_1TGS[0].transpose(0, 1) @ of_groups).transpose(0, 1).reshape(-1, heads, head_dim)
                more_TNH = decays[number].exp()[..., None] * more_TNH
                outputs[number] = (out + more_TNH).to(out.dtype)
        return tied(parts.joined(outputs, whole), arrived)

    return scan


def _fused_scan(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., torch.Tensor | None]:
    packed = _packed_by(original, "seq_idx")

    def scan(*args: Any, seq_idx: object = None, **keywords: Any) -> torch.Tensor | None:
        carried = rows()
        if carried.is_cut or packed is None:
            return None  # the mixer goes on with the functions that this one fuses
        return original(*args, **packed(carried), **keywords)

    return scan


def _selective_scan(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., torch.Tensor]:
    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **keywords: Any,
    ) -> torch.Tensor:
        carried = rows()
        dtype = _exact_dtype(hidden_states)
        channels, state_dim = A.shape
        of_rows = [x.transpose(1, 2) for x in (hidden_states, dt, B, C, *(() if z is None else (z,)))]

        def run(given: Sequence[torch.Tensor], **more: Any) -> Any:
            x, dt, B, C, *z = (one.transpose(1, 2) for one in given)
            of_steps = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
            mixed = original(x, dt, A, B, C, D=D, z=z[0] if z else None, **of_steps, **keywords, **more)
            return (mixed[0].transpose(1, 2), mixed[1]) if more else mixed.transpose(1, 2)

        parts = _Parts(carried, of_rows)
        outputs, sums, summaries = [], [], []
        for of_run, fragment in parts.fragments:
            out = run(fragment, **({"return_last_state": True} if of_run.is_followed else {}))
            step_TD = fragment[1][0].to(dtype) + (0 if delta_bias is None else delta_bias.to(dtype))
            step_TD = functional.softplus(step_TD) if delta_softplus else step_TD
            sums.append(step_TD.cumsum(0))
            if of_run.is_followed:
                out, state = out
                summaries.append(torch.cat([state[0].to(dtype), (A.to(dtype) * sums[-1][-1:].t()).exp()], dim=1))
            outputs.append(out)

        if not carried.is_cut:
            return parts.joined((), parts.run_whole(run, None)).transpose(1, 2)
        nothing = _nothing(dtype, (0, channels, 2 * state_dim), hidden_states, dt, A, B, delta_bias)
        sent = carried.send_summaries(summaries, nothing, name)
        whole = parts.run_whole(run, None)

        def after(summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
            add, times = summary.split(state_dim, dim=-1)
            return add if state is None else torch.addcmul(add, times, state)

        states, arrived = sent.states(after)
        for number, (of_run, fragment) in enumerate(parts.fragments):
            if of_run.state is None:
                continue
            state_DS = states[of_run.state].to(dtype)
            more = []
            with torch.autocast(state_DS.device.type, enabled=False):
                for sum_TD, C_TS in zip(
                    sums[number].split(DECAY_TOKENS), fragment[3][0].to(dtype).split(DECAY_TOKENS), strict=True
                ):
                    decay_TDS = (A.to(dtype) * sum_TD[..., None]).exp()
                    more.append(torch.einsum("tds,ds,ts->td", decay_TDS, state_DS, C_TS))
                more_TD = torch.cat(more) * (1 if z is None else functional.silu(fragment[4][0].to(dtype)))
                outputs[number] = (outputs[number] + more_TD).to(outputs[number].dtype)
        return tied(parts.joined(outputs, whole), arrived).transpose(1, 2)

    return scan


class _Parts:
    """Tensors of the rows of a call, in fragments and whole documents.

    Attributes:
        fragments: each one's run, and its rows of the tensors.
    """

    def __init__(self, carried: CarriedRows, tensors: Sequence[torch.Tensor]) -> None:
        self._carried = carried
        parts = [carried.split(x) for x in tensors]
        runs = [run for run in carried.on_host.runs if run.is_fragment]
        self.fragments = [(run, [of_x[0][number] for of_x in parts]) for number, run in enumerate(runs)]
        self._whole = [of_x[1] for of_x in parts]

    def run_whole(self, function: Callable[..., torch.Tensor], packed: Packed | None) -> torch.Tensor | None:
        """Runs a function on all whole documents; returns None if this rank has none.

        Args:
            packed: None if the function takes no such keywords.
        """
        whole = [x for x in self._whole if x is not None]
        if not whole:
            return None
        if len(self._carried.on_host.whole_tokens) == 1:
            return function(whole)
        if packed is not None:
            return function(whole, **packed(self._carried))
        num_rows = whole[0].shape[1]

        def run(gather: Gather) -> torch.Tensor:
            return function([gather(x[0]) for x in whole])

        return self._carried.on_device.buckets.run(run, num_rows)[None]

    def joined(self, outputs: Sequence[torch.Tensor], whole: torch.Tensor | None) -> torch.Tensor:
        """Returns the rows of all parts in their order."""
        return self._carried.joined(outputs, whole)


def _packed_by(function: Callable[..., Any], name: str) -> Packed | None:
    """Returns what makes the keywords of a function for packed rows; None if it has none.

    Transformers calls an installed kernel, or its own code, which takes any keyword and follows neither "cu_seqlens"
    nor "seq_idx", one of which is the name.
    """
    wrapper = inspect.unwrap(function, stop=_holds_implementation)
    of_wrapper = inspect.getclosurevars(wrapper).nonlocals if inspect.isfunction(wrapper) else {}
    known = inspect.signature(of_wrapper.get("implementation", function)).parameters
    if name not in known:
        return None
    if name == "seq_idx":
        return lambda carried: {name: carried.on_device.whole_numbers}
    if "cu_seqlens_cpu" not in known:
        return lambda carried: {name: carried.on_device.whole_offsets}
    on_host = "cu_seqlens_cpu"
    return lambda carried: {name: carried.on_device.whole_offsets, on_host: carried.on_device.whole_offsets_on_host}


def _holds_implementation(function: Callable[..., Any]) -> bool:
    return "implementation" in getattr(getattr(function, "__code__", None), "co_freevars", ())


def _exact_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of states: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _nothing(dtype: torch.dtype, shape: tuple[int, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
    """Returns an empty tensor that needs gradients if any of these does. Whether backward exchanges summaries must not
    depend on the fragments of a rank: if only a decay is trained, summaries need gradients, and values do not."""
    return torch.cat([x.reshape(-1)[:0].to(dtype) for x in tensors if x is not None]).view(shape)


CONVOLUTION = "causal_conv1d_fn"
REPLACED: dict[str, Replacing] = {
    CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _fused_scan,
    "mamba_selective_scan": _selective_scan,
}
