"""Simulated steps: equations by hand, and what has to hold for any documents."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.analysis.models import SimulatedModel, llama_shape, preset
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate import simulation as run
from distca_hf.analysis.simulate import ways
from distca_hf.analysis.simulate.costs import Costs, Passes, Tiles
from distca_hf.analysis.simulate.load import Exchanges, Hidden, Load, ours, waited_for
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import make_result
from distca_hf.analysis.simulate.simulation import Simulation, run_steps
from distca_hf.analysis.simulate.step import Training
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.arrays import IntArray
from distca_hf.cost import Mask
from distca_hf.errors import ConfigError, PackingError
from distca_hf.layout import Layout
from distca_hf.placement.place import fill_in_order, place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.transfers import bytes_between
from lib.planning import bench_ways
from lib.planning.planners import whole_documents
from lib.planning.published_setting import published


PROFILE = find_profile("h200")
assert PROFILE.between_nodes is not None
# All sends take as long as those of an all-to-all.
ONE_RATE = replace(PROFILE, between_nodes=replace(PROFILE.between_nodes, one_way=(), to_next=()))
MODEL = SimulatedModel.of(preset("llama3-8b"))


def costs_of(model: SimulatedModel = MODEL, profile: ClusterProfile = PROFILE, tensor_ranks: int = 1) -> Costs:
    return Costs(profile, model, False, Notes(), tensor_ranks)


def training_of(ranks: int, ranks_per_node: int = 8, model: SimulatedModel = MODEL) -> Training:
    costs = costs_of(model)
    return Training(costs, Cluster(PROFILE, ranks, min(ranks, ranks_per_node), costs.notes))


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


# Equations.


NOTHING = np.zeros(1)


def test_chunks_are_attended_as_they_come() -> None:
    """Local calls of 1 s, 4 s of others' rows in two chunks, an exchange of 6 s that brings the second after 6 s."""
    local, remote = Passes(array(1.0), array(8.0)), Passes(array(4.0), array(2.0))
    late, wires = Passes(array(0.5), array(2.5)), Exchanges(array(6.0), NOTHING, NOTHING, array(5.0))
    of = Hidden(wires, chunks=2).attention(local, remote, late, 1)

    assert of.forward.tolist() == [8.0]  # 3 s until the first chunk, 2 s of it, wait for the second, 2 s of it
    assert of.recomputed.tolist() == [5.0]
    assert of.backward.tolist() == [10.0 + 5.0 - 2.5]  # late calls run while gradients leave
    assert (of.sent.tolist(), of.sent_backward.tolist()) == ([6.0], [5.0])


def test_rows_come_later_where_weights_are_gathered_meanwhile() -> None:
    """The wires are shared for 2 s, or for as long as rows take."""
    local, remote, late = Passes(array(1.0), array(8.0)), Passes(array(4.0), array(2.0)), Passes(NOTHING, NOTHING)
    wires = Exchanges(array(6.0), NOTHING, NOTHING, array(5.0))
    alone, shared, throughout = (
        Hidden(wires, gathering=gathering).attention(local, remote, late, 1) for gathering in (0.0, 2.0, 9.0)
    )

    assert [alone.forward[0], shared.forward[0], throughout.forward[0]] == [6.0 + 4.0, 8.0 + 4.0, 12.0 + 4.0]
    assert alone.recomputed == shared.recomputed  # rows are there
    assert alone.sent == shared.sent == throughout.sent


def test_results_of_queries_that_move_leave_beside_late_calls() -> None:
    """Half of the late calls are left for the way of results, the others are early: rows come."""
    local, remote = Passes(array(4.0), array(9.0)), Passes(array(3.0), array(8.0))
    late, wires = Passes(array(2.0), array(4.0)), Exchanges(array(4.0), array(2.0), array(8.0), array(6.0))
    of = Hidden(wires, moves_queries=True).attention(local, remote, late, 1)

    assert of.forward.tolist() == [4.0 + 3.0 + 2.0]  # 4 s of rows, calls, 2 s of results beside 1 s of late calls
    assert of.recomputed.tolist() == [3.0 + 3.0 + 2.0]  # rows are there
    assert of.backward.tolist() == [8.0 + 8.0 + 6.0]  # output gradients come in 8 s, beside 7 s of early calls


