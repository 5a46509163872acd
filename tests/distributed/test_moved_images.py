"""Images that arrived on some ranks are computed on all: gradients of all parameters are those of one process."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from test_shared_images import CAT, DOG, LONG, MARKS, QUESTION, TAIL, Image, Row, batch_of, loss_of
from test_shared_prefixes import in_double, words
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distca_hf
from distca_hf.comm.transport import AllToAll
from distca_hf.errors import PackingError, PeerLostError, PlanMismatchError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.structure import transformers_model
from support.given_batches import Batch, Gradients, gradients_of
from support.multimodal import multimodal_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.versions import images_may_move


pytestmark = images_may_move

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "mistral3", "gemma3", "llava", "kimi_k25")
# Classes whose images all have one size. Batches of Gemma 3 have the form of LLaVA's. Kimi K2.5 has square patches.
OF_ONE_SIZE, FORMS = ("internvl", "gemma3", "llava"), {"gemma3": "llava", "kimi_k25": "qwen2_5_vl"}
# Largest difference of a gradient. Kimi K2.5 rounds some numbers to float32, also without distca.
MOST, OF_KIMI = 1e-12, 1e-6
PAGE, CLIP = Image(5, 8, 12), Image(6, 4, 8, frames=6)
# Has more tokens than a rank's share.
FILM = Image(7, 8, 12, frames=12)
CASES = ("one rank", "some ranks", "all ranks")
# Kinds that are trained in the first two cases; others are in one of them.
IN_BOTH_CASES = KINDS if is_thorough() else ("qwen3_vl",)


def rows_of(kind: str, case: str, num_ranks: int) -> list[list[Row]]:
    """Returns the rows of every rank."""
    page, text = Image(5) if kind in OF_ONE_SIZE else PAGE, [[words(30 + rank, rank)] for rank in range(num_ranks)]
    many: list[Row] = [[QUESTION, CAT, TAIL, page, words(9, 7), DOG, LONG], [words(5, 8), page]]
    few: list[list[Row]] = [[[words(4, rank), Image(20 + rank), words(50, rank)]] for rank in range(num_ranks)]
    if case == "one rank":
        return [many, *([row] for row in text[1:])]
    if case == "some ranks":
        return [text[:1], many, *few[2:]]
    if case == "one image":
        return [*([row] for row in text[1:]), [[words(9, 1), CAT, TAIL]]]
    if case == "a long video":
        return [[[QUESTION, FILM, TAIL], text[0]], *([row] for row in text[1:])]
    if case == "videos":
        return [[[QUESTION, CLIP, TAIL], [CAT, words(9, 9), CLIP]], *few[1:]]
    return [many, *few[1:]]


@contextmanager
def exactly() -> Iterator[None]:
    """Computes in float64, also where Kimi K2.5 asks for sums in float32."""
    usual = torch.Tensor.new_zeros

    def new_zeros(x: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        return usual(x, *size, dtype=torch.float64 if dtype is torch.float32 else dtype, **more)

    with in_double(), patch.object(torch.Tensor, "new_zeros", new_zeros):
        yield


def given(kind: str, rows: Sequence[Row]) -> Batch:
    batch = batch_of(FORMS.get(kind, kind), rows)
    if kind == "qwen3_vl" and "video_grid_thw" in batch:  # its own positions need text between frames
        shape = batch["input_ids"].shape
        batch["position_ids"] = torch.arange(shape[1]).expand(3, *shape)
        del batch["second_per_grid_ts"]
    if kind == "kimi_k25":
        del batch["mm_token_type_ids"]
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"][:, : 3 * 14 * 14].unflatten(1, (3, 14, 14))
    return batch


def _frozen(model: nn.Module) -> nn.Module:
    transformers_model(model).model.visual.requires_grad_(False)
    return model


def _with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["qkv", "linear_fc1", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, lora).to(torch.float64)


def _checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


# Ways to train, by what they make of a model.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "sharded": _checkpointed,
    "sharded and frozen": _frozen,
    "waiting": lambda model: model,
    "frozen": _frozen,
    "adapters": _with_adapters,
}


def made(kind: str, way: str, implementation: str) -> nn.Module:
    model = multimodal_model(kind, implementation).to(torch.float64)
    if kind == "kimi_k25":
        model.set_experts_implementation("eager")  # others compute no float64
    return WAYS[way](model)


def alone(kind: str, way: str, rows: Sequence[Row]) -> Gradients:
    """Returns the sum of the gradients of every row by itself, in one process without distca."""
    model = made(kind, way, "sdpa")
    with exactly():
        for row in rows:
            loss_of(model, given(kind, [row])).backward()
    return gradients_of(model)


def _wrapped(model: nn.Module, way: str) -> nn.Module:
    if not way.startswith("sharded"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=way != "waiting")
    for block in (*model.model.visual.blocks, *model.model.language_model.layers, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


Trained = tuple[Gradients, tuple[float, float], list[int]]


def _train(kind: str, way: str, cases: Sequence[str]) -> dict[str, Trained]:
    """Returns mean gradients, imbalance of towers before and after, and exchanges of two steps, by case."""
    results, plugin = {}, distca_hf.DistCAPlugin()
    for case in cases:
        model = distca_hf.enable(made(kind, way, "distca"), plugin)
        wrapped, traffic = _wrapped(model, way), plugin.transport(torch.device("cpu")).traffic
        batch, exchanges = given(kind, rows_of(kind, case, dist.get_world_size())[dist.get_rank()]), []
        for _ in range(2):
            model.zero_grad()
            before = traffic.exchanges
            with exactly():
                loss_of(wrapped, batch).backward()
            exchanges.append(traffic.exchanges - before)
        gradients = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in gradients_of(model).items()
        }
        results[case] = gradients, watch_of(model).towers.imbalance, exchanges
    plugin.close()
    return results


def check(kind: str, way: str, cases: Sequence[str], num_ranks: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Compares gradients; returns the imbalance of towers by case."""
    by_rank = run_ranks(num_ranks, _train, folder, kind, way, cases)
    for case in cases:
        expected = alone(kind, way, [row for rows in rows_of(kind, case, num_ranks) for row in rows])
        assert len({tuple(results[case][2]) for results in by_rank}) == 1
        for results in by_rank:
            ours = {name: num_ranks * gradient for name, gradient in results[case][0].items()}
            largest = max(gradient.abs().max().item() for gradient in expected.values())
            for name, gradient in expected.items():
                worst = (ours[name] - gradient).abs().max() / max(gradient.abs().max().item(), 1e-4 * largest)
                assert worst <= (OF_KIMI if kind == "kimi_k25" else MOST), (kind, way, case, name, worst)
        assert any("visual" in name or "vision" in name for name in expected) != ("frozen" in way)
    return {case: by_rank[0][case][1] for case in cases}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in KINDS])
