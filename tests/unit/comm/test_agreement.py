"""Agreement, roll call and transports among ranks that are threads."""

import time

import pytest
import torch
from torch.distributed import HashStore

from distca_hf.comm.agreement import WIDTH, Agreement, Announced, Occasion
from distca_hf.comm.grid import Scope
from distca_hf.comm.groups import open_transport
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.transport import REMEMBERED_EXCHANGES, AllToAll, LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError, PeerLostError, PlanMismatchError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import Fault, FaultTransport, LoopbackTransport, fail, run_ranks, stall
from support.harm import NEVER_SECONDS
from support.layouts import SHARED
from support.parity import live_plan


def _agree(transport: LoopbackTransport, **changes: int) -> dict[str, list[int]]:
    facts = {"fingerprint": 5, "settings": 7} | changes
    numbers = {"label_tokens": 10 * (transport.rank + 1)}
    return Agreement.start(transport, Occasion.TAKE, 3, facts, numbers).wait()


def test_equal_facts_agree_and_numbers_arrive() -> None:
    assert run_ranks(3, _agree) == [{"label_tokens": [10, 20, 30]}] * 3


def test_ranks_at_different_places_meet_in_an_error() -> None:
    def body(transport: LoopbackTransport) -> str:
        occasion, facts = (Occasion.ATTEND, {"gradients": 1}) if transport.rank else (Occasion.TAKE, {"settings": 7})
        with pytest.raises(PlanMismatchError) as caught:
            Agreement.start(transport, occasion, transport.rank, facts, {}).wait()
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "their next step is take micro-batch 0 on rank 0, attend micro-batch 1 on rank 1" in message


def test_a_failed_agreement_fails_again_with_the_ranks_that_it_lost() -> None:
    class Lost:
        def wait(self) -> list[list[int]]:
            error = PeerLostError("rank 1 has left")
            error.lost_ranks = (1,)
            raise error

    agreement = Agreement.start(LocalTransport(), Occasion.TAKE, 0, {}, {})
    agreement.gather = Lost()
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
            agreement.wait()
        assert caught.value.lost_ranks == (1,)


# Occasions whose facts may differ between stages, and those for which they may not.
OF_A_STAGE = (Occasion.PLAN, Occasion.ATTEND, Occasion.DIFFERENTIATE, Occasion.COMPARE)
OF_THE_GROUP = (Occasion.TAKE, Occasion.REPORT)


@pytest.mark.parametrize("occasion", [*OF_A_STAGE, *OF_THE_GROUP], ids=lambda occasion: occasion.name)
def test_ranks_agree_with_those_of_the_occasion(occasion: Occasion) -> None:
    """Two stages of two data ranks of two tensor ranks."""

    def body(transport: LoopbackTransport) -> tuple[list[int], list[int]] | str:
        facts, numbers = {"layers": transport.grid.stage}, {"labels": 10 * transport.rank}
        agreement = Agreement.start(transport, occasion, 0, facts, numbers)
        try:
            return agreement.wait(Scope.ROWS)["labels"], agreement.wait()["labels"]
        except PlanMismatchError as error:
            return str(error)

    for rank, seen in enumerate(run_ranks(2, body, tensor_ranks=2, stages=2)):
        if occasion in OF_A_STAGE:
            assert seen == ([0, 10], [0, 0, 10, 10])  # each data rank once, and all ranks of the stage
        else:
            assert f"rank {rank} (stage {rank // 4}, data {rank // 2 % 2}, tensor {rank % 2}), micro-batch 0" in seen
            assert "layers is 0 on ranks 0 (stage 0, data 0, tensor 0), 1 (stage 0, data 0, tensor 1)" in seen


def test_a_signal_reaches_all_stages_with_the_next_micro_batch() -> None:
    def body(transport: LoopbackTransport) -> list[dict[int, int]]:
        transport.traffic.leave_signal = 15 if transport.grid.rank == 3 else 0
        seen = []
        for occasion in (Occasion.ATTEND, Occasion.TAKE):
            Agreement.start(transport, occasion, 0, {}, {}).wait()
            seen.append(dict(transport.traffic.leaving))
        return seen

    by_rank = run_ranks(1, body, tensor_ranks=2, stages=2)
    assert by_rank == [[{}, {3: 15}]] * 2 + [[{3: 15}, {3: 15}]] * 2