def test_rows_that_are_not_kept_are_sent_three_times() -> None:
    """In backward with the outputs and output gradients of queries that move."""
    local, remote, late = Passes(array(1.0), array(2.0)), Passes(array(4.0), array(8.0)), Passes(NOTHING, NOTHING)
    wires = Exchanges(array(6.0), NOTHING, array(1.0), array(5.0))
    of = Hidden(wires, keeps=False).attention(local, remote, late, 1)

    assert of.forward.tolist() == of.recomputed.tolist() == [10.0]
    assert of.backward.tolist() == [6.0 + 2.0 + 8.0 + 5.0]
    assert of.sent_backward.tolist() == [6.0 + 2.0 + 5.0]


def test_exchanges_that_kernels_hide_cost_their_delay_alone() -> None:
    local, remote = Passes(array(10.0, 12.0), array(30.0, 36.0)), Passes(array(2.0, 0.0), array(6.0, 0.0))
    late, none = Passes(array(0.0, 0.0), array(9.0, 9.0)), array(0.0, 0.0)
    wires = Exchanges(array(1.0, 0.0), none, none, array(1.0, 0.0))
    of = Hidden(wires, kernel_delay=0.5).attention(local, remote, late, 1)

    assert of.forward.tolist() == [12.5, 12.0]
    assert of.backward.tolist() == [36.5, 36.0]


def test_an_exchange_that_kernels_wait_for_delays_none() -> None:
    """A rank without local calls waits for all rows, and for the end of its results."""
    local, remote = Passes(NOTHING, NOTHING), Passes(array(5.0), array(9.0))
    late, wires = Passes(NOTHING, NOTHING), Exchanges(array(4.0), array(2.0), array(1.0), array(3.0))
    of = Hidden(wires, moves_queries=True, kernel_delay=0.5).attention(local, remote, late, 1)

    assert of.forward.tolist() == [4.0 + 5.0 + 2.0]
    assert of.backward.tolist() == [1.0 + 9.0 + 3.0]


def test_each_exchange_has_bytes_of_its_own() -> None:
    """A rank that sends a long document's queries gets as many outputs back, one after the other."""
    costs = costs_of()
    layout = Layout.from_packs([np.array([65_536]), np.array([4096] * 16)])
    plan = plan_by_moving(layout, 8)
    cluster = Cluster(ONE_RATE, 2, 1, costs.notes)
    (attention,) = ours(costs, cluster, plan, 4, False).attention
    num_bytes = bytes_between(plan, MODEL.heads.token_bytes(2))

    assert plan.moves_queries
    both = WireBytes.both_ways(array(float(num_bytes[0, 1] + num_bytes[1, 0])))
    seconds = cluster.exchange(WireBytes.both_ways(NOTHING), both)
    assert attention.sent[0] == pytest.approx(float(seconds[0]), rel=0.01)


def test_layers_with_windows_exchange_the_keys_before_each_part() -> None:
    """A document over two ranks: 1,023 keys of the first rank go to the second, and their gradients come back."""
    model = replace(MODEL, window_layers=((Mask(1024), 4),), full_layers=0)
    costs = costs_of(model)
    plan = plan_in_place(Layout.from_segments([80_000], [[(0, 0, 40_000)], [(0, 40_000, 80_000)]]), 8)
    cluster = Cluster(ONE_RATE, 2, 1, costs.notes)
    (attention,) = ours(costs, cluster, plan, 1, False).attention
    sent = WireBytes.both_ways(np.full(2, 1023.0 * MODEL.heads.token_bytes(2).key_value))
    seconds = cluster.exchange(WireBytes.both_ways(np.zeros(2)), sent)

    assert attention.sent == pytest.approx(seconds)
    assert attention.sent_backward == pytest.approx(seconds)
    whole = costs.attention(np.full(2, 40_000), array(0, 40_000), Mask(1024))
    assert attention.forward == pytest.approx(whole.forward, rel=0.05)