def test_gradients_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    cases = CASES[:2] if kind in IN_BOTH_CASES else [CASES[KINDS.index(kind) % 2]]
    for before, after in check(kind, "plain", cases, 2, tmp_path).values():
        assert before > 1.4 > 1.3 > after


@pytest.mark.parametrize(
    ("kind", "num_ranks", "cases"),
    [("qwen2_5_vl", 4, CASES[1:]), *([("mistral3", 3, CASES[2:])] if is_thorough() else [])],
)
def test_several_ranks_share_images(kind: str, num_ranks: int, cases: Sequence[str], tmp_path: Path) -> None:
    for before, after in check(kind, "plain", cases, num_ranks, tmp_path).values():
        assert before > 1.3 * after


@pytest.mark.parametrize("way", [*WAYS][1:] if is_thorough() else ["sharded", "waiting", "adapters"])
def test_all_ways_to_train_have_the_gradients_of_one_process(way: str, tmp_path: Path) -> None:
    """Ranks that compute no image compute a copy of one, if others wait for their towers."""
    check("qwen3_vl", way, ["one image", *CASES[: way == "sharded"]], 3, tmp_path)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"] if is_thorough() else ["qwen2_5_vl"])
def test_frames_of_videos_are_computed_by_themselves(kind: str, tmp_path: Path) -> None:
    [(before, after)] = check(kind, "plain", ["videos"], 2, tmp_path).values()

    assert before > 1.8 > 1.05 > after


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"] if is_thorough() else ["qwen3_vl"])
def test_a_video_may_be_longer_than_the_share_of_a_rank(kind: str, tmp_path: Path) -> None:
    """Its frames are computed on three ranks, and its tokens are cut between them, with their further features."""
    [(before, after)] = check(kind, "plain", ["a long video"], 3, tmp_path).values()

    assert (before, after) == (3.0, 1.0)