@pytest.mark.parametrize("occasion", [Occasion.PLAN, Occasion.TAKE], ids=lambda occasion: occasion.name)
def test_a_rank_that_is_unable_shows_it_to_those_of_its_step(occasion: Occasion) -> None:
    def body(transport: LoopbackTransport) -> str:
        if transport.grid.rank == 3:
            with pytest.raises(ValueError, match="bad"), Announced(transport, 0, occasion):
                raise ValueError("this batch is bad\nand long")
            return ""
        try:
            Agreement.start(transport, occasion, 0, {}, {}).wait()
        except PeerLostError as error:
            return str(error)
        return "agreed"

    by_rank = run_ranks(1, body, tensor_ranks=2, stages=2)
    words = "rank 3 (stage 1, tensor 1) could not do its part; see the error there: ValueError: this batch is bad on"
    assert words in by_rank[2]
    for seen in by_rank[:2]:
        assert (seen == "agreed") if occasion is Occasion.PLAN else (words in seen)


def test_a_cause_that_is_no_text_is_told_in_part() -> None:
    """Half a surrogate pair, as JSON may hold it, has no bytes in UTF-8."""

    def body(transport: LoopbackTransport) -> str:
        if transport.rank == 1:
            with pytest.raises(ValueError, match="row"), Announced(transport, 0, Occasion.TAKE):
                raise ValueError("row \ud83d is bad")
            return ""
        with pytest.raises(PeerLostError) as caught:
            Agreement.start(transport, Occasion.TAKE, 0, {}, {}).wait()
        return str(caught.value)

    assert "see the error there: ValueError: row ? is bad on rank 1" in run_ranks(2, body)[0]


@pytest.mark.parametrize("differs", [False, True])
def test_any_number_of_facts_fits_and_names_travel_only_where_some_differ(differs: bool) -> None:
    """As many settings as there may ever be: one more changes no width."""

    def body(transport: LoopbackTransport) -> tuple[list[int], str]:
        widths: list[int] = []
        gather = transport.gather
        transport.gather = lambda values, where, scope: (widths.append(len(values)), gather(values, where, scope))[1]
        facts = {f"setting {number}": "x" * number for number in range(300)}
        if differs and transport.rank == 1:
            facts["setting 250"] = "other"
        try:
            Agreement.start(transport, Occasion.TAKE, 0, facts, {}).wait()
        except PlanMismatchError as error:
            return widths, str(error)
        return widths, ""

    for widths, message in run_ranks(3, body):
        assert widths[0] == WIDTH
        assert len(widths) == 1 + differs
        assert (f"setting 250 is {'x' * 250} on ranks 0 and 2, other on rank 1." in message) == differs


def test_roll_call_tells_who_left_who_is_silent_and_nothing_about_who_answers() -> None:
    store = HashStore()
    calls = [RollCall(store, rank, range(4), patience_seconds=0.5) for rank in range(4)]
    calls[1].leave("ValueError: no tokens left")
    calls[2].missing()

    missing = calls[0].missing()

    assert missing[1] == "left: ValueError: no tokens left"
    assert "does not answer after 0.5 s" in missing[3]
    assert set(missing) == {1, 3}


def test_roll_call_shows_what_strangers_left_as_text() -> None:
    store = HashStore()
    for key, value in (("left/1", b"\x1b[31m\xff"), ("here/2", "soon")):
        store.set(f"distca_hf/rollcall/{key}", value)

    assert RollCall(store, 0, range(3)).missing() == {1: "\ufffd[31m\ufffd"}


def test_roll_call_names_the_rank_that_came_much_later_than_the_others() -> None:
    store = HashStore()
    waited_seconds = [300.0, 40.0, 299.8, 300.2]
    for rank, seconds in enumerate(waited_seconds):
        RollCall(store, rank, range(4), patience_seconds=0.0).missing(seconds)
    found = [RollCall(store, rank, range(4)).missing(seconds) for rank, seconds in enumerate(waited_seconds)]

    assert found == [{1: "came 260 s late"}, {}, {1: "came 260 s late"}, {1: "came 260 s late"}]