def test_tiles_of_a_cut_document_by_hand() -> None:
    """Rank 0 holds tokens 0 to 5, rank 1 tokens 6 to 9 of one document."""
    layout = Layout.from_segments([10], [[(0, 0, 6)], [(0, 6, 10)]])
    full, window = Tiles.of(plan_in_place(layout)), Tiles.of(plan_in_place(layout), Mask(3))

    columns = [(x.rank.tolist(), x.queries.tolist(), x.keys.tolist(), x.pairs.tolist()) for x in (full, window)]
    assert columns[0] == ([0, 1, 1], [6, 4, 4], [0, 0, 6], [21, 10, 24])
    # A query attends itself and the two tokens before: the first two queries of rank 1 attend keys of rank 0.
    assert columns[1] == ([0, 1, 1], [6, 4, 4], [0, 0, 2], [15, 9, 3])
    assert full.waits.tolist() == window.waits.tolist() == [False, False, True]
    moved = Tiles.of(plan_by_moving(Layout.from_packs([[90], []]), 8))
    assert moved.waits.tolist() == [bool(rank) or keys > 0 for rank, keys in zip(moved.rank, moved.keys, strict=True)]


def test_a_task_is_a_square_and_a_prefix() -> None:
    costs, full = costs_of(), PROFILE.attention[0]
    at, row, column = (
        full.square_tokens.index(2048.0),
        full.prefix_queries.index(2048.0),
        full.prefix_keys.index(8192.0),
    )
    seconds = costs.attention(array(2048), array(8192))

    assert seconds.forward[0] == pytest.approx(full.square_forward[at] + full.prefix_forward[row][column])
    assert seconds.backward[0] == pytest.approx(full.square_backward[at] + full.prefix_backward[row][column])
    # Twice as many heads take twice as long, and two tensor ranks half of it.
    wide = SimulatedModel.of(llama_shape("wide", (64, 16, 128), (32, 4096, 14_336, 128_256)))
    assert costs_of(wide).attention(array(2048), array(8192)).forward == pytest.approx(2 * seconds.forward)
    assert costs_of(tensor_ranks=2).attention(array(2048), array(8192)).forward == pytest.approx(seconds.forward / 2)


def test_windows_cost_their_pairs() -> None:
    times = next(times for times in PROFILE.attention if times.window_tokens == 1024)
    tokens = times.square_tokens[-1]
    costs, mask = costs_of(), Mask(1024)

    assert costs.attention(array(tokens), array(0), mask).forward == pytest.approx(times.square_forward[-1])
    whole, half = costs.attention(array(tokens), array(0), mask), costs.attention(array(tokens), array(0), Mask(512))
    assert half.forward[0] / whole.forward[0] == pytest.approx(0.5, rel=0.01)
    assert any("window of 512" in line for line in costs.notes.lines())


def test_layers_of_other_models_are_scaled_and_said() -> None:
    costs = costs_of(SimulatedModel.of(preset("qwen3-32b")))
    tokens = np.array([16_384])

    ratio = float(costs.layer(tokens).forward[0] / costs_of().layer(tokens).forward[0])
    weights = preset("qwen3-32b").size.layer_parameters / 64 / 218_103_808  # type: ignore[union-attr]
    assert 0.8 * weights < ratio < 1.2 * weights
    assert any("hidden size 5,120" in line for line in costs.notes.lines())


def test_collectives_over_nodes_share_their_wires() -> None:
    """Every node receives all bytes, and its ranks share them."""
    notes = Notes()
    one, eight = Cluster(PROFILE, 2, 1, notes), Cluster(PROFILE, 16, 8, notes)
    weights = 64 * 2.0**20

    ratio = one.all_gather(2 * weights) / eight.all_gather(8 * weights * 16 / 15)
    assert ratio == pytest.approx(1.0)
    assert Cluster(PROFILE, 8, 8, notes).all_gather(weights) < one.all_gather(weights)
    assert Cluster(PROFILE, 1, 1, notes).all_gather(weights) == 0.0