def _exchange(rows: Sequence[Sequence[Row]]) -> list[tuple[list[int], int]]:
    """Returns exchanges and gathers of steps on batches, each given as the rows of both ranks; rank 0 evaluates by
    itself in between."""
    plugin, counts = distca_hf.DistCAPlugin(), []
    model = distca_hf.enable(made("qwen3_vl", "plain", "distca"), plugin)
    transport = plugin.transport(torch.device("cpu"))
    for of_ranks in rows:
        seen, before, usual = list[str](), transport.traffic.exchanges, transport.gather

        def noted(values: Sequence[int], where: str, *args: object, seen=seen, usual=usual) -> object:  # type: ignore[no-untyped-def]
            seen.append(where)
            return usual(values, where, *args)

        transport.gather = noted
        batch = batch_of("qwen3_vl", of_ranks[dist.get_rank()])
        loss_of(model, batch).backward()
        transport.gather = usual
        counts.append((transport.traffic.exchanges - before, sum("images" in where for where in seen)))
        if not dist.get_rank():
            with torch.no_grad():
                loss_of(model.eval(), batch)
            model.train()
    plugin.close()
    return counts


def test_nothing_is_sent_for_images_that_are_even_or_not_there(tmp_path: Path) -> None:
    text = [words(40, 1)]
    even, none, uneven = [[[CAT, *text]], [[DOG, *text]]], [[text], [text]], [[[CAT, *text, DOG]], [[*text, LONG]]]
    first, second = run_ranks(2, _exchange, tmp_path, [even, none, uneven])

    assert first == second
    exchanges, gathers = zip(*first, strict=True)
    assert gathers == (0, 0, 1)  # sizes are gathered with lengths of documents
    assert exchanges[0] == exchanges[1] == 0 < exchanges[2]


def _rows_of_features(rows: Sequence[Sequence[Row]]) -> list[tuple[str, int, int]]:
    """Returns place, number of rows and bytes of a row of each exchange of features for layers, in a step."""
    plugin, seen = distca_hf.DistCAPlugin(), list[tuple[str, int, int]]()
    model = distca_hf.enable(made("qwen3_vl", "plain", "distca"), plugin)
    transport = plugin.transport(torch.device("cpu"))
    usual = transport.exchange

    def noted(asked: AllToAll) -> object:
        if "features of images" in asked.where:
            seen.append((asked.where, len(asked.rows), asked.rows[:1].numel() * asked.rows.element_size()))
        return usual(asked)

    transport.exchange = noted
    loss_of(model, batch_of("qwen3_vl", rows[dist.get_rank()])).backward()
    plugin.close()
    return seen


def test_layers_get_features_only_of_image_tokens(tmp_path: Path) -> None:
    """The cat has 4 tokens and the page 24. Rank 1 has no image, and computes some of the tokens."""
    text = words(90, 1)
    by_rank = run_ranks(2, _rows_of_features, tmp_path, [[[QUESTION, CAT, text, PAGE, LONG]], [[words(12, 2)]]])

    for of_rank in by_rank:
        assert [where.rpartition(", ")[2] for where, _, _ in of_rank] == ["forward", "backward"]
        # One layer of the text gets features of 64 numbers; a rank that sends none has no row to look at.
        assert {width for _, rows, width in of_rank if rows} <= {64 * 8}
    (forward, backward), (forward_1, backward_1) = ([rows for _, rows, _ in of_rank] for of_rank in by_rank)
    assert (forward, forward_1) == (4 + 24, 0)
    assert backward + backward_1 == 4 + 24
    assert backward_1 > 0


def _cast_or_not() -> list[tuple[set[int], float, Gradients]]:
    return [_cast_pixels(casts) for casts in (True, False)]


