"""More bytes, slower links and more of FSDP's traffic make no simulated step faster, however noisy a profile is."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.analysis.models import SimulatedModel, preset
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, LinkTimes, find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate import ways
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Load, ours
from distca_hf.analysis.simulate.step import Training
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.cost import Mask
from distca_hf.placement.place import fill_in_order, place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from lib.planning import bench_ways
from lib.planning.published_setting import published


PROFILE = find_profile("h200")
MODEL = replace(SimulatedModel.of(preset("llama3-8b")), window_layers=((Mask(1024), 24),))
LENGTHS, RANKS = np.array([40_000, 24_000, *[3000] * 12]), 4
PLACED = plan_in_place(place(LENGTHS, RANKS, head_groups=8), 8)
MOVED = plan_by_moving(fill_in_order(LENGTHS, RANKS), 8)
# A little is lost to rounding.
ROUNDED = 1 + 1e-9

SIZES = tuple(2.0**power for power in (16, 19, 22, 25, 28, 30))
TIMES = st.lists(st.floats(1e-5, 0.1), min_size=len(SIZES), max_size=len(SIZES)).map(tuple)
BYTES = st.sampled_from([0.0, 1.0, *SIZES]) | st.floats(0, 2.0**32)
FACTORS = st.floats(1, 3)


def links_of(*times: tuple[float, ...], beside: float = 0.0) -> LinkTimes:
    return LinkTimes(2, SIZES, *times[:3], beside, beside, "today", "none", 1, *times[3:])


NOISY = st.builds(links_of, TIMES, TIMES, TIMES, beside=st.floats(0, 30))
NEWER = st.builds(links_of, TIMES, TIMES, TIMES, TIMES, TIMES, beside=st.floats(0, 30))


def with_links(links: LinkTimes) -> ClusterProfile:
    return replace(PROFILE, within_node=links, between_nodes=links)


@given(NOISY | NEWER, BYTES, BYTES, FACTORS, FACTORS)
def test_more_bytes_take_no_less(links: LinkTimes, sent: float, received: float, more: float, others: float) -> None:
    cluster = Cluster(with_links(links), 2, 1, Notes())

    def seconds(sent: float, received: float) -> float:
        nothing = WireBytes.both_ways(np.zeros(1))
        return float(cluster.exchange(nothing, WireBytes(np.array([sent]), np.array([received])))[0])

    assert seconds(sent, received) <= ROUNDED * seconds(more * sent, others * received)
    assert seconds(sent, received) == seconds(received, sent)
    assert float(cluster.to_next(np.array(sent), 2)[0]) <= ROUNDED * float(
        cluster.to_next(np.array(more * sent), 2)[0]
    )
    assert cluster.all_gather(sent) <= ROUNDED * cluster.all_gather(more * sent)


@settings(max_examples=20, deadline=None)
@given(NOISY | NEWER, FACTORS, FACTORS, st.booleans(), st.booleans())
def test_slower_links_and_more_of_fsdps_traffic_take_no_less(
    links: LinkTimes, exchanges: float, collectives: float, checkpointed: bool, saves: bool
) -> None:
    names = {
        **dict.fromkeys(("exchange", "one_way", "to_next"), exchanges),
        **dict.fromkeys(("all_gather", "reduce_scatter"), collectives),
    }
    times: dict[str, Any] = {name: tuple(x * by for x in getattr(links, name)) for name, by in names.items()}
    slower = replace(links, **times)
    before, behind = (_seconds(each, checkpointed, saves) for each in (links, slower))
    assert all(before[way] <= ROUNDED * behind[way] for way in before), (before, behind)


def _seconds(links: LinkTimes, checkpointed: bool, saves: bool) -> dict[str, float]:
    """Returns the seconds of a micro-batch in every way, with all links like these."""
    costs = Costs(with_links(links), MODEL, False, Notes())
    cluster = Cluster(costs.profile, RANKS, 2, costs.notes)
    training = Training(costs, cluster, checkpointed)
    loads: dict[str, Load] = {
        "packing": ways.plain_packing(costs, LENGTHS, RANKS),
        "ulysses": ways.ulysses(costs, cluster, LENGTHS, 2),
        "ring": ways.ring(costs, cluster, LENGTHS, RANKS),
        "gathered": bench_ways.gathered(costs, cluster, [LENGTHS], RANKS),
        "published": published(costs, cluster, LENGTHS, 0.05),
        "placed": ours(costs, cluster, PLACED, 4, saves),
        "moved": ours(costs, cluster, MOVED, 1, saves),
        "sent twice": ours(costs, cluster, MOVED, 1, saves, keeps=False),
    }
    return {name: training.micro_batch_seconds(load) for name, load in loads.items()}