def test_bytes_that_go_one_way_are_sent_at_the_rate_of_one_way() -> None:
    """Two ways of 1 GB take as long as was measured; of 1 GB against half, half goes alone."""
    links = PROFILE.between_nodes
    assert links is not None
    alone = tuple(seconds / 2 for seconds in links.exchange)
    cluster = Cluster(replace(PROFILE, between_nodes=replace(links, one_way=alone)), 2, 1, Notes())
    nothing, whole, half = array(0.0), array(2.0**30), array(2.0**29)

    def seconds_of(sent: np.ndarray, received: np.ndarray) -> float:
        return float(cluster.exchange(WireBytes.both_ways(nothing), WireBytes(sent, received))[0])

    assert seconds_of(whole, whole) == pytest.approx(links.exchange[-1])
    assert seconds_of(whole, nothing) == seconds_of(nothing, whole) == pytest.approx(links.exchange[-1] / 2)
    both = seconds_of(half, half)
    assert seconds_of(half, whole) == pytest.approx(links.exchange[-1] / 2 + both / 2, rel=1e-3)
    assert seconds_of(nothing, nothing) == 0.0


@pytest.mark.parametrize("factors", [(0.5, 1, 0.5, 1, 0.5, 1), (2,) * 6, (3, 0.5, 3, 0.5, 3, 0.5)])
def test_both_ways_at_once_take_as_long_as_was_measured(factors: tuple[float, ...]) -> None:
    """Also where times of another size have more between both ways and one, or one way took longer than both."""
    links = PROFILE.between_nodes
    assert links is not None
    alone = tuple(by * seconds for by, seconds in zip(factors, links.exchange, strict=True))
    num_bytes = np.geomspace(links.num_bytes[0], 4 * links.num_bytes[-1], 50)
    nothing, whole, sent = (
        WireBytes.both_ways(np.zeros(50)),
        WireBytes.both_ways(num_bytes),
        WireBytes(num_bytes, 0 * num_bytes),
    )

    cluster, one_rate = (
        Cluster(replace(PROFILE, between_nodes=replace(links, one_way=times)), 50, 1, Notes()) for times in (alone, ())
    )
    both_ways = one_rate.exchange(nothing, whole)
    assert cluster.exchange(nothing, whole) == pytest.approx(both_ways)
    assert (cluster.exchange(nothing, sent) <= 1.000001 * both_ways).all()


def test_rings_pass_keys_to_the_next_rank() -> None:
    """Where a ring spans nodes, some ranks send all of them to another node."""
    links = PROFILE.within_node
    assert links is not None
    passed = replace(PROFILE, within_node=replace(links, to_next=tuple(3 * seconds for seconds in links.exchange)))
    cluster, num_bytes = Cluster(passed, 16, 8, Notes()), array(2.0**30)
    assert passed.between_nodes is not None

    assert cluster.to_next(num_bytes, 8)[0] == pytest.approx(3 * links.exchange[-1])
    assert cluster.to_next(num_bytes, 16)[0] == pytest.approx(passed.between_nodes.to_next[-1])


def test_groups_that_begin_within_a_node_and_end_in_another_use_links_between_nodes() -> None:
    """Three GPUs of a node, groups of two: the second group is on two nodes."""
    cluster, num_bytes = Cluster(PROFILE, 6, 3, Notes()), array(2.0**30)
    within, between = PROFILE.within_node, PROFILE.between_nodes
    assert within is not None
    assert between is not None

    assert cluster.share_beyond(2).tolist() == [0, 0, 1, 1, 0, 0]
    assert cluster.share_beyond(6).tolist() == [3 / 5] * 6
    inside, across = within.exchange[-1], between.to_next[-1]
    assert cluster.to_next(num_bytes, 2) == pytest.approx([inside, inside, across, across, inside, inside])
    lengths = np.full(6, 8192)
    apart = training_of(6, 3)
    whole_nodes = training_of(6, 2)
    seconds = [
        [load.attention[0].forward.max() for load in (ways.ulysses(t.costs, t.cluster, lengths, 2),)]
        for t in (apart, whole_nodes)
    ]
    assert seconds[0] > seconds[1]