def test_roll_call_does_not_wait_when_everybody_is_accounted_for() -> None:
    store = HashStore()
    calls = [RollCall(store, rank, range(2), patience_seconds=NEVER_SECONDS) for rank in range(2)]
    calls[1].leave("RuntimeError: gone")

    assert list(calls[0].missing()) == [1]


def test_roll_call_without_a_store_says_so() -> None:
    class GoneStore(HashStore):
        def set(self, key, value):
            raise RuntimeError("Broken pipe")

    call = RollCall(HashStore(), 1, range(2))
    call._store = GoneStore()
    call.leave("anything")

    assert "store is gone (Broken pipe)" in call.missing()[0]


def test_what_a_rank_left_behind_outlives_the_store_that_it_hosted() -> None:
    class GoesWithRank0(HashStore):
        def check(self, keys):
            if keys == ["left/2"]:
                raise RuntimeError  # without words
            return super().check(keys)

    calls = [RollCall(HashStore(), rank, range(3)) for rank in range(2)]
    calls[0]._store = calls[1]._store = GoesWithRank0()
    calls[0].leave("ValueError: the data is broken")

    assert calls[1].missing() == {0: "left: ValueError: the data is broken"}


def test_agreement_that_failed_is_not_forgotten() -> None:
    """Whoever catches the error cannot go on with the plan."""

    def run(transport: Transport) -> list[str]:
        live = live_plan(SHARED, transport, DistCAConfig(kernel="reference"))
        live.begin_forward_pass(1, {"dtype": transport.rank})
        rows, errors = int(SHARED.rank_rows[transport.rank]), []
        q = torch.randn(rows, 2, 8)
        for _ in range(2):
            with pytest.raises(PlanMismatchError) as caught:
                flash_attn(q, q, q, AttentionSpec(0.3), live.handle)
            errors += caught.value.__notes__
        return errors

    for notes in run_ranks(2, run):
        assert len(notes) == 2
        assert all("forward call 1 of attention" in note for note in notes)


def test_traffic_counts_bytes_to_others_and_remembers_the_last_exchanges() -> None:
    def body(transport: LoopbackTransport) -> tuple[int, int, list[str]]:
        for number in range(REMEMBERED_EXCHANGES + 5):
            rows = torch.zeros(3, 4, dtype=torch.float64)
            transport.exchange(
                AllToAll(rows, [1, 2], [1, 1] if transport.rank == 0 else [2, 2], f"exchange {number}")
            ).wait()
        return transport.traffic.exchanges, transport.traffic.bytes_sent, list(transport.traffic.recent)

    # Rank 0 keeps one row and sends two; rank 1 sends one and keeps two.
    (exchanges, sent, recent), (_, sent_by_1, _) = run_ranks(2, body)
    assert exchanges == REMEMBERED_EXCHANGES + 5
    assert (sent, sent_by_1) == (2 * 4 * 8 * exchanges, 1 * 4 * 8 * exchanges)
    assert recent[-1] == f"exchange {exchanges - 1}"
    assert len(recent) == REMEMBERED_EXCHANGES


def test_faults_happen_at_their_exchange_and_the_rest_passes() -> None:
    transport = FaultTransport(LocalTransport(), [Fault(1, fail(OSError("cable"))), Fault(2, stall(0.05))])
    rows = torch.zeros(1, 1)
    transport.exchange(AllToAll(rows, [1], [1], "first")).wait()
    with pytest.raises(OSError, match="cable"):
        transport.exchange(AllToAll(rows, [1], [1], "second"))
    began = time.monotonic()
    transport.exchange(AllToAll(rows, [1], [1], "third")).wait()

    assert time.monotonic() - began >= 0.05
    assert transport.traffic.exchanges == 2


def test_a_rank_that_fails_frees_the_others() -> None:
    def body(transport: LoopbackTransport) -> None:
        if transport.rank == 1:
            raise ArithmeticError("first cause")
        transport.gather([1], "waiting").wait()

    with pytest.raises(ArithmeticError, match="first cause"):
        run_ranks(3, body)


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(open_transport(torch.device("cpu"), 1.0), LocalTransport)


def test_several_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes were launched"):
        open_transport(torch.device("cpu"), 1.0)
