"""Documents that begin with the same tokens and images: layers compute these once, and gradients of text and towers
are those of every row by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_shared_prefixes import LEAST_TOKENS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import distca_hf
from distca_hf.batches.read_documents import Reading, mark
from distca_hf.errors import PackingError
from distca_hf.integrations.models.forward_watch import watch_of
from support.given_batches import PATCH, Batch, Gradients, gradients_of, in_double
from support.multimodal import IMAGE_TOKEN, VIDEO_TOKEN, multimodal_model
from support.ranks import run_ranks
from support.rows_of_documents import prefixes_in_steps_of, words
from support.versions import classes_of_today, states_travel


@dataclass(frozen=True)
class Image:
    """An image of random numbers, `height` x `width` patches; two by two of them become a token. Or a video of frames,
    which take `seconds`."""

    seed: int
    height: int = 4
    width: int = 4
    frames: int = 0
    seconds: float = 0.5


Row = Sequence[torch.Tensor | Image]
# Side of a patch in pixels.
SIDE = 16


def columns_of(kind: str, images: Sequence[Image]) -> tuple[list[int], Batch]:
    """Returns tokens of images, and the columns that a processor would make of them."""
    if kind in PATCH and (videos := [image for image in images if image.frames]):
        _, columns = columns_of(
            kind, [replace(video, height=video.height * video.frames, frames=0) for video in videos]
        )
        grid = torch.tensor([[video.frames, video.height, video.width] for video in videos])
        seconds = torch.tensor([video.seconds for video in videos])
        of_videos = {
            "pixel_values_videos": columns["pixel_values"],
            "video_grid_thw": grid,
            "second_per_grid_ts": seconds,
        }
        tokens = [image.height * image.width * max(image.frames, 1) // 4 for image in images]
        return tokens, columns_of(kind, [image for image in images if not image.frames])[1] | of_videos
    drawn = partial(torch.randn, dtype=torch.float64)
    generators = [torch.Generator().manual_seed(image.seed) for image in images]
    tokens = [image.height * image.width // 4 for image in images]
    if not images:
        return [], {}
    if kind in PATCH:
        patches = [drawn(4 * count, PATCH[kind], generator=one) for count, one in zip(tokens, generators, strict=True)]
        grid = torch.tensor([[1, image.height, image.width] for image in images])
        return tokens, {"pixel_values": torch.cat(patches), "image_grid_thw": grid}
    if kind == "mistral3":
        sizes = torch.tensor([(SIDE * image.height, SIDE * image.width) for image in images])
        pixels = torch.zeros(len(images), 3, *sizes.amax(dim=0).tolist(), dtype=torch.float64)
        for place, (height, width), generator in zip(pixels, sizes.tolist(), generators, strict=True):
            place[:, :height, :width] = drawn(3, height, width, generator=generator)
        return tokens, {"pixel_values": pixels, "image_sizes": sizes}
    # Images, or tiles of them, have four tokens.
    side = {"llava": 64, "internvl": 56}[kind]
    tiles = [drawn(count // 4, 3, side, side, generator=one) for count, one in zip(tokens, generators, strict=True)]
    return tokens, {"pixel_values": torch.cat(tiles)}


def batch_of(kind: str, rows: Sequence[Row], side: str = "right") -> Batch:
    """Returns padded rows."""
    tokens, columns = columns_of(kind, [part for row in rows for part in row if isinstance(part, Image)])
    ids, of_images = list[torch.Tensor](), iter(tokens)
    for row in rows:
        parts = [
            torch.full((next(of_images),), VIDEO_TOKEN if part.frames else IMAGE_TOKEN)
            if isinstance(part, Image)
            else part % IMAGE_TOKEN
            for part in row
        ]
        ids.append(torch.cat(parts))
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    batch = {"input_ids": padded(ids), "attention_mask": padded([torch.ones_like(row) for row in ids]), **columns}
    if kind in PATCH:
        batch["mm_token_type_ids"] = (batch["input_ids"] - IMAGE_TOKEN + 1).clamp(min=0)
    elif kind == "gemma3":
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return batch


def pack_of(kind: str, rows: Sequence[Row]) -> Batch:
    """Returns one row of all rows, with positions of three axes, as a collator for Qwen-VL makes it."""
    alone, index = [batch_of(kind, [row]) for row in rows], model_of(kind, "sdpa").model.get_rope_index
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    positions = [index(**{name: one[name] for name in names if name in one})[0] for one in alone]
    pack = {name: torch.cat([one[name] for one in alone], 1) for name in ("input_ids", "mm_token_type_ids")}
    offsets = torch.tensor([0, *(one["input_ids"].shape[1] for one in alone)]).cumsum(0).to(torch.int32)
    _, columns = columns_of(kind, [part for row in rows for part in row if isinstance(part, Image)])
    return {**pack, **columns, "position_ids": torch.cat(positions, 2), "cu_seq_lens_q": offsets}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns a sum over all tokens."""
    logits = model(**batch, use_cache=False).logits[:, :-1]
    if (offsets := batch.get("cu_seq_lens_q")) is None:
        mask = batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]
    else:
        mask = torch.ones_like(batch["input_ids"][:, 1:])
        mask[0, offsets[1:-1].long() - 1] = 0
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / 100