def test_collectives_delay_exchanges_that_kernels_wait_for() -> None:
    """A layer's weights are gathered from its beginning on: what is left of that behind the first products shares the
    wires, and so does the sum of gradients in backward. Meanwhile no products run that it could delay."""
    training = training_of(4, 1)
    tokens, kernels = np.full(4, 4096), Passes(np.full(4, 1e-3), np.full(4, 3e-3))
    layer, size = training.costs.layer(tokens), training.costs.layer_weight_bytes
    gather, reduce = training.gather_seconds(size), training.reduce_seconds(size)
    share, beside = training.costs.share_before_attention, training.cluster.products_beside
    before = share * layer.forward.max()
    waits = np.full(4, 10 * (gather + reduce))

    def seconds_of(sent: np.ndarray) -> tuple[float, float]:
        load = Load(tokens, [waited_for(kernels, 1, waits, sent)])
        return training.layers_seconds(load)

    alone, shared = seconds_of(np.zeros(4)), seconds_of(waits)
    assert before < gather
    assert shared[0] - alone[0] == pytest.approx((1 - beside) * (gather - before))
    assert shared[1] - alone[1] == pytest.approx((1 - beside) * (gather + reduce - share * layer.kept.max()))


def test_links_that_were_not_measured_are_refused() -> None:
    within = replace(PROFILE, between_nodes=None)

    Cluster(within, 8, 8, Notes())
    with pytest.raises(ConfigError, match="links between nodes were not measured, and 16 ranks, 8 per node"):
        Cluster(within, 16, 8, Notes())
    with pytest.raises(
        ConfigError, match=r"links within a node were not .* `distca profile` on a node of several GPUs"
    ):
        Cluster(replace(PROFILE, within_node=None), 16, 8, Notes())


# What has to hold.

LENGTHS = st.lists(st.integers(16, 40_000), min_size=4, max_size=20).map(np.array)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4]))
def test_no_way_is_faster_than_an_even_one(lengths: IntArray, ranks: int) -> None:
    """But for rates, which differ a little between shapes of tasks."""
    training = training_of(ranks)
    least = training.micro_batch_seconds(bench_ways.even(training.costs, lengths, ranks))
    layout = place(lengths, ranks, head_groups=8)
    loads = [
        ways.whole_documents(training.costs, lengths, ranks),
        ways.ulysses(training.costs, training.cluster, lengths, ranks),
        ways.ring(training.costs, training.cluster, lengths, ranks),
        bench_ways.gathered(training.costs, training.cluster, [lengths], ranks),
        published(training.costs, training.cluster, lengths, 0.0),
        ours(training.costs, training.cluster, plan_in_place(layout, 8), 1, False),
        ours(training.costs, training.cluster, plan_by_moving(fill_in_order(lengths, ranks), 8), 1, False),
    ]

    for load in loads:
        assert training.micro_batch_seconds(load) > 0.9 * least
        assert int(load.tokens.sum()) >= int(lengths.sum())


@settings(max_examples=20, deadline=None)
@given(LENGTHS)
def test_on_one_rank_all_ways_are_one(lengths: IntArray) -> None:
    training = training_of(1)
    plain = training.micro_batch_seconds(ways.plain_packing(training.costs, lengths, 1))

    for load in (
        bench_ways.even(training.costs, lengths, 1),
        ways.whole_documents(training.costs, lengths, 1),
        ours(training.costs, training.cluster, plan_in_place(place(lengths, 1), 8), 1, False),
    ):
        assert training.micro_batch_seconds(load) == pytest.approx(plain)


