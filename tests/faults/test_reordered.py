"""Exchanges that ranks start in different orders, or with other row counts, and backward passes that they run in
different orders, or not equally often: found before anything is sent."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from datasets import Dataset

import distca_hf
from distca_hf.comm.agreement import Agreement, CheckedTransport, Occasion
from distca_hf.comm.transport import AllToAll
from distca_hf.errors import PlanMismatchError
from distca_hf.testing import Fault, FaultTransport, LoopbackTransport, run_ranks, swap
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks as run_processes
from support.ranks import start_ranks


CPU = torch.device("cpu")
ROWS = torch.arange(4.0).reshape(2, 2)


def test_swapped_exchange_starts_after_the_next_or_when_it_is_waited_for() -> None:
    def body(transport: LoopbackTransport) -> list[str]:
        faulty = FaultTransport(transport, [Fault(0, swap), Fault(2, swap)])
        first = faulty.exchange(AllToAll(ROWS, [1, 1], [1, 1], "first"))
        second = faulty.exchange(AllToAll(2 * ROWS, [1, 1], [1, 1], "second"))
        third = faulty.exchange(AllToAll(3 * ROWS, [1, 1], [1, 1], "third"))
        for factor, exchange in ((2, second), (1, first), (3, third)):
            assert torch.equal(exchange.wait(), factor * ROWS[[transport.rank, transport.rank]])
        return list(transport.traffic.recent)

    assert run_ranks(2, body) == [["second", "first", "third"]] * 2


def _checked(transport: LoopbackTransport, swapped: bool, places: tuple[str, str]) -> FaultTransport:
    """Two exchanges are started, in another order on rank 1 if they are swapped."""
    faults = [Fault(0, swap)] if swapped and transport.rank == 1 else []
    faulty = FaultTransport(CheckedTransport(transport), faults)
    exchanges = [faulty.exchange(AllToAll(ROWS, [1, 1], [1, 1], place)) for place in places]
    for exchange in exchanges:
        exchange.wait()
    return faulty


PLACES = ("micro-batch 4, layer 0, forward", "micro-batch 4, layer 1, forward")


def test_error_names_both_places() -> None:
    def body(transport: LoopbackTransport) -> tuple[str, int]:
        with pytest.raises(PlanMismatchError) as caught:
            _checked(transport, True, PLACES)
        return str(caught.value), transport.traffic.exchanges

    for rank, (message, exchanges) in enumerate(run_ranks(2, body)):
        assert f"rank {rank}, exchange 0: ranks exchange in different orders, nothing was sent" in message
        assert f"{PLACES[0]} (rows of 2 x 4 bytes) on rank 0" in message
        assert f"{PLACES[1]} (rows of 2 x 4 bytes) on rank 1" in message
        assert exchanges == 0


def test_exchanges_in_order_pass() -> None:
    assert [faulty.traffic.exchanges for faulty in run_ranks(2, lambda t: _checked(t, False, PLACES))] == [
        2,
        2,
    ]


def test_place_with_a_long_name_is_no_obstacle() -> None:
    long = ("ä" * 200, "ä" * 200)
    assert len(run_ranks(2, lambda t: _checked(t, True, long))) == 2


def test_rows_that_nobody_expects_are_named() -> None:
    def body(transport: LoopbackTransport) -> str:
        receive = [1, 1] if transport.rank == 0 else [0, 1]
        with pytest.raises(PlanMismatchError) as caught:
            CheckedTransport(transport).exchange(AllToAll(ROWS, [1, 1], receive, PLACES[0]))
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "rank 0 sends 1 rows to rank 1, which expects 0; nothing was sent" in message


def _train_on_packs(folder: Path, at: int | None) -> list[float]:
    """Three steps of a model of whole documents, whose attention tasks move; on rank 1 one exchange is overtaken by
    the next. Rows of keys and of queries may be equally long and equally many: places tell them apart."""
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(debug=distca_hf.Debug(check_exchanges=True), kv_residency="refetch")
    transport = plugin.transport(CPU)
    if rank == 1 and at is not None:
        plugin._transports[CPU] = FaultTransport(transport, [Fault(at, swap)])
    model = distca_hf.enable(tiny_model("minimax", num_hidden_layers=LAYERS), plugin).train()
    ids = torch.tensor(random_documents(1, seed=rank, lengths=(180,) if rank == 0 else (9,)))
    losses = []
    for step in range(3):
        loss = model(input_ids=ids, labels=ids, position_ids=torch.arange(ids.shape[1])[None]).loss
        loss.backward()
        losses.append(loss.item())
        (folder / f"steps-{rank}").write_text(str(step + 1))
    return losses


# Exchanges of the only layer with attention: keys and queries leave together, outputs return; in backward, where keys
# are fetched again, gradients of both do.
FORWARD, BACKWARD = 3, 4
LAYERS = 2


@pytest.mark.parametrize(
    ("at", "steps", "place"),
    [
        (0, 0, "micro-batch 0, layer 0, forward"),
        (FORWARD + BACKWARD + FORWARD, 1, "micro-batch 1, layer 0, backward"),
        (None, 3, ""),
    ],
    ids=["first forward", "last backward", "nothing"],
)
def test_keys_overtaken_by_queries_are_noticed_on_real_ranks(
    at: int | None, steps: int, place: str, tmp_path: Path
) -> None:
    outcomes = start_ranks(2, _train_on_packs, tmp_path, tmp_path, at)

    for outcome in outcomes:
        path = tmp_path / f"steps-{outcome.rank}"
        assert int(path.read_text() if path.is_file() else 0) == steps
        assert outcome.exit_code == (0 if at is None else 1)
        if at is not None:
            said = outcome.output.rpartition("PlanMismatchError: ")[2].partition("\n")[0]
            assert f"rank {outcome.rank}, exchange {at}: ranks exchange in different orders" in said
            assert said.count(place) == 2, said
            assert "on rank 0" in said
            assert "on rank 1" in said


def _train_without_a_window_layer(folder: Path) -> None:
    """One step; on rank 1 the first layer, which has a window, is left out."""
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=100, debug=distca_hf.Debug(check_exchanges=True))
    model = distca_hf.enable(tiny_model("gemma3", num_hidden_layers=2), plugin).train()
    if rank == 1:
        model.model.layers[0].forward = lambda hidden_states, *args, **kwargs: hidden_states
    dataset = Dataset.from_dict({"input_ids": random_documents(1, lengths=(150,))})
    (batch,) = plugin.dataloader(dataset, model=model)
    model(**batch).loss.backward()
    (folder / f"steps-{rank}").write_text("1")


def test_a_rank_that_skips_the_exchange_of_a_window_layer_is_named(tmp_path: Path) -> None:
    """Its next layer would send the keys of whole prefixes where others expect a window."""
    outcomes = start_ranks(2, _train_without_a_window_layer, tmp_path, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for outcome in outcomes:
        said = outcome.output.rpartition("PlanMismatchError: ")[2].partition("\n")[0]
        assert re.search(r"rank \d sends \d+ rows to rank \d, which expects \d+; nothing was sent", said), said
    assert not list(tmp_path.glob("steps-*"))


class Passes:
    """Forward passes of two micro-batches, each of one document that is cut between ranks."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        self.is_different = torch.distributed.get_rank() == 1
        self.plugin = distca_hf.DistCAPlugin(tokens_per_rank=100, checkpointed_attention="recompute")
        self.model = distca_hf.enable(tiny_model(num_hidden_layers=LAYERS), self.plugin).train()
        if use_reentrant is not None:
            self.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            self.model.enable_input_require_grads()
        dataset = Dataset.from_dict({"input_ids": random_documents(2, lengths=(150,))})
        self._batches = iter(self.plugin.dataloader(dataset, model=self.model, prefetch=2))

    def loss(self) -> torch.Tensor:
        return self.model(**next(self._batches)).loss

    def losses_of_one_batch(self) -> list[torch.Tensor]:
        batch = next(self._batches)
        return [self.model(**batch).loss for _ in range(2)]

    def loss_of_a_pack(self) -> torch.Tensor:
        """Rank 1 has little work and computes tasks of the other one."""
        ids = torch.tensor(random_documents(1, seed=self.is_different, lengths=(9 if self.is_different else 180,)))
        return self.model(input_ids=ids, labels=ids, position_ids=torch.arange(ids.shape[1])[None]).loss

    def differentiate_last_layer(self, loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, list(self.model.model.layers[-1].parameters()), retain_graph=True)


