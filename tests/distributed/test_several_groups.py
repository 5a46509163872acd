"""Several groups of ranks in one job: each shares documents among its own ranks, and trains as one process does."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distca_hf
from distca_hf.comm.averaging import check_averaging
from distca_hf.errors import ConfigError
from support.data import random_dataset, random_documents
from support.layouts import random_layout
from support.models import tiny_model
from support.parity import Case, Difference, compare
from support.ranks import run_ranks, start_ranks


CPU = torch.device("cpu")
# How the ranks of a job are divided, by the kind of group that a plugin is given.
PAIRS = {"process group": ((0, 1), (2, 3)), "mesh": ((0, 2), (1, 3))}
TOKENS_PER_RANK = 256


@dataclass
class Seen:
    """What one rank of a pair has seen."""

    core: list[Difference]
    loss: float
    gradients: float
    packs: float
    packs_exchanged: bool
    refused: dict[str, str]


def _of_pair(kind: str) -> Any:
    """The group of this rank."""
    if kind == "mesh":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("share", "other"))["share"]
    group, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in PAIRS[kind]])
    return group


def _documents(pair: int) -> list[list[int]]:
    """Other documents for every pair, of other lengths; all fit one micro-batch."""
    return random_documents(9 + 2 * pair, seed=pair, lengths=(5, 17, 60))


def _exact(documents: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process, one document after the other, with sdpa."""
    model = tiny_model(implementation="sdpa").double().train()
    labels = sum(len(document) - 1 for document in documents)
    total = 0.0
    for document in documents:
        ids = torch.tensor([document])
        logits = model(input_ids=ids).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / labels
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def _packs(plugin: distca_hf.DistCAPlugin) -> tuple[float, bool]:
    """The difference of a loss over this rank's own pack, and whether attention tasks moved."""
    transport = plugin.transport(CPU)
    lengths = (150,) if transport.rank == 0 else (20, 20)
    documents = random_documents(len(lengths), seed=dist.get_rank(), lengths=lengths)
    ids = torch.tensor([token for document in documents for token in document])[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    labels = ids.where(positions > 0, -100)  # no document learns the beginning of the next one
    model = distca_hf.enable(tiny_model().double().train(), plugin)
    before = transport.traffic.exchanges
    loss = model(input_ids=ids, position_ids=positions, labels=labels).loss
    exchanged = transport.traffic.exchanges > before
    loss.backward()
    return abs(float(loss.detach()) - _exact(documents)[0]), exchanged


def _train_in_pairs(kind: str) -> Seen:
    rank = dist.get_rank()
    pair = next(number for number, ranks in enumerate(PAIRS[kind]) if rank in ranks)
    group = _of_pair(kind)
    refused = _refused(kind)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, kernel="cpu", group=group)
    transport = plugin.transport(CPU)
    assert (transport.rank, transport.world_size) == (PAIRS[kind][pair].index(rank), 2)
    seeds = range(10 * pair, 10 * pair + 5)  # other layouts, and other exchanges, for every pair
    core = [compare(Case.draw(seed, random_layout(random.Random(seed), 2)), transport) for seed in seeds]

    documents = _documents(pair)
    model = distca_hf.enable(tiny_model().double().train(), plugin)
    batch = next(iter(plugin.dataloader(random_dataset().from_dict({"input_ids": documents}))))
    if kind == "mesh":
        wrapped = fully_shard(model, mesh=group)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    loss = wrapped(**batch).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group.get_group() if kind == "mesh" else group)
    exact_loss, exact = _exact(documents)
    differences = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if kind == "mesh" else gradient
        differences.append(float((whole - exact[name]).abs().max()))
    packs, packs_exchanged = _packs(plugin)
    refused |= _refused_in_training(plugin)
    return Seen(core, abs(float(mean) / 2 - exact_loss), max(differences), packs, packs_exchanged, refused)


def _words(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def _refused(kind: str) -> dict[str, str]:
    """Words of the errors that ranks get for groups that cannot be used. Ranks are in unequally many groups then."""
    words = {}
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("share", "other"))
        words["two dimensions"] = _words(lambda: distca_hf.DistCAPlugin(group=mesh))
    first_pair = dist.new_group([0, 1])
    if dist.get_rank() in (2, 3):
        words["not in it"] = _words(lambda: distca_hf.DistCAPlugin(group=first_pair))
    return words


def _refused_in_training(plugin: distca_hf.DistCAPlugin) -> dict[str, str]:
    """Words of the errors that ranks get where gradients would be averaged over the whole job."""
    model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
    loader = plugin.dataloader(random_dataset(4, lengths=(30,)))
    with torch.no_grad():  # before it is wrapped
        model.eval()(**next(iter(loader)))
    model.train()
    batches = iter(loader)
    wrapped = nn.parallel.DistributedDataParallel(model)
    words = {"DDP": _words(lambda: wrapped(**next(batches)))}
    sharded = fully_shard(tiny_model(num_hidden_layers=1), mesh=init_device_mesh("cpu", (4,)))
    words["FSDP2"] = _words(lambda: check_averaging(sharded, plugin.members))
    PartialState(cpu=True)
    other = distca_hf.DistCAPlugin(group=plugin.group)
    words["Accelerate"] = _words(lambda: other.transport(CPU))
    return words


@pytest.mark.parametrize("kind", PAIRS)
def test_every_group_shares_rows_and_trains_by_itself(kind: str, tmp_path: Path) -> None:
    by_rank = run_ranks(4, _train_in_pairs, tmp_path, kind)

    for rank, seen in enumerate(by_rank):
        assert max(difference.largest for difference in seen.core) <= 1e-10
        assert all(difference.as_planned for difference in seen.core)
        assert seen.loss <= 1e-6  # losses are computed in fp32
        assert seen.gradients <= 1e-6
        assert seen.packs <= 1e-6
        assert seen.packs_exchanged
        over_four = "over ranks 0, 1, 2, 3 of the job, and ranks {}, {} of the job share documents".format(
            *next(pair for pair in PAIRS[kind] if rank in pair)
        )
        assert f"DistributedDataParallel averages gradients {over_four}" in seen.refused["DDP"]
        assert f"averages gradients {over_four}" in seen.refused["FSDP2"]
        assert "Accelerate averages gradients over 4" in seen.refused["Accelerate"]
        assert ("not in it" in seen.refused) == (rank in (2, 3))
    assert any(difference.bytes_sent for seen in by_rank for difference in seen.core)
    assert "rank 3 is not in the group" in by_rank[3].refused["not in it"]
    if kind == "mesh":
        assert "2 dimensions, 'share', 'other'" in by_rank[0].refused["two dimensions"]
        assert "group=mesh['share']" in by_rank[0].refused["two dimensions"]


def _lose_a_rank(_: Path) -> int:
    """Rank 3 fails while its pair waits for it; the other pair goes on."""
    pairs = PAIRS["mesh"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("share", "other"))["share"]
    transport = distca_hf.DistCAPlugin(group=mesh).transport(CPU)
    transport.gather([0], "all connected").wait()  # a rank may return from its groups before others have connected
    if dist.get_rank() == pairs[1][1]:
        raise ArithmeticError("first cause")
    return sum(row[0] for row in transport.gather([dist.get_rank()], "here").wait())


def test_lost_rank_is_named_in_its_group_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes = start_ranks(4, _lose_a_rank, tmp_path, tmp_path)

    assert [outcome.result for outcome in outcomes] == [2, None, 2, None]
    assert "rank 0, here: rank 1 (rank 3 of the job) left: ArithmeticError: first cause" in outcomes[1].output
