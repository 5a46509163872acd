"""Memory with activations and state on the host, beside numbers by hand, and what makes a training fit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from distca_hf.analysis.decoder_size import DecoderSize, LayerSize
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.fit import CHANGES, RankLoad, Room, advice
from distca_hf.analysis.memory import PIECE_BYTES, Memory, estimate_memory, pinned_bytes
from distca_hf.analysis.models import preset
from distca_hf.analysis.training_setup import GIB, TrainingSetup
from distca_hf.cli import app
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError


def size_of(name: str, layers: int | None = None) -> DecoderSize:
    """The sizes of a built-in model, cut to so many layers."""
    shape = preset(name)
    assert shape.size is not None
    size = shape.size.decoder(shape.heads)
    (layer,) = size.layers
    count = layers or layer.count
    parameters = size.parameters - (layer.count - count) * layer.parameters
    return replace(size, parameters=parameters, layers=(replace(layer, count=count),))


LLAMA, TOKENS = size_of("llama3-8b"), 131_072
ROOT, LAYER = 2 * 128_256 * 4096, 218_103_808  # weights of embedding and head, and of a layer
# Bytes of a token in attention's backward: queries, keys, values and their gradients in bf16 and fp32; the norm, and
# gradients of the sum and of the output.
ATTENTION = (2 + 2 + 4) * (4096 + 2 * 1024) + 3 * 2 * 4096
OFFLOADED = TrainingSetup(8, checkpointing="offloaded", liger=True)
ALL = replace(OFFLOADED, mlp_tokens=8192, state_on_host=True)


def of(setup: TrainingSetup, tokens: int = TOKENS, size: DecoderSize = LLAMA) -> Memory:
    return estimate_memory(size, setup, tokens)


def test_two_layers_are_on_the_gpu_and_all_of_them_on_the_host() -> None:
    """In the backward of the second layer, by which gradients of 30 layers are summed."""
    found = of(OFFLOADED)
    token_bytes = 2 * 4096 + 2 * 4096 + 4 * 32  # input, output, log-sum-exps

    assert found.kept == 2 * token_bytes * TOKENS
    assert found.host == found.host_kept == 32 * token_bytes * TOKENS  # 16 pieces, 16, and a quarter of one
    assert found.gradients == 4 * 30 * LAYER // 8
    assert found.gathered == 2 * (ROOT + ROOT // 2 + 3 * LAYER)
    assert found.state == 12 * (ROOT + 32 * LAYER) // 8 + found.gradients
    assert 42 < found.total / GIB < 44
    assert of(replace(OFFLOADED, checkpointing="saved")).host == 0


def test_pinned_memory_is_rounded_up_piece_by_piece() -> None:
    assert [pinned_bytes(number) for number in (0, 1, 2, 3, 2**20, 2**20 + 1)] == [0, 1, 2, 4, 2**20, 2**21]
    tokens = 10_000  # inputs and outputs: one piece and 14.8 MB each; log-sum-exps: 1.28 MB
    assert of(OFFLOADED, tokens).host_kept == 32 * (2 * (PIECE_BYTES + 2**24) + 2**21)


def test_state_on_the_host_takes_16_bytes_of_a_weight_and_what_pinning_adds() -> None:
    """Parts of eight ranks: those of MLPs are 29.4 MB and take 2^25 bytes, of attention exactly 2^23 and 2^21, of
    embedding and head 263 MB and take 2^28."""
    found, share = of(ALL), (ROOT + 32 * LAYER) // 8

    pinned = 32 * (3 * 2**25 + 2 * 2**23 + 2 * 2**21) + 2 * 2**28
    assert found.host_state == 8 * share + 2 * pinned
    assert 16 * share < found.host_state < 1.1 * 16 * share
    assert found.state == found.optimizer_step == 0
    assert found.gathered == 2 * (ROOT + ROOT // 2 + 3 * LAYER) + 4 * LAYER // 8


def test_on_the_host_only_whole_gradients_of_earlier_micro_steps_stay_on_the_gpu() -> None:
    accumulated = replace(ALL, micro_steps=4)
    assert of(accumulated).gradients == 2 * LLAMA.parameters
    assert of(replace(accumulated, sharding="fsdp2_synced")).gradients == 0
    with pytest.raises(ConfigError, match="ZeRO-3 with weights and optimizer on the host is not estimated"):
        replace(ALL, sharding="zero3")


def test_in_tiles_an_mlp_grows_with_the_tile() -> None:
    """Up to the tile where attention's backward needs more."""
    whole, tiles = (of(replace(OFFLOADED, mlp_tokens=tokens)).layer for tokens in (0, 65_536))
    assert whole - tiles == 8 * 14_336 * (TOKENS - 65_536)  # gate, up, product and a gradient
    assert of(replace(OFFLOADED, mlp_tokens=TOKENS)).layer == whole
    assert of(replace(OFFLOADED, mlp_tokens=1024)).layer == ATTENTION * TOKENS
    unchecked = TrainingSetup(8, checkpointing="none", liger=True)
    kept, in_tiles = (of(replace(unchecked, mlp_tokens=tokens), 16_384) for tokens in (0, 1024))
    assert kept.kept - in_tiles.kept == 32 * 8 * 14_336 * 16_384
    assert (kept.layer, in_tiles.layer) == (0, 8 * 14_336 * 1024)