def _in_other_orders(losses: list[torch.Tensor], is_different: bool) -> None:
    for loss in reversed(losses) if is_different else losses:
        loss.backward()


def _left_out_of_a_sum(passes: Passes) -> None:
    losses = [passes.loss(), passes.loss()]
    del losses[passes.is_different]  # another one on each rank
    sum(losses).backward()  # type: ignore[union-attr]


def _left_out_before_the_next(passes: Passes) -> None:
    loss = passes.loss()
    if not passes.is_different:
        loss.backward()
    passes.loss()


def _twice_on_one_rank(passes: Passes) -> None:
    loss = passes.loss()
    loss.backward(retain_graph=True)
    if passes.is_different:
        loss.backward()
    passes.loss()


# What ranks run, and words of all of them about it.
BACKWARD_PASSES: dict[str, tuple[Callable[[Passes], None], bool | None, str]] = {
    **{
        f"other orders{name}": (
            lambda passes: _in_other_orders([passes.loss(), passes.loss()], passes.is_different),
            reentrant,
            "their next step is differentiate micro-batch 0 on rank 0, differentiate micro-batch 1 on rank 1",
        )
        for name, reentrant in {"": None, ", reentrant": True, ", recomputed": False}.items()
    },
    "other orders of packs": (
        lambda passes: _in_other_orders([passes.loss_of_a_pack(), passes.loss_of_a_pack()], passes.is_different),
        None,
        "their next step is differentiate micro-batch 0 on rank 0, differentiate micro-batch 1 on rank 1",
    ),
    "other orders of one batch": (
        lambda passes: _in_other_orders(passes.losses_of_one_batch(), passes.is_different),
        None,
        "forward pass that backward follows is number 1 on rank 0, number 2 on rank 1",
    ),
    "left out of a sum": (
        _left_out_of_a_sum,
        None,
        "their next step is differentiate micro-batch 1 on rank 0, differentiate micro-batch 0 on rank 1",
    ),
    "left out before the next": (
        _left_out_before_the_next,
        None,
        "their next step is differentiate micro-batch 0 on rank 0, take micro-batch 1 on rank 1",
    ),
    "twice on one rank": (
        _twice_on_one_rank,
        None,
        "their next step is take micro-batch 1 on rank 0, differentiate micro-batch 0 on rank 1",
    ),
}


