"""The benchmark of a training step runs on CPU processes: all modes, their numbers and bytes."""

import importlib
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import LlamaConfig

from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.cost import Mask, causal_pairs
from support.commands import REPOSITORY
from support.scripts import run_script, small_llama
from support.thorough import is_thorough
from support.versions import classes_of_today


EXCHANGING = ("ulysses", "context", "placed", "given")
RANKS, LAYERS, HEADS, KV_HEADS, DIM, TOKENS = 2, 2, 4, 2, 16, 512
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": HEADS * DIM,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}


def step_on(
    folder: Path, words: str, ranks: int = RANKS, documents: str = f"{TOKENS},8x64", **changes: object
) -> tuple[str, dict[str, Any]]:
    """What one round of a model with some changes prints, and its figures; losses and attention of all modes are
    right, and those of the product exchange something."""
    config, out = folder / "config.json", folder / "out.json"
    config.write_text(json.dumps(CONFIG | changes))
    quick = f"--device cpu --config {config} --documents {documents} --rounds 1 --warmup 0 --out {out}"
    printed = run_script(ranks, folder, f"scripts/benchmarks/attention_step.py {quick} {words}".split())
    facts = json.loads(out.read_text())
    assert all(error <= 1 for errors in facts["errors"].values() for error in errors.values())
    for name, mode in facts["modes"].items():
        assert (mode["exchanged_bytes"] > 0) == (name in EXCHANGING)
        if name != "ideal":  # its keys are made up in part
            assert mode["loss"] == pytest.approx(facts["modes"]["local"]["loss"], rel=1e-5)
    return printed, facts


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module("lib.documents")


def test_host_time_of_attention_calls_is_told_for_every_rank(tmp_path: Path) -> None:
    size = ["--device", "cpu", "--documents", "64,24x8", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    printed = run_script(
        RANKS, tmp_path, ["scripts/benchmarks/host_time.py", *size, "--head-dim", "8", "--repeats", "2"]
    )

    assert "2 passes; alone: the kernel cpu\n" in printed
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    names, numbers = zip(*((name, [int(number) for number in row]) for name, *row in rows[1:]), strict=True)
    assert names == ("rank 0", "rank 1", "largest of all")
    assert numbers[-1] == [max(of) for of in zip(*numbers[:-1], strict=True)]
    assert min(numbers[-1][:-1]) > 0


def test_all_modes_run_and_say_what_they_exchange(tmp_path: Path) -> None:
    printed, facts = step_on(tmp_path, "--layers 1")
    modes = facts["modes"]

    names = ["local", "ideal", "ulysses", "context", "placed", "given"]
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("| ")] == ["mode", *names]
    assert list(facts["errors"]) == list(modes) == names
    assert all(len(mode["seconds"]) == 1 for mode in modes.values())
    # Forward, recomputed forward and backward; half of everything goes to the other one of two ranks.
    calls, number_bytes = 3, 4
    query, key_value = TOKENS * HEADS * DIM * number_bytes, TOKENS * 2 * KV_HEADS * DIM * number_bytes
    assert modes["ulysses"]["exchanged_bytes"] == calls * (2 * query + key_value) // 2
    assert modes["context"]["exchanged_bytes"] == calls * key_value


