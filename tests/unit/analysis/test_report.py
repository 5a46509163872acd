"""distca report: figures of runs and plans, sentences about the rank that others wait for, and bad input."""

import json
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distca_hf.analysis import answer as estimates
from distca_hf.analysis.report import run_folder
from distca_hf.analysis.report.estimates import Predictor
from distca_hf.analysis.report.figures import CallOfRanks, Seconds, chosen_calls, fitted
from distca_hf.analysis.report.run_folder import read_folder
from distca_hf.analysis.report.run_report import page_of, read_source
from distca_hf.analysis.report.straggler import slow_server_in_words, straggler_in_words
from distca_hf.cli import app
from distca_hf.errors import ReportError
from distca_hf.traces import RankTrace, file_name
from support.made_answers import made_simulation
from support.made_traces import made_trace, write_run, write_served_run


def report(source: Path, *options: str) -> Any:
    """The figures that the command prints as JSON."""
    done = CliRunner().invoke(app, ["report", str(source), "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lengths = tmp_path_factory.mktemp("lengths") / "lengths.json"
    lengths.write_text(json.dumps([3000, 12000, 90000, 500] * 8))
    options = ["--gpus", "4", "--tokens-per-rank", "65536", "--micro-steps", "2", "--compare", "--json"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(estimates, "MOST_STEPS", 1)
        planned = CliRunner().invoke(app, ["plan", str(lengths), *options])
    assert planned.exit_code == 0, planned.output
    found: dict[str, Any] = json.loads(planned.stdout)
    return found


# --- runs


def test_only_files_of_the_run_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pipe is waited for, nothing without an end is read, and no link leads out of the folder."""
    write_run(tmp_path / "other", ranks=1)
    planted: dict[str, tuple[Callable[[Path], object], str]] = {
        "pipe": (os.mkfifo, r"rank-00000\.jsonl cannot be read: it is a device or a pipe"),
        "device": (
            lambda path: path.symlink_to("/dev/zero"),
            r"is a link to /dev/zero, outside of .*device: give the",
        ),
        "link": (lambda path: path.symlink_to(tmp_path / "other" / path.name), r"is a link to .*other/rank.* outside"),
        "folder": (lambda path: path.mkdir(), r"rank-00000\.jsonl cannot be read: Is a directory"),
        "long": (lambda path: path.write_bytes(b"0" * 300), r"cannot be read: it has a line of more than 200 bytes"),
    }
    monkeypatch.setattr(run_folder, "LONGEST_LINE_BYTES", 200)
    for name, (plant, words) in planted.items():
        (tmp_path / name).mkdir()
        plant(tmp_path / name / file_name(0))
        with pytest.raises(ReportError, match=words):
            read_folder(tmp_path / name)


def test_run_with_given_batches_says_work_of_a_step_and_tokens(tmp_path: Path) -> None:
    found = report(write_run(tmp_path, ranks=4, steps=2, given=True))
    step = found["steps"][0]

    assert (step["before"], step["after"]) == ("batches as they came", "rows placed inside the model")
    assert step["findings"][1] == (
        "The busiest rank has 2.00 → 1.00 times the mean work in a step (layers, attention, head), 2.00 → 1.00 times "
        "the mean tokens."
    )
    assert found["summary"][1] == "Work of the busiest rank in a step 2.00 → 1.00 times the mean, on average."
    assert step["step_work"] == [4 * 65536] * 4


def test_run_has_all_ranks_of_every_step(tmp_path: Path) -> None:
    write_run(tmp_path / "output" / "distca_report", ranks=4, steps=3, layers=5)
    found = report(tmp_path / "output")

    assert (found["kind"], found["title"], found["notes"]) == ("distca-report", "Run output", [])
    assert [step["label"].split(",")[0] for step in found["steps"]] == ["step 100", "step 200", "step 300"]
    step, trace = found["steps"][0], made_trace(2, 4, layers=5)
    assert step["work_before"] == pytest.approx(trace.work_before, rel=1e-4)
    assert step["tokens"] == [65536] * 4
    assert step["imbalance_before"] == pytest.approx(1.5)
    assert [[to, size] for source, to, size in step["sent"] if source == 2] == [
        list(pair) for pair in trace.sent_bytes
    ]
    attention = sum(us for call in trace.calls for use, us in call.spans if use in ("local", "remote")) / 1e6
    assert step["seconds"]["attention"][2] == pytest.approx(attention, rel=1e-4)
    predicted = Predictor().predict({2: trace}, 4)
    assert step["seconds"]["rates"] == predicted.rates == "h200"
    assert step["seconds"]["predicted_attention"][2] == pytest.approx(predicted.predicted_attention[2], rel=1e-4)
    assert step["seconds"]["predicted_rest"][2] == pytest.approx(predicted.predicted_rest[2], rel=1e-4)
    parts = [sum(step["seconds"][name][2] for name in ("attention", "waiting", "exchange", "rest"))]
    assert parts == [pytest.approx(trace.pass_seconds, rel=1e-3)]
    assert [(call["part"], len(call["ranks"])) for call in step["calls"]] == [("forward", 4)] * 3 + [
        ("backward", 4)
    ] * 3
    assert step["memory"][2]["limit_bytes"] == 141 * 2**30


def test_missing_ranks_are_named_and_their_bytes_come_from_the_others(tmp_path: Path) -> None:
    whole = report(write_run(tmp_path / "whole", ranks=4))["steps"][0]
    write_run(tmp_path / "traces", ranks=4)
    (tmp_path / "traces" / file_name(2)).unlink()
    found = report(tmp_path / "traces")
    step = found["steps"][0]

    assert "No traces of rank 2 (in all steps)" in found["notes"][0]
    assert step["missing"] == [2]
    assert step["tokens"][2] is step["seconds"]["attention"][2] is None
    assert step["work"] == whole["work"]
    assert {(source, to) for source, to, _ in step["sent"]} == {(source, to) for source, to, _ in whole["sent"]}
    assert "Traces of rank 2 are missing." in step["findings"]


def test_micro_batches_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    """The earlier run had more ranks, stages, and more micro-batches in a step."""
    for rank in range(4):
        earlier = replace(made_trace(rank % 2, 2, 200), stage=rank // 2)
        (tmp_path / file_name(rank)).write_text(earlier.line() + "\n")
    more = replace(made_trace(3, 4), micro_batch=396)
    (tmp_path / file_name(4)).write_text(more.line() + "\n")
    for rank in range(2):
        own = [replace(made_trace(rank, 2, step), written=2e9 + step) for step in (100, 200)]
        (tmp_path / file_name(rank)).write_text("".join(f"{trace.line()}\n" for trace in own))
    found = report(tmp_path)

    assert [step["label"] for step in found["steps"]] == ["step 100, micro-batch 99", "step 200, micro-batch 199"]
    assert found["notes"] == [
        "3 traces of an earlier run in the same folder, or of steps that ran again, are left out."
    ]


@pytest.mark.parametrize("left", [1, 300])
@pytest.mark.parametrize("before", [0, 1])
def test_last_line_is_left_out_wherever_it_is_cut(left: int, before: int, tmp_path: Path) -> None:
    """A run that is killed while it writes: after a few bytes, or in its first reported step."""
    write_run(tmp_path, ranks=2, steps=before + 1)
    lines = (tmp_path / file_name(1)).read_text().splitlines()
    (tmp_path / file_name(1)).write_text("".join(f"{line}\n" for line in lines[:before]) + lines[before][:left])
    found = report(tmp_path)

    assert [step["missing"] for step in found["steps"]] == [[]] * before + [[1]]
    assert "The last line of rank-00001.jsonl is cut off" in found["notes"][1]


def test_of_many_micro_batches_some_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a pipeline has a trace for every micro-batch, part and rank."""
    monkeypatch.setattr(run_folder, "MOST_TRACES", 40)
    for rank in range(2):
        traces = [
            replace(made_trace(rank, 2, step), micro_batch=10 * step + number)
            for step in range(1, 9)
            for number in range(10)
        ]
        (tmp_path / file_name(rank)).write_text("".join(f"{trace.line()}\n" for trace in traces))
    found = report(tmp_path)

    assert {step["label"].split(",")[0] for step in found["steps"]} == {"step 1", "step 8"}
    assert found["notes"][-1].startswith("2 of 8 reported steps are read")


def test_stages_and_chunks_are_steps_of_their_own(tmp_path: Path) -> None:
    places = [(stage, chunk) for stage in range(2) for chunk in range(2)]
    lines = [replace(made_trace(0, 1), stage=stage, chunk=chunk).line() for stage, chunk in places]
    (tmp_path / file_name(0)).write_text("\n".join(lines))

    assert [step["label"] for step in report(tmp_path)["steps"]] == [
        f"step 100, micro-batch 99{stage}{chunk}" for stage in ("", ", stage 1") for chunk in ("", ", chunk 1")
    ]


def test_servers_are_rows_behind_the_trainers(tmp_path: Path) -> None:
    """Two trainers and servers 0 and 3, of which the second is half as fast and computes for longest."""
    write_served_run(tmp_path)
    found = report(tmp_path)
    step = found["steps"][0]

    assert (step["num_ranks"], step["servers"], step["missing"], found["notes"]) == (2, [0, 3], [], [])
    assert [len(step["seconds"][name]) for name in ("attention", "waiting", "rest")] == [4] * 3
    assert {len(call["ranks"]) for call in step["calls"]} == {4}
    assert [bar["label"] for bar in step["memory"]] == ["rank 0", "rank 1", "server 0", "server 3"]
    assert step["imbalance"] == pytest.approx(1.0, abs=2e-3)
    assert ["attention servers (speeds)", "0 (1.00), 3 (0.50)"] in step["facts"]
    balance, slow, busiest, idlest = step["findings"]
    assert "the longest time is 1.000 times that of an even split" in balance
    assert slow.startswith("Trainers wait for server 3: ")
    assert "It attends at 0.36 times the speed of a trainer, and the plan counts on 0.50" in slow
    assert busiest.startswith("Server 3 computes and sends for ")
    assert idlest.startswith("Server 0 computes and sends for ")
    assert found["summary"][-2] == "Trainers wait for server 3 in 1 of them."
    assert found["summary"][-1].startswith("Attention servers compute and send for ")


def test_missing_server_is_named_and_harms_nothing(tmp_path: Path) -> None:
    write_served_run(tmp_path)
    (tmp_path / file_name(3, is_server=True)).unlink()
    found = report(tmp_path)
    step = found["steps"][0]

    assert found["notes"][0].startswith("No traces of server 3 (in all steps)")
    assert "Traces of server 3 are missing." in step["findings"]
    assert (step["missing"], step["seconds"]["attention"][3]) == ([3], None)
    assert (len(step["work"]), len(step["seconds"]["attention"])) == (4, 4)


def test_servers_without_traces_of_trainers_are_shown(tmp_path: Path) -> None:
    write_served_run(tmp_path)
    for rank in range(2):
        (tmp_path / file_name(rank)).unlink()
    found = report(tmp_path)

    assert found["notes"][0].startswith("No traces of rank 0, 1 (in all steps)")
    assert found["steps"][0]["seconds"]["waiting_for_servers"] == [None, None]
    assert page_of(read_folder(tmp_path))


def test_of_many_ranks_servers_keep_their_rows(tmp_path: Path) -> None:
    spans = (("wait", 5.0),)
    call = CallOfRanks(
        "forward", 0, 0, [(rank, (("wait", float(rank)),) if rank < 100 else spans) for rank in range(130)]
    )
    (few,) = chosen_calls([call], num_ranks=100)
    (fewer,) = chosen_calls([replace(call, ranks=call.ranks[:110])], num_ranks=100)

    shown = [rank for rank, _ in few.ranks]
    assert (len(shown), sum(rank >= 100 for rank in shown), shown[0]) == (48, 24, 0)
    assert [rank for rank, _ in fewer.ranks][-10:] == list(range(100, 110))


def test_ranks_are_summed_by_node_and_servers_are_not(tmp_path: Path) -> None:
    """136 ranks on 17 nodes, the last of which has all 8; servers come behind the nodes."""
    (step,) = read_folder(write_served_run(tmp_path, ranks=136)).steps
    places = {place for source, to, _ in step.sent for place in (source, to)}

    assert (step.nodes_sent, step.servers) == (17, (0, 3))
    assert places == set(range(17 + 2))
    assert {(source, to): size for source, to, size in step.sent if to >= 17} == {
        (node, server): 8e6 for node in range(17) for server in (17, 18)
    }
    assert all(abs(source - to) <= 1 for source, to, _ in step.sent if to < 17)


def test_large_run_becomes_a_small_page(tmp_path: Path) -> None:
    """160 ranks, of which the matrix is by node; and many steps, of which some are shown."""
    write_run(tmp_path / "wide", ranks=160, layers=1)
    wide = read_folder(tmp_path / "wide")
    (step,) = wide.steps
    assert step.nodes_sent == 20
    assert max(max(source, to) for source, to, _ in step.sent) == 19
    assert {len(call.ranks) for call in step.calls} == {48}
    many = replace(wide, steps=[step] * 400, begin_with=399)
    small = fitted(many)

    assert len(page_of(small).encode()) < 2_000_000
    assert 5 < len(small.steps) < 400
    assert small.begin_with == len(small.steps) - 1
    assert f"{len(small.steps)} of 400 micro-batches are shown" in small.notes[0]


def test_traces_of_one_step_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, alive, most = run_folder.read_trace, weakref.WeakSet[RankTrace](), []

    def note(line: str, where: str) -> RankTrace:
        trace = read(line, where)
        alive.add(trace)
        most.append(len(alive))
        return trace

    monkeypatch.setattr(run_folder, "read_trace", note)
    found = report(write_run(tmp_path, ranks=3, steps=9))

    assert len(found["steps"]) == 9
    assert len(most) == 27
    assert max(most) <= 2 * 3


def test_lines_may_be_empty_or_of_another_form_and_are_numbered_as_in_the_file(tmp_path: Path) -> None:
    """An object with its fields in another order is read as well."""
    traces = [made_trace(0, 1, step) for step in (100, 200)]
    turned = json.dumps(dict(reversed(json.loads(traces[0].line()).items())))
    file = tmp_path / file_name(0)
    file.write_text(f"\n{turned}\n\n\n{traces[1].line()}\n\n")
    assert [step["label"].split(",")[0] for step in report(tmp_path)["steps"]] == ["step 100", "step 200"]

    file.write_text(f"\n{turned}\n\n\n{traces[1].line().replace('num_ranks', 'number')}\n")
    assert f"{file_name(0)} line 5 has no 'num_ranks'" in refusal(tmp_path)


# --- the rank that others wait for


def seconds(attention: list[float], waiting: list[float], rest: float = 1.0) -> Seconds:
    return Seconds(attention=attention, waiting=waiting, exchange=[0.0] * 4, rest=[rest] * 4, step=[2.0] * 4)


EVEN = [1.0e9] * 4
STRAGGLERS = {
    "work": ([1.0e9, 1.0e9, 1.3e9, 1.0e9], [0.5, 0.5, 0.65, 0.5], [0.2, 0.2, 0.0, 0.2], "It has 1.21 times the mean"),
    "kernels": (EVEN, [0.5, 0.5, 0.65, 0.5], [0.2, 0.2, 0.0, 0.2], "take 1.30 times as long as the median"),
    "elsewhere": (EVEN, [0.5] * 4, [0.2, 0.2, 0.0, 0.2], "it comes late from elsewhere"),
}


@pytest.mark.parametrize("name", STRAGGLERS)
def test_rank_that_others_wait_for_is_named_with_the_reason(name: str) -> None:
    work, attention, waiting, reason = STRAGGLERS[name]
    sentence = straggler_in_words(work, seconds(attention, waiting))

    assert sentence.startswith("Others wait for rank 2: rank 0 waits 200.0 ms in attention, rank 2 0.0 ms.")
    assert reason in sentence


def test_nobody_is_named_where_all_wait_alike_or_not_at_all() -> None:
    assert "All ranks wait about as long" in straggler_in_words(EVEN, seconds([0.5] * 4, [0.3] * 4))
    assert "No rank waits for others" in straggler_in_words(EVEN, seconds([0.5] * 4, [0.001] * 4))


def write_run_that_waits_once(folder: Path, steps: int, slow_step: int) -> Path:
    """Ranks wait in one step, for rank 1, and in no other one."""
    for rank in range(4):
        traces = [
            made_trace(rank, 4, 100 * step, slow_rank=1 if step == slow_step else None) for step in range(1, steps + 1)
        ]
        (folder / file_name(rank)).write_text("".join(f"{trace.line()}\n" for trace in traces))
    return folder


def test_summary_names_a_rank_only_where_the_steps_do(tmp_path: Path) -> None:
    """Some rank always waits least, also where none waits."""
    never = report(write_run(tmp_path / "never", ranks=4, steps=3))
    once = report(write_run_that_waits_once(tmp_path, steps=3, slow_step=2))

    assert len(never["summary"]) == 1
    assert all(any("No rank waits for others" in line for line in step["findings"]) for step in never["steps"])
    assert once["summary"][1:] == ["Others wait for rank 1 in 1 of them."]
    assert [any("Others wait for rank 1" in line for line in step["findings"]) for step in once["steps"]] == [
        False,
        True,
        False,
    ]


def test_report_opens_on_the_step_that_shows_something_and_the_command_names_it(tmp_path: Path) -> None:
    write_run_that_waits_once(tmp_path, steps=3, slow_step=2)
    printed = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")]).stdout
    lines = printed.splitlines()

    assert report(tmp_path)["begin_with"] == 1
    assert " ".join(lines[1:3]).endswith("times the mean, on average.")
    assert lines[4] == "step 200, micro-batch 199:"
    assert "Others wait for rank 1: rank" in printed
    assert "step 300" not in printed


SERVED_WORK = (4.0e8, 4.0e8, 2.0e8)
SLOW_SERVERS = {
    "more work": (
        SERVED_WORK,
        (1.0, 1.0, 0.4),
        [1.0, 1.0, 1.25],
        [0.2, 0.3],
        "It has 1.25 times the work of a trainer",
    ),
    "slower": (SERVED_WORK, (1.0, 1.0, 0.5), [1.0, 1.0, 1.5], [0.5, 0.5], "at 0.33 times the speed of a trainer"),
    "sending": (SERVED_WORK, (1.0, 1.0, 0.5), [1.0, 1.0, 0.98], [0.2, 0.2], "the time is that of sending"),
    "alone": (
        (0.0, 0.0, 9.0),
        (0.0, 0.0, 1.0),
        [0.0, 0.0, 0.9],
        [0.9, 0.9],
        "Trainers leave all attention to servers",
    ),
}


def served_seconds(attention: list[float], waits: list[float]) -> Seconds:
    exchange = [0.0, 0.0, 0.2 if attention[2] < 1 else 0.0]
    return Seconds(
        attention=attention,
        waiting=[*waits, 0.0],
        exchange=exchange,
        rest=[1.0] * 3,
        step=[2.0] * 3,
        waiting_for_servers=waits,
    )


@pytest.mark.parametrize("name", SLOW_SERVERS)
def test_server_that_trainers_wait_for_is_named_with_the_reason(name: str) -> None:
    work, speeds, attention, waits, reason = SLOW_SERVERS[name]
    trace = replace(made_trace(0, 2), servers=(3,), work=work, speeds=speeds)
    sentence = slow_server_in_words(trace, served_seconds(attention, waits))

    assert sentence is not None
    assert sentence.startswith("Trainers wait for server 3: in attention it computes and sends for ")
    assert reason in sentence


@pytest.mark.parametrize(
    ("attention", "waits"), [([1.0, 1.0, 1.5], [0.3, 0.0]), ([1.3, 1.0, 1.2], [0.1, 0.2]), ([1.0, 1.0, 1.5], [])]
)
def test_no_server_is_named_if_a_trainer_waits_for_none_or_computes_as_long(
    attention: list[float], waits: list[float]
) -> None:
    trace = replace(made_trace(0, 2), servers=(3,), work=SERVED_WORK, speeds=(1.0, 1.0, 0.5))
    seconds = replace(served_seconds(attention, waits or [0.0, 0.0]), waiting_for_servers=waits)

    assert slow_server_in_words(trace, seconds) is None


# --- outputs of other commands


def test_plan_has_its_micro_steps_and_tables(plan: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = report(tmp_path / "plan.json")
    first = found["steps"][0]

    assert [step["label"] for step in found["steps"]] == ["micro-step 0 of 2", "micro-step 1 of 2"]
    uneven = [step["imbalance_before"] for step in found["steps"]]
    assert uneven[found["begin_with"]] == max(uneven), "the report opens on the least even one"
    assert sum(size for step in found["steps"] for *_, size in step["sent"]) == pytest.approx(
        plan["bytes_total"], rel=1e-4
    )
    assert sum(sum(step["tokens"]) for step in found["steps"]) == plan["tokens"]
    busiest = sum(max(step["work"]) for step in found["steps"])
    assert busiest / sum(sum(step["work"]) / 4 for step in found["steps"]) == pytest.approx(
        plan["imbalance"], rel=1e-3
    )
    assert [bar["label"] for bar in first["memory"]] == ["FSDP2", "FSDP2 synced", "ZeRO-3"]
    assert first["seconds"]["rates"] == plan["estimates"]["profile"]["source"] == "h200"
    assert first["seconds"]["predicted_attention"] == pytest.approx(
        plan["estimates"]["rank_seconds"][0]["attention"], rel=1e-3
    )
    assert [table["title"] for table in found["tables"]] == [
        "Work of the busiest rank over the mean, in an epoch",
        "Other numbers of tokens per rank",
        "Ways to train, simulated",
    ]


def test_simulation_has_bars_of_every_number_of_gpus(tmp_path: Path) -> None:
    (tmp_path / "simulation.json").write_text(json.dumps(made_simulation()))
    found = report(tmp_path / "simulation.json")
    first, _, assumptions = found["tables"]

    assert found["steps"] == []
    assert found["summary"][0] == "8 GPUs x 65,536 tokens, 4 micro-steps: Choose distca."
    assert (first["bars"], first["marked"], first["rows"][1][:2]) == (1, [1], ["distca, placed", 2])
    assert first["note"] == "Choose distca. Left out: rings: too few heads."
    assert assumptions["rows"] == [["FSDP2 in bf16"]]

    staged = made_simulation()
    staged["simulations"][0]["num_stages"] = 4
    (tmp_path / "simulation.json").write_text(json.dumps(staged))
    assert report(tmp_path / "simulation.json")["summary"][0].startswith(
        "8 GPUs x 65,536 tokens, 4 micro-steps, also as 4 stages: "
    )


def test_answer_of_the_real_command_is_drawn(tmp_path: Path) -> None:
    """Every figure of `distca simulate --json`, as it prints it, and a page of it."""
    (tmp_path / "lengths.json").write_text(json.dumps([500, 3000, 12_000] * 30))
    options = ["--gpus", "2,4", "--tokens-per-rank", "8192", "--batches", "1", "--json"]
    simulated = CliRunner().invoke(app, ["simulate", str(tmp_path / "lengths.json"), *options])
    assert simulated.exit_code == 0, simulated.output
    answer = json.loads(simulated.stdout)
    (tmp_path / "simulation.json").write_text(simulated.stdout)
    found = report(tmp_path / "simulation.json", "--output", str(tmp_path / "page.html"))
    *tables, assumptions = found["tables"]

    assert found["title"] == f"Simulation of llama3-8b on {tmp_path / 'lengths.json'}"
    assert "costs come from the profile h200 (NVIDIA H200, 20" in found["notes"][0]
    assert [row for (row,) in assumptions["rows"]] == answer["assumptions"]
    for one, table, sentence in zip(answer["simulations"], tables, found["summary"], strict=True):
        assert sentence == f"{one['gpus']} GPUs x 8,192 tokens: {one['in_short']}"
        assert [row[0] for row in table["rows"]] == [way["label"] for way in one["ways"]]
        for column, name in ((1, "step_seconds"), (2, "tokens_per_second"), (3, "utilisation"), (6, "gpu_hours")):
            assert [row[column] for row in table["rows"]] == pytest.approx(
                [way[name] for way in one["ways"]], rel=1e-4
            )
        assert table["marked"] == [number for number, way in enumerate(one["ways"]) if way["is_ours"]]
    assert (tmp_path / "page.html").stat().st_size > 20_000


def test_page_is_written_with_its_path_in_the_last_line(plan: dict[str, Any], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "-", "--output", str(tmp_path / "page.html")], input=json.dumps(plan))

    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert done.stdout.splitlines()[-1].startswith(f"{tmp_path / 'page.html'}: ")
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


# --- bad input


def cut(folder: Path) -> None:
    text = (folder / file_name(1)).read_text()
    (folder / file_name(1)).write_text(text[:-60])


def cut_within(folder: Path) -> None:
    cut(folder)
    with (folder / file_name(1)).open("a") as file:
        file.write("\n" + made_trace(1, 2, 200).line())


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "does not exist: give a folder of traces"),
    "empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "has no traces"),
    "empty files": (
        lambda folder: [path.write_text("") for path in folder.iterdir()],
        "has no whole trace in 2 files: no step was reported",
    ),
    "cut off": (
        lambda folder: [path.write_text(path.read_text()[:-60]) for path in folder.iterdir()],
        "has no whole trace in 2 files, and in 2 of them the beginning of one: no step was reported",
    ),
    "cut within": (cut_within, "rank-00001.jsonl line 1 is not JSON: the file is cut off"),
    "foreign": (lambda folder: (folder / file_name(0)).write_text('{"step": 1}'), "is not a trace of a training"),
    "binary": (lambda folder: (folder / file_name(0)).write_bytes(b"\xff\xfe\x00"), "is not text"),
}


def refusal(source: Path, *options: str) -> str:
    """The one line on stderr of a command that must be refused."""
    done = CliRunner().invoke(app, ["report", str(source), *options])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith("distca: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("name", BAD)
def test_bad_run_is_one_line(name: str, tmp_path: Path) -> None:
    harm, words = BAD[name]
    harm(write_run(tmp_path / "traces", ranks=2))

    assert words in refusal(tmp_path / "traces", "--output", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON, or cut off"),
        ('{"tokens_per_rank": 5', "is not JSON, or cut off"),
        ("[1, 2]", "holds a list"),
        ('{"kind": NaN}', "has the number NaN"),
        ('{"kind": 1e999}', "has the number 1e999"),
        ('{"kind": 1e308}', "has the number 1e308, which is not finite or too large"),
        (f'{{"kind": {10**400}}}', "has the number 1000"),
        (r'{"kind": "\ud800"}', "has half a character"),
        ("{}", "is JSON of no command that is known here"),
        ('{"kind": "distca-report"}', "is printed by distca report itself"),
    ],
)
def test_bad_file_is_one_line(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content)

    assert words in refusal(tmp_path / "plan.json", "--json")


UNEVEN = [{"rank_work": ["many"], "rank_work_before": [1], "rank_tokens": [1], "bytes_between": []}]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"written": 10**400}, "has the number 1000"),
        ({"tokens": 10**400}, "has the number 1000"),
        ({"work_before": [1e308, 1e308]}, "has the number 1e+308"),
        ({"memory": {"kind": "GPU", "peak_bytes": 10**400}}, "has the number 1000"),
        (
            {"calls": [{"part": [], "layer": 0, "window_tokens": 0, "begin_us": 0, "spans": []}]},
            "has '[]' where a Pass",
        ),
        ({"device": "\ud800"}, "has half a character"),
    ],
)
def test_trace_that_nothing_can_be_made_of_is_one_line(harm: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = json.loads(made_trace(0, 2).line())
    (tmp_path / file_name(0)).write_text(json.dumps(content | harm))

    assert f"{tmp_path / file_name(0)} line 1 has " in refusal(tmp_path)
    assert words in refusal(tmp_path)


def test_plan_of_another_version_is_one_line(plan: dict[str, Any], tmp_path: Path) -> None:
    simulation = made_simulation() | {"simulations": [{}]}
    (tmp_path / "plan.json").write_text(json.dumps(simulation))
    assert "is not what distca simulate --json" in refusal(tmp_path / "plan.json", "--json")
    for name, value in (
        ("micro_batches", None),
        ("micro_batches", [{}]),
        ("whole_epoch", []),
        ("estimates", 5),
        ("micro_batches", UNEVEN),
    ):
        (tmp_path / "plan.json").write_text(json.dumps({**plan, name: value}))
        assert "is not what distca plan --json of this version prints" in refusal(tmp_path / "plan.json", "--json")


def test_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    source = write_run(tmp_path / "traces", ranks=1)

    assert "cannot be written" in refusal(source, "--output", str(tmp_path / "nowhere" / "page.html"))
    assert read_source(source).steps