def test_slow_links_cost_ulysses_more_than_ours() -> None:
    lengths = np.array([65_536, *[4096] * 48])
    seconds = {}
    for per_node in (4, 1):
        training = training_of(4, per_node)
        plan = plan_in_place(place(lengths, 4, head_groups=8), 8)
        for name, load in (
            ("ulysses", ways.ulysses(training.costs, training.cluster, lengths, 4)),
            ("ours", ours(training.costs, training.cluster, plan, 4, False)),
            ("even", bench_ways.even(training.costs, lengths, 4)),
        ):
            seconds[name, per_node] = training.micro_batch_seconds(load)

    assert seconds["ulysses", 1] / seconds["even", 1] > 1.15 > seconds["ulysses", 4] / seconds["even", 4]
    assert seconds["ours", 1] / seconds["even", 1] < 1.05


def test_the_longest_first_counts_matrices_too() -> None:
    """By attention alone, the rank without the long document would hold nearly all other tokens."""
    lengths = np.array([30_000, *[1000] * 120])
    held = ways.longest_first(costs_of(), lengths, 2)
    by_pairs = whole_documents(lengths, 2)

    assert max(int(x.sum()) for x in held) < 95_000 < max(int(lengths[x].sum()) for x in by_pairs)
    assert sorted(np.concatenate(held).tolist()) == sorted(lengths.tolist())


def test_best_fit_keeps_documents_whole_where_it_can() -> None:
    assert [x.tolist() for x in ways.best_fit(np.array([3, 8, 5, 8, 4, 4]), 4)] == [[8], [8], [5, 3], [4, 4]]
    # Longer than a pack: cut into packs. No room: cut to fill what is left.
    held = ways.best_fit(np.array([20, 7, 7, 6]), 4)
    assert [int(x.sum()) for x in held] == [10] * 4
    # Pairs between the halves of 20 and of 6.
    left_out = ways.left_out_pairs(MODEL, held, np.array([20, 7, 7, 6]))
    assert left_out == MODEL.attention_layers * (10 * 10 + 3 * 3)


# Two micro-batches of 8 x 64K tokens, with two long documents each.
MIXED = [*[65_536] * 4, *[2048] * 384]


def simulate(lengths: list[int], **options: object) -> tuple[Simulation, dict[str, float], str]:
    given = {"gpus": 8, "tokens_per_rank": 65_536, "context_tokens": None, "batches": 2, **options}
    request = SimulationRequest(given.pop("model", MODEL), **given)  # type: ignore[arg-type]
    steps = request.steps(np.array(lengths))
    simulation, done = run_steps(request, PROFILE, steps)
    result = make_result(simulation, steps, done, 1e9)
    return simulation, {way.key: way.step_seconds for way in result.ways}, result.in_short()


def test_a_long_document_among_short_ones_is_worth_it() -> None:
    _, seconds, words = simulate(MIXED, ranks_per_node=2)

    assert seconds["plain"] > 1.3 * seconds["placed"]
    assert min(seconds, key=lambda key: seconds[key]) == "placed"
    assert words.startswith("Choose distca, ")


def test_documents_that_are_alike_bring_nothing() -> None:
    _, seconds, words = simulate([4096] * 256, checkpointing="recomputed")

    assert seconds["plain"] == pytest.approx(seconds["placed"], rel=0.01)
    assert "do not bother" in words


def test_accumulation_puts_long_documents_together() -> None:
    _, once, _ = simulate(MIXED * 2)
    _, four, _ = simulate(MIXED * 2, accumulation=4, batches=1)

    assert four["placed"] == pytest.approx(4 * once["placed"], rel=0.05)
    assert four["sorted_packs"] < four["plain"]


HYBRID = replace(MODEL, mixer_layers=24)
WHOLE = replace(HYBRID, whole_documents=True)


def test_documents_of_hybrids_are_cut() -> None:
    """Ways that send no states are left out."""
    simulation, seconds, _ = simulate([120_000, *[2048] * 100] * 4, model=HYBRID)

    assert {"plain", "given", "servers", "placed"} <= seconds.keys()
    assert not any(key.startswith(("tasks_moved", "ulysses", "ring", "published")) for key in seconds)
    assert simulation.missing() == ["Ulysses and rings: 24 layers carry a state, which these ways do not send"]
    assert SimulationRequest(HYBRID, 8, 16_384, 32_768).longest_tokens == 32_768


