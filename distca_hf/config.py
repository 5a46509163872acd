"""All settings in one dataclass; the only place that reads the environment.

A value comes from, in this order: an explicit argument, a recipe (YAML), the environment variable `DISTCA_<FIELD>`,
the default.
"""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from distca_hf.errors import ConfigError, UnknownSettingError, did_you_mean, nearest
from distca_hf.setting_help import describe_settings, signature_of_settings
from distca_hf.topology import Topology


ENVIRONMENT_PREFIX = "DISTCA_"
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")

CHUNKS_BETWEEN_NODES = 4
# Settings that may differ between ranks.
SETTINGS_OF_ONE_RANK = frozenset({"prefetch", "plans_in_flight", "kernel_times", "metrics"})

OverlongPolicy = Literal["error", "split", "truncate"]
KernelName = Literal["auto", "flash4", "flash3", "flash2", "torch_varlen", "cpu", "reference"]
# Kernels of that table by the names that Transformers has for them.
OF_TRANSFORMERS = {f"flash_attention_{version}": f"flash{version}" for version in (2, 3, 4)}
Residency = Literal["auto", "keep", "refetch"]
Evaluation = Literal["local", "distca"]
CheckpointedAttention = Literal["save", "offload", "recompute"]
Metrics = Literal["basic", "all"]


def _setting(name: str, default: Any, help: str) -> Any:
    """Returns a dataclass field whose default may be overridden by `DISTCA_<NAME>`."""

    def from_environment() -> Any:
        text = os.environ.get(ENVIRONMENT_PREFIX + name.upper())
        return default if text is None else _parse(name, text, ENVIRONMENT_PREFIX + name.upper())

    return field(default_factory=from_environment, metadata={"help": help, "default": default})


