"""Streams on several ranks: each reads its part, tokens travel, and training goes on on another number of ranks."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from torch.distributed.device_mesh import init_device_mesh

import distca_hf
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.config import Timeouts
from distca_hf.data.rows import Reading
from distca_hf.errors import ConfigError, PlanMismatchError
from support.apart import hurry
from support.ranks import run_ranks, start_ranks
from support.streams import Rows, all_tokens, numbered, numbered_stream, tokens_in


DOCUMENTS = 240
TOKENS_PER_RANK = 48
# Numbers of ranks, one after the other. `tests/property/test_stream_resume.py` has more pairs.
WORLDS = (3, 1, 4)
State = dict[str, Any]


def _loader(stream: Any, micro_steps: int = 1, **settings: Any) -> StreamLoader:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, pad_to_multiple_of=1, **settings)
    return plugin.dataloader(stream, seed=3, device="cpu", micro_steps=micro_steps)


def _rows(batches: Iterable[dict[str, Any]]) -> list[tuple[list[int], list[int], list[int]]]:
    names = ("input_ids", "position_ids", "shift_labels")
    return [tuple(batch[name][0].tolist() for name in names) for batch in batches]  # type: ignore[misc]


def _part(state: State | None, steps: int | None, micro_steps: int, shards: int) -> tuple[Counter[int], State]:
    loader = _loader(numbered_stream(DOCUMENTS, shards), micro_steps)
    if state is not None:
        loader.load_state_dict(state)
    seen: Counter[int] = Counter()
    for batch in islice(loader, None if steps is None else steps * micro_steps):
        seen += tokens_in(batch)
    return seen, loader.state_dict()


@pytest.mark.parametrize(("micro_steps", "shards"), [(3, 8), (1, 1)])
def test_every_document_comes_once_on_any_numbers_of_ranks(micro_steps: int, shards: int, tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    state: State | None = None
    for run, world in enumerate(WORLDS):
        steps = 1 if run + 1 < len(WORLDS) else None
        parts = run_ranks(world, _part, tmp_path / str(run), state, steps, micro_steps, shards)
        for tokens, _ in parts:
            seen += tokens
        states = [json.dumps(of_rank) for _, of_rank in parts]
        assert len(set(states)) == 1
        state = json.loads(states[0])

    assert seen == all_tokens(DOCUMENTS)


def test_each_pass_has_a_reader_for_every_rank(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    state: State | None = None
    for world in (2, 3):
        parts = run_ranks(world, _part, tmp_path / str(world), state, None, 1, 6)
        state = parts[0][1]
        assert state["readers"] == world
        seen += sum((tokens for tokens, _ in parts), Counter())

    assert state is not None
    assert state["pass"] == 2
    assert seen == all_tokens(DOCUMENTS, passes=2)


def _stopped(stops: list[int]) -> list[Any]:
    """Batches of this rank: whole, and stopped and resumed in the same processes."""
    whole = _rows(_loader(numbered_stream(250), 3))
    parts: list[Any] = []
    state = None
    for stop in [*stops, None]:
        loader = _loader(numbered_stream(250), 3)
        if state is not None:
            loader.load_state_dict(state)
        parts += _rows(islice(loader, stop))
        state = json.loads(json.dumps(loader.state_dict()))
    loader = _loader(numbered_stream(250), 3)
    left = _rows(islice(loader, 5)) + _rows(loader)  # left early, and gone on with
    return [parts == whole, left == whole, len(whole)]


def test_batches_are_bit_equal_after_two_stops_on_the_same_ranks(tmp_path: Path) -> None:
    for equal, gone_on, batches in run_ranks(3, _stopped, tmp_path, [4, 6]):
        assert equal
        assert gone_on
        assert batches > 30


def _held() -> tuple[Counter[int], str]:
    """Tokens of a whole pass, of which an iteration that is held took the first batch; and what it raises later."""
    loader = _loader(numbered_stream(DOCUMENTS))
    held = iter(loader)
    seen = tokens_in(next(held))
    for batch in loader:
        seen += tokens_in(batch)
    with pytest.raises(ConfigError) as raised:
        next(held)
    return seen, str(raised.value)


def test_a_new_iteration_ends_one_that_is_held(tmp_path: Path) -> None:
    parts = run_ranks(2, _held, tmp_path)

    assert sum((seen for seen, _ in parts), Counter()) == all_tokens(DOCUMENTS)
    for rank, (_, told) in enumerate(parts):
        assert re.match(rf"rank {rank}, micro-batch \d+: a later iteration of this loader has begun", told)


def _own_rows() -> Counter[int]:
    """Each rank gives its own rows, rank 1 many more."""
    rank = torch.distributed.get_rank()
    numbers = range(20) if rank == 0 else range(20, 200)
    seen: Counter[int] = Counter()
    for batch in _loader(Rows([{"input_ids": numbered(number)} for number in numbers])):
        seen += tokens_in(batch)
    return seen


def test_a_part_may_end_long_before_another(tmp_path: Path) -> None:
    first, second = run_ranks(2, _own_rows, tmp_path)

    assert first + second == all_tokens(200)
    assert abs(first.total() - second.total()) <= 2 * 40  # ranks hold equally many, whoever read them


def _whole_documents() -> list[Any]:
    """Documents that begin, and that end, in this rank's rows of each batch."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, pad_to_multiple_of=1)
    device = torch.device("cpu")
    planner = PlacedPlanner(plugin, 2, whole_documents=True)
    loader = StreamLoader(
        *(numbered_stream(), planner, plugin.transport(device), plugin.thread_transport(), device), micro_steps=2
    )
    held = []
    for ids, positions, _ in _rows(loader):
        starts = [at for at, position in enumerate(positions) if position == 0 and ids[at]]
        ends = [*starts[1:], len(ids) - ids.count(0)]
        held += [(ids[start], stop - start) for start, stop in zip(starts, ends, strict=True)]
    return held


