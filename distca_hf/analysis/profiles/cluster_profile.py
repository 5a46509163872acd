"""The file of a profile: times of GPUs and links, and where they come from.

A file has a schema number (`SCHEMA`). Files with another one are refused, and so are other JSON files and files with
unknown names: numbers of a half-understood file would be silently wrong.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from distca_hf.errors import ConfigError, did_you_mean
from distca_hf.flops import H100_GIB, gpu_of_device, peak_flops
from distca_hf.version import __version__
from distca_hf.whole_file import read_at_most


# Schema of the file; changes with every change that an older reader would misunderstand.
SCHEMA = 1
KIND = "distca_hf cluster profile"
# Names in a file: its head, the parts of a profile, and the table of the setting `kernel_times`.
HEAD = ("kind", "schema", "distca_hf")
PARTS = ("made", "attention", "layers", "rates", "within_node", "between_nodes")
NAMES = (*HEAD, *PARTS, "kernel_times")
# Largest file that is read: a thousand times the size of ours.
MOST_BYTES = 2**25
OF_ANOTHER_VERSION = "install the version that wrote it, or measure again with `distca profile`"

Numbers = tuple[float, ...]
Table = tuple[Numbers, ...]
# Limits of measured numbers, in any unit: products and quotients of a few of them are still finite.
LEAST, MOST = 1e-30, 1e30


class UnknownNamesError(ValueError):
    """Names of another version: the file is not damaged, but this version does not know what they mean."""


def check_names(where: str, content: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UnknownNamesError if content has unknown names."""
    if unknown := set(content) - {*known}:
        raise UnknownNamesError(f"{where} has {', '.join(sorted(unknown))}")


def read_dataclass(cls: Any, content: Mapping[str, Any]) -> Any:
    """Returns a dataclass of JSON values; lists become tuples. Raises UnknownNamesError if names are unknown;
    TypeError or ValueError if names are missing, or a value is of another kind or out of range."""
    check_names(cls.__name__, content, {field.name for field in fields(cls)})
    found = cls(**{name: _as_tuples(value) for name, value in content.items()})
    for name, kind in get_type_hints(cls).items():
        value = getattr(found, name)
        if kind in (int, float, str, bool) and type(value) not in (kind, *[int] * (kind is float)):
            raise ValueError(f"{cls.__name__}.{name} is {value!r}, and must be of type {kind.__name__}")
        least = 0 if kind is float or name == "window_tokens" else 1
        if kind in (int, float) and not least <= value <= MOST:
            raise ValueError(f"{cls.__name__}.{name} is {value}, and must be at least {least}, and at most {MOST:g}")
    return found


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def check_curve(name: str, sizes: Sequence[float], *times: Sequence[float]) -> None:
    """Raises ValueError if sizes do not rise, or times are not equally many, finite and above 0."""
    check_rising(name, sizes)
    for seconds in times:
        if len(seconds) != len(sizes):
            raise ValueError(f"{len(seconds)} times for {len(sizes)} {name}")
        check_positive(name, seconds)


def check_rising(name: str, sizes: Sequence[float]) -> None:
    """Raises ValueError if sizes are missing, or do not rise from above 0."""
    if not sizes or any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError(f"{name} do not rise: {sizes}")
    check_positive(name, sizes)


def check_positive(name: str, values: Sequence[float]) -> None:
    """Raises ValueError if a value is not above 0, or not within what can be measured."""
    if not all(LEAST <= value <= MOST for value in values):
        raise ValueError(f"{name}: {values} are not all above 0, between {LEAST:g} and {MOST:g}")


