"""Wrappers that average gradients: over the ranks that share documents they train as one process does, over others
they are refused before the first step. What leaves other weights on ranks all the same is noticed in the next pass."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import distca_hf
from distca_hf.errors import ConfigError, PlanMismatchError
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks


RANKS = 4
NAMES_OF_FSDP1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
FULL, GRADIENTS, NOTHING, HYBRID, HYBRID_ZERO2 = (getattr(ShardingStrategy, name) for name in NAMES_OF_FSDP1)


class Groups(NamedTuple):
    """Groups and meshes of this rank: with all others, the neighbour, the other neighbour, and itself."""

    everyone: dist.ProcessGroup
    pair: dist.ProcessGroup
    across: dist.ProcessGroup
    alone: dist.ProcessGroup
    grid: DeviceMesh
    line: DeviceMesh
    column: DeviceMesh

    @classmethod
    def of(cls) -> "Groups":
        def mine(*sets: list[int]) -> Any:
            return dist.new_subgroups_by_enumeration(list(sets))[0]

        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "pair"))
        line, column = (
            init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")) for shape in ((1, RANKS), (RANKS, 1))
        )
        pairs = mine([0, 1], [2, 3]), mine([0, 2], [1, 3]), mine(*[[rank] for rank in range(RANKS)])
        return cls(mine(list(range(RANKS))), *pairs, grid, line, column)


Wrap = Callable[[Any, Groups], nn.Module]


def _ddp(**given: Any) -> Callable[[Any], nn.Module]:
    return lambda model: nn.parallel.DistributedDataParallel(model, **given)


def _fsdp1(model: Any, strategy: ShardingStrategy, layers: bool = False, **given: Any) -> nn.Module:
    policy = ModuleWrapPolicy({LlamaDecoderLayer}) if layers else None
    fixed = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, sharding_strategy=strategy, auto_wrap_policy=policy, **fixed, **given)


def _fsdp2(model: Any, mesh: DeviceMesh, of_layers: DeviceMesh | None = None) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=of_layers or mesh)
    return fully_shard(model, mesh=mesh)


def _nested_fsdp1(model: Any, groups: Groups) -> nn.Module:
    """Layers are averaged over pairs, the rest over all."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = _fsdp1(layer, FULL, process_group=groups.pair)
    return _fsdp1(model, FULL, process_group=groups.everyone)


