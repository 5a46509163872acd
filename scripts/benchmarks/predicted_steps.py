"""Compares steps that `distca simulate` predicts with measured ones, and with published speed-ups; prints tables for
docs/simulation.md.

    python scripts/benchmarks/predicted_steps.py [--cluster h200] [--published 30]

Steps are predicted from the profile of the GPUs they were measured on, or all from one that is named. Profiles hold
times of single kernels, layers and links. They were not fitted to these steps. Attention kernels are called otherwise
since 2026-11-26 (docs/benchmarks/kernels.md): steps from before have the profiles of before.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.profiles.cluster_profile import DEFAULT_PROFILE, ClusterProfile, find_profile
from distca_hf.analysis.profiles.curves import Notes
from lib.parser import profile_name, whole
from lib.planning.predicted import Compared, MeasuredRow, compare, compare_servers, simulate_row
from lib.planning.published_setting import GPUS, MODELS, PUBLISHED, K, simulate_point, with_faster_links
from lib.tables import head, row


# GPUs of the measured servers.
SERVERS_GPU = "H200"
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
MEASURED = BENCHMARKS / "measured-steps.json"
# Profiles that were measured before long prefixes were called as they are now.
FORMER = str(BENCHMARKS / "profiles" / "{}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    profile = "profile, as distca simulate takes it; by default that of the row's GPUs"
    parser.add_argument("--cluster", type=profile_name, help=profile)
    parser.add_argument("--published", type=whole, default=0, metavar="BATCHES", help="also the published evaluation")
    options = parser.parse_args()
    for line in measured_lines(options.cluster):
        print(line)
    if options.published:
        for line in published_lines(find_profile(options.cluster or DEFAULT_PROFILE), options.published):
            print(line)


def measured_lines(cluster: str | None) -> Iterator[str]:
    """Yields a table of all ratios, and the worst error of each on each kind of GPU, from a profile: by default that
    of the GPUs of each row, and of the kernel calls of its time."""
    notes, all_compared = Notes(), list[Compared]()
    yield head(["page", "GPUs, links", "documents", "ratio", "measured", "predicted", "error"], 4)
    for values in json.loads(MEASURED.read_text())["rows"]:
        measured = MeasuredRow(**{"gpu": "H200", **values})
        own = measured.gpu if measured.heads_apart else FORMER.format(measured.gpu.lower())
        profile = find_profile(cluster or own)
        all_compared += compare(measured, simulate_row(measured, profile, notes))
    all_compared += compare_servers(MEASURED, find_profile(cluster or FORMER.format(SERVERS_GPU.lower())))
    for one in all_compared:
        ratios = f"{one.measured:.3f}", f"{one.simulated:.3f}", f"{one.error:+.1%}"
        page = one.row.page.removesuffix(".md")
        documents = f"{one.row.model} {one.row.documents}".strip()
        yield row([page, f"{one.row.gpus} {one.row.gpu}, {one.row.links}", documents, one.ratio, *ratios])
    yield ""
    yield head(["GPU", "ratio", "rows", "mean error", "worst error"], 2)
    for gpu, name in dict.fromkeys((one.row.gpu, one.ratio) for one in all_compared):
        errors = [one.error for one in all_compared if (one.row.gpu, one.ratio) == (gpu, name)]
        yield row([gpu, name, len(errors), f"{sum(errors) / len(errors):+.1%}", f"{max(errors, key=abs):+.1%}"])
    yield ""
    yield from (f"- {line}" for line in notes.lines())


def published_lines(profile: ClusterProfile, batches: int) -> Iterator[str]:
    """Yields a table of the published evaluation."""
    profile = with_faster_links(profile)
    yield head(["model", "lengths", "context", "GPUs", "DistCA ÷ baseline", "published", "distca_hf ÷ DistCA"], 3)
    for name, (_, contexts) in MODELS.items():
        for lengths, (least, most) in PUBLISHED.items():
            documents = read_lengths(Path(lengths)).tokens
            for context in contexts:
                for gpus in GPUS:
                    point = simulate_point(name, documents, context, gpus, profile, batches)
                    ratios = point.baseline / point.published, point.published / point.ours
                    words = f"{least:.2f} to {most:.2f}"
                    yield row([name, lengths, f"{context // K}K", gpus, f"{ratios[0]:.2f}", words, f"{ratios[1]:.2f}"])


if __name__ == "__main__":
    main()
