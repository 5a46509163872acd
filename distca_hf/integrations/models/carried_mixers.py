"""Carried mixers: mixers of Transformers whose documents may be cut, because their states travel.

A mixer's own forward function runs once on all rows of a rank. Some of the functions that it calls are replaced:

    causal_conv1d_fn                           the first tokens of each segment see tokens before it (`convolved`)
    torch_chunk_gated_delta_rule,
    chunk_kimi_delta_attention                 `DeltaRule`
    mamba2_chunk_scan                          `Scan`
    mamba_selective_scan                       `SelectiveScan`
    mamba2_split_conv1d_scan_combined          fuses the first one with a scan: runs if no document is cut

Whole documents run in one call if the function knows packed rows, otherwise in batches (`Buckets`).
"""

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import nn

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.state_rules import DeltaRule, Packed, Scan, SelectiveScan, StateRule
from distca_hf.planning.fragments import GroupName
from distca_hf.runtime.carried_states import CarriedRows, tied
from distca_hf.runtime.device_fragments import DeviceGroup


# Returns the rows of a mixer's present call.
Rows = Callable[[], CarriedRows]
# Makes a replacement for a function that a mixer calls, given this function, the rows and the mixer's name.
Replacing = Callable[[Callable[..., Any], Rows, str], Callable[..., Any]]
# Modules of classes that a mixer may inherit from: `fully_shard` gives it a class of torch.
OF_LIBRARIES = ("transformers.", "torch.", "builtins")
# Functions not in `REPLACED` that may mix tokens: they run only for a token that continues from a cache.
OF_CACHES = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "recurrent_kimi_delta_attention",
        "mamba2_selective_state_update",
        "mamba_selective_state_update",
    }
)
# Functions, and methods of mixers, that do not mix tokens.
OF_TOKENS = frozenset({"apply_mask_to_padding_states", "fix_query_key_value_ordering"})


def carries(mixer: nn.Module) -> bool:
    """Returns whether the states of a mixer can travel. Its class must come from Transformers. Its forward function
    must call the convolution and its rule as functions of its module, by names known here, and nothing else that may
    mix tokens. No other forward function may be set on the mixer (`kernelize` does so)."""
    own = vars(mixer).get("forward")
    is_known = all(one.__module__.startswith(OF_LIBRARIES) for one in type(mixer).__mro__)
    if getattr(own, "before", own) is not None or not is_known:
        return False  # `Apart.before` is the function that it replaced
    forward = inspect.unwrap(type(mixer).forward)
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
    """Returns how many tokens before each token the mixer's convolution sees."""
    return max(int(part.kernel_size[0]) for part in mixer.modules() if isinstance(part, nn.Conv1d)) - 1


def carried_forward(mixer: nn.Module, rows: Rows, name: str) -> Callable[..., Any]:
    """Returns a mixer's forward function, with replaced functions inside."""
    forward = inspect.unwrap(type(mixer).forward)
    names = forward.__globals__
    replaced = {key: replace(names[key], rows, name) for key, replace in REPLACED.items() if key in names}
    bound = FunctionType(
        forward.__code__, {**names, **replaced}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound.__get__(mixer)


def _convolution(original: Callable[..., torch.Tensor], rows: Rows, name: str) -> Callable[..., torch.Tensor]:
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> torch.Tensor:
        _check_unused(keywords, CONVOLUTION, name)
        return rows().convolved(hidden_states, lambda x: original(x, weight, bias=bias, activation=activation), name)

    return convolve


def _delta_rule(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., tuple[torch.Tensor, None]]:
    packed = _packed_by(original, "cu_seqlens")
    _check_takes(original, ("initial_state", "output_final_state"), name)

    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        _check_unused(keywords, "delta rule", name)
        rule = DeltaRule(original, (query, key, value, g, beta), packed, use_qk_l2norm_in_kernel)
        return _carried(rule, rows(), name), None

    return apply


def _scan(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., torch.Tensor]:
    packed = _packed_by(original, "seq_idx")
    _check_takes(original, ("initial_states", "return_final_states"), name)

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **keywords: Any,
    ) -> torch.Tensor:
        _check_unused({**keywords, "z": z}, "scan", name)  # a gate has one entry per row, and would have to be split
        carried, function = rows(), partial(original, chunk_size=chunk_size)
        if carried.is_cut:  # several calls use parameters, and gradients of one call would be rounded before their sum
            D, dt_bias = (x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in (D, dt_bias))
        step_options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        return _carried(Scan(function, (hidden_states, dt, B, C), packed, A, D, step_options), carried, name)

    return scan


def _fused_scan(original: Callable[..., Any], rows: Rows, name: str) -> Callable[..., torch.Tensor | None]:
    packed = _packed_by(original, "seq_idx")

    def scan(*args: Any, seq_idx: object = None, **keywords: Any) -> torch.Tensor | None:
        carried = rows()
        if carried.is_cut or packed is None:
            return None  # the mixer then calls the functions that this one fuses
        return original(*args, **packed(carried.on_device.whole), **keywords)

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
        **of_implementation: Any,
    ) -> torch.Tensor:
        _check_unused({"return_last_state": return_last_state}, "scan", name)
        of_rows = [x.transpose(1, 2) for x in (hidden_states, dt, B, C, *(() if z is None else (z,)))]
        step_options = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
        rule = SelectiveScan(partial(original, **of_implementation), of_rows, A, D, step_options)
        return _carried(rule, rows(), name).transpose(1, 2)

    return scan