@dataclass(kw_only=True)
class DistCAConfig:
    """Settings of core attention disaggregation. Every field can also be given as `DISTCA_<FIELD>` or in a recipe.

    Raises:
        ConfigError: a value is outside what the field allows.
    """

    tokens_per_rank: int = _setting(
        "tokens_per_rank",
        8192,
        "Tokens each rank holds of a micro-batch, at most. Documents may be ranks x this long.",
    )
    overlong: OverlongPolicy = _setting(
        "overlong",
        "error",
        "What to do with a document longer than ranks x tokens_per_rank: refuse it (error), cut it into several "
        "documents (split), or keep its beginning (truncate).",
    )
    pad_to_multiple_of: int = _setting(
        "pad_to_multiple_of",
        128,
        "Rows of a rank are padded up to this multiple, never beyond tokens_per_rank. Set it to tokens_per_rank for "
        "one constant shape, to 1 for (nearly) no padding.",
    )
    kernel: KernelName = _setting(
        "kernel", "auto", "Attention kernel; auto takes the fastest one that can do the job."
    )
    kv_residency: Residency = _setting(
        "kv_residency",
        "auto",
        "Keys and values received from other ranks: keep them in memory until recomputation and backward (keep), "
        "fetch them again (refetch), or keep them while they fit kv_budget_gib (auto).",
    )
    kv_budget_gib: float = _setting(
        "kv_budget_gib",
        4.0,
        "With kv_residency=auto: memory for what all layers keep until backward, on the rank that receives most; "
        "where attention is recomputed for what one layer keeps, and for what waits for that in all layers.",
    )
    exchange_legs: int = _setting(
        "exchange_legs",
        0,
        "In how many parts rows travel at most to and from other ranks, so that the first are computed while the "
        "others are on their way: more hide slow links, fewer cost less where links are fast. 0: one on a single "
        "node, four on several.",
    )
    checkpointed_attention: CheckpointedAttention = _setting(
        "checkpointed_attention",
        "save",
        "With activation checkpointing: save attention outputs, so that neither attention nor its exchange runs twice "
        "(save), in host memory (offload), or recompute them, too (recompute).",
    )
    evaluate: Evaluation = _setting(
        "evaluate",
        "local",
        "Evaluation: every rank attends to its own batches (local), or batches are placed on all ranks as in "
        "training, so that documents longer than one rank can hold are evaluated (distca).",
    )
    sort_packs: bool = _setting(
        "sort_packs",
        False,
        "Packs of others: choose which rank runs which pack of an optimizer step when, so that equally heavy ones run "
        "at the same time.",
    )
    regroup_steps: bool = _setting(
        "regroup_steps",
        True,
        "Trainer with gradient accumulation: within an optimizer step long documents train together, so that fewer "
        "keys and values move; micro-batches of one step then differ in work.",
    )
    ranks_per_node: int = _setting(
        "ranks_per_node",
        0,
        "Ranks that share a node, and with it fast links; 0: as launched (LOCAL_WORLD_SIZE).",
    )
    kernel_times: str = _setting(
        "kernel_times",
        "",
        "Path of a table of kernel times (scripts/benchmarks/kernel_times.py writes it): placement then makes "
        "predicted seconds equal instead of attended pairs.",
    )
    deterministic: bool = _setting(
        "deterministic",
        False,
        "Bit-equal gradients from run to run; costs about a quarter of the backward kernel's speed.",
    )
    save_on_signal: bool = _setting(
        "save_on_signal",
        True,
        "Trainer, on SIGTERM (preemption) or Ctrl-C: end the step, save a checkpoint on all ranks at the same step, "
        "and leave with status 143 or 130. A handler that is there already stays.",
    )
    metrics: Metrics = _setting(
        "metrics",
        "basic",
        "What a Trainer's logs have in addition: imbalance, tokens per second and GPU, utilisation and memory "
        "(basic), or also what helps to find out why a training is slow (all). May differ between ranks.",
    )
    check_weights_every_steps: int = _setting(
        "check_weights_every_steps",
        0,
        "Trainer: every so many steps compare the weights that all ranks should hold alike, bit by bit; 0 never does.",
    )
    check_exchanges: bool = _setting(
        "check_exchanges",
        False,
        "For debugging: before every exchange ranks show each other which one they mean; costs a message each.",
    )
    check_finite: bool = _setting(
        "check_finite",
        False,
        "For debugging: look for numbers that are not finite in what goes into and comes out of every attention call; "
        "waits for the device each time.",
    )
    prefetch: int = _setting("prefetch", 2, "Micro-batches planned and read ahead of the training loop.")
    exchange_timeout_seconds: float = _setting(
        "exchange_timeout_seconds", 300.0, "Deadline of one exchange between ranks, after which the step fails."
    )
    agreement_timeout_seconds: float = _setting(
        "agreement_timeout_seconds",
        1800.0,
        "Deadline for all ranks to come to the same micro-batch; what one rank does alone between two of them, saving "
        "for example, must fit in it.",
    )
    plans_in_flight: int = _setting(
        "plans_in_flight",
        8,
        "Plans kept alive after the training loop has dropped their batch: compiled graphs find them by number only.",
    )

    def __new__(cls, *unnamed: object, **settings: object) -> Self:
        if cls.__init__ is DistCAConfig.__init__:  # a subclass may take arguments of its own
            _check_names(unnamed, settings, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(DistCAConfig):
            _check_type(setting.name, getattr(self, setting.name))
        at_least = {
            "tokens_per_rank": 1,
            "pad_to_multiple_of": 1,
            "ranks_per_node": 0,
            "exchange_legs": 0,
            "check_weights_every_steps": 0,
            "prefetch": 1,
            "plans_in_flight": 1,
        }
        for name, smallest in at_least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {smallest}")
        for name in ("exchange_timeout_seconds", "agreement_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")
            setattr(self, name, float(getattr(self, name)))
        if not 0 <= self.kv_budget_gib < math.inf:
            raise ConfigError(
                f"kv_budget_gib={self.kv_budget_gib} must be at least 0 and finite; kv_residency='keep' has no limit"
            )
        self.kv_budget_gib = float(self.kv_budget_gib)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Reads a YAML file: either the settings themselves or a recipe with a `plugin` section.

        Raises:
            ConfigError: the file is no mapping, or holds a key that is no setting.
        """
        content = read_yaml(path)
        return cls(**check_settings(content.get("plugin", content), f"{path}"))

    def topology(self, num_ranks: int) -> Topology:
        """Returns which ranks share a node."""
        launched = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        return Topology(num_ranks, self.ranks_per_node or launched)

    def num_chunks(self, num_ranks: int) -> int:
        """ExchangeChunks of every exchange (`exchange_legs`)."""
        topology = self.topology(num_ranks)
        return self.exchange_legs or (1 if topology.ranks_per_node >= num_ranks else CHUNKS_BETWEEN_NODES)

    def shared_settings(self) -> dict[str, object]:
        """Returns the settings that ranks must share, by name."""
        return {
            setting.name: getattr(self, setting.name)
            for setting in dataclasses.fields(DistCAConfig)
            if setting.name not in SETTINGS_OF_ONE_RANK
        }


DistCAConfig.__doc__ = describe_settings(DistCAConfig)
DistCAConfig.__signature__ = signature_of_settings(DistCAConfig)  # type: ignore[attr-defined]


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read as a YAML mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not {type(content).__name__}")
    return content


def check_settings(values: object, where: str) -> dict[str, Any]:
    """Keys and values of `values`, all known settings with values of the right type.

    Raises:
        UnknownSettingError: a key is no setting.
        ConfigError: a value has the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: the plugin settings must be a mapping, not {type(values).__name__}")
    _check_names((), values, where)
    for name, value in values.items():
        try:
            _check_type(name, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return {str(name): value for name, value in values.items()}


def as_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings as the environment variables that `DistCAConfig()` reads back."""
    return {ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in settings.items()}


def unknown_environment_settings() -> dict[str, str | None]:
    """Returns variables that begin with `DISTCA_` and set nothing, each with the one that is most likely meant."""
    variables = {name.upper(): ENVIRONMENT_PREFIX + name.upper() for name in _names()}
    unknown = {name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)} - set(variables.values())
    meant = {name: nearest(name.removeprefix(ENVIRONMENT_PREFIX), variables) for name in sorted(unknown)}
    return {name: near and variables[near] for name, near in meant.items()}


def launched_rank() -> int:
    """Returns the rank that the launcher gave to this process (0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


def launched_local_rank() -> int:
    """Returns the number of this process on its node (0 without a launcher)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launched_error_file() -> str | None:
    """Returns the file in which torchrun and accelerate look for the error that ended this process."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def launched_world_size() -> int:
    """Returns the number of processes the launcher started (1 without a launcher)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Returns whether a launcher (torchrun, accelerate launch) started this process as one of its ranks. Schedulers
    of clusters number nodes by the first two names."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(os.environ)


def _names() -> list[str]:
    return [setting.name for setting in dataclasses.fields(DistCAConfig)]


def _check_names(unnamed: Sequence[object], settings: Iterable[object], where: str) -> None:
    """Refuses settings that are given without a name, or with one that is not known.

    Raises:
        UnknownSettingError: there are such settings; names the first.
    """
    known = _names()
    if unnamed:
        raise UnknownSettingError(
            f"{where}: {unnamed[0]!r} has no name; write which setting it is, for example {known[0]}={unnamed[0]!r}"
        )
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or f" Known settings: {', '.join(known)}"
            raise UnknownSettingError(f"{where}: unknown setting {name!r}.{hint}")


@cache
def _allowed(name: str) -> tuple[type, tuple[Any, ...]]:
    """Returns the type of a setting and, for a choice, its values."""
    hint = typing.get_type_hints(DistCAConfig)[name]
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    return hint, ()


def _check_type(name: str, value: Any) -> None:
    kind, choices = _allowed(name)
    if choices:
        if value not in choices:
            hint = f". Transformers' {value} is {OF_TRANSFORMERS[value]!r} here" if value in OF_TRANSFORMERS else ""
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}{hint}")
        return
    accepted: type | types.UnionType = float | int if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}={value!r} must be of type {kind.__name__}, not {type(value).__name__}")


IN_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}


def _parse(name: str, text: str, where: str) -> Any:
    kind, _ = _allowed(name)
    readers: dict[type, Callable[[str], Any]] = {int: int, float: float, str: str, bool: _parse_bool}
    try:
        return readers[kind](text)
    except ValueError as error:
        raise ConfigError(f"{where}={text!r} is not {IN_WORDS[kind]}") from error


def _parse_bool(text: str) -> bool:
    if text.lower() not in (*YES, *NO):
        raise ValueError(text)
    return text.lower() in YES
