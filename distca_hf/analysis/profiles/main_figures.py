"""Main figures: writes a profile, and the few numbers of it that a reader looks at first, as JSON and in words."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distca_hf.analysis.profiles.cluster_profile import AttentionTimes, ClusterProfile, LinkTimes
from distca_hf.analysis.profiles.kernel_times import kernel_times_of
from distca_hf.analysis.profiles.shipped import DEFAULT_FILE
from distca_hf.cost import causal_pairs
from distca_hf.errors import ConfigError
from distca_hf.flops import ATTENTION_BACKWARD
from distca_hf.whole_file import replaced


@dataclass(frozen=True)
class LinkFigures:
    """Links within a node, or between nodes.

    Attributes:
        ranks: ranks that measured.
        exchange_bytes_per_second, all_gather_bytes_per_second, reduce_scatter_bytes_per_second: of the largest size.
        exchange_latency_seconds: of an exchange of the smallest size.
    """

    ranks: int
    exchange_bytes_per_second: float
    all_gather_bytes_per_second: float
    reduce_scatter_bytes_per_second: float
    exchange_latency_seconds: float

    @classmethod
    def of(cls, links: LinkTimes) -> "LinkFigures":
        """Returns the figures of measured links."""
        times = (links.exchange, links.all_gather, links.reduce_scatter)
        exchange, gather, reduce = (links.num_bytes[-1] / seconds[-1] for seconds in times)
        return cls(links.ranks, exchange, gather, reduce, links.exchange[0])


@dataclass(frozen=True)
class MainFigures:
    """A profile in short.

    Attributes:
        file: of the profile.
        device, kernel, processes, nodes, date: see `Made`.
        matrix_flops: operations per second of a large matrix product.
        attention_tokens: queries of the longest document that was measured.
        attention_forward_flops, attention_backward_flops: operations per second for that document.
        layer_tokens_per_second: tokens that one layer without attention computes forward and backward, kept in
            between; of the first measured layer, in its largest call.
        within_node, between_nodes: links; None where they were not measured.
    """

    file: str
    device: str
    kernel: str
    processes: int
    nodes: int
    date: str
    matrix_flops: float
    attention_tokens: int
    attention_forward_flops: float
    attention_backward_flops: float
    layer_tokens_per_second: float
    within_node: LinkFigures | None
    between_nodes: LinkFigures | None

    @classmethod
    def of(cls, profile: ClusterProfile, file: Path) -> "MainFigures":
        """Returns the figures of a profile, and the path of its file."""
        made, attention = profile.made, profile.attention[0]
        flops, layer = _flops_of_longest(attention), profile.layers[0]
        return cls(
            file=str(file),
            device=made.device,
            kernel=made.kernel,
            processes=made.processes,
            nodes=made.nodes,
            date=made.date,
            matrix_flops=profile.rates.matrix_flops,
            attention_tokens=int(attention.square_tokens[-1]),
            attention_forward_flops=flops / attention.square_forward[-1],
            attention_backward_flops=ATTENTION_BACKWARD * flops / attention.square_backward[-1],
            layer_tokens_per_second=layer.tokens[-1] / (layer.kept[-1] + layer.backward[-1]),
            within_node=None if profile.within_node is None else LinkFigures.of(profile.within_node),
            between_nodes=None if profile.between_nodes is None else LinkFigures.of(profile.between_nodes),
        )

    def as_json(self) -> dict[str, Any]:
        """Returns all figures by their names."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns all figures in words."""
        rates = (self.matrix_flops, self.attention_forward_flops, self.attention_backward_flops)
        matrix, forward, backward = (f"{flops / 1e12:.3g}" for flops in rates)
        return [
            f"{self.file}: {self.processes} x {self.device}, {self.kernel}, {self.date}",
            f"matrix products {matrix} TFLOP/s; attention over {self.attention_tokens:,} tokens {forward} forward, "
            f"{backward} backward",
            f"a layer without attention, forward and backward: {self.layer_tokens_per_second:,.0f} tokens/s",
            *(
                f"links {name}: {_link_words(links)}"
                for name, links in (("within a node", self.within_node), ("between nodes", self.between_nodes))
            ),
        ]


def _flops_of_longest(attention: AttentionTimes) -> float:
    """Returns the operations of the forward pass of the longest square: two products for each pair."""
    pairs = causal_pairs(0, int(attention.square_tokens[-1]))
    return 2.0 * 2 * attention.head_dim * attention.heads * float(pairs)


def _link_words(links: LinkFigures | None) -> str:
    if links is None:
        return "not measured"
    rates = (links.exchange_bytes_per_second, links.all_gather_bytes_per_second, links.reduce_scatter_bytes_per_second)
    exchange, gather, reduce = (f"{rate / 1e9:.3g}" for rate in rates)
    return (
        f"{exchange} GB/s exchanged, {gather} gathered, {reduce} reduced; an exchange takes "
        f"{links.exchange_latency_seconds * 1e6:.0f} us or more"
    )


def write(profile: ClusterProfile, path: Path) -> None:
    """Writes a profile; the file can also be given to the setting `kernel_times`.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = profile.as_json() | {"kernel_times": kernel_times_of(profile.attention[0])}
    try:
        with replaced(path, named=path != DEFAULT_FILE) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