def _check_unused(keywords: Mapping[str, Any], function: str, name: str) -> None:
    """Checks that a mixer gives its function no argument that would be ignored."""
    given = [key for key, value in keywords.items() if value is not None and value is not False]
    if given:
        raise UnsupportedAttentionError(
            f"{name} gives its {function} {given[0]!r}, which is not known for documents whose states travel; train "
            "without it, or report the model and the version of Transformers"
        )


def _carried(rule: StateRule, carried: CarriedRows, name: str) -> torch.Tensor:
    """Returns outputs of all rows of a rank, `[1, T, ...]`; a collective call if any document is cut."""
    of_rows = [carried.split(x) for x in rule.rows]
    rows = {group: [of_x[group] for of_x in of_rows] for group in of_rows[0]}
    held = carried.on_device
    if not carried.is_cut:
        return _of_whole(rule, rows["whole"], held.whole)
    begun = rule.begin(rows["followed"], held) if "followed" in rows else None
    summaries = [rule.no_summaries(), *([] if begun is None else [begun.summaries])]
    sent = carried.send_summaries(torch.cat(summaries), name)
    outputs: dict[GroupName, torch.Tensor] = {}
    if "whole" in rows:
        outputs["whole"] = _of_whole(rule, rows["whole"], held.whole)
    states, arrived = sent.states(rule.after)
    of_middle, of_last = states.split([len(held.middle.tokens), len(held.last.tokens)])
    if begun is not None:
        outputs["followed"] = rule.continued(begun, of_middle, held) if len(of_middle) else begun.outputs
    if "last" in rows:
        outputs["last"] = rule.ended(rows["last"], of_last, held.last)
    return tied(carried.joined(outputs), arrived)


def _of_whole(rule: StateRule, rows: Sequence[torch.Tensor], group: DeviceGroup) -> torch.Tensor:
    if len(group.tokens) == 1:
        return rule.outputs(rows)
    if rule.packed is not None:
        return rule.outputs(rows, **rule.packed(group))
    batches = zip(*(group.buckets.gathered(x[0]) for x in rows), strict=True)
    return group.buckets.joined([rule.outputs(batch) for batch in batches], rows[0].shape[1])[None]


def _packed_by(function: Callable[..., Any], keyword: str) -> Packed | None:
    """Returns a maker of a function's keywords for packed rows, "cu_seqlens" or "seq_idx"; None if it has none."""
    known = _parameters_of(function)
    if keyword not in known:
        return None
    if keyword == "seq_idx":
        return lambda group: {keyword: group.numbers}
    if "cu_seqlens_cpu" not in known:
        return lambda group: {keyword: group.offsets}
    return lambda group: {keyword: group.offsets, "cu_seqlens_cpu": group.offsets_on_host}


def _check_takes(function: Callable[..., Any], keywords: tuple[str, ...], name: str) -> None:
    """Checks that a function takes and returns states. Raises UnsupportedAttentionError if it does not. Transformers
    drops keywords that an installed kernel lacks."""
    if missing := [keyword for keyword in keywords if keyword not in _parameters_of(function)]:
        raise UnsupportedAttentionError(
            f"{name} calls a kernel that has no {missing[0]!r}, so states of cut documents cannot reach it; install "
            "another version of its package, or train without it"
        )


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of what a function of Transformers runs: an installed kernel, or the function's own torch
    code, which does not follow packed rows."""
    wrapper = inspect.unwrap(
        function, stop=lambda one: "implementation" in getattr(getattr(one, "__code__", None), "co_freevars", ())
    )
    of_wrapper = inspect.getclosurevars(wrapper).nonlocals if inspect.isfunction(wrapper) else {}
    return inspect.signature(of_wrapper.get("implementation", function)).parameters


class CalledFunctions:
    """The functions that mixers of one class call: their forward function, and what it finds in its module. Raises
    UnsupportedAttentionError if someone has wrapped the forward function. Functions are replaced inside it, so the
    wrapper would not run."""

    def __init__(self, mixer: nn.Module) -> None:
        self._class = type(mixer)
        self._forward: Any = self._class.forward
        function = inspect.unwrap(self._forward, stop=_is_foreign)
        if _is_foreign(function):
            raise UnsupportedAttentionError(
                f"{self._class.__name__}.forward is wrapped by a function of {_module_of(function)}, which would not "
                "run: states of cut documents travel inside the function of Transformers. Use hooks of the modules "
                "(register_forward_pre_hook, register_forward_hook) in place of the wrapper"
            )
        self._names, self._of_module = function.__code__.co_names, function.__globals__
        self._found = self._look()

    def _look(self) -> list[object]:
        return [*map(self._of_module.get, self._names)]

    def has_changed(self) -> bool:
        """Returns whether a function of the module has changed since the last call. Compares objects, in 2 µs for all
        mixers of a class. Raises UnsupportedAttentionError if the forward function has changed."""
        if self._class.forward is not self._forward:
            raise UnsupportedAttentionError(
                f"{self._class.__name__}.forward was replaced after distca_hf.enable, which replaces functions that "
                "the old one calls. Replace it before enable and before plugin.dataloader(model=...), so that both "
                "know whether states can travel through it"
            )
        before, self._found = self._found, self._look()
        return not all(map(is_, before, self._found))


def _module_of(function: Any) -> str:
    """Returns the module that defines a function. Its `__module__` may be of another function, copied by `wraps`."""
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__name__))


def _is_foreign(function: Any) -> bool:
    return not _module_of(function).startswith("transformers.")


CONVOLUTION = "causal_conv1d_fn"
REPLACED: dict[str, Replacing] = {
    CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _fused_scan,
    "mamba_selective_scan": _selective_scan,
}
