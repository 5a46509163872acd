"""Config: all settings, in one dataclass with groups for rarely used ones. Only this file and `launched` read the
environment.

A value comes from the first of these that gives one: an explicit argument, the recipe (YAML), the environment variable
`DISTCA_<FIELD>` or `DISTCA_<GROUP>_<FIELD>`, the default.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from distca_hf.errors import ConfigError, nearest
from distca_hf.launched import ATTACH, JOB_SECRET, LAUNCHED_SERVERS, read_servers
from distca_hf.layout import Topology
from distca_hf.settings import Settings, described, fields_of, read_text, values_of


# Prefix of the environment variables that set a field.
ENVIRONMENT_PREFIX = "DISTCA_"
# Environment variable with the settings of the recipe that started this process: JSON, by the names of `fields_of`.
OF_RECIPE = "DISTCA_SETTINGS_OF_RECIPE"
# Chunks of an exchange if the group spans nodes: the first chunk is attended while the others are sent. More chunks
# start more kernels, fewer hide less (docs/design.md, "Chunks hide a slow network").
CHUNKS_BETWEEN_NODES = 4
# Most chunks of an exchange: a pass plans and starts all of them, also empty ones. 100,000 kept a step for minutes.
MOST_CHUNKS = 256
# Longest deadline. Gloo counts nanoseconds in 64 bits: a deadline beyond 292 years overflows.
LONGEST_SECONDS = 1e9
# Settings that may differ between ranks.
SETTINGS_OF_ONE_RANK = frozenset({"prefetch", "plans_in_flight", "kernel_times", "metrics", "report_folder"})

# Values of settings that are names. The help of each setting describes them.
OverlongPolicy = Literal["error", "split", "truncate"]
KernelName = Literal["auto", "flash4", "flash3", "flash2", "torch_varlen", "ffpa", "cpu", "reference"]
Residency = Literal["auto", "keep", "refetch"]
Evaluation = Literal["local", "distca"]
CheckpointedAttention = Literal["save", "offload", "recompute"]
Metrics = Literal["basic", "all"]


class _Default:
    """Makes the default of a setting, which a recipe or the environment may override."""

    name: str  # name of the setting; in a group `group.field`

    def __init__(self, default: object) -> None:
        self._default = default

    def __call__(self) -> object:
        variable = variable_of(self.name)
        try:
            of_recipe = dict(json.loads(os.environ.get(OF_RECIPE, "{}")))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"environment variable {OF_RECIPE}: distca_hf.run writes it ({error}); unset it"
            ) from error
        if self.name in of_recipe:
            return of_recipe[self.name]
        text = os.environ.get(variable)
        if text is None:
            return self._default
        return read_text(DistCAConfig, self.name, text, f"environment variable {variable}")


def _setting(
    default: object,
    help: str,
    at_least: int | None = None,
    at_most: float | None = None,
    positive: bool = False,
    or_number: bool = False,
    check: Callable[[object], object] | None = None,
) -> Any:
    """Returns a dataclass field whose default a recipe or `DISTCA_<NAME>` may override."""
    metadata = {"help": help, "default": default}
    limits = {"at_least": at_least, "at_most": at_most, "positive": positive, "or_number": or_number, "check": check}
    return field(default_factory=_Default(default), metadata=metadata | limits)


def variable_of(name: str) -> str:
    """Returns the environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.upper().replace(".", "_")


