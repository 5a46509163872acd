"""Auxiliary losses of routers are products of means over the tokens of one rank, as in any data parallelism: they
depend on which rank holds which tokens. Nothing else of a mixture of experts does."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import AutoModelForCausalLM

import distca_hf
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks


pytestmark = pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23), reason="Transformers divides experts rightly since 5.23"
)
RANKS = 2
LENGTHS = (30, 41, 29, 60)
COEFFICIENT = 0.01


@dataclass
class Losses:
    """Means over ranks, of one micro-batch.

    Attributes:
        labels: loss of the labels alone.
        auxiliary: loss of the routers, before its coefficient.
    """

    labels: float
    auxiliary: float


def write_model(folder: Path) -> Path:
    """Routers that prefer some experts: these are what an auxiliary loss is for."""
    model = tiny_model("qwen3_moe", num_hidden_layers=2, initializer_range=0.2, router_aux_loss_coef=COEFFICIENT)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, attention: str, **arguments: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, **arguments)
    model.config.output_router_logits = True
    return model.train()


def on_ranks(folder: Path, batches: list[list[list[int]]]) -> list[tuple[Losses, Losses, Losses]]:
    """By batch, of whole experts; of experts that are divided; and of the same again with documents on other ranks."""
    return [_of_batch(folder, documents, -(-sum(map(len, documents)) // RANKS)) for documents in batches]


def _of_batch(folder: Path, documents: list[list[int]], tokens_per_rank: int) -> tuple[Losses, Losses, Losses]:
    from transformers.distributed import DistributedConfig

    divided = {"distributed_config": DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)}
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens_per_rank)
    seen = []
    for arguments, order in (({}, documents), (divided, documents), (divided, documents[::-1])):
        model = distca_hf.enable(load(folder, "distca", **arguments), plugin)
        (batch,) = plugin.dataloader(Dataset.from_dict({"input_ids": order}), shuffle=False, model=model)
        output = model(**batch)
        means = torch.stack([output.loss - COEFFICIENT * output.aux_loss, output.aux_loss]).detach()
        dist.all_reduce(means)
        seen.append(Losses(*(means / RANKS).tolist()))
    return seen[0], seen[1], seen[2]


def in_one_process(folder: Path, documents: list[list[int]]) -> Losses:
    """All tokens in one pass of sdpa."""
    ids = torch.tensor([*itertools.chain(*documents)])[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    labels = ids.where(positions > 0, -100)
    output = load(folder, "sdpa")(input_ids=ids, position_ids=positions, labels=labels, use_cache=False)
    return Losses(float(output.loss - COEFFICIENT * output.aux_loss), float(output.aux_loss))


def test_only_the_auxiliary_loss_depends_on_who_holds_which_tokens(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = write_model(tmp_path / "model")
    batches = [random_documents(count, lengths=LENGTHS) for count in (4, 100)]
    seen = run_ranks(RANKS, on_ranks, tmp_path, folder, batches)[0]

    differences = []
    for documents, (whole, divided, turned) in zip(batches, seen, strict=True):
        alone = in_one_process(folder, documents)
        for losses in (whole, divided, turned):
            assert losses.labels == pytest.approx(alone.labels, abs=1e-5)
        assert divided.auxiliary == pytest.approx(whole.auxiliary, rel=1e-5), "where experts are changes nothing"
        assert whole.auxiliary != pytest.approx(turned.auxiliary, rel=1e-5)
        differences.append(whole.auxiliary / alone.auxiliary - 1)
    record_property("relative differences with 85 and 2,000 tokens per rank", differences)
    assert differences[0] > 0.02
    assert 1e-5 < abs(differences[1]) < differences[0] / 5, "means over more tokens depend less on which they are"
