"""Images that arrived on some ranks are computed on all, and gradients of all parameters are those of one process."""

from pathlib import Path

import pytest
import torch.distributed as dist
from test_shared_images import CASES, CAT, CLIP, DOG, LONG, MARKS, QUESTION, TAIL, WIDE, Image, Row, alone
from test_shared_images import assert_equal, batch_of, in_double, loss_of, model_of, pack_of, words
from torch import nn

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.given_batches import Gradients, gradients_of
from support.ranks import run_ranks


def rows_of(kind: str, case: str, world_size: int) -> list[list[Row]]:
    large = Image(5) if kind in ("llava", "gemma3") else Image(5, 8, 12)
    one = [[QUESTION, CAT, TAIL, large, words(9, 7), DOG, LONG], [words(5, 8), large]]
    text = [[words(30 + rank, rank)] for rank in range(world_size)]
    if case == "one rank":
        return [one, *([row] for row in text[1:])]
    if case == "some ranks":
        return [[*text[:1]], one, *[[[CAT, words(40, 3)]] for _ in text[2:]]]
    return [one, *[[[words(4, rank), Image(20 + rank), words(50, rank)]] for rank in range(1, world_size)]]


CASES_OF = ("one rank", "some ranks", "all ranks", "text")


def _train(kind: str) -> dict[str, tuple[Gradients, tuple[float, float], int]]:
    results, rank, world = {}, dist.get_rank(), dist.get_world_size()
    for case in CASES_OF[:3]:
        plugin = distca_hf.DistCAPlugin()
        model = distca_hf.enable(model_of(kind, "distca"), plugin)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        with in_double():
            loss_of(wrapped, batch_of(kind, rows_of(kind, case, world)[rank])).backward()
        results[case] = gradients_of(model), watch_of(model).towers.imbalance
        plugin.close()
    return results


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [pytest.param(name, marks=MARKS.get(name, ())) for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3", "internvl", "llava")])
def test_gradients_are_those_of_one_process(kind: str, world: int, tmp_path: Path) -> None:
    by_rank = run_ranks(world, _train, tmp_path, kind)
    for case in CASES_OF[:3]:
        expected = alone(kind, [row for rows in rows_of(kind, case, world) for row in rows])
        for results in by_rank:
            ours, imbalance = results[case]
            print(kind, case, imbalance)
            assert_equal({weight: world * gradient for weight, gradient in ours.items()}, expected, (kind, case))
