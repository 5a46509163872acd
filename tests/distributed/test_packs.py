"""Batches that somebody else packed: tokens stay, attention tasks move, numbers stay."""

import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

import distca_hf
from distca_hf.comm.groups import open_transport
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving
from support.data import random_dataset, random_documents
from support.models import VOCABULARY, tiny_model
from support.parity import Case, Difference, compare
from support.ranks import run_ranks


CASES = 20
Pack = list[list[int]]


def skewed_layout(rng: random.Random, num_ranks: int) -> Layout:
    """Packs of which a few hold all long documents."""
    heavy = set(rng.sample(range(num_ranks), rng.randint(1, max(1, num_ranks // 2))))
    return Layout.from_packs(
        [
            [rng.randint(100, 300) for _ in range(rng.choice([1, 2]))] + [7] * rng.randint(0, 3)
            if rank in heavy
            else [rng.randint(1, 30) for _ in range(rng.choice([0, 1, 4]))]
            for rank in range(num_ranks)
        ]
    )


def moved_share(plan: Plan) -> float:
    """Work computed away from home, as a share of all work."""
    moved = plan.pieces.select(plan.pieces.moved)
    pairs = (moved.stop * (moved.stop + 1) - moved.start * (moved.start + 1)) // 2
    return float((pairs * (moved.rows // moved.tokens)).sum() / plan.work.sum())


def _compare_many(first_seed: int, num_ranks: int) -> list[tuple[float, Difference]]:
    transport = open_transport(torch.device("cpu"), 20.0)
    results = []
    for seed in range(first_seed, first_seed + CASES):
        plan = plan_by_moving(skewed_layout(random.Random(seed), num_ranks), head_groups=1 + seed % 4)
        results.append((moved_share(plan), compare(Case.draw(seed, plan.layout, plan), transport)))
    return results


def test_moved_tasks_equal_unsplit_attention(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    by_rank = run_ranks(4, _compare_many, tmp_path, 400, 4)
    differences = [difference for rank in by_rank for _, difference in rank]
    shares = [share for share, _ in by_rank[0]]

    record_property("largest difference", max(difference.largest for difference in differences))
    assert max(difference.largest for difference in differences) <= 1e-10
    assert all(difference.as_planned for difference in differences), differences
    assert sum(share >= 0.3 for share in shares) >= CASES / 2, shares


# --- through a model

LONG, SHORT = (180, 90), (5, 9, 17)


def packs_of(world: int) -> list[Pack]:
    """One pack per rank: long documents on the first, short ones on the others, none on the last of three."""
    packs = [random_documents(2, lengths=LONG), *(random_documents(4, rank, SHORT) for rank in range(1, world))]
    return [*packs[:2], []] if world == 3 else packs


def as_batch(pack: Pack, form: str) -> dict[str, Any]:
    """A pack in one of the forms in which collators bring them."""
    features = [{"input_ids": ids, "labels": ids} for ids in pack]
    if not pack:
        empty = torch.zeros((1, 0), dtype=torch.int64)
        return {"input_ids": empty, "labels": empty.clone(), "position_ids": empty.clone()}
    if form == "rows":
        ids = torch.tensor(pack)
        return {"input_ids": ids, "labels": ids.clone()}
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=form == "offsets")(features)
    if form == "offsets":
        batch.pop("position_ids")
        lengths = [len(ids) for ids in pack]
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        assert batch["cu_seq_lens_q"].flatten().tolist() == [0, *accumulate(lengths)]
    return dict(batch)


def _gradients(packs: list[Pack], form: str) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss and gradients of this rank's pack, summed over ranks, and imbalance before and after."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plugin = distca_hf.DistCAPlugin()
    model = distca_hf.enable(tiny_model(), plugin).train()
    wrapped = nn.parallel.DistributedDataParallel(model)
    loss = wrapped(**as_batch(packs[rank], form), num_items_in_batch=1).loss
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    facts = model._distca_watch.planner.history[-1]
    gradients = {name: parameter.grad * world for name, parameter in model.named_parameters()}
    return total.item(), gradients, [facts.imbalance_before, facts.imbalance]


@pytest.mark.parametrize(("world", "form"), [(2, "positions"), (3, "offsets"), (2, "rows")])
def test_packs_of_all_ranks_have_the_gradients_of_their_documents(world: int, form: str, tmp_path: Path) -> None:
    packs = (
        [[ids[:60] for ids in pack if len(ids) >= 60] for pack in packs_of(world)]
        if form == "rows"
        else packs_of(world)
    )
    model = tiny_model(implementation="sdpa").train()
    expected = 0.0
    for document in (ids for pack in packs for ids in pack):
        ids = torch.tensor(document)[None]
        loss = model(ids, labels=ids, num_items_in_batch=1, use_cache=False).loss
        loss.backward()
        expected += loss.item()

    for total, gradients, (before, after) in run_ranks(world, _gradients, tmp_path, packs, form):
        assert total == pytest.approx(expected, rel=1e-5)
        assert after < 1.05 < before
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-3, rtol=1e-4, msg=name)


def _placed_and_packed_in_turn() -> list[float]:
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = distca_hf.enable(tiny_model(), plugin).train()
    placed = iter(plugin.dataloader(random_dataset()))
    losses = []
    for _ in range(3):
        for batch in (next(placed), as_batch(packs_of(2)[rank], "positions") | {"num_items_in_batch": 100}):
            loss = model(**batch).loss
            loss.backward()
            torch.distributed.all_reduce(total := loss.detach().clone())
            losses.append(total.item())
    return losses


def test_one_model_takes_placed_and_packed_batches_in_turn(tmp_path: Path) -> None:
    losses = run_ranks(2, _placed_and_packed_in_turn, tmp_path)[0]

    assert losses[1] == losses[3] == losses[5]
    assert len({losses[0], losses[2], losses[4]}) == 3


def _evaluate_on_one_rank() -> float | None:
    rank = torch.distributed.get_rank()
    model = distca_hf.enable(tiny_model(), distca_hf.DistCAPlugin())
    batch = as_batch(packs_of(2)[0], "positions")
    if rank == 1:
        return None
    with torch.no_grad():
        model.train()(**batch)
    return model.eval()(**batch).loss.item()


def test_evaluation_on_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    alone, nothing = run_ranks(2, _evaluate_on_one_rank, tmp_path)
    model = tiny_model(implementation="sdpa").eval()

    assert nothing is None
    assert alone == pytest.approx(
        model(**as_batch(packs_of(2)[0], "positions"), use_cache=False).loss.item(), rel=1e-5
    )


def _padded(rank: int, step: int) -> dict[str, Any]:
    """Rank 0 pads on the left in the second step; documents of the other one are longer."""
    torch.manual_seed(10 * step + rank)
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, 8 + 40 * rank))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if rank == 0 and step == 1:
        batch["attention_mask"][0, :3] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def _train_on_padded(implementation: str) -> tuple[list[float], list[float], list[bool]]:
    """Losses, gradient norms, and whether a step was planned."""
    rank, losses, norms, planned = torch.distributed.get_rank(), [], [], []
    model = tiny_model(implementation=implementation).train()
    if implementation == "distca":
        distca_hf.enable(model, distca_hf.DistCAPlugin())
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        watch = watch_of(model)
        seen = 0 if watch is None or watch.planner is None else len(watch.planner.history)
        loss = wrapped(**_padded(rank, step), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        model.zero_grad()
        planned.append(watch is not None and watch.planner is not None and len(watch.planner.history) > seen)
    if watch is not None and watch.planner is not None:
        assert watch.planner.times.micro_batches == sum(planned), "metrics are those of planned micro-batches"
    return losses, norms, planned


def test_padded_batch_of_one_rank_is_attended_by_every_rank_alone(tmp_path: Path) -> None:
    """The steps around it are balanced; numbers are those of sdpa."""
    ours = run_ranks(2, _train_on_padded, tmp_path / "distca", "distca")
    usual = run_ranks(2, _train_on_padded, tmp_path / "sdpa", "sdpa")

    for (losses, norms, planned), (losses_of_sdpa, norms_of_sdpa, _) in zip(ours, usual, strict=True):
        assert planned == [True, False, True]
        assert losses == pytest.approx(losses_of_sdpa, abs=1e-5)
        assert norms == pytest.approx(norms_of_sdpa, rel=1e-4)


def _nothing() -> list[dict[str, Any]]:
    """Batches without a token, in every form."""
    batches = []
    for shape in ((1, 0), (2, 0), (0, 5)):
        names = "input_ids", "attention_mask", "labels"
        batches.append({name: torch.zeros(shape, dtype=torch.int64) for name in names})
    offsets = torch.tensor([0, 0], dtype=torch.int32)
    return [*batches, as_batch([], "positions") | {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone()}]


def _train_on_nothing_or_padding() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients; rank 0 has a padded batch beside batches of nothing."""
    rank, losses, gradients = torch.distributed.get_rank(), [], []
    model = distca_hf.enable(tiny_model(), distca_hf.DistCAPlugin()).train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for nothing in _nothing():
        loss = wrapped(**(nothing if rank == 1 else _padded(0, 1))).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.zero_grad()
    return losses, gradients


def test_rank_without_tokens_trains_beside_a_padded_one(tmp_path: Path) -> None:
    model = tiny_model(implementation="sdpa").train()
    expected = model(**_padded(0, 1), use_cache=False).loss
    expected.backward()

    (losses, gradients), (nothing, _) = run_ranks(2, _train_on_nothing_or_padding, tmp_path)
    assert nothing == [0.0] * 4
    assert losses == pytest.approx([expected.item()] * 4, abs=1e-5)
    for of_batch in gradients:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(of_batch[name], parameter.grad / 2, atol=1e-5, rtol=1e-4, msg=name)


def _positional_calls_of_adapters() -> list[tuple[float, float]]:
    """Losses by position and by name, of a PEFT model whose `forward` names none of its arguments."""
    from peft import LoraConfig, get_peft_model

    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    distca_hf.enable(model, plugin).train()
    names = "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels"
    packed = as_batch(packs_of(2)[torch.distributed.get_rank()], "positions")
    losses = []
    for batch in (packed, next(iter(plugin.dataloader(random_dataset())))):
        others = {name: value for name, value in batch.items() if name not in names}
        by_position = model(*[batch.get(name) for name in names], **others).loss.item()
        losses.append((by_position, model(**batch).loss.item()))
    return losses


def test_adapters_without_a_task_take_arguments_by_position(tmp_path: Path) -> None:
    for losses in run_ranks(2, _positional_calls_of_adapters, tmp_path):
        for by_position, by_name in losses:
            assert by_position == by_name
