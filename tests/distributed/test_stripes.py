"""One document as large as almost the whole micro-batch: its heads are divided among all ranks, numbers stay."""

import random
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn

import distca_hf
from distca_hf.comm.groups import open_transport
from distca_hf.planning.plan import plan_in_place
from support.data import random_documents
from support.layouts import striped_layout
from support.models import tiny_model
from support.parity import Case, Difference, compare
from support.ranks import run_ranks


CASES = 15
RANKS = 6
TOKENS_PER_RANK = 64
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


def _compare_many(num_ranks: int) -> list[Difference]:
    transport = open_transport(torch.device("cpu"), 20.0)
    differences = []
    for seed in range(CASES):
        layout = striped_layout(random.Random(seed), num_ranks, longest_tokens=200)
        differences.append(compare(Case.draw(seed, layout, plan_in_place(layout, 1 + seed % 4)), transport))
    return differences


def test_stripes_equal_unsplit_attention(tmp_path: Path) -> None:
    differences = [difference for rank in run_ranks(4, _compare_many, tmp_path, 4) for difference in rank]

    assert max(difference.largest for difference in differences) <= 1e-10
    assert all(difference.as_planned for difference in differences), differences


def documents() -> list[list[int]]:
    return [*random_documents(1, 1, (340,)), *random_documents(4, 2, (3, 5, 9))]


def _gradients(tile_heads: int) -> tuple[dict[str, torch.Tensor], int, list[int]]:
    """Gradients of one micro-batch, in how many groups its plan divides heads, and the work of every rank."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, attention_kv_heads=tile_heads)
    model = distca_hf.enable(tiny_model(**HEADS), plugin).train()
    dataset = Dataset.from_dict({"input_ids": documents()})
    batch = next(iter(plugin.dataloader(dataset, shuffle=False, model=model)))
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(**batch).loss.backward()
    facts = batch["distca_plan"].facts
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return gradients, facts.rows_per_token, list(facts.work)


@pytest.mark.parametrize(("tile_heads", "groups", "imbalance"), [(0, 8, 1.02), (6, 4, 1.06), (4, 4, 1.06)])
def test_a_model_with_striped_documents_has_the_gradients_of_its_documents(
    tile_heads: int, groups: int, imbalance: float, tmp_path: Path
) -> None:
    """Ranks divide the heads of each tile."""
    by_rank = run_ranks(RANKS, _gradients, tmp_path, tile_heads)

    model = tiny_model(implementation="sdpa", **HEADS).train()
    labels = sum(len(document) - 1 for document in documents())
    for document in documents():
        ids = torch.tensor([document])
        model(input_ids=ids, labels=ids, num_items_in_batch=labels, use_cache=False).loss.backward()
    for gradients, rows_per_token, work in by_rank:
        assert rows_per_token == groups
        assert max(work) <= imbalance * sum(work) / RANKS
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
