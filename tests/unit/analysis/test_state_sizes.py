"""Sizes of states, as `distca plan`, `simulate` and `check` count them, against what layers send."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from distca_hf.analysis.check.find import find_candidate
from distca_hf.analysis.check.run_check import Job, check
from distca_hf.analysis.decoder_size import StateSize, state_size_of
from distca_hf.analysis.epoch import PlannedMicroBatch, figures_of
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.models import SimulatedModel, preset
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import ours
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.analysis.training_setup import TrainingSetup
from distca_hf.cli import app
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.flops import find_gpu
from distca_hf.layout import Layout, Topology
from distca_hf.planning import folds
from distca_hf.planning.plan import plan_in_place
from distca_hf.testing import NotedTransport
from support.carried_steps import FOUR, UNCUT, layout_of, step_on_ranks
from support.versions import states_travel
from support.wide_models import FAMILIES, wide_model


CUT = Layout.from_segments([600], [[(0, 0, 200)], [(0, 200, 600)]])
STATES = StateSize(mixers=10, heads=4, head_bytes=1000, halo_tokens=3, halo_bytes=100)


@states_travel
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    ("model_type", "by_heads"), [(model_type, number % 2 == 1) for number, model_type in enumerate(FAMILIES)]
)
def test_as_many_numbers_are_sent(model_type: str, by_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED_BYTES", -math.inf if by_heads else math.inf)
    size = state_size_of(wide_model(model_type, "distca"))
    assert size is not None
    # Of each layer: numbers of a row, and rows that ranks send or receive, in each exchange.
    numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))

    def noted(transport: Transport) -> Transport:
        def note(asked: AllToAll) -> None:
            _, layer, kind, phase = [*asked.where.split(", "), "", "", ""][:4]
            if phase == "forward" and kind in ("halos", "summaries", "states"):
                numbers[layer][kind].add(asked.rows.shape[1:].numel())
                rows[layer][kind] += [sum(asked.send_counts), sum(asked.receive_counts)]

        return cast(Transport, NotedTransport(transport, note, lambda _: None))

    step_on_ranks(partial(wide_model, model_type, "distca"), FOUR, around=noted)
    layout = layout_of(FOUR)
    assert len(rows) == size.mixers
    for layer, of_layer in rows.items():
        sent = {kind: sum(numbers[layer][kind]) * max(of_layer[kind]) for kind in of_layer}
        assert ("states" in sent) == (by_heads and model_type != "lfm2")
        halos = sent.pop("halos")
        counted = replace(size, halo_bytes=0).most_bytes(layout)
        assert 4 * sum(sent.values()) == counted or (by_heads and counted / 2 < 4 * sum(sent.values()) < counted)
        assert numbers[layer]["halos"] == {size.halo_bytes // 2}, "in bf16"
        assert 0 < 2 * halos <= replace(size, head_bytes=0).most_bytes(layout), "some fragments are shorter"
        assert size.most_bytes(layout_of(UNCUT)) == 0


@states_travel
def test_sizes_that_a_mixer_has_under_other_names_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, job = wide_model("bamba", "distca"), Job(find_gpu("h200"), 4096, TrainingSetup(8))
    del model.model.layers[2].mamba.ssm_state_size
    assert state_size_of(model) is None

    known = check(find_candidate("qwen3_next"), job)
    monkeypatch.setattr("distca_hf.analysis.decoder_size.SUMMARIES", {})
    unknown = check(find_candidate("qwen3_next"), job)
    assert [words for words in unknown.verdict.notes if words not in known.verdict.notes] == [
        "the size of states that travel between ranks is not known, and left out of the memory"
    ]
    shape = find_model("qwen3_next")
    assert (shape.state_size, shape.has_unknown_states) == (None, True)
    step = PlannedMicroBatch.of(plan_in_place(CUT), shape)
    assert figures_of([step], Topology(2, 2)).state_bytes_max_rank is None
    costs = Costs(find_profile("h200"), SimulatedModel.of(shape), False, Notes())
    ours(costs, Cluster(costs.profile, 2, 2, costs.notes), plan_in_place(CUT), 1, saves_attention=True)
    assert "sizes of states that travel are not known, and left out" in costs.notes.lines()


def test_plans_and_simulated_steps_and_memory_count_them() -> None:
    """A summary and a halo travel from rank 0 to rank 1."""
    of_layer = 4 * 1000 + 3 * 100
    shape = replace(preset("llama3-8b"), mixer_layers=10, state_size=STATES)
    steps = [PlannedMicroBatch.of(plan_in_place(CUT), shape)] * 2
    assert figures_of(steps, Topology(2, 2)).state_bytes_max_rank == 2 * of_layer

    loads = []
    for model in (shape, replace(shape, state_size=None, whole_documents=True)):
        costs = Costs(find_profile("h200"), SimulatedModel.of(model), False, Notes())
        cluster = Cluster(costs.profile, 2, 2, costs.notes)
        loads.append(ours(costs, cluster, plan_in_place(CUT), 1, saves_attention=True))
    counted, without = loads
    assert (counted.state_bytes, without.state_bytes, counted.left_out_pairs) == (of_layer, 0, 0)
    seconds = 10 * 2 * cluster.alike_exchange(of_layer)
    assert counted.further_seconds - without.further_seconds == pytest.approx(seconds)
    assert seconds > 0

    request = SimulationRequest(SimulatedModel.of(shape), 2, 300, None)
    setup = request.setup("fsdp2")
    kept = [request.rank_load(300, 0, state_bytes=state_bytes).memory(setup).kept for state_bytes in (0, of_layer)]
    assert kept[1] - kept[0] == 10 * of_layer


@states_travel
def test_plan_prints_what_states_send(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([6000, 2000]))

    def run(model: str, *options: str) -> str:
        arguments = ["plan", str(tmp_path / "lengths.json"), "--gpus", "2", "--tokens-per-rank", "4000", "--model"]
        result = CliRunner().invoke(app, [*arguments, model, *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    of_mixer = json.loads(run("qwen3_next", "--json"))
    states, cut = of_mixer["state_bytes_max_rank"], of_mixer["cut_documents"]
    assert (states, cut) == (4 * 2**20 + 3 * 2 * 8192, 1)
    assert of_mixer["estimates"]["ways"][-1]["state_bytes"] == states
    assert "of states, per mixer: largest rank 4.24 MB" in " ".join(run("qwen3_next").split())
    assert "of states" not in run("llama3-8b")


@states_travel
def test_check_counts_the_states_of_a_document_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8 ranks the last one receives 7 summaries of 4 MiB, or as many bytes as folding by heads takes."""

    def kept(num_ranks: int) -> int:
        job = Job(find_gpu("h200"), 4096, TrainingSetup(num_ranks))
        return check(find_candidate("qwen3_next"), job).memory["fsdp2"].kept

    size = find_model("qwen3_next").state_size
    assert size is not None
    assert (size.mixers, size.heads * size.head_bytes) == (36, 4 * 2**20)
    halos = size.halo_tokens * size.halo_bytes
    alone = kept(1)
    assert kept(2) - alone == 36 * (4 * 2**20 + halos)
    monkeypatch.setattr(folds, "LEAST_SAVED_BYTES", math.inf)
    assert kept(8) - alone == 36 * (7 * 4 * 2**20 + halos)
    monkeypatch.undo()
    assert 36 * 4 * 2**20 < kept(8) - alone < 36 * 3 * 4 * 2**20
