"""More bytes take no less time on simulated wires, however noisy a profile is."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, LinkTimes, find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate.wires import Cluster, WireBytes


PROFILE = find_profile("h200")
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
    # Running one after the other takes no longer than that.
    assert cluster.attention_beside == min(links.attention_beside, 1.0)
    assert any("measured to delay attention" in line for line in cluster.notes.lines()) == (links.attention_beside > 1)
