"""Report: pictures of a run. Needs the extra `report`."""

from collections.abc import Sequence
from pathlib import Path


def draw_balance(work_before: Sequence[Sequence[int]], work: Sequence[Sequence[int]], path: Path) -> None:
    """Draws the attention work of every rank in every micro-batch, before and after placement; 1.0 is the mean.

    Args:
        work_before, work: `[micro_batches][ranks]` attended pairs.
        path: picture to write; its ending decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_ranks = len(work[0])
    figure, panels = pyplot.subplots(
        2, 1, figsize=(min(16.0, 4.0 + 0.3 * len(work)), 5.0), sharex=True, sharey=True, layout="constrained"
    )
    for panel, title, batches in zip(
        panels, ("packed in order", "placed by distca"), (work_before, work), strict=True
    ):
        shares = [[value * num_ranks / max(1, sum(batch)) for value in batch] for batch in batches]
        for rank in range(num_ranks):
            offset = (rank - (num_ranks - 1) / 2) * 0.8 / num_ranks
            places = [1 + index + offset for index in range(len(shares))]
            panel.bar(places, [share[rank] for share in shares], 0.8 / num_ranks, label=f"rank {rank}")
        mean = sum(max(share) for share in shares) / len(shares)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{title}: max / mean work {mean:.3f}", loc="left", fontsize="medium")
        panel.set_ylabel("work / mean")
    if num_ranks <= 8:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=num_ranks)
    panels[1].set_xlabel("micro-batch")
    panels[1].margins(x=0.01)
    figure.suptitle("Attention work of each rank", x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