def test_in_tiles_attention_grows_with_the_heads() -> None:
    """Only the norm and gradients of the sum and of the output stay whole. Added are an fp32 sum of input gradients,
    and the output gradient of a tile, or an input gradient."""
    setup, numbers = replace(OFFLOADED, mlp_tokens=1024), 4096 + 2 * 1024
    for heads, tile in ((4, 8 * numbers // 2 + 2 * 4096 // 2), (2, 8 * numbers // 4 + 2 * 4096 // 4)):
        found = of(replace(setup, attention_kv_heads=heads))
        assert found.layer == (3 * 2 * 4096 + 4 * 4096 + tile) * TOKENS
    tile = 2 * numbers // 8 + 2 * 4096  # gradients of one head's projections, and one of their input
    assert of(replace(setup, attention_kv_heads=1)).layer == (3 * 2 * 4096 + 4 * 4096 + tile) * TOKENS
    assert of(replace(setup, attention_kv_heads=8)) == of(setup)
    whole, tiles = (of(replace(OFFLOADED, attention_kv_heads=heads)) for heads in (0, 2))
    assert whole.layer - tiles.layer == 2 * numbers * TOKENS  # not there in the MLP's backward
    assert (whole.kept, whole.host) == (tiles.kept, tiles.host)
    received = [estimate_memory(LLAMA, replace(setup, attention_kv_heads=of), TOKENS, GIB).received for of in (0, 3)]
    assert received == [2 * GIB, 2 * round(GIB * 3 / 8)]  # tiles of 3, 3 and 2
    unchecked = TrainingSetup(8, checkpointing="none", liger=True)
    kept, in_tiles = (of(replace(unchecked, attention_kv_heads=heads), 16_384) for heads in (0, 2))
    assert kept.kept - in_tiles.kept == 32 * 2 * numbers * 16_384


def test_norms_of_queries_and_keys_are_counted_wherever_a_model_comes_from(tmp_path: Path) -> None:
    """They save their inputs, 2 bytes a number; without Liger's kernels an fp32 copy and the normalized numbers."""
    with_norms = size_of("qwen3-8b")
    without = replace(with_norms, layers=(replace(with_norms.layers[0], norms_heads=False),))
    for liger, of_number in ((True, 2), (False, 6)):
        setup = TrainingSetup(8, checkpointing="none", liger=liger)
        more, less = (of(setup, 1000, size).kept for size in (with_norms, without))
        assert more - less == 36 * of_number * (32 + 8) * 128 * 1000

    sizes = {"num_hidden_layers": 2, "vocab_size": 1000}
    for model_type, expected in (("qwen3", True), ("llama", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
        found = find_model(str(tmp_path)).size
        assert found is not None
        assert {layer.norms_heads for layer in found.decoder(SMALL).layers} == {expected}


SMALL = Heads(query=2, key_value=1, dim=4, value_dim=4, groups=1)
LAYERS = st.builds(
    LayerSize,
    count=st.integers(1, 40),
    parameters=st.integers(10**6, 10**9),
    mlp_size=st.floats(0, 50_000),
    heads=st.sampled_from((None, SMALL, preset("llama3-8b").heads, preset("qwen3-0.6b").heads)),
)


@st.composite
def sizes(draw: st.DrawFn) -> DecoderSize:
    layers = tuple(draw(st.lists(LAYERS, min_size=1, max_size=3)))
    hidden, vocabulary = draw(st.integers(64, 16_384)), draw(st.sampled_from((0, 32_000, 151_936)))
    embedding = max(1, vocabulary) * hidden * draw(st.sampled_from((1, 2)))
    parameters = embedding + sum(layer.count * layer.parameters for layer in layers)
    return DecoderSize(hidden, vocabulary, parameters, embedding, layers)


WAYS: tuple[Any, ...] = ("saved", "offloaded")
SETUPS = st.builds(
    TrainingSetup,
    num_ranks=st.sampled_from((1, 2, 8, 64)),
    sharding=st.sampled_from(("fsdp2", "fsdp2_synced")),
    checkpointing=st.just("saved"),
    liger=st.booleans(),
    micro_steps=st.sampled_from((1, 4)),
    mlp_tokens=st.sampled_from((0, 4096)),
    state_on_host=st.booleans(),
)
NUMBERS = st.integers(1, 1 << 20)


@given(size=sizes(), setup=SETUPS, tokens=NUMBERS)
def test_offloading_never_needs_more_of_a_gpu(size: DecoderSize, setup: TrainingSetup, tokens: int) -> None:
    """What leaves the GPU arrives on the host, except for two layers; each tensor's last piece is rounded up."""
    saved, offloaded = (estimate_memory(size, replace(setup, checkpointing=way), tokens) for way in WAYS)

    assert offloaded.total <= saved.total
    each = [layer.kept_bytes(size.hidden_size, TrainingSetup(1)) for layer in size.layers]
    kept = sum(layer.count * one * tokens for layer, one in zip(size.layers, each, strict=True))
    assert offloaded.kept <= 2 * max(each) * tokens + 1
    assert kept - 3 * size.num_layers <= offloaded.host_kept <= 2 * kept + 3 * size.num_layers
    pieces = (PIECE_BYTES * len(size.layers) * 3 * max(layer.count for layer in size.layers)) / 2
    assert offloaded.host_kept <= kept + pieces + 3 * size.num_layers
    assert offloaded.host_state == saved.host_state


@given(size=sizes(), setup=SETUPS, tokens=NUMBERS, tiles=st.lists(NUMBERS, min_size=2, max_size=4))
def test_smaller_tiles_and_state_on_the_host_never_need_more(
    size: DecoderSize, setup: TrainingSetup, tokens: int, tiles: list[int]
) -> None:
    totals = [estimate_memory(size, replace(setup, mlp_tokens=tile), tokens).total for tile in [*sorted(tiles), 0]]
    assert totals == sorted(totals)
    on_gpu, on_host = (estimate_memory(size, replace(setup, state_on_host=is_so), tokens) for is_so in (False, True))
    layer = 4 * max(layer.parameters for layer in size.layers) // setup.num_ranks  # gradients on their way
    assert on_host.total <= on_gpu.total + layer
    assert (on_gpu.host_state, on_host.parameters, on_host.optimizer) == (0, 0, 0)
    assert on_host.host_state >= 16 * (size.parameters // setup.num_ranks) - 16 * 64


def test_what_fits_needs_no_advice() -> None:
    room, found = Room(72 * GIB), of(OFFLOADED)
    assert advice(RankLoad(LLAMA, 8192), OFFLOADED, room) == ""
    assert [room.node_bytes(found, num_ranks) for num_ranks in (2, 8, 16)] == [
        times * found.host for times in (2, 8, 8)
    ]


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (Room(72 * GIB), "It fits with --checkpointing offloaded (checkpointed_attention"),
        (Room(40 * GIB), "It fits with --checkpointing offloaded --mlp-tokens 16384 (checkpointed"),
        (
            Room(18 * GIB),
            '--mlp-tokens 16384 --offload-params (checkpointed_attention="offload", mlp_tokens=16384, fsdp',
        ),
        (
            Room(16 * GIB),
            '--mlp-tokens 16384 --attention-kv-heads 2 --offload-params (checkpointed_attention="offload", '
            "mlp_tokens=16384, attention_kv_heads=2, fsdp",
        ),
        (Room(12 * GIB), "--offload-params --gpus 16 --tokens-per-rank 65536 (checkpointed"),
        (Room(40 * GIB, 300), "It fits with --checkpointing offloaded --gpus 16 --tokens-per-rank 65536 ("),
        (Room(72 * GIB, 500), "It fits with --gpus 16 --tokens-per-rank 65536: 52.3 GiB on a GPU"),
        (Room(1 * GIB, 500), "No option makes it fit; take fewer tokens, or GPUs and nodes with more memory"),
    ],
)
def test_options_are_named_in_order_until_it_fits(room: Room, words: str) -> None:
    setup = replace(OFFLOADED, checkpointing="saved")
    told = advice(RankLoad(LLAMA, TOKENS), setup, room)

    assert told.startswith(f"a GPU needs 100.4 GiB, and {room.gpu_bytes / GIB:.1f} are usable. ")
    assert words in told


def test_what_is_too_much_for_the_host_goes_back() -> None:
    told = advice(RankLoad(LLAMA, 16_384), ALL, Room(72 * GIB, 100), more_ranks=False)
    assert told.startswith("the host of a node needs 190.3 GiB, and 100.0 may be pinned (--host-gib). It fits ")
    assert "It fits without --offload-params (fsdp_offload_params: false): 20.6 GiB on a GPU and 64.5 on" in told
    told = advice(RankLoad(LLAMA, 16_384), ALL, Room(72 * GIB, 10), more_ranks=False)
    assert "It fits with --checkpointing saved and without --offload-params (checkpointed_attention=" in told


def test_every_option_of_advice_is_one_of_the_command() -> None:
    said = CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "200"}).stdout
    for option in CHANGES:
        assert option.removeprefix("no ").split()[0] in said


def check_json(*options: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["check", "llama3-8b", *map(str, options), "--json"])
    found: dict[str, Any] = json.loads(result.stdout)
    return found


LONG = ("--tokens-per-rank", TOKENS, "--gpu", "h100", "--liger")
HOST = ("--checkpointing", "offloaded", "--mlp-tokens", 8192, "--offload-params")


def test_check_prints_the_host_and_what_makes_it_fit() -> None:
    text = " ".join(CliRunner().invoke(app, ["check", "llama3-8b", *map(str, LONG)]).stdout.split())
    assert "on the host" not in text.partition("Does not fit:")[0]
    assert "Does not fit: a GPU needs 104.7 GiB, and 71.6 are usable. It fits with --checkpointing offloaded (" in text
    given = [*LONG, *HOST, "--host-gib", 500]
    text = " ".join(CliRunner().invoke(app, ["check", "llama3-8b", *map(str, given)]).stdout.split())
    assert "on the host of a node (8 GPUs) 641.8 fits in 500.0 no" in text
    assert "Does not fit: the host of a node needs 641.8 GiB, and 500.0 may be pinned (--host-gib). It fits" in text
    assert "ZeRO-3 is not estimated" in text
    assert "64.5 GiB of activations, 15.7 of weights, gradients and AdamW" in text


def test_check_says_what_fits_neither_gpu_nor_host() -> None:
    found = check_json(*LONG, "--checkpointing", "offloaded", "--host-gib", 300, "--gpu", "l4")
    assert found["fits"] == {"fsdp2": False, "zero3": False}
    told = found["advice"]
    assert re.match(
        r"a GPU needs \d+\.\d GiB, and 2\d\.\d are usable; the host of a node needs 516\.0 GiB, and ", told
    )
    assert "300.0 may be pinned (--host-gib). It fits with " in told


def test_json_of_check_has_the_host() -> None:
    found = check_json(*LONG, *HOST, "--ranks-per-node", 4)
    memory = found["memory_bytes"]["fsdp2"]

    assert set(found["memory_bytes"]) == {"fsdp2"}
    assert memory["host"] == memory["host_kept"] + memory["host_state"]
    assert found["node_bytes"]["fsdp2"] == 4 * memory["host"]
    assert memory["layer"] == ATTENTION * TOKENS
    assert (found["fits"], found["advice"], found["mlp_tokens"]) == ({"fsdp2": True}, None, 8192)
    largest = found["largest_tokens_per_rank"]["fsdp2"]
    limited = check_json(*LONG, *HOST, "--ranks-per-node", 4, "--host-gib", 200)
    assert limited["largest_tokens_per_rank"]["fsdp2"] < TOKENS < largest
    assert limited["room_bytes"] == found["room_bytes"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([4096] * 300))
    return path


def test_plan_counts_the_host(lengths: Path) -> None:
    given = ["plan", str(lengths), "--gpus", "8", "--tokens-per-rank", "65536", "--liger", *map(str, HOST)]
    result = CliRunner().invoke(app, [*given, "--host-gib", "100"])
    text = " ".join(result.stdout.split())
    found = json.loads(CliRunner().invoke(app, [*given, "--host-gib", "100", "--json"]).stdout)
    of_gpu = found["estimates"]["memory_bytes"]["fsdp2"]

    assert found["estimates"]["node_bytes"]["fsdp2"] == 8 * of_gpu["host"]
    assert found["estimates"]["assumptions"]["state_on_host"] is True
    (choice,) = (one for one in found["choices"] if one["tokens_per_rank"] == 65536)
    assert choice["fits"] is False
    assert f"the host of a node needs {8 * of_gpu['host'] / GIB:.1f} GiB, which does not fit: 100.0 may be" in text
    assert f"Does not fit: {found['estimates']['advice']}." in text
    of_free = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert of_free["estimates"]["advice"] is None
    assert of_free["estimates"]["over_plain"] == found["estimates"]["over_plain"]


def test_plan_of_given_batches_counts_the_host(lengths: Path) -> None:
    given = ["plan", str(lengths), "--gpus", "8", "--batch-size", "4", "--liger", *map(str, HOST), "--json"]
    found = json.loads(CliRunner().invoke(app, [*given, "--host-gib", "100"]).stdout)

    assert found["node_bytes"] > 100 * GIB
    assert "may be pinned" in found["advice"]
    assert "which does not fit: 100.0 may be pinned" in found["in_short"]
    tiny = json.loads(CliRunner().invoke(app, [*given, "--gpu-gib", "5"]).stdout)  # only shorter batches would fit
    assert "No option makes it fit" in tiny["advice"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mlp-tokens", -1), "--mlp-tokens -1 must be between 0 and"),
        (("--attention-kv-heads", -1), "--attention-kv-heads -1 must be between 0 and"),
        (("--host-gib", 0), "--host-gib 0 must be above 0"),
        (("--host-gib", "nan"), "--host-gib nan must be above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: tuple[object, ...], words: str, lengths: Path) -> None:
    for command in (
        ["check", "llama3-8b"],
        ["plan", str(lengths), "--gpus", "8", "--tokens-per-rank", "4096"],
        ["plan", str(lengths), "--gpus", "8", "--batch-size", "1"],
    ):
        result = CliRunner().invoke(app, [*command, *map(str, options)])
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert words in result.stderr


def test_experts_do_not_run_in_tiles() -> None:
    experts = preset("qwen3-30b-a3b")
    size = experts.size.decoder(experts.heads)
    whole, tiled = (
        estimate_memory(size, TrainingSetup(8, liger=True, mlp_tokens=tile_tokens), 65_536)
        for tile_tokens in (0, 4096)
    )

    assert whole == tiled
    assert "--mlp-tokens" not in advice(RankLoad(size, 65_536), TrainingSetup(8, liger=True), Room(30 * GIB))


def test_check_refuses_tiles_of_a_model_that_trains_without() -> None:
    result = CliRunner().invoke(app, ["check", "qwen3_moe", "--mlp-tokens", "4096"])

    assert result.exit_code == 1
    assert "no layer has an MLP that runs on 4,096 tokens at a time" in " ".join(result.output.split())


def test_check_refuses_tiles_of_heads_by_name() -> None:
    result = CliRunner().invoke(app, ["check", "olmo2", "--attention-kv-heads", "1"])
    text = " ".join(result.output.split())

    assert result.exit_code == 1
    assert "attention_kv_heads=1: model.layers.0.self_attn (Olmo2Attention) has q_norm.weight of shape" in text
    found = check_json(*LONG, *HOST, "--attention-kv-heads", 2)
    less = found["memory_bytes"]["fsdp2"]["layer"]
    assert (found["status"], found["attention_kv_heads"]) == ("works", 2)
    assert less < check_json(*LONG, *HOST)["memory_bytes"]["fsdp2"]["layer"]


def test_more_ranks_receive_more_of_one_document() -> None:
    """A rank receives all of it but its own tokens."""
    size = preset("llama3-8b").size.decoder(preset("llama3-8b").heads)
    load = RankLoad(size, 131_072, received_bytes=GIB)
    setup = TrainingSetup(2, "fsdp2", "offloaded", True, mlp_tokens=16_384, state_on_host=True)
    found = advice(load, setup, Room(15 * GIB))
    ranks, tokens = (int(number) for number in re.findall(r"--gpus (\d+) --tokens-per-rank (\d+)", found)[0])
    of_more = RankLoad(size, tokens, received_bytes=round(GIB * (1 - 1 / ranks) / (1 - 1 / 2)))

    assert f"{of_more.memory(replace(setup, num_ranks=ranks)).total / GIB:.1f} GiB on a GPU" in found