@dataclass(frozen=True)
class Made:
    """Origin of a profile. `date`: day and time, UTC. `device`: name of the GPU, as torch calls it. `kernel`: class of
    the attention kernel. `versions`: of packages, CUDA and NCCL. `remarks`: anything else that a reader must
    know."""

    date: str
    device: str
    kernel: str
    processes: int
    nodes: int
    command: str
    versions: Mapping[str, str]
    remarks: str = ""


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of one task of the attention kernel, for all heads.

    A task is computed as in training: a causal *square* against the keys of its queries, and a *prefix* without a mask
    against the keys before. Short tasks are measured many in one call.

    Attributes:
        heads, kv_heads, head_dim: heads of the call.
        window_tokens: sliding window of the squares; 0 for full attention.
        square_tokens: `[squares]` queries, which are as many as keys.
        square_forward, square_backward: `[squares]` seconds. These and other times are empty until they are measured.
        prefix_queries, prefix_keys: sizes of prefixes; none with a window.
        prefix_forward, prefix_backward: `[queries, keys]` seconds, a merge or a sum included.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int
    square_tokens: Numbers
    square_forward: Numbers = ()
    square_backward: Numbers = ()
    prefix_queries: Numbers = ()
    prefix_keys: Numbers = ()
    prefix_forward: Table = ()
    prefix_backward: Table = ()


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a decoder layer without core attention: projections, gated MLP, norms, rotary embeddings, sums.

    Attributes:
        liger: whether norms, rotary embeddings and the MLP are Liger's kernels.
        tokens: `[sizes]` tokens of a call.
        forward, kept: `[sizes]` seconds of a pass that keeps nothing, and of one that keeps what backward needs; empty
            until they are measured.
        backward: `[sizes]` seconds of backward only.
    """

    hidden_size: int
    mlp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    liger: bool
    tokens: Numbers
    forward: Numbers = ()
    kept: Numbers = ()
    backward: Numbers = ()


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a GPU for everything that is not measured by size.

    Attributes:
        matrix_flops: operations per second of a large matrix product.
        copy_bytes: bytes per second that a copy reads and writes.
        optimizer_seconds: AdamW, per parameter of a rank, in fp32.
        head_seconds: last matrix and loss, forward and backward, per token and 1,000 entries of the vocabulary.
        head_hidden_size: size of a token's vector in that measurement.
    """

    matrix_flops: float
    copy_bytes: float
    optimizer_seconds: float
    head_seconds: float
    head_hidden_size: int


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of exchanges and collectives between ranks that share a node, or that do not.

    Attributes:
        num_bytes: `[sizes]` bytes that a rank receives from others, and sends.
        exchange: `[sizes]` seconds of an all-to-all through the product's transport.
        all_gather, reduce_scatter: `[sizes]` seconds of FSDP's collectives.
        attention_beside: seconds by which a second of exchange delays an attention kernel meanwhile.
        products_beside: seconds by which a second of gathering delays matrix products meanwhile.
        ranks_per_node: of these ranks; 1 also for a stand-in, whose ranks share a node and count as nodes.
        one_way: `[sizes]` seconds of an exchange in which every second rank sends to the others, and receives
            nothing; empty if not measured.
        to_next: `[sizes]` seconds in which every rank sends keys and values to the next one, as rings do; empty if
            not measured.
    """

    ranks: int
    num_bytes: Numbers
    exchange: Numbers
    all_gather: Numbers
    reduce_scatter: Numbers
    attention_beside: float
    products_beside: float
    date: str
    command: str
    ranks_per_node: int = 1
    one_way: Numbers = ()
    to_next: Numbers = ()


@dataclass(frozen=True)
class ClusterProfile:
    """Everything that was measured on a cluster. `attention`: full attention of all heads first. `layers`: of several
    sizes. `within_node`, `between_nodes`: links; None if not measured. `source`: file or name that it was read
    from."""

    made: Made
    attention: tuple[AttentionTimes, ...]
    layers: tuple[LayerTimes, ...]
    rates: DeviceRates
    within_node: LinkTimes | None
    between_nodes: LinkTimes | None
    source: str = ""

    def summary(self) -> dict[str, str]:
        made = self.made
        return {"source": self.source, "date": made.date, "device": made.device, "remarks": made.remarks}

    @classmethod
    def load(cls, path: Path) -> "ClusterProfile":
        """Reads a file that `profiles.__main__.write` wrote. Raises ConfigError if it cannot be read, is not a cluster
        profile, or has another schema."""
        try:
            with path.open("rb") as file:
                content = json.loads(read_at_most(file, MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read as a cluster profile: {error}") from error
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, content: object, source: str) -> "ClusterProfile":
        """Returns the profile of a file's content."""
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ConfigError(f"{source} is not a cluster profile; `distca profile --output cluster.json` writes one")
        schema = content.get("schema")
        versions = (
            f"distca_hf {content.get('distca_hf', '(unknown)')} wrote it, and this is {__version__}, which reads form "
            f"{SCHEMA}"
        )
        if schema != SCHEMA:
            raise ConfigError(f"{source} is a cluster profile of form {schema!r}: {versions}; {OF_ANOTHER_VERSION}")
        try:
            check_names("the file", content, NAMES)
            within, between = content["within_node"], content["between_nodes"]
            profile = cls(
                read_dataclass(Made, content["made"]),
                tuple(read_dataclass(AttentionTimes, entry) for entry in content["attention"]),
                tuple(read_dataclass(LayerTimes, entry) for entry in content["layers"]),
                read_dataclass(DeviceRates, content["rates"]),
                None if within is None else read_dataclass(LinkTimes, within),
                None if between is None else read_dataclass(LinkTimes, between),
                source,
            )
            profile._check()
        except UnknownNamesError as error:
            raise ConfigError(
                f"{source} is a cluster profile of another version: {error}, which is not known here. {versions}; "
                f"{OF_ANOTHER_VERSION}"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{source} is a damaged cluster profile: {error!r}") from error
        return profile

    def as_json(self) -> dict[str, Any]:
        """Returns the content of a file, without the table of the setting `kernel_times`."""
        content = {name: value for name, value in asdict(self).items() if name != "source"}
        return {"kind": KIND, "schema": SCHEMA, "distca_hf": __version__, **content}

    def _check(self) -> None:
        """Raises ValueError if sizes do not rise, or numbers of times differ from numbers of sizes."""
        if not self.attention or not self.layers:
            raise ValueError("no attention, or no layers")
        if self.attention[0].window_tokens:
            raise ValueError("the first attention has a window, and full attention comes first")
        for times in self.attention:
            check_curve("square_tokens", times.square_tokens, times.square_forward, times.square_backward)
            if times.prefix_queries:
                check_rising("prefix_queries", times.prefix_queries)
                for name, table in (("forward", times.prefix_forward), ("backward", times.prefix_backward)):
                    if len(table) != len(times.prefix_queries):
                        raise ValueError(f"prefix_{name}: {len(table)} rows for {len(times.prefix_queries)} sizes")
                    check_curve("prefix_keys", times.prefix_keys, *table)
        for layer in self.layers:
            check_curve("tokens", layer.tokens, layer.forward, layer.kept, layer.backward)
        for links in filter(None, (self.within_node, self.between_nodes)):
            check_curve("num_bytes", links.num_bytes, links.exchange, links.all_gather, links.reduce_scatter)
            for seconds in (links.one_way, links.to_next):
                if seconds != ():  # measured
                    check_curve("num_bytes", links.num_bytes, seconds)
        check_positive("rates", list(asdict(self.rates).values()))


FOLDER = "distca_hf.analysis.profiles"
# Profile that is used if none is named, and file that one is written to.
DEFAULT_PROFILE, DEFAULT_FILE = "h200", Path("cluster.json")


def shipped_profiles() -> dict[str, Path]:
    """Returns the files of all profiles that come with the package, by name."""
    files = (Path(str(file)) for file in resources.files(FOLDER).iterdir() if file.name.endswith(".json"))
    return {file.stem: file for file in sorted(files)}


def find_profile(name: str) -> ClusterProfile:
    """Returns the profile of a file, or the shipped one of a name."""
    shipped = shipped_profiles()
    if name.lower() in shipped:
        return replace(ClusterProfile.load(shipped[name.lower()]), source=name.lower())
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return ClusterProfile.load(path)
    known = f"{', '.join(shipped)}, or a file that `distca profile` wrote"
    peak = _peak(name)
    if peak is None:
        raise ConfigError(f"--cluster {name}: choose one of {known}.{did_you_mean(name, shipped)}")

    def apart(other: str) -> float:
        return abs(math.log((_peak(other) or 1.0) / peak))

    nearest = min(shipped, key=apart)
    raise ConfigError(
        f"--cluster {name}: this GPU has no measured profile. The nearest is {nearest}, whose peak is "
        f"{(_peak(nearest) or 0) / peak:.2f} times as high: give --cluster {nearest}, the "
        "memory of yours by --gpu-gib, and take only ratios, or measure one with `distca profile`"
    )


def profile_of_device(device: str) -> ClusterProfile | None:
    """Returns the shipped profile of a GPU, by the name that torch has for it; None if there is none."""
    gpu = gpu_of_device(device)
    profiles = map(find_profile, shipped_profiles() if gpu else ())
    return next((profile for profile in profiles if gpu_of_device(profile.made.device) == gpu), None)


def gpu_gib_of(profile: ClusterProfile, given: float | None = None) -> float:
    """Returns the given memory of a GPU in GiB, or else its profile's; an H100's if the GPU is unknown."""
    return (known_gib(profile) or H100_GIB) if given is None else given


def known_gib(profile: ClusterProfile) -> float | None:
    """Returns the memory of the GPU of a profile, in GiB; None if the GPU is unknown."""
    gpu = gpu_of_device(profile.made.device)
    return None if gpu is None else gpu.gib


def _peak(name: str) -> float | None:
    return peak_flops(name.replace("_", " "))