def test_documents_stay_whole_if_a_state_cannot_travel() -> None:
    lengths = [60_000, *[2048] * 100] * 4
    simulation, seconds, _ = simulate(lengths, model=WHOLE)
    _, cut, _ = simulate(lengths, model=HYBRID)

    assert {"tasks_moved", "placed"} <= seconds.keys()
    assert not any(key.startswith(("given", "servers", "ulysses", "ring", "published")) for key in seconds)
    assert seconds["placed"] > cut["placed"]
    assert any("documents that stay whole" in words for words in simulation.missing())
    assert SimulationRequest(WHOLE, 8, 16_384, None).longest_tokens == 16_384
    with pytest.raises(
        ConfigError, match=r"--context 32768: documents of \S+ stay whole .* a rank holds 16384 tokens"
    ):
        SimulationRequest(WHOLE, 8, 16_384, 32_768)


def test_windows_leave_less_to_win() -> None:
    windows = replace(MODEL, window_layers=((Mask(1024), 24),))
    _, full, _ = simulate(MIXED)
    _, short, _ = simulate(MIXED, model=windows)

    assert 1.0 < short["plain"] / short["placed"] < full["plain"] / full["placed"]


@pytest.mark.parametrize(
    ("gpus", "context_tokens", "words"),
    [
        (
            3,
            16_384,
            [
                "Ulysses: no group of 2, 4, 8, ... data ranks that holds 16,384 tokens divides all 3",
                "rings: no group of 2, 4, 8, ... data ranks that holds 16,384 tokens divides all 3",
                "attention servers: fewer than 8 data ranks, or documents that stay whole",
            ],
        ),
        (16, 131_072, ["Ulysses: a group within a node holds at most 65,536 tokens, and the context has 131,072"]),
        (8, 65_536, []),
    ],
)
def test_ways_that_are_left_out_are_explained(gpus: int, context_tokens: int, words: list[str]) -> None:
    request = SimulationRequest(MODEL, gpus, 8192, context_tokens)

    assert Simulation(request, PROFILE).missing() == words


def killed(*task: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(run, "_simulate", killed)
    request = SimulationRequest(MODEL, 4, 8192, 32_768, batches=2)

    with pytest.raises(ConfigError, match="processes that simulate 4 GPUs was killed, mostly for want of memory"):
        run.run_steps(request, PROFILE, request.steps(np.array([1024] * 400)))


def test_processes_and_one_process_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SimulationRequest(MODEL, 8, 8192, 65_536, batches=3)
    steps = request.steps(np.array([40_000, *[2048] * 60] * 4))
    one, alone = run_steps(request, PROFILE, steps)
    monkeypatch.setattr(run, "WORTH_PROCESSES", 0)
    several, together = run_steps(request, PROFILE, steps)

    ways = {step.number: step.ways for step in together}
    for step in alone:
        for key, way in step.ways.items():
            assert ways[step.number][key].seconds == pytest.approx(way.seconds)
    assert several.costs.notes.lines() == one.costs.notes.lines()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 0}, "--gpus 0 must be between"),
        (
            {"context_tokens": 8 * 16_384 + 1},
            r"--context 131073 does not fit: 8 data ranks x 16384 tokens hold 131072",
        ),
        ({"tensor_ranks": 3}, "--tensor 3 must divide --gpus 8"),
        ({"tensor_ranks": 16, "gpus": 16, "ranks_per_node": 16}, "--tensor 16 must divide the 8 KV heads"),
        ({"checkpointing": "some"}, "--checkpointing some must be one of saved, offloaded, recomputed, none"),
        ({"gpu_gib": 0.0}, "--gpu-gib 0 must be above 0"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SimulationRequest(MODEL, **{"gpus": 8, "tokens_per_rank": 16_384, "context_tokens": None, **options})  # type: ignore[arg-type]


def test_documents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PackingError, match=r"a document of 200000 tokens .*--context 131072 splits"):
        simulate([200_000, *[2048] * 64], tokens_per_rank=16_384)
    with pytest.raises(PackingError, match="fill 1 of 4 micro-steps"):
        simulate([2048] * 16, accumulation=4)