@described
@dataclass(kw_only=True)
class Debug(Settings):
    """Settings for finding a fault: checks that wait for the device or for other ranks.

    Raises:
        ConfigError: a value is not one that the field allows.
    """

    check_exchanges: bool = _setting(
        False,
        "Before every exchange ranks compare which one they are making; costs a message each.",
    )
    check_finite: bool = _setting(
        False,
        "Look for numbers that are not finite in inputs and outputs of every attention call; waits for the device "
        "each time.",
    )
    check_weights_every_steps: int = _setting(
        0,
        "Trainer: steps between two comparisons of weights, or parts of them, that several ranks hold, bit by bit; "
        "0: never.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        self.check_values(Debug)


@described
@dataclass(kw_only=True)
class Timeouts(Settings):
    """Deadlines after which a run ends with an error that names the missing ranks.

    Raises:
        ConfigError: a deadline is not positive, or too long.
    """

    exchange_seconds: float = _setting(
        300.0,
        "Deadline of one exchange between ranks, after which the step fails.",
        at_most=LONGEST_SECONDS,
        positive=True,
    )
    agreement_seconds: float = _setting(
        1800.0,
        "How long ranks wait for each other at each micro-batch; must exceed what only one rank does in between, such "
        "as saving.",
        at_most=LONGEST_SECONDS,
        positive=True,
    )
    heartbeat_limit_seconds: float = _setting(
        3.0,
        "Seconds without a heartbeat after which an attention server counts as lost; after three times as long its "
        "process is replaced.",
        at_most=LONGEST_SECONDS,
        positive=True,
    )

    def __post_init__(self) -> None:
        self.check_values(Timeouts)


@described
@dataclass(kw_only=True)
class DistCAConfig(Settings):
    """Settings of core attention disaggregation. Every field can also be given as `DISTCA_<FIELD>` or in a recipe.

    Settings are fixed once they are made. `dataclasses.replace(settings, prefetch=4)` makes others.

    Raises:
        ConfigError: a value is not one that the field allows.
    """

    tokens_per_rank: int = _setting(
        0,
        "Batches that distca_hf makes (placed batches): tokens each rank holds of one, at most; documents may be "
        "ranks x this long. 0: batches stay yours, and their rows are placed inside the model.",
        at_least=0,
    )
    overlong: OverlongPolicy = _setting(
        "error",
        "Documents longer than ranks x tokens_per_rank: refuse them (error), cut each into several documents "
        "(split), or keep its beginning (truncate).",
    )
    stream_buffer_tokens: int = _setting(
        0,
        "Placed batches of a stream: tokens of documents that are read ahead, to fill batches from. 0: an optimizer "
        "step and three more batches.",
        at_least=0,
    )
    skip_bad_rows: bool = _setting(
        False,
        "Rows of a stream that cannot be trained on: leave them out, with a warning each (yes), or end with an error "
        "that names the row (no).",
    )
    pad_to_multiple_of: int = _setting(
        128,
        "Rows of a rank are padded up to this multiple, never beyond tokens_per_rank. Set it to tokens_per_rank for "
        "one constant shape, to 1 for (nearly) no padding.",
        at_least=1,
    )
    kernel: KernelName = _setting("auto", "Attention kernel; auto takes the fastest one that can do the job.")
    kv_residency: Residency = _setting(
        "auto",
        "Keys and values received from other ranks: keep them in memory until recomputation and backward (keep), "
        "fetch them again (refetch), or keep them while they fit kv_budget_gib (auto).",
    )
    kv_budget_gib: float = _setting(
        4.0,
        "With kv_residency=auto: memory for rows that all layers keep until backward, on the rank that receives most; "
        "if layers recompute attention, only one checkpointed region counts. Rows that wait for recomputation count "
        "for all layers.",
        at_least=0,
    )
    exchange_chunks: int = _setting(
        0,
        "Most chunks in which rows are sent between ranks. The first are computed while the others are sent: more "
        "hide a slow network, fewer cost less on a fast one. 0: one on a single node, four on several.",
        at_least=0,
        at_most=MOST_CHUNKS,
    )
    checkpointed_attention: CheckpointedAttention = _setting(
        "save",
        "With activation checkpointing: save attention outputs, so that neither attention nor its exchange runs twice "
        "(save); let them and the layers' inputs wait in host memory (offload); or recompute them, too (recompute).",
    )
    mlp_tokens: int = _setting(
        0,
        "MLPs of decoder layers run on this many tokens at a time, which saves memory within a layer. 0: on all.",
        at_least=0,
    )
    attention_kv_heads: int = _setting(
        0,
        "Attention modules run on at most this many KV heads at a time, with the query heads that share them, which "
        "saves memory within a layer. 0: on all.",
        at_least=0,
    )
    shared_prefix_tokens: int = _setting(
        256,
        "Your own batches: documents that begin with this many equal tokens, or more, share them: layers compute a "
        "shared prefix once for all ranks, and its results return to every row. 0: never.",
        at_least=0,
    )
    evaluate: Evaluation = _setting(
        "local",
        "Evaluation: every rank attends to its own batches (local), or batches are placed on all ranks as in "
        "training (distca). Then documents may be longer than one rank can hold.",
    )
    regroup_steps: bool = _setting(
        True,
        "Trainer with gradient accumulation: within an optimizer step long documents train together, so that fewer "
        "keys and values move; micro-batches of one step then differ in work.",
    )
    ranks_per_node: int = _setting(
        0,
        "Ranks that share a node, and with it a fast network; 0: as launched (LOCAL_WORLD_SIZE).",
        at_least=0,
    )
    attention_servers: str = _setting(
        "0",
        "Launched processes of each node that compute attention for the others and do not train: one number for all "
        "nodes, or one per node (0,8). They are the last ones of their node; distca_hf.run makes them servers.",
        or_number=True,
        check=lambda value: read_servers(str(value)),
    )
    trainers_attend: bool = _setting(
        True,
        "With attention servers: trainers compute attention, too (yes), or leave all of it to servers (no).",
    )
    server_speed: float = _setting(
        0.0,
        "Speed of an attention server relative to a trainer: plans give it work in proportion. 0: measured in "
        "training, for each server.",
        at_least=0,
    )
    kernel_times: str = _setting(
        "",
        "Path of a file that `distca profile` wrote: placement then makes predicted seconds equal instead of "
        "attended pairs.",
    )
    deterministic: bool = _setting(
        False,
        "Bit-equal gradients from run to run; costs about a quarter of the backward kernel's speed.",
    )
    save_on_signal: bool = _setting(
        True,
        "Trainer, on SIGTERM (preemption) or Ctrl-C: end the step, save a checkpoint on all ranks at the same step, "
        "and leave with status 143 or 130. A handler that is there already stays.",
    )
    metrics: Metrics = _setting(
        "basic",
        "Metrics in a Trainer's logs: imbalance, tokens per second and GPU, utilisation and memory (basic), or also "
        "metrics that help to find out why a training is slow (all). May differ between ranks.",
    )
    report_every_steps: int = _setting(
        0,
        "Optimizer steps from one reported step to the next: ranks write traces of it for `distca report`; 0: none. "
        "Other steps pay nothing for it.",
        at_least=0,
    )
    report_folder: str = _setting(
        "",
        "Folder of these traces; empty: distca_report, in a Trainer's output folder or in the working directory. May "
        "differ between ranks.",
    )
    prefetch: int = _setting(2, "Micro-batches planned and read ahead of the training loop.", at_least=1)
    plans_in_flight: int = _setting(
        8,
        "Plans kept alive after the training loop has dropped their batch: compiled graphs find them by number only.",
        at_least=1,
    )
    timeouts: Timeouts = field(default_factory=Timeouts)
    debug: Debug = field(default_factory=Debug)

    def __post_init__(self) -> None:
        self.check_values(DistCAConfig)
        # One text for each meaning: ranks compare texts.
        vars(self)["attention_servers"] = ",".join(map(str, read_servers(self.attention_servers)))

    def check_places(self, maker: str) -> None:
        """Checks that the size of placed batches is known.

        Raises:
            ConfigError: it is not known.
        """
        if not self.tokens_per_rank:
            raise ConfigError(
                f"{maker} needs a size for its batches: give the plugin tokens_per_rank, the most tokens of a rank. "
                "Your own batches need none: train on them with plugin.attach(trainer), or distca_hf.enable(model, "
                "plugin) in a loop"
            )

    @property
    def node_size(self) -> int:
        """Ranks that share a node, if known; 0: all of them."""
        return self.ranks_per_node

    def topology(self, num_ranks: int) -> Topology:
        """Returns which ranks share a node: all of them, unless their number is known."""
        return Topology(num_ranks, self.node_size or num_ranks)

    def num_chunks(self, topology: Topology) -> int:
        """Returns the most chunks of an exchange between these ranks."""
        return self.exchange_chunks or (1 if topology.num_nodes == 1 else CHUNKS_BETWEEN_NODES)

    def shared_settings(self) -> dict[str, object]:
        """Returns the settings that ranks must share, by name."""
        values = values_of(self, DistCAConfig) | {"ranks_per_node": self.node_size}
        return {name: value for name, value in values.items() if name not in SETTINGS_OF_ONE_RANK}


for _name, _field in fields_of(DistCAConfig).items():
    cast(_Default, _field.default_factory).name = _name


def config_of(settings: Mapping[str, object]) -> DistCAConfig:
    """Returns settings with these values, by the names of `fields_of`; others have their defaults. Raises
    UnknownSettingError if a key is not a setting; ConfigError if a value is not one that the field allows."""
    groups: dict[str, dict[str, Any]] = {"timeouts": {}, "debug": {}}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        group, _, inner = name.rpartition(".")
        (groups[group] if group in groups else values)[inner] = value
    return DistCAConfig(timeouts=Timeouts(**groups["timeouts"]), debug=Debug(**groups["debug"]), **values)


def unknown_environment_settings() -> dict[str, str | None]:
    """Returns variables that begin with `DISTCA_` and set nothing, each with the variable that is probably meant."""
    variables = {
        variable.removeprefix(ENVIRONMENT_PREFIX): variable for variable in map(variable_of, fields_of(DistCAConfig))
    }
    given = {name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)}
    unknown = given - set(variables.values()) - {ATTACH, LAUNCHED_SERVERS, JOB_SECRET, OF_RECIPE}
    meant = {name: nearest(name.removeprefix(ENVIRONMENT_PREFIX), variables) for name in sorted(unknown)}
    return {name: near and variables[near] for name, near in meant.items()}