def test_documents_stay_whole_if_they_must(tmp_path: Path) -> None:
    first, second = run_ranks(2, _whole_documents, tmp_path)

    assert Counter([*first, *second]) == Counter(all_tokens().items())


def _on_a_mesh() -> list[Any]:
    """Rows of two data ranks, each of which is two tensor ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, pad_to_multiple_of=1)
    plugin.use_mesh(mesh, data="data", tensor="tensor")
    loader = plugin.dataloader(numbered_stream(100), device="cpu")
    rows = _rows(loader)
    plugin.close()
    return rows


def test_tensor_ranks_of_one_data_rank_get_the_same_rows(tmp_path: Path) -> None:
    first, same_as_first, second, same_as_second = run_ranks(4, _on_a_mesh, tmp_path)

    assert first == same_as_first != second == same_as_second
    tokens = Counter(token for rows in (first, second) for ids, *_ in rows for token in ids if token)
    assert tokens == all_tokens(100)


def _bad_row() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": numbered(number)} for number in range(200)]
    if torch.distributed.get_rank() == 1:
        rows[150] = {"input_ids": [-5]}
    list(_loader(Rows(rows)))


def _missing_shard() -> None:
    class Missing(Rows):
        def __iter__(self) -> Any:
            if torch.distributed.get_rank() == 1:
                raise FileNotFoundError("shard-7.parquet")
            return super().__iter__()

    list(_loader(Missing([{"input_ids": [3]}])))


def _waits_for_ever() -> None:
    class Waits(Rows):
        def __iter__(self) -> Any:
            yield from islice(super().__iter__(), 60)
            if torch.distributed.get_rank() == 1:
                threading.Event().wait()
            yield from self.rows[60:]

    rows = [{"input_ids": numbered(number)} for number in range(200)]
    list(_loader(Waits(rows), timeouts=Timeouts(agreement_seconds=3.0)))


def test_rank_that_waits_for_its_stream_too_long_is_named(tmp_path: Path) -> None:
    outcome, _ = start_ranks(2, _waits_for_ever, tmp_path, endless=frozenset({1}))

    assert outcome.exit_code == 1
    assert re.search(r"StepTimeoutError: rank 0, micro-batch \d+, agreement to read: rank 1 does not", outcome.output)
    # It did not wait a second time, to tell rank 1.
    assert "could not be reached" not in (tmp_path / "rank-0.log").read_text()


def _fails_in_training() -> None:
    for number, _ in enumerate(_loader(numbered_stream(DOCUMENTS))):
        if number == 3 and torch.distributed.get_rank() == 1:
            raise RuntimeError("the model does not fit")


def _other_inputs() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=64)
    row = {"input_ids": [1, 2], **({"kinds": [1, 2]} if torch.distributed.get_rank() else {})}
    device = torch.device("cpu")
    transports = plugin.transport(device), plugin.thread_transport()
    reading = Reading(inputs=frozenset({"kinds"}))
    list(StreamLoader(Rows([row]), PlacedPlanner(plugin, 2), *transports, device, reading=reading))


DIFFERS: dict[str, dict[str, Any]] = {
    "seed is 3 on rank 0, 4 on rank 1": {"seed": 4},
    "shuffle is True on rank 0, False on rank 1": {"shuffle": False},
    "prefetch is 2 on rank 0, 3 on rank 1": {"prefetch": 3},
    "micro_steps is 1 on rank 0, 2 on rank 1": {"micro_steps": 2},
    "stream_buffer_tokens is 0 on rank 0, 1000 on rank 1": {"stream_buffer_tokens": 1000},
    "tokens_per_rank is 48 on rank 0, 64 on rank 1": {"tokens_per_rank": 64},
}


def _all_differ() -> list[str]:
    """The error of a loader for each setting that differs on rank 1."""
    errors = []
    for of_rank_1 in DIFFERS.values():
        try:
            _differs(**of_rank_1)
            errors.append("no error")
        except PlanMismatchError as error:
            errors.append(str(error))
    return errors


def _differs(**of_rank_1: Any) -> None:
    """Reads with a setting that differs on rank 1."""
    of_plugin: dict[str, Any] = {"tokens_per_rank": TOKENS_PER_RANK, "stream_buffer_tokens": 0}
    of_loader: dict[str, Any] = {"seed": 3, "shuffle": True, "prefetch": 2, "micro_steps": 1}
    if torch.distributed.get_rank():
        for settings in (of_plugin, of_loader):
            settings |= {name: value for name, value in of_rank_1.items() if name in settings}
    list(distca_hf.DistCAPlugin(**of_plugin).dataloader(numbered_stream(), device="cpu", **of_loader))


def test_settings_that_differ_are_told_before_tokens_are_sent(tmp_path: Path) -> None:
    for rank, errors in enumerate(run_ranks(2, _all_differ, tmp_path)):
        for told, error in zip(DIFFERS, errors, strict=True):
            assert re.search(rf"rank {rank}, micro-batch 0: ranks disagree, .*{told}", error), (told, error)


def _other_rows(kind: str, folder: Path) -> None:
    """Reads a stream that has other rows on rank 1, in equal shards and columns."""
    rank = torch.distributed.get_rank()
    if kind == "files":
        files = [folder / f"{name}.jsonl" for name in ("a", "b" if rank == 0 else "c")]
        for file in files:
            file.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
        stream = load_dataset("json", data_files=[*map(str, files)], split="train", streaming=True)
    elif kind == "sizes":
        file = folder / str(rank) / "a.jsonl"
        file.parent.mkdir()
        file.write_text((json.dumps({"input_ids": [1, 2, 3]}) + "\n") * (rank + 1))
        stream = load_dataset("json", data_files=[str(file)], split="train", streaming=True)
    elif kind == "rows":
        rows = Dataset.from_dict({"input_ids": [numbered(number) for number in range(40)]})
        stream = rows.shuffle(seed=rank).to_iterable_dataset()
    else:
        stream = numbered_stream()
        stream = stream.shuffle(seed=5 + rank) if kind == "seed" else stream.filter(_odd if rank else _even)
    list(_loader(stream))


def _odd(row: dict[str, Any]) -> bool:
    return bool(row["input_ids"][0] % 2)


def _even(row: dict[str, Any]) -> bool:
    return not _odd(row)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("seed", r"generator=checksum \w{8}\) on rank 0, .*generator=checksum \w{8}\) on rank 1"),
        ("files", r"base_files=a\.jsonl .*, b\.jsonl.* on rank 0, .*base_files=a\.jsonl .*, c\.jsonl.* on rank 1"),
        ("sizes", r"base_files=a\.jsonl of 25 bytes.* on rank 0, .*base_files=a\.jsonl of 50 bytes.* on rank 1"),
        ("rows", r"shards=40 rows, some of which have checksum \w{8}, .* on rank 0, .*=40 rows, .* on rank 1"),
        ("filter", r"mask_function=_even.* on rank 0, .*mask_function=_odd.* on rank 1"),
    ],
)
def test_streams_of_other_rows_are_refused(kind: str, told: str, tmp_path: Path) -> None:
    outcomes = start_ranks(2, partial(_other_rows, kind, tmp_path), tmp_path / "ranks")

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for rank, outcome in enumerate(outcomes):
        assert re.search(
            rf"PlanMismatchError: rank {rank}, micro-batch 0: ranks disagree, .*step \d of the stream is .*{told}",
            outcome.output,
        )


def _a_pass_more(goes_on_with: str) -> None:
    """Rank 1 begins a second pass, and rank 0 does something else. No deadline may pass meanwhile."""
    hurry()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=64, timeouts=Timeouts(agreement_seconds=3600.0))
    loader, other = (plugin.dataloader(numbered_stream(), device="cpu") for _ in range(2))
    list(loader)
    if torch.distributed.get_rank() == 1:
        list(loader)
    elif goes_on_with == "another loader":
        list(other)
    else:
        torch.distributed.barrier()


@pytest.mark.parametrize(
    ("goes_on_with", "told"),
    [
        ("another loader", r"their next step is begin micro-batch 0 on rank 0, begin micro-batch \d+ on rank 1"),
        ("a barrier", r"ranks wait for each other at different places: .*agreement to begin on rank 1"),
    ],
)
def test_a_rank_that_reads_a_pass_more_is_named_before_any_deadline(
    goes_on_with: str, told: str, tmp_path: Path
) -> None:
    outcomes = start_ranks(2, partial(_a_pass_more, goes_on_with), tmp_path)

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert re.search(told, outcomes[1].output)


def _ends_at_once_in_its_second_pass() -> list[Counter[int]]:
    rank = torch.distributed.get_rank()

    class Once(Rows):
        def __iter__(self) -> Any:
            self._begin = self.at * rank
            return super().__iter__()

    numbers = range(20) if rank else range(20, 40)
    loader = _loader(Once([{"input_ids": numbered(number)} for number in numbers]))
    return [sum(map(tokens_in, loader), Counter()) for _ in range(2)]


def test_a_part_that_ends_at_once_in_its_second_pass_is_told(tmp_path: Path) -> None:
    ranks = run_ranks(2, _ends_at_once_in_its_second_pass, tmp_path)

    first, second = (sum(of_pass, Counter()) for of_pass in zip(*ranks, strict=True))
    assert first == all_tokens(40)
    assert sum(second.values()) < sum(first.values())
    assert "reader 1 of 2 gives no row in pass 1, and gave some before" in (tmp_path / "rank-1.log").read_text()
    assert "gives no row" not in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (_bad_row, ("rank 1 could not do its part", "reader 1 of 2, row 150: input_ids is -5")),
        (_missing_shard, ("rank 1 could not do its part", "shard-7.parquet")),
        (_fails_in_training, ("rank 1 left: RuntimeError: the model does not fit", "the model does not fit")),
        (_other_inputs, ('{"kinds": "int64"} on rank 1',) * 2),
    ],
    ids=["a bad row", "a shard that vanished", "an error in training", "columns that differ"],
)
def test_what_only_one_rank_finds_ends_all_of_them(body: Any, told: tuple[str, str], tmp_path: Path) -> None:
    outcomes = start_ranks(2, body, tmp_path)

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for outcome, text in zip(outcomes, told, strict=True):
        assert text in outcome.output