def model_of(kind: str, implementation: str) -> PreTrainedModel:
    return multimodal_model(kind, implementation).to(torch.float64)


@dataclass
class Case:
    """Rows of ranks; further ranks have those of the last one.

    Attributes:
        shared: tokens that are not computed twice.
        side: of padding; or "pack" for one row of all.
    """

    rows: Sequence[Sequence[Row]]
    shared: int
    side: str = "right"


QUESTION, LONG, TAIL = words(50, 1), words(90, 2), words(60, 3)
CAT, DOG, WIDE = Image(1), Image(2), Image(1, 4, 8)


def answers(*prompt: torch.Tensor | Image, lengths: Sequence[int] = (9, 20), seed: int = 10) -> list[Row]:
    """Rows of a prompt and answers of these lengths."""
    return [[*prompt, words(length, seed + at)] for at, length in enumerate(lengths)]


# Prefixes of 16, 80 and 144 tokens are compared. A small image has four tokens, a wide one eight.
CASES = {
    "pairs": Case([answers(QUESTION, CAT, TAIL), answers(DOG, LONG)], 80 + 80),
    "pairs, padded left": Case([answers(QUESTION, CAT, TAIL), answers(DOG, LONG)], 80 + 80, "left"),
    "a group on two ranks": Case(
        [answers(QUESTION, CAT, LONG, lengths=(5, 70)), answers(QUESTION, CAT, LONG, lengths=(3, 40), seed=20)],
        3 * 144,
    ),
    "other images after equal text": Case(
        [[[QUESTION, CAT, LONG], [QUESTION, DOG, LONG]], [[QUESTION, WIDE, LONG]]], 2 * 16
    ),
    "other images before equal text": Case([[[CAT, LONG], [DOG, LONG]], [[WIDE, LONG]]], 0),
    "one image after other text": Case([[[words(7, 4), CAT, LONG], [words(7, 5), CAT, LONG]], [[CAT, LONG]]], 0),
    "the second image differs": Case(
        [[[QUESTION, CAT, TAIL, DOG, LONG], [QUESTION, CAT, TAIL, CAT, LONG]], [[QUESTION, CAT, TAIL, WIDE, LONG]]],
        2 * 80,
    ),
    "images on some rows": Case(
        [[*answers(LONG), *answers(TAIL, CAT, TAIL)], [[LONG, CAT], *answers(TAIL, CAT, TAIL, seed=20)]],
        2 * 80 + 3 * 80,
    ),
    "images on one rank": Case([answers(QUESTION, CAT, TAIL), [*answers(LONG), [QUESTION, LONG]]], 80 + 80 + 16),
    "two turns": Case(
        [[[CAT, TAIL, WIDE, LONG, words(4, 6)], [CAT, TAIL, WIDE, LONG, words(5, 7)]], [[CAT, TAIL, words(80, 8)]]],
        144 + 16,
    ),
}
PADDED = list(CASES)
CASES["packs"] = Case(
    [
        [*answers(QUESTION, CAT, TAIL), [QUESTION, DOG, TAIL], *answers(DOG, LONG)],
        [*answers(DOG, LONG, seed=20), [QUESTION, CAT, TAIL]],
    ],
    2 * 80 + 16 + 3 * 80,
    "pack",
)
CLIP, SLOW = Image(1, frames=2), Image(1, frames=2, seconds=1.0)
CASES["videos and images"] = Case(
    [
        [*answers(QUESTION, CAT, words(9, 9), CLIP, LONG), [QUESTION, CAT, words(9, 9), SLOW, LONG]],
        [[QUESTION, DOG, words(9, 9), CLIP, LONG], [QUESTION, CAT, words(9, 9), CLIP, TAIL]],
    ],
    144 + 3 * 16,
)
CASES["text"] = Case([answers(LONG), [*answers(LONG, seed=20), [TAIL]]], 3 * 80)
# All with one kind. Only Qwen's have positions of three axes. LLaVA's images have one size. States of Qwen3.5 go on
# from images.
OF_KINDS = {
    "gemma3": ["text"],
    "qwen2_5_vl": [*PADDED, "packs", "videos and images", "text"],
    "qwen3_vl": ["images on some rows", "packs"],
    "qwen3_5": ["the second image differs", "packs"],
    "mistral3": ["other images after equal text", "two turns"],
    "internvl": ["a group on two ranks", "one image after other text"],
    "llava": ["pairs, padded left", "images on one rank"],
}
MARKS = {"qwen3_vl": [classes_of_today], "qwen3_5": [classes_of_today, states_travel]}


