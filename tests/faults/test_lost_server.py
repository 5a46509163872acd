"""A lost attention server costs a step, and no numbers: the step runs again without it. Servers trace what trainers
report, and a lost one is missing in the report."""

import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import distca_hf
from distca_hf.analysis.report.run_folder import read_folder
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.servers.served_transport import ServedTransport
from support.data import random_dataset
from support.lost_server import ServerHarm, harm_server
from support.models import tiny_model
from support.ranks import Outcome, start_ranks
from support.thorough import is_thorough


STEPS, LOST_AT = 4, 2


def _train(
    folder: Path, harmed: bool, phase: str, trainers_attend: bool = True, opens_another: bool = False
) -> tuple[list[float], int]:
    """Losses of a loop of its own under FSDP2, and how often a step ran again.

    Args:
        opens_another: another plugin opens a membership, too, after this one.
    """
    traces = {"report_every_steps": int(harmed), "report_folder": str(folder / "traces")}
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, trainers_attend=trainers_attend, **traces)
    loader = plugin.dataloader(random_dataset(90), seed=3)
    torch.manual_seed(0)
    model = distca_hf.enable(tiny_model(num_hidden_layers=2), plugin).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = plugin.training_transport(torch.device("cpu"))
    transport = found if isinstance(found, ServedTransport) else None
    assert (transport is not None) == harmed
    other = distca_hf.DistCAPlugin(tokens_per_rank=96)
    if opens_another:
        other.training_transport(torch.device("cpu"))
    if harmed and torch.distributed.get_rank() == 0:
        ServerHarm(folder, LOST_AT * 2 + 1, phase).watch(model.model.layers[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, again, batches = [], 0, iter(loader)
    for _ in range(STEPS):
        window = [next(batches), next(batches)]
        while True:
            if transport is not None:
                transport.begin_step()
            total = 0.0
            for number, batch in enumerate(window):
                model.set_requires_gradient_sync(number == 1)
                loss = model(**batch).loss
                loss.backward()
                total += loss.item()
            if transport is None or transport.end_step():
                break
            again += 1
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    watch = watch_of(model)
    assert watch is not None
    watch.reported_steps.flush()
    other.close()
    plugin.close()
    return losses, again


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    losses = [outcome.result[0] for outcome in start_ranks(2, _train, folder, folder, False, "forward")[:2]]
    assert not (folder / "traces").exists(), "nothing was to be reported"
    return losses


@pytest.mark.parametrize(
    ("servers", "how", "phase", "opens_another"),
    [
        (2, signal.SIGKILL, "forward", True),
        (1, signal.SIGSTOP, "backward", False),
        *([(1, signal.SIGKILL, "backward", False), (2, signal.SIGSTOP, "forward", False)] if is_thorough() else []),
    ],
)
def test_training_goes_on_without_a_lost_server(
    servers: int, how: signal.Signals, phase: str, opens_another: bool, tmp_path: Path, undisturbed: list[list[float]]
) -> None:
    outcomes = start_ranks(
        2,
        _train,
        tmp_path,
        tmp_path,
        True,
        phase,
        True,
        opens_another,
        servers=servers,
        meanwhile=harm_server(tmp_path, 2, how),
        endless=frozenset({2}),
    )
    assert _well(outcomes, [0, 1, *range(3, 2 + servers)])
    for outcome, expected in zip(outcomes[:2], undisturbed, strict=True):
        losses, again = outcome.result
        assert losses == pytest.approx(expected, abs=1e-5)
        assert again == 1, outcome.output
    _assert_report_names_servers(tmp_path / "traces", servers)


def _assert_report_names_servers(traces: Path, servers: int) -> None:
    """The first server is lost in the second micro-batch of the third step, whose first one ran again without it."""
    steps = read_folder(traces).steps
    with_both, without = steps[: 2 * LOST_AT], steps[2 * LOST_AT :]

    assert len(steps) == 2 * STEPS
    for step in with_both:
        assert (step.servers, step.missing) == ((0, 1)[:servers], [])
        assert step.seconds is not None
        assert (len(step.work), len(step.seconds.attention)) == (2 + servers, 2 + servers)
        assert {len(call.ranks) for call in step.calls} == {2 + servers}
        sent = {(source, to) for source, to, _ in step.sent}
        assert {(2, 0), (2, 1)} & sent, "a server returns results"
    for step in without:
        assert (step.servers, step.missing) == ((1,)[: servers - 1], [])
        assert [bar.label for bar in step.memory] == ["rank 0", "rank 1", "server 1"][: 1 + servers]


def test_training_ends_where_only_servers_may_attend_and_the_last_is_lost(tmp_path: Path) -> None:
    harm = harm_server(tmp_path, 2, signal.SIGKILL)
    outcomes = start_ranks(
        2, _train, tmp_path, tmp_path, True, "forward", False, servers=1, meanwhile=harm, endless=frozenset({2})
    )

    for outcome in outcomes[:2]:
        assert outcome.exit_code == 1
        assert "none of 1 attention servers is left, and trainers_attend=False" in outcome.output


def _well(outcomes: list[Outcome], ranks: list[int]) -> bool:
    failed = [outcomes[rank] for rank in ranks if outcomes[rank].exit_code]
    assert not failed, "\n".join(f"--- {outcome.rank}: {outcome.exit_code}\n{outcome.output}" for outcome in failed)
    return True
