"""Times training steps of a Qwen3-VL on pages, photos and text, with towers where images arrived and moved.

    torchrun --nproc-per-node 2 scripts/benchmarks/image_towers.py --layers 4 --tower-layers 3 --rounds 8
    torchrun --nproc-per-node 2 scripts/benchmarks/image_towers.py --device cpu --size tiny --layers 2 \\
        --page-side 16 --photo-side 4 --pages 2 --photos 2 --texts 2 --page-tokens 60 --photo-tokens 40 --rounds 2 \\
        --warmup 1

Each workload is measured by itself. A step is forward and backward of one pack of each rank, FSDP's collectives (of
towers, too), and AdamW at a learning rate of 0. All modes run in one process with the same weights, documents and
kernel, one after the other, again and again. Columns of the tables: README.md.

    mix     packs of the first half of the ranks are pages with little text; the others have photos, and text
            of as many tokens
    even    every rank has its share of pages, photos and text

A document has one image before its text, or none. The loss is one of hidden states, without a head. Towers attend
with sdpa in all modes. A model of 36 layers has a tower of 27.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.structure import set_attention, text_configs
from distca_hf.integrations.models.tower_borders import TowerBorders
from lib.model import Backbone, Shape
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import count, few, names, whole
from lib.place import Mode, Place, without
from lib.report import EXCHANGED_GB, STEP_MS
from lib.tables import Columns, figure, peak_gib
from lib.trainer_batches import AsOfTrainer, Batch
from lib.whole_model import TrainingRunner, Workload, measure_workloads


MODES = {
    "plain": "packs as they are, and the kernel itself; nothing is exchanged but weights and gradients",
    "ideal": "the same on packs of the workload even: all work is even, and nothing is exchanged",
    "arrived": "the product with towers where images arrived; rows are placed",
    "moved": "the product: images are computed where towers have even work, too",
}
COLUMNS: Columns = {
    "step ms": STEP_MS,
    "÷ first": figure("ratio_to_first", 1, 3),
    "÷ ideal": figure("ratio_to_ideal", 1, 3),
    "÷ arrived": figure("ratio_to_arrived", 1, 3),
    "towers": figure("towers", 1, 3),
    "peak GiB": peak_gib,
    "exchanged GB": EXCHANGED_GB,
    "loss": figure("loss", 1, 4),
}
WORKLOADS = ("mix", "even")
# Patches of a side of the square that becomes a token, pixels of a patch, and frames of one.
MERGED, PATCH, FRAMES = 2, 16, 2
# Sizes of text and tower.
SIZES = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).parent.glob("presets/images/*.json"))
}
# Patches of a side of its image, 0 without one, and tokens of its text.
Document = tuple[int, int]


def main() -> None:
    on_all_ranks(measure, parse())


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, MODES)
    parser.set_defaults(modes="plain,ideal,arrived,moved", checkpointing="saved")
    parser.add_argument("--size", choices=[*SIZES], default="8b", help="of text and tower, in place of a preset")
    parser.add_argument("--tower-layers", type=few, default=3, help="layers of the tower")
    chosen = names(WORKLOADS, "workload")
    parser.add_argument("--workloads", type=chosen, default=",".join(WORKLOADS), help="comma-separated, see above")
    parser.add_argument("--pages", type=count, default=4, help="pages of a rank that has them; an even number")
    parser.add_argument("--page-side", type=count, default=128, help="patches of a side of a page")
    parser.add_argument("--photos", type=count, default=16, help="photos of a rank that has them; an even number")
    parser.add_argument("--photo-side", type=count, default=32, help="patches of a side of a photo")
    parser.add_argument("--page-tokens", type=count, default=512, help="of the text of a page")
    parser.add_argument("--photo-tokens", type=count, default=256, help="of the text of a photo")
    parser.add_argument("--texts", type=count, default=10, help="documents of text of a rank that has photos; even")
    parser.add_argument("--seed", type=whole, default=0, help="of tokens and pixels")
    options = parse_shared(parser)
    for name in ("config", "preset", "documents", "liger"):
        if vars(options)[name] != parser.get_default(name):
            parser.error(f"--{name} is for other programs: this one has --size and its own documents")
    options.layers = options.layers or 4
    for name in ("pages", "photos", "texts", "page_side", "photo_side"):
        if vars(options)[name] % 2:
            parser.error(f"--{name.replace('_', '-')} {vars(options)[name]} is odd")
    rest = options.pages * tokens_of((options.page_side, options.page_tokens))
    rest -= options.photos * tokens_of((options.photo_side, options.photo_tokens))
    if rest < options.texts or rest % options.texts:
        reason = f"photos leave {rest} tokens of as many as pages have"
        parser.error(f"{reason}; --texts {options.texts} do not divide them")
    options.text_tokens = rest // options.texts
    return options


def tokens_of(document: Document) -> int:
    """Returns the tokens of a document: its image's, and its text's."""
    side, tokens = document
    return (side // MERGED) ** 2 + tokens


def packs_of(options: argparse.Namespace, workload: str, num_ranks: int) -> list[list[Document]]:
    """Returns the documents of every rank, of equally many tokens."""
    if num_ranks % 2:
        raise SystemExit(f"{num_ranks} ranks: half of them have pages; launch an even number")
    pages = [(options.page_side, options.page_tokens)] * options.pages
    photos = [(options.photo_side, options.photo_tokens)] * options.photos
    texts = [(0, options.text_tokens)] * options.texts
    if workload == "mix":
        return [pages] * (num_ranks // 2) + [photos + texts] * (num_ranks // 2)
    return [pages[::2] + photos[::2] + texts[::2]] * num_ranks


def build_config(options: argparse.Namespace) -> Qwen3VLConfig:
    """Returns the configuration of a Qwen3-VL."""
    sizes, depth = SIZES[options.size], options.tower_layers
    text = {**sizes["text"], "num_hidden_layers": options.layers, "use_cache": False}
    text["max_position_embeddings"] = max(tokens_of(one) for one in packs_of(options, "even", 2)[0]) + 1
    tower = {**sizes["tower"], "depth": depth, "out_hidden_size": text["hidden_size"], "patch_size": PATCH}
    tower |= {"spatial_merge_size": MERGED, "temporal_patch_size": FRAMES}
    deep = sorted({depth * part // 4 for part in (1, 2, 3)})[: options.layers]
    config = Qwen3VLConfig(text_config=text, vision_config={**tower, "deepstack_visual_indexes": deep})
    config.image_token_id = text["vocab_size"] - 1
    return config


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Builds the model once, and measures one workload after the other."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    packs = {workload: packs_of(options, workload, num_ranks) for workload in WORKLOADS}
    config, dtype = build_config(options), torch.float32 if options.fsdp else options.dtype
    torch.manual_seed(options.seed)
    with device:
        causal_lm = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    place = Place.open(Backbone(causal_lm), Shape(0.0, {}), options, device)
    place.enable(0, config.text_config.max_position_embeddings, options)
    runner = TowerRunner(place)
    batches = {name: batch_of(pack[rank], config, options.seed + rank, device) for name, pack in packs.items()}

    def measure_one(workload: str) -> Workload:
        modes = [_mode(name, place, batches["even" if name == "ideal" else workload]) for name in options.modes]
        measured = runner.run(modes, options.warmup, options.rounds)
        watch = watch_of(causal_lm)
        assert watch is not None
        arrived, moved = watch.towers.imbalance  # largest over mean work of towers, where images arrived and moved
        further = {
            name: {
                "ratio_to_first": mode.ratio_to(next(iter(measured.values()))),
                **{f"ratio_to_{other}": mode.ratio_to(measured.get(other)) for other in ("ideal", "arrived")},
                "towers": {"ideal": 1.0, "moved": moved}.get(name, arrived),
            }
            for name, mode in measured.items()
        }
        return sum(map(tokens_of, packs[workload][0])), measured, further

    remark = f"{options.tower_layers} layers of the tower"
    measure_workloads(options, config, device, measure_one, COLUMNS, remark)


class TowerRunner(TrainingRunner):
    """Runs steps; only the text attends as modes say."""

    def _set_attention(self, implementation: str) -> None:
        for config in text_configs(self._model.causal_lm):
            set_attention(config, implementation)


def batch_of(documents: Sequence[Document], config: Qwen3VLConfig, seed: int, device: torch.device) -> Batch:
    """Returns a pack of documents with random tokens and pixels; positions on all axes are as in text."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([tokens_of(document) for document in documents])
    ids = torch.randint(0, config.image_token_id, (int(lengths.sum()),), generator=random)
    first = lengths.cumsum(0) - lengths
    sides = torch.tensor([side for side, _ in documents])
    for start, side in zip(first.tolist(), sides.tolist(), strict=True):
        ids[start : start + (side // MERGED) ** 2] = config.image_token_id
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    grid = torch.stack([torch.ones_like(sides), sides, sides], dim=1)[sides > 0]
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * FRAMES * PATCH**2, generator=random)
    batch = {
        "input_ids": ids[None],
        "position_ids": positions.expand(3, 1, -1),
        "cu_seq_lens_q": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }
    return {name: value.to(device) for name, value in batch.items()}


def _mode(name: str, place: Place, batch: Batch) -> Mode:
    """Returns the mode of a name for a batch."""
    if name in ("plain", "ideal"):
        given = {key: value for key, value in batch.items() if key != "cu_seq_lens_q"}
        work = place.whole_work(batch["cu_seq_lens_q"].diff().tolist())
        return Mode(name, "bench_whole", [{**given, "bench_work": work}])
    meanwhile = [partial(without, TowerBorders, "begin")] if name == "arrived" else []
    return Mode.of_product(name, AsOfTrainer(place.model, [[batch]], shares=False), *meanwhile)


if __name__ == "__main__":
    main()