def alone(kind: str, rows: Sequence[Row]) -> Gradients:
    """Returns the sum of the gradients of every row by itself, without distca."""
    model = model_of(kind, "sdpa")
    with in_double():
        for row in rows:
            loss_of(model, batch_of(kind, [row])).backward()
    gradients = gradients_of(model)
    of_towers = [gradient for name, gradient in gradients.items() if "vision" in name or "visual" in name]
    has_images = any(isinstance(part, Image) for row in rows for part in row)
    assert any(gradient.abs().max() > 1e-6 for gradient in of_towers) == has_images
    return gradients


def assert_equal(ours: Gradients, expected: Gradients, case: object) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        worst = (ours[name] - gradient).abs().max() / max(gradient.abs().max().item(), 1e-4 * largest)
        assert worst <= 1e-12, (case, name, worst)


def given(kind: str, rows: Sequence[Row], side: str) -> Batch:
    """Returns the batch of a rank."""
    return pack_of(kind, rows) if side == "pack" else batch_of(kind, rows, side)


def _train(kind: str) -> dict[str, tuple[Gradients, int, int]]:
    """Returns mean gradients, shared tokens and tokens that layers computed, by case."""
    results, rank = {}, dist.get_rank()
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    for name in OF_KINDS[kind]:
        case = CASES[name]
        model = distca_hf.enable(model_of(kind, "distca"), plugin)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        with in_double(), prefixes_in_steps_of(64):
            loss_of(wrapped, given(kind, case.rows[rank], case.side)).backward()
        facts = watch_of(model).planner.history[-1]
        results[name] = gradients_of(model), facts.shared_tokens, sum(facts.tokens)
    plugin.close()
    return results


@pytest.mark.parametrize("kind", [pytest.param(name, marks=MARKS.get(name, ())) for name in OF_KINDS])
def test_gradients_on_ranks_are_those_of_every_row_alone(kind: str, tmp_path: Path) -> None:
    by_rank = run_ranks(2, _train, tmp_path, kind)

    for name in OF_KINDS[kind]:
        case = CASES[name]
        expected = alone(kind, [row for rows in case.rows for row in rows])
        tokens = sum(int(batch_of(kind, rows)["attention_mask"].sum()) for rows in case.rows)
        for results in by_rank:
            ours, shared, computed = results[name]
            assert (shared, computed) == (case.shared, tokens - case.shared), name
            assert_equal({weight: 2 * gradient for weight, gradient in ours.items()}, expected, (kind, name))


def _train_sharded(kind: str, name: str) -> tuple[Gradients, int]:
    """Returns mean gradients with FSDP, also of towers, and shared tokens."""
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    model = distca_hf.enable(model_of(kind, "distca"), plugin)
    for block in (*model.model.visual.blocks, *model.model.language_model.layers, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    with in_double(), prefixes_in_steps_of(64):
        loss_of(model, batch_of(kind, CASES[name].rows[dist.get_rank()])).backward()
    gradients = {weight: gradient.full_tensor() for weight, gradient in gradients_of(model).items()}
    shared = watch_of(model).planner.history[-1].shared_tokens
    plugin.close()
    return gradients, shared


@classes_of_today
def test_towers_that_are_sharded_have_gradients_on_ranks_that_hold_no_image(tmp_path: Path) -> None:
    """The other rank holds the rows of all images."""
    kind, name = "qwen3_vl", "a group on two ranks"
    for ours, shared in run_ranks(2, _train_sharded, tmp_path, kind, name):
        assert shared == CASES[name].shared
        expected = alone(kind, [row for rows in CASES[name].rows for row in rows])
        assert_equal({weight: 2 * gradient for weight, gradient in ours.items()}, expected, (kind, name))


@pytest.mark.parametrize("name", ["images on some rows", "packs"])
def test_one_rank_computes_images_in_shared_prefixes_once(name: str) -> None:
    case, plugin = CASES[name], distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    model, rows = distca_hf.enable(model_of("qwen2_5_vl", "distca"), plugin), [row for of in case.rows for row in of]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        model.zero_grad()
        with in_double(), prefixes_in_steps_of(64):
            loss_of(model, given("qwen2_5_vl", rows, case.side)).backward()

    assert [facts.shared_tokens for facts in watch_of(model).planner.history] == [case.shared] * 2
    assert_equal(gradients_of(model), alone("qwen2_5_vl", rows), name)
    plugin.close()


def test_images_that_are_written_to_unseen_are_noticed_in_the_next_pass() -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    model = distca_hf.enable(model_of("qwen2_5_vl", "distca"), plugin)
    reader = watch_of(model).reader
    for step in range(3):
        batch = batch_of("qwen2_5_vl", answers(QUESTION, CAT, TAIL))
        reading = Reading(reader, batch)
        mark(batch, reading)
        assert reading.documents is not None
        if step == 1:
            batch["pixel_values"].data[9, 77] += 1
        if step < 2:
            loss_of(model, batch).backward()
            continue
        with pytest.raises(PackingError, match="the checksum of pixel_values in micro-batch 1 is "):
            loss_of(model, batch)
    plugin.close()
