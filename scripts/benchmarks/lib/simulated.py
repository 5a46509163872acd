"""Ratios of a measured step, and those that `distca simulate` predicts for it from a profile of such GPUs.

Experts that are divided between ranks are not simulated: a layer's time then depends on how many tokens each of them
gets, and profiles have no all-to-all in the midst of a layer.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.config import DistCAConfig
from distca_hf.layout import Topology
from lib.planning.predicted import Setting, model_of, simulate
from lib.tables import figure, table_of


# Modes, and their names in the simulation.
NAMES = {"placed": "recomputed"} | {name: name for name in ("local", "ideal", "ulysses", "context")}
RATIOS = (("local", "placed"), ("placed", "ideal"), ("ulysses", "ideal"), ("context", "ideal"))
Ratios = dict[str, tuple[float, float]]


def refused(options: argparse.Namespace) -> str | None:
    """Returns why a step is not simulated; None if it is."""
    if options.ep_size > 1:
        return f"experts that {options.ep_size} ranks divide are not simulated"
    if options.share_tokens:
        return "the part of one rank is not simulated"
    if options.checkpointing == "offloaded":
        return "attention outputs that wait on the host are not simulated"
    if not options.fsdp:
        return "steps are simulated under FSDP2: leave --no-fsdp out"
    return None


def ratios_of(options: argparse.Namespace, config: Any, seconds: Mapping[str, float], data_ranks: int) -> Ratios:
    """Returns each ratio of two modes, measured and simulated from the profile of `--cluster`.

    Args:
        seconds: measured steps of the modes, by name.
        data_ranks: that share the documents.
    """
    notes, text = Notes(), config.get_text_config()
    setting = Setting(
        model_of(config.to_dict()),
        np.array(options.lengths),
        data_ranks,
        slow=os.environ.get("NCCL_P2P_DISABLE") == "1",
        reduce_bytes=options.reduce_dtype.itemsize,
        root_share=1.0 if text.tie_word_embeddings else 0.5,
        tensor_ranks=options.tp_size,
        replicas=options.dp_replicate_size,
        liger=options.liger,
        checkpointing=options.checkpointing,
        keeps=DistCAConfig().kv_residency != "refetch",
        chunks=DistCAConfig().num_chunks(Topology(data_ranks, data_ranks)),
    )
    known = [name for name in seconds if name in NAMES]
    simulated = simulate(setting, [NAMES[name] for name in known], find_profile(options.cluster), notes)
    return {
        f"{above} ÷ {below}": (seconds[above] / seconds[below], simulated[NAMES[above]] / simulated[NAMES[below]])
        for above, below in RATIOS
        if above in known and below in known
    }


def table(ratios: Ratios) -> str:
    """Returns a Markdown table with a row for each ratio."""
    figures = {name: dict(zip(("measured", "simulated"), both, strict=True)) for name, both in ratios.items()}
    return table_of(
        {
            "measured": figure("measured", 1, 3),
            "simulated": figure("simulated", 1, 3),
            "simulated ÷ measured": lambda of: f"{of['simulated'] / of['measured'] - 1:+.1%}",
        },
        figures,
        "ratio",
    )
