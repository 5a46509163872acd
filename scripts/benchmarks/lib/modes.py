"""Modes of a benchmark step: the same documents and weights, held and attended in different ways (`MODES`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from datasets import Dataset

from distca_hf.arrays import IntArray
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import GivenPlans
from distca_hf.integrations.models.distributed_check import follow_mesh
from distca_hf.integrations.models.mixer_calls import KEYWORD, DocumentRows
from distca_hf.integrations.models.mixers import halo_tokens_for
from distca_hf.integrations.models.planner import planner_for
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.runtime.forward_pass import ForwardPass
from lib.baselines.operators import Call, ChosenKeys, MadeUpKeys, Work, make_call, whole_call
from lib.baselines.peers import MagiWork, RingmasterWork, ringmaster_states
from lib.baselines.ring_code import Llama3Work, RingWork, ZigzagWork
from lib.documents import (
    Documents,
    Holding,
    Segment,
    batch_of,
    evenly_spread,
    gathered_rows,
    share_of,
    whole_documents,
    zigzag,
)
from lib.place import Mode, Place, without
from lib.trainer_batches import AsOfTrainer, Batch, rows_on_one_device


# Methods of a forward pass in which ranks agree.
AGREEMENTS = ("agree_to_attend", "_agree_to_differentiate")


def _local(place: Place, documents: Documents) -> Mode:
    holding = whole_documents(_lengths(documents), place.wires.world_size, place.shares)
    segments = holding[place.wires.rank]
    work = place.whole_work([stop for _, _, stop in segments])
    return Mode("local", "bench_whole", [{**_pack(place, segments, documents), "bench_work": work}])


def _pack(place: Place, segments: Sequence[Segment], tokens: Sequence[IntArray]) -> Batch:
    """Returns segments. Mixers of the model take each for a whole document, in one call if their states may travel."""
    batch: Batch = batch_of(segments, tokens, place.device)
    if not place.carries_state:
        return batch
    lengths, halo_tokens = [stop - start for _, start, stop in segments], halo_tokens_for(place.model)
    if halo_tokens is None:
        batch[KEYWORD] = DocumentRows(np.array(lengths), 1, sum(lengths), place.device)
    else:
        documents = [(document, 0, tokens) for document, tokens in enumerate(lengths)]
        batch[KEYWORD] = rows_on_one_device(documents, halo_tokens, place.device)
    return batch


def _ideal(place: Place, documents: Documents) -> Mode:
    """Spreads the work evenly, with `MadeUpKeys` for keys of other ranks. With attention servers each trainer has the
    share of one of all ranks; attention of its other rows is zero."""
    rank, num_ranks = place.wires.rank, place.share_of or place.wires.world_size
    holdings = evenly_spread(_lengths(documents), num_ranks + place.servers)
    whole, parts = (holding[rank] for holding in holdings)
    served = share_of([*chain(*(chain(*holding[num_ranks:]) for holding in holdings))], rank, num_ranks)
    calls: list[Call] = []
    made_up: list[MadeUpKeys] = []
    if whole:
        calls.append(whole_call([stop for _, _, stop in whole], place.device))
    if parts:
        queries, keys = [stop - start for _, start, stop in parts], [stop for _, _, stop in parts]
        first = calls[0].queries.stop if calls else 0
        local_rows = torch.arange(first, first + sum(queries), device=place.device)
        # The last keys of a task are own rows: as many as there are queries.
        last = [np.arange(end - own, end) for end, own in zip(accumulate(keys), queries, strict=True)]
        places = torch.from_numpy(np.concatenate(last)).to(place.device)
        widths = [kind.widths[1:3] for kind in place.shape.kinds]
        made_up.append(MadeUpKeys(sum(keys), widths, place.dtype, places, local_rows))
        calls.append(make_call(first, queries, keys, made_up[0], place.device))
    batch = {**_pack(place, [*whole, *parts, *served], documents), "bench_work": place.work(*calls)}
    return Mode("ideal", "bench_whole", [batch], exact=False, meanwhile=[keys.made for keys in made_up])


def _ulysses(place: Place, documents: Documents) -> Mode:
    _check_may_cut(place, "ulysses")
    lengths = _lengths(documents)
    batches = _batches(place, _in_order(lengths, place.wires.world_size), documents, place.whole_work(lengths))
    return Mode("ulysses", "bench_heads", batches)


def _ringmaster(place: Place, documents: Documents) -> Mode:
    lengths = _lengths(documents)
    held = _in_order(lengths, place.wires.world_size)
    batches = [{**batch, KEYWORD: None} for batch in _batches(place, held, documents, place.whole_work(lengths))]
    passed = partial(ringmaster_states, place.model, lengths, place.device)
    return Mode("ringmaster", "bench_heads", batches, meanwhile=[passed])


def _context(place: Place, documents: Documents) -> Mode:
    _check_may_cut(place, "context")
    lengths, num_ranks = _lengths(documents), place.wires.world_size
    holding = zigzag(range(len(lengths)), lengths, num_ranks)
    gathered = gathered_rows(holding, lengths)
    segments = holding[place.wires.rank]
    calls, row = [], 0
    for chunks in (segments[: len(lengths)], segments[len(lengths) :]):
        queries, keys = [stop - start for _, start, stop in chunks], [stop for _, _, stop in chunks]
        rows = torch.from_numpy(np.concatenate([gathered[document][:stop] for document, _, stop in chunks]))
        calls.append(make_call(row, queries, keys, ChosenKeys(rows.to(place.device)), place.device))
        row += sum(queries)
    return Mode("context", "bench_gathered", _batches(place, holding, documents, place.work(*calls)))


def _of_package(
    name: str, make: Callable[..., RingWork], place: Place, documents: Documents, chunked: bool = False
) -> Mode:
    """Returns a mode whose ranks have consecutive tokens, or two chunks of every document. `make` returns attention
    from wires, kernel, lengths and device."""
    _check_may_cut(place, name)
    lengths, num_ranks = _lengths(documents), place.wires.world_size
    if chunked:
        holding = [sorted(held) for held in zigzag(range(len(lengths)), lengths, num_ranks)]
    else:
        holding = _in_order(lengths, num_ranks)
    work = make(place.wires, place.kernel, lengths, place.device)
    return Mode(name, "bench_package", _batches(place, holding, documents, work))


def _ringmaster_dense(way: str, place: Place, documents: Documents) -> Mode:
    make = partial(RingmasterWork, way, place.shape.layers[place.shape.only_kind][0])
    return _of_package(f"ringmaster-{way}", make, place, documents)


def _magi(place: Place, documents: Documents, setting: str) -> Mode:
    _check_may_cut(place, "magi")
    work = MagiWork(setting, place.shape, place.wires, _lengths(documents), place.device)
    batches = [{**work.batch(documents), "bench_work": work}]
    return Mode(f"magi@{setting}", "bench_package", batches, meanwhile=[work.planned], planner=work)


def _placed(place: Place, documents: Documents) -> Mode:
    tokens_per_rank = sum(_lengths(documents)) // place.wires.world_size
    plugin = place.plugin(tokens_per_rank)
    follow_mesh(place.model, plugin)
    loader = PlacedLoader(  # as plugin.dataloader makes it, for tokens that may be numbers beyond the vocabulary
        Dataset.from_dict({"input_ids": [tokens.astype(np.int32) for tokens in documents]}),
        planner_for(place.model, plugin, plugin.annex.extra_ranks),
        plugin.training_transport(place.device),
        place.device,
        shuffle=False,
    )
    batches = [{name: batch[name] for name in ("input_ids", "position_ids", "distca_plan")} for batch in loader]
    tokens = [batch["input_ids"].shape[1] for batch in batches]
    if tokens != [tokens_per_rank]:
        raise SystemExit(f"placed: rank {place.wires.rank} holds {tokens} tokens, not {tokens_per_rank}")
    return Mode.of_product("placed", batches)


def _given(place: Place, documents: Documents) -> Mode:
    names = ("input_ids", "position_ids")
    batches = [{name: batch[name] for name in names} for batch in _local(place, documents).batches]
    return Mode.of_product("given", AsOfTrainer(place.model, [batches]))


@contextmanager
def tasks_move() -> Iterator[None]:
    """Leaves rows of given batches where they are; attention tasks move instead, as for models that carry a state."""
    stay = mock.patch.object(GivenPlans, "layout", lambda plans, home, *_: home)
    move = mock.patch.object(GivenPlans, "plan", lambda plans, home, _=None: plan_by_moving(home, plans.head_groups))
    with stay, move:
        yield


class Kind(NamedTuple):
    """A kind of mode: how it is built for the documents of a step, and what `--help` says."""

    build: Callable[..., Mode]  # from `Place`, `Documents` and a setting if it has any
    words: str


MODES = {
    "local": Kind(_local, "plain packing: whole documents, packed in order; nothing is exchanged"),
    "ideal": Kind(
        _ideal,
        "the same work, spread evenly without any transfer. Of each length every rank has equally many whole "
        "documents; the rest is cut in zigzag, and keys of other ranks are made-up local ones. Tokens and attended "
        "pairs are equal on all ranks, to the pair. Layers with a state take each part for a document",
    ),
    "ulysses": Kind(_ulysses, "heads over all ranks: all-to-all of q, k, v before attention, and of its output after"),
    "context": Kind(_context, "every document in zigzag over all ranks, keys and values all-gathered"),
    "zigzag": Kind(
        partial(_of_package, "zigzag", ZigzagWork, chunked=True),
        "ring attention by the package ring-flash-attn, its own code on this kernel; only if it is named",
    ),
    "llama3": Kind(
        partial(_of_package, "llama3", Llama3Work),
        "that package's all-gather of some heads after the other, which it recommends for packed documents; only if "
        "it is named",
    ),
    "ringmaster": Kind(
        _ringmaster,
        "axolotl-ringmaster passes the states of layers, by its own code and flash-linear-attention's context over "
        "all ranks; attention as in ulysses; only if it is named",
    ),
    "ringmaster-ulysses": Kind(
        partial(_ringmaster_dense, "ulysses"),
        "Ulysses by the package axolotl-ringmaster, its own code on this kernel; only if it is named",
    ),
    "ringmaster-ring": Kind(
        partial(_ringmaster_dense, "ring"),
        "that package's default ring, which gathers keys and values of consecutive tokens; only if it is named",
    ),
    "magi": Kind(
        _magi,
        "MagiAttention, its own planner, transfers and kernel, once for each of --magi-settings; it plans anew in "
        "every round, which is timed apart from the step; only if it is named",
    ),
    "placed": Kind(_placed, "the product: batches of plugin.dataloader"),
    "given": Kind(
        _given,
        "the product on the packs of local, whose rows are placed inside the model; attention tasks move instead if "
        "a state of its layers cannot travel",
    ),
    "moved": Kind(
        lambda *given: _given(*given).renamed("moved", tasks_move),
        "given, but rows stay where they are, and attention tasks move; only if it is named",
    ),
    "unchecked": Kind(
        lambda *given: _placed(*given).renamed("unchecked", partial(without, ForwardPass, *AGREEMENTS)),
        "placed, but ranks agree on nothing in a forward pass: the price of that is placed ÷ unchecked",
    ),
}
# Run only if they are asked for by name: what pip installs for them, and the packages that then are there.
_RING, _RINGMASTER = ("--no-deps ring-flash-attn", "ring_flash_attn"), ("--no-deps axolotl-ringmaster", "ringmaster")
OF_PACKAGE = {
    "zigzag": _RING,
    "llama3": _RING,
    "ringmaster": ("'axolotl-ringmaster[fla]'", "ringmaster", "fla"),
    "ringmaster-ulysses": _RINGMASTER,
    "ringmaster-ring": _RINGMASTER,
    "magi": ("--no-build-isolation git+https://github.com/SandAI-org/MagiAttention@2c64135", "magi_attention"),
}


def _check_may_cut(place: Place, name: str) -> None:
    """Exits if documents have to stay whole: states do not travel in this mode."""
    if place.carries_state:
        raise SystemExit(f"{name} cuts documents, and layers of the model carry a state: leave this mode out")


def build_mode(name: str, place: Place, documents: Documents) -> Mode:
    """Returns the mode of a name for a step on these documents; exits if they cannot be held in this way. A collective
    call. The name is one of `MODES`, with @ and a setting if it has any."""
    kind, _, setting = name.partition("@")
    return MODES[kind].build(place, documents, *setting.split())


def _lengths(documents: Documents) -> list[int]:
    return [len(tokens) for tokens in documents]


def _in_order(lengths: Sequence[int], num_ranks: int) -> Holding:
    """Returns equal intervals of all tokens for the ranks."""
    layout = fill_in_order(lengths, num_ranks)
    return [layout.held_by(rank) for rank in range(num_ranks)]


def _batches(place: Place, holding: Holding, documents: Documents, work: Work | RingWork) -> list[Batch]:
    segments = holding[place.wires.rank]
    return [{**batch_of(segments, documents, place.device), "bench_work": work}]