# Wrappers, and the group of the plugin.
VALID: dict[str, tuple[Wrap, str | None]] = {
    "DDP": (lambda m, g: _ddp()(m), None),
    "DDP, group of all": (lambda m, g: _ddp(process_group=g.everyone)(m), None),
    "DDP in pairs": (lambda m, g: _ddp(process_group=g.pair)(m), "pair"),
    "FSDP1": (lambda m, g: _fsdp1(m, FULL), None),
    "FSDP1 of layers, gradients": (lambda m, g: _fsdp1(m, GRADIENTS, layers=True), None),
    "FSDP1, no shards": (lambda m, g: _fsdp1(m, NOTHING), None),
    "FSDP1, hybrid by mesh": (lambda m, g: _fsdp1(m, HYBRID, layers=True, device_mesh=g.grid), None),
    "FSDP1, hybrid by groups": (lambda m, g: _fsdp1(m, HYBRID_ZERO2, process_group=(g.pair, g.across)), None),
    "FSDP1 in pairs": (lambda m, g: _fsdp1(m, FULL, process_group=g.across), "across"),
    "FSDP2": (lambda m, g: _fsdp2(m, init_device_mesh("cpu", (RANKS,))), None),
    "HSDP": (lambda m, g: _fsdp2(m, g.grid), None),
    "HSDP of one shard": (lambda m, g: _fsdp2(m, g.column), None),
    "HSDP of one replica": (lambda m, g: _fsdp2(m, g.line, of_layers=g.grid), None),
    "FSDP2 in pairs": (lambda m, g: _fsdp2(m, g.grid["pair"]), "pair"),
}
DDP, MESH, EMBEDDINGS = "DistributedDataParallel", "the device mesh of model.", "embed_tokens.weight"
# Wrappers, the group of the plugin, what the error says of the wrapper, and the groups that it averages over.
INVALID: dict[str, tuple[Wrap, str | None, str, str]] = {
    "DDP in pairs": (lambda m, g: _ddp(process_group=g.pair)(m), None, DDP, "pair"),
    "DDP alone": (lambda m, g: _ddp(process_group=g.alone)(m), None, DDP, "alone"),
    "DDP over more": (lambda m, g: _ddp()(m), "pair", DDP, "all"),
    "DDP in other pairs": (lambda m, g: _ddp(process_group=g.pair)(m), "across", DDP, "pair"),
    "FSDP1 in pairs": (lambda m, g: _fsdp1(m, FULL, process_group=g.pair), None, "(FULL_SHARD)", "pair"),
    # Torch makes NO_SHARD of any strategy over one rank.
    "FSDP1 alone": (lambda m, g: _fsdp1(m, FULL, process_group=g.alone), None, "(NO_SHARD)", "alone"),
    "FSDP1 over more": (lambda m, g: _fsdp1(m, GRADIENTS), "pair", "(SHARD_GRAD_OP)", "all"),
    "FSDP1 of layers in pairs": (_nested_fsdp1, None, "(FULL_SHARD)", "pair"),
    "FSDP1, no shards in pairs": (lambda m, g: _fsdp1(m, NOTHING, process_group=g.pair), None, "(NO_SHARD)", "pair"),
    "FSDP1, hybrid of one shard": (lambda m, g: _fsdp1(m, HYBRID, device_mesh=g.column), None, "(NO_SHARD)", "alone"),
    "FSDP1, hybrid of a pair": (
        lambda m, g: _fsdp1(m, HYBRID, process_group=(g.pair, g.alone)),
        None,
        "(HYBRID_SHARD)",
        "pair, alone",
    ),
    "FSDP1, hybrid of a pair twice": (
        lambda m, g: _fsdp1(m, HYBRID, process_group=(g.pair, g.pair)),
        None,
        "(HYBRID_SHARD)",
        "pair, pair",
    ),
    "FSDP2 in pairs": (lambda m, g: _fsdp2(m, g.grid["pair"]), None, f"{MESH}{EMBEDDINGS}", "pair"),
    "FSDP2 alone": (lambda m, g: _fsdp2(m, g.column["shards"]), None, f"{MESH}{EMBEDDINGS}", "alone"),
    "FSDP2 of layers in pairs": (
        lambda m, g: _fsdp2(m, g.line, of_layers=g.grid["across"]),
        None,
        f"{MESH}layers.0.self_attn.q_proj.weight",
        "across",
    ),
    "HSDP over more": (lambda m, g: _fsdp2(m, g.grid), "pair", f"{MESH}{EMBEDDINGS}", "all"),
}


def _pack() -> dict[str, torch.Tensor]:
    """The first rank of each pair has a long document, so that tasks move."""
    rank = dist.get_rank()
    ids = torch.tensor(random_documents(1, seed=rank, lengths=(120 if rank in (0, 3) else 20,)))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1])[None]}