def _cast_pixels(casts: bool) -> tuple[set[int], float, Gradients]:
    """Returns bytes of a row of pixels in transit, loss and gradients of a model in bfloat16 with float32 pixels."""
    plugin, row_bytes = distca_hf.DistCAPlugin(), set[int]()
    model = distca_hf.enable(multimodal_model("qwen3_vl").bfloat16(), plugin)
    towers = watch_of(model).towers
    assert towers.towers.cast == "visual.dtype"
    if not casts:
        towers.towers = towers.towers._replace(cast="")
    transport = plugin.transport(torch.device("cpu"))
    usual = transport.exchange

    def noted(asked: AllToAll) -> object:
        if asked.where.endswith("pixels"):
            row_bytes.add(asked.row_bytes)
        return usual(asked)

    transport.exchange = noted
    batch = batch_of("qwen3_vl", rows_of("qwen3_vl", "one rank", 2)[dist.get_rank()])
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].float()
    loss = loss_of(model, batch)
    loss.backward()
    plugin.close()
    return row_bytes, loss.item(), gradients_of(model)


def test_pixels_travel_in_the_dtype_of_the_tower_and_nothing_changes(tmp_path: Path) -> None:
    for (row_bytes, loss, gradients), (usual_bytes, usual_loss, usual_gradients) in run_ranks(
        2, _cast_or_not, tmp_path
    ):
        assert (row_bytes, usual_bytes) == ({2 * 1536}, {4 * 1536})
        assert loss == usual_loss
        assert all(torch.equal(gradient, usual_gradients[name]) for name, gradient in gradients.items())


def _fail_in_all_ways() -> dict[str, str]:
    return {change: _fail(change) for change in WRONG}


def _fail(change: str) -> str:
    """Returns the error of a step in which rank 1 has another processor, or images of another size than it says."""
    model = distca_hf.enable(
        multimodal_model("mistral3" if change == "size" else "qwen2_5_vl"), distca_hf.DistCAPlugin()
    )
    kind = "mistral3" if change == "size" else "qwen2_5_vl"
    batch = batch_of(kind, [[words(9, 1), CAT, words(4, 2)], [words(9, 1), DOG, words(4, 2)]])
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    if dist.get_rank():
        if change == "grid":
            batch["image_grid_thw"] = batch["image_grid_thw"] + torch.tensor([[0, 0, 0], [0, 2, 0]])
        elif change == "size":
            batch["image_sizes"] = batch["image_sizes"] + torch.tensor([[0, 0], [0, 64]])
        elif change == "tokens":
            batch["input_ids"] = batch["input_ids"].clamp(max=99)
        elif change == "width":
            batch["pixel_values"] = nn.functional.pad(batch["pixel_values"], (0, 24))
        elif change == "dtype":
            batch["pixel_values"] = batch["pixel_values"].double()
    if change == "argument":
        batch["interpolate_pos_encoding"], batch["num_items_in_batch"] = bool(dist.get_rank()), 5 + dist.get_rank()
    with pytest.raises((PackingError, PeerLostError, PlanMismatchError)) as stopped:
        model(**batch)
    return str(stopped.value)


WRONG = {
    "grid": r"rank 1.*item 1 of 2 is 1 x 6 x 4 = 24 patches, and pixel_values has 16 for it: 32 .* not 40",
    "size": r"rank 1.*image 1 of 2 is 64 x 128 pixels, and pixel_values holds 64 x 64",
    "width": r"numbers of a patch, or channels of pixels is 1176 on rank 0 and 1200 on rank 1; nothing was sent",
    "dtype": r"torch.float32 .*rank 0.*torch.float64 .*rank 1",
    "argument": r"argument interpolate_pos_encoding of towers is False on rank 0, True on rank 1\. Ranks need",
    "tokens": r"rank 1.*image_grid_thw of 2 images or videos, and input_ids hold no token .*\(100 or 101\)\. If",
}


def test_wrong_images_are_named(tmp_path: Path) -> None:
    of_first, of_second = run_ranks(2, _fail_in_all_ways, tmp_path)

    for change, message in WRONG.items():
        assert re.search(message, of_second[change]), change
        expected = "rank 1 could not do its part" if change in ("grid", "size", "tokens") else message
        assert re.search(expected, of_first[change]), change