def _run_backward_differently(_: Path) -> dict[str, str]:
    words = {}
    for name, (run, use_reentrant, _) in BACKWARD_PASSES.items():
        passes = Passes(use_reentrant)
        with pytest.raises(PlanMismatchError) as caught:
            run(passes)
        words[name] = str(caught.value)
        passes.plugin.close()
    return words


def test_backward_passes_that_ranks_run_differently_send_nothing(tmp_path: Path) -> None:
    for by_name in run_processes(2, _run_backward_differently, tmp_path, tmp_path):
        for name, (_, _, words) in BACKWARD_PASSES.items():
            assert (
                f"ranks disagree, nothing was sent: {words}. All ranks must run backward of the same" in by_name[name]
            )


def _count_agreements(_: Path) -> dict[str, int]:
    """Agreements of backward passes, by what runs on all ranks alike."""

    def count(run: Callable[[Passes], object], use_reentrant: bool | None = None) -> int:
        passes = Passes(use_reentrant)
        with mock.patch.object(Agreement, "start", side_effect=Agreement.start) as start:
            run(passes)
        passes.plugin.close()
        return sum(call.args[1] is Occasion.DIFFERENTIATE for call in start.call_args_list)

    def partly_then_all(passes: Passes) -> None:
        loss = passes.loss()
        passes.differentiate_last_layer(loss)
        loss.backward()

    def without_gradients(passes: Passes) -> None:
        with torch.no_grad():
            passes.loss()

    return {
        "once": count(lambda passes: passes.loss().backward()),
        "reentrant": count(lambda passes: passes.loss().backward(), True),
        "recomputed": count(lambda passes: passes.loss().backward(), False),
        "sum of two": count(lambda passes: (passes.loss() + passes.loss()).backward()),
        "sum of one batch": count(lambda passes: sum(passes.losses_of_one_batch()).backward()),  # type: ignore[union-attr]
        "partly, then all": count(partly_then_all),
        "without gradients": count(without_gradients),
        "never": count(lambda passes: passes.loss()),
    }


def test_ranks_agree_once_on_each_backward_pass(tmp_path: Path) -> None:
    expected = {
        "once": 1,
        "reentrant": 1,
        "recomputed": 1,
        "sum of two": 2,
        "sum of one batch": 2,
        "partly, then all": 2,
        "without gradients": 1,  # at the end of the pass
        "never": 0,
    }
    assert run_processes(2, _count_agreements, tmp_path, tmp_path) == [expected] * 2