def test_mixers_run_on_whole_documents_in_every_mode(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": DIM}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    step_on(tmp_path, "--modes local,ideal,given", **sizes, **heads, **kinds)


@classes_of_today
def test_layers_with_heads_of_their_own_count_as_such(tmp_path: Path) -> None:
    """As Gemma 4 31B: windows with narrow heads; full layers with wide ones, fewer keys, which are values, too."""
    window, wide = 64, 2 * DIM
    own = {"global_head_dim": wide, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": DIM}
    kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
    others = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "sliding_window": window}
    _, facts = step_on(tmp_path, "--modes local,ideal,placed,given", **own, **kinds, **others)
    load = facts["load"]
    of_window, full = (sum(mask.pairs(0, tokens) for tokens in (TOKENS, *[64] * 8)) for mask in (Mask(window), Mask()))
    assert load["pairs"] == [2 * of_window / RANKS, full / RANKS]
    attention = 4 * HEADS * (load["pairs"][0] * DIM + load["pairs"][1] * wide)
    mlps, narrow = 3 * 3 * 64 * 128, 2 * 64 * (2 * HEADS + 2 * KV_HEADS) * DIM
    weights = mlps + narrow + 64 * (2 * HEADS + 1) * wide
    # Angles of rotary embeddings are counted, too, if they are a matrix product, as in Transformers 5.17.
    assert load["model_flops"] / 3 - attention == pytest.approx(2 * weights * load["tokens"], rel=3e-4)


@pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23), reason="Transformers divides experts rightly since 5.23"
)
def test_experts_of_both_ranks_compute_in_every_mode(tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": DIM}
    words = "--ep-size 2 --even-experts --modes local,ideal,placed --cluster h100"
    printed, facts = step_on(tmp_path, words, model_type="qwen3_moe", **experts)

    assert "FSDP2, gradients summed in float32, experts over 2 ranks" in printed
    assert "no simulation: experts that 2 ranks divide are not simulated" in printed
    assert facts["simulated"] == {}
    # Matrix products of a token: queries, keys, values and outputs; the router; two of eight experts.
    width = HEADS * DIM
    weights = width * (2 * HEADS + 2 * KV_HEADS) * DIM + 8 * width + 2 * 3 * 32 * width
    tokens = facts["load"]["tokens"]
    pairs = LAYERS * (causal_pairs(0, TOKENS) + 8 * causal_pairs(0, 64)) / RANKS
    assert facts["load"]["pairs"] == [pairs]
    linear = facts["load"]["model_flops"] / 3 - pairs * 4 * DIM * HEADS
    assert linear == pytest.approx(2 * weights * LAYERS * tokens)


@pytest.mark.parametrize(
    ("divided", "words", "data_ranks", "tensor_ranks"),
    [
        pytest.param(
            "--tp-size 2",
            "FSDP2, gradients summed in float32, layers over 2 tensor ranks",
            *(2, 2),
            marks=pytest.mark.skipif(
                Version(transformers.__version__).release < (5, 19), reason="Transformers trains so since 5.19"
            ),
        ),
        *(
            [("--dp-replicate-size 2", "FSDP2, gradients summed in float32, 2 replicas", 4, 1)]
            if is_thorough()
            else []
        ),
    ],
)
def test_ranks_of_a_grid_compute_in_every_mode(
    tmp_path: Path, divided: str, words: str, data_ranks: int, tensor_ranks: int
) -> None:
    """Four ranks: two data ranks of two tensor ranks each, or two replicas of two shards."""
    options = f"{divided} --modes local,ideal,placed,given --cluster h100"
    printed, facts = step_on(tmp_path, options, 4, f"{TOKENS},24x64")
    modes = facts["modes"]

    assert words in printed
    tokens = (TOKENS + 24 * 64) // data_ranks
    assert facts["load"]["tokens"] == tokens
    assert modes["placed"]["tokens_per_second"] == pytest.approx(
        tokens / tensor_ranks / modes["placed"]["step_seconds"]
    )
    # A tensor rank computes its heads, and its part of all matrix products.
    width, mlp = HEADS * DIM, 128
    weights = width * (2 * HEADS + 2 * KV_HEADS) * DIM + 3 * width * mlp
    pairs = LAYERS * (causal_pairs(0, TOKENS) + 24 * causal_pairs(0, 64)) / data_ranks
    linear = facts["load"]["model_flops"] / 3 - pairs * 4 * DIM * HEADS / tensor_ranks
    # Older versions of Transformers multiply positions by DIM / 2 frequencies as matrices, once for all layers.
    products, rotary = 2 * weights * LAYERS * tokens / tensor_ranks, tokens * DIM
    assert linear in (pytest.approx(products), pytest.approx(products + rotary))
    assert set(facts["simulated"]) == {"local ÷ placed", "placed ÷ ideal"}
    for ratio, (measured, simulated) in facts["simulated"].items():
        above, below = ratio.split(" ÷ ")
        assert measured == pytest.approx(modes[above]["step_seconds"] / modes[below]["step_seconds"])
        assert simulated > 0


@pytest.mark.parametrize(("size", "lowest"), [("ep_size", "5.23"), ("tp_size", "5.19")])
def test_older_versions_of_transformers_are_named(monkeypatch: pytest.MonkeyPatch, size: str, lowest: str) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    divided = importlib.import_module("lib.divided")
    # Transformers replaces its module while it is imported: this file may have another one than the program.
    monkeypatch.setattr(divided.transformers, "__version__", "5.17.0")
    options = Namespace(**{"ep_size": 1, "tp_size": 1, "dp_replicate_size": 1, size: 2})
    with pytest.raises(SystemExit, match=f"--{size[:2]}-size needs Transformers {lowest}, this is 5.17.0"):
        divided.build_divided_model(LlamaConfig(), options)


def test_modes_that_know_no_tensor_ranks_are_refused(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--tp-size", "2", "--modes", "placed,context"]
    with pytest.raises(AssertionError, match="--tp-size is measured without context, llama3, magi, ringmaster"):
        run_script(1, tmp_path, ["scripts/benchmarks/attention_step.py", *options])


def test_simulated_layers_of_a_configuration_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of four Llama layers gives the numbers that rows of measured steps are compared with; replicas
    add the sums over them, and two tensor ranks halve the work."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    predicted, model = importlib.import_module("lib.planning.predicted"), importlib.import_module("lib.model")
    profile, notes = find_profile("h100"), Notes()
    names = {"local": 1.0, "ideal": 1.0, "recomputed": 1.0, "fixed": 1.0}
    row = predicted.MeasuredRow("", 4, "H100", "NVLink", "131072,96x4096", names)
    layers = predicted.model_of(model.PRESETS["llama3-8b"] | {"num_hidden_layers": 4})
    flat = predicted.Setting(layers, predicted.np.array(predicted.parse_documents(row.documents)), 4, slow=False)
    times = predicted.simulate(flat, names, profile, notes)
    replicas = predicted.simulate(replace(flat, replicas=2), names, profile, notes)
    tensor = predicted.simulate(replace(flat, data_ranks=2, tensor_ranks=2), names, profile, notes)

    assert times == pytest.approx(predicted.simulate_row(row, profile))
    for name in names:
        assert times[name] < replicas[name] < 1.02 * times[name]
        assert tensor[name] >= 0.99 * tensor["ideal"]
    assert times["ideal"] < tensor["ideal"] < 1.1 * times["ideal"]


@pytest.mark.parametrize(("preset", "longest"), [("A", 65_536), ("B", 131_072), ("C", 65_536)])
def test_presets_fill_four_ranks_equally_in_every_mode(documents: ModuleType, preset: str, longest: int) -> None:
    lengths = documents.parse_documents(preset)
    whole, parts = documents.evenly_spread(lengths, 4)
    even = [[*left, *right] for left, right in zip(whole, parts, strict=True)]
    packs = documents.whole_documents(lengths, 4)
    zigzag = documents.zigzag(range(len(lengths)), lengths, 4)

    assert packs[0] == [(0, 0, longest)]
    for holding in (even, packs, zigzag):
        assert {sum(stop - start for _, start, stop in held) for held in holding} == {sum(lengths) // 4}
        assert sorted(document for held in holding for document, start, _ in held if start == 0) == [
            *range(len(lengths))
        ]
    for holding in (even, zigzag):
        work = [sum(causal_pairs(start, stop) for _, start, stop in held) for held in holding]
        assert work == [documents.attended_pairs(lengths) // 4] * 4
    assert max(documents.smaller_lengths(lengths, 4)) == documents.COMPARED_TOKENS


def test_presets_have_as_many_tokens_for_every_gpu(documents: ModuleType) -> None:
    for preset, tokens_per_gpu in {"A": 65_536, "B": 131_072, "C": 65_536, "D": 65_536}.items():
        assert documents.spelled_out(preset) == documents.spelled_out(f"{preset}:4")
        for gpus in (1, 2, 4, 8):
            lengths = documents.parse_documents(f"{preset}:{gpus}")
            documents.check_lengths(lengths, gpus)
            assert sum(lengths) == tokens_per_gpu * gpus
            assert lengths[0] == (sum(lengths) if preset == "D" else tokens_per_gpu)
            if preset != "D":
                documents.whole_documents(lengths, gpus)
    assert documents.spelled_out("A:8") == "65536,5x32768,9x16384,72x2048"
    assert documents.spelled_out("131072,96x4096") == "131072,96x4096"


def test_documents_that_do_not_fit_are_refused(documents: ModuleType) -> None:
    with pytest.raises(SystemExit, match="whole documents do not fill ranks of 384, 384 tokens"):
        documents.whole_documents([512, 64, 64, 64, 64], 2)
    with pytest.raises(SystemExit, match="a document of 510 tokens cannot be cut in 4 equal chunks"):
        documents.check_lengths([512, 510, 2], 2)


def test_what_the_product_refuses_ends_a_program_in_its_words(tmp_path: Path) -> None:
    words = ["scripts/benchmarks/host_time.py", "--device", "cpu", "--documents", "256", "--kernel", "flash4"]
    with pytest.raises(AssertionError, match="SystemExit: kernel='flash4' cannot be used"):
        run_script(1, tmp_path, words)


def test_one_process_has_the_tokens_and_pairs_of_a_rank(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(small_llama(num_key_value_heads=1)))
    options = ["--device", "cpu", "--config", str(config), "--documents", "512,8x64;256,4x64", "--modes", "ideal"]
    quick = ["--share-tokens", "512", "--rounds", "1", "--warmup", "0", "--out", out]
    printed = run_script(1, tmp_path, ["scripts/benchmarks/attention_step.py", *options, *quick])
    of_two, of_one = (json.loads((tmp_path / name).read_text()) for name in ("out.json", "out.1.json"))

    assert "the part of one rank of 2" in printed
    assert [facts["load"]["tokens"] for facts in (of_two, of_one)] == [512, 512]
    assert of_two["load"]["pairs"] == [(causal_pairs(0, 512) + 8 * causal_pairs(0, 64)) / 2]
    assert of_one["load"]["pairs"] == [causal_pairs(0, 256) + 4 * causal_pairs(0, 64)]
    for facts in (of_two, of_one):
        assert all(error <= 1 for error in facts["errors"]["ideal"].values())
        assert facts["modes"]["ideal"]["exchanged_bytes"] == 0