def _train(wrapped: nn.Module, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Weights after two steps.

    Args:
        group: to average gradients over, where no wrapper does.
    """
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for _ in range(2):
        wrapped(**_pack()).loss.backward()
        for parameter in wrapped.parameters() if group is not None else ():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group)
        optimizer.step()
        optimizer.zero_grad()
    is_fsdp1 = isinstance(wrapped, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(wrapped) if is_fsdp1 else nullcontext():
        return [getattr(x, "full_tensor", x.clone)() for x in (p.detach() for p in wrapped.parameters())]


def _run_all(_: Path) -> dict[str, float | str]:
    """By case the largest difference from weights that were averaged by hand, or the words of the error."""
    groups, found = Groups.of(), {}
    named: dict[str | None, dist.ProcessGroup | None] = {None: None, "pair": groups.pair, "across": groups.across}
    plugins = {name: distca_hf.DistCAPlugin(group=group) for name, group in named.items()}

    def enabled(of_group: str | None) -> Any:
        return distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugins[of_group])

    by_hand = {name: _train(enabled(name), group or groups.everyone) for name, group in named.items()}
    for case, (wrap, of_group, *_) in {f"valid {n}": c for n, c in VALID.items()}.items():
        weights = zip(_train(wrap(enabled(of_group), groups)), by_hand[of_group], strict=True)
        found[case] = max(float((one - other).abs().max()) for one, other in weights)
    for case, (wrap, of_group, _, _) in INVALID.items():
        with pytest.raises(ConfigError) as caught:
            _train(wrap(enabled(of_group), groups))
        found[f"invalid {case}"] = str(caught.value)
    return found | {name: _second_pass(enabled(None), groups, name) for name in SECOND_PASSES}


# What happens between two passes, and words of all ranks about the second one.
SECOND_PASSES = {
    "nobody averages": "ranks disagree, nothing was sent: weight lm_head.weight is",
    "one leaves the step out": "ranks disagree, nothing was sent: weight lm_head.weight is",
    "one changes a buffer": "ranks disagree, nothing was sent: buffer model.rotary_emb.inv_freq is",
    "all change a buffer": "",
    "wrapped over a pair": "DistributedDataParallel averages gradients over ranks",
}


def _second_pass(model: Any, groups: Groups, between: str) -> str:
    """Words of the error in a second pass, if there is one. The fused optimizer, Trainer's default, writes to weights
    without a trace in their versions."""
    rank = dist.get_rank()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight)
    model(**_pack()).loss.backward()
    if between != "nobody averages":
        dist.all_reduce(model.lm_head.weight.grad, op=dist.ReduceOp.AVG)
    if between != "one leaves the step out" or rank != 1:
        torch.optim.AdamW([model.lm_head.weight], fused=True).step()
    if between == "all change a buffer" or (between == "one changes a buffer" and rank == 1):
        model.model.rotary_emb.inv_freq *= 1 + (1 + rank) / 100_000
    wrapped = _ddp(process_group=groups.pair)(model) if between == "wrapped over a pair" else model
    try:
        wrapped(**_pack())
    except (PlanMismatchError, ConfigError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(RANKS, _run_all, tmp_path_factory.mktemp("wrappers"), Path())


@pytest.mark.parametrize("name", VALID)
def test_wrappers_over_the_ranks_that_share_documents_train(name: str, found: list[dict[str, Any]]) -> None:
    assert all(of_rank[f"valid {name}"] < 1e-6 for of_rank in found), [of_rank[f"valid {name}"] for of_rank in found]


@pytest.mark.parametrize("name", INVALID)
def test_wrappers_over_other_ranks_are_refused(name: str, found: list[dict[str, Any]]) -> None:
    _, of_group, wrapper, groups = INVALID[name]
    for rank, of_rank in enumerate(found):
        ranks = {
            "all": "ranks 0, 1, 2, 3 of the job",
            "pair": f"ranks {rank & 2}, {rank | 1} of the job",
            "across": f"ranks {rank & 1}, {rank | 2} of the job",
            "alone": f"rank {rank} of the job",
        }
        over = " and then ".join(ranks[group] for group in groups.split(", "))
        expected = f"{wrapper} averages gradients over {over}, and {ranks[of_group or 'all']} share documents"
        assert expected in of_rank[f"invalid {name}"]


@pytest.mark.parametrize("between", SECOND_PASSES)
def test_what_one_rank_changes_after_a_pass_is_noticed_in_the_next(between: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert SECOND_PASSES[between] in of_rank[between]
        assert bool(SECOND_PASSES[between]) == bool(of_rank[between])
        assert ("and take every optimizer step" in of_rank[between]) == ("ranks disagree" in of_rank[between])
