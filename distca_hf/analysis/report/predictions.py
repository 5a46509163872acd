"""Predictions: seconds of every rank in a micro-batch, from the measured profile of its GPU.

    tasks of a rank, by kind of layers ── kernel times of the profile ── attention
    tokens of a rank                   ── layer times of the profile  ── everything else

These are the costs of `distca simulate`, without exchanges and collectives. If a GPU has no profile, rates
of an H200 make an estimate, and the report says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from distca_hf.analysis.models import ModelSize, SimulatedModel
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, profile_of_device
from distca_hf.analysis.profiles.curves import FloatArray, Notes
from distca_hf.analysis.report.figures import OfRanks, Seconds
from distca_hf.analysis.simulate.costs import Costs, Tiles
from distca_hf.cost import CAUSAL_MASK, Heads, Mask
from distca_hf.errors import first_line
from distca_hf.traces import HeadSizes, LayersTrace, ModelSizes, RankTrace


@dataclass
class Predictor:
    """Predicts the micro-batches of a run.

    Args:
        named: profile for all ranks; None: the one of the setting `kernel_times` if it is in the run's folder and of
            a rank's GPU, else the shipped one of this GPU.
        folder: of the run. A trace may name any file; files outside the folder are not opened.

    Attributes:
        notes: everything that was extrapolated beyond measured sizes, or taken from other heads.
        unread: why files of the setting cannot be read.
    """

    named: ClusterProfile | None = None
    folder: Path = Path()
    notes: Notes = field(default_factory=Notes)
    unread: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shipped, self._loaded = cache(profile_of_device), cache(self._load)
        self._made: dict[tuple[str, ModelSizes, HeadSizes], Costs] = {}

    def predict(self, of_ranks: Mapping[int, RankTrace], num_ranks: int) -> Seconds:
        """Returns predicted seconds of one micro-batch; empty if there is nothing to predict from. Commas separate the
        names of several profiles. `of_ranks`: traces by rank, attention servers after the others; some may be missing.
        """
        by_gpu: dict[tuple[str, str], list[RankTrace]] = {}
        for trace in of_ranks.values():
            by_gpu.setdefault((trace.device, trace.profile), []).append(trace)
        attention: list[float | None] = [None] * num_ranks
        rest = list(attention)
        names, sources = dict[str, None](), dict[str, None]()
        for traces in by_gpu.values():
            part = self._part(traces)
            if part is None:
                continue
            names[part.rates] = sources[part.source] = None
            for trace, *seconds in zip(traces, part.predicted_attention, part.predicted_rest, strict=True):
                attention[trace.rank], rest[trace.rank] = seconds
        return Seconds(", ".join(names), "; ".join(sources), attention, rest) if names else Seconds()

    def lines(self) -> list[str]:
        return [*self.unread, *(f"Predicted seconds: {line}." for line in self.notes.lines())]

    def _part(self, traces: Sequence[RankTrace]) -> Seconds | None:
        """Returns predicted seconds of ranks with one kind of GPU."""
        model, costs, device, profile = traces[0].model, traces[0].costs, traces[0].device, self.named
        if profile is None:
            set_in_run = self._loaded(traces[0].profile) if traces[0].profile else None
            is_of_device = set_in_run is not None and set_in_run.made.device == device
            profile = set_in_run if is_of_device else self._shipped(device)
        if profile is not None and model is not None and model.heads:
            tokens = np.array([trace.tokens for trace in traces])
            of_layers = self._costs(profile, model, model.heads[0])
            return Seconds(
                profile.source,
                f"the measured profile {profile.source} of {profile.made.device}",
                self._attention(profile, model, traces),
                of_layers.rest_seconds(tokens, model.recomputes_layers, model.backward_share).tolist(),
            )
        if costs is None:
            return None
        pair_seconds = costs.pair_forward_seconds + costs.pair_backward_seconds
        known = "sizes of the model are not known" if profile is not None else f"no profile was measured on {device}"
        return Seconds(
            costs.rates,
            f"the rates of an {costs.rates}, an estimate: {known}",
            [trace.work[trace.rank] * pair_seconds for trace in traces],
            [trace.tokens * costs.token_seconds for trace in traces],
        )

    def _load(self, path: str) -> ClusterProfile | None:
        """Returns the profile in a file; None, with a note, if it cannot be read here."""
        try:
            file = Path(path).resolve()
            if file.is_relative_to(self.folder.resolve()) and file.is_file():
                return ClusterProfile.load(file)
            words = f"{path} is not a file in the folder of the run; give it with --cluster"
        except (OSError, ValueError) as error:
            words = first_line(error)
        self.unread[f"The file of the setting kernel_times is not a profile to predict from: {words}."] = None
        return None

    def _attention(self, profile: ClusterProfile, model: ModelSizes, traces: Sequence[RankTrace]) -> OfRanks:
        """Returns `[traces]` seconds of attention in all layers; None if tasks are not known."""
        total = np.zeros(len(traces))
        for kinds in zip(*(trace.kinds for trace in traces), strict=False):
            window = kinds[0].window_tokens
            heads = next((heads for heads in model.heads if heads.window_tokens == window), model.heads[0])
            is_full = not window or window >= traces[0].longest_document_tokens
            mask = CAUSAL_MASK if is_full else Mask(window, kinds[0].chunked)
            seconds = _of_kind(self._costs(profile, model, heads), kinds, mask, model)
            total += kinds[0].layers * seconds
        return [None if np.isnan(one) else float(one) for one in total]

    def _costs(self, profile: ClusterProfile, model: ModelSizes, heads: HeadSizes) -> Costs:
        key = profile.source, model, heads
        if key in self._made:
            return self._made[key]
        size = ModelSize(
            layers=model.layers,
            hidden_size=model.hidden_size,
            vocabulary=round(model.head_weights / model.hidden_size),
            parameters=model.layer_weights + model.head_weights,
            layer_parameters=model.layer_weights,
            embedding_parameters=model.head_weights,
        )
        of_layer = Heads(heads.query, heads.key_value, heads.dim, heads.value_dim, heads.groups)
        simulated = SimulatedModel("", of_layer, size=size)
        self._made[key] = costs = Costs(profile, simulated, model.liger, self.notes, model.tensor_ranks)
        return costs


def _of_kind(costs: Costs, kinds: Sequence[LayersTrace], mask: Mask, model: ModelSizes) -> FloatArray:
    """Returns `[traces]` seconds of attention in a layer of one kind; NaN if its tasks are not known."""
    rows = [(place, *task) for place, kind in enumerate(kinds) for task in kind.tasks or ()]
    place, queries, before, one_group = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    remote = np.zeros(len(rows), dtype=bool)  # who holds them makes no difference to kernels
    tiles = Tiles.of_tasks(mask, place, queries, before, one_group.astype(bool), remote)
    passes = costs.seconds(tiles)
    seconds = passes.forward * (1 + model.recomputes_attention) + passes.backward
    unknown = np.array([np.nan if kind.tasks is None else 0.0 for kind in kinds])
    total: FloatArray = unknown + np.bincount(tiles.rank, seconds, len(kinds))
    return total
