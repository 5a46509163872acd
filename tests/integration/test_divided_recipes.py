"""Recipes for models that Transformers divides as it loads them, with tiny models on CPUs; they are saved as ordinary
checkpoints."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.scripts import run_script
from support.texts import save_word_model, write_documents


pytestmark = pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23), reason="Transformers divides experts rightly since 5.23"
)
# Accelerate knows no ParallelismConfig on CPUs, which Trainer makes for tensor ranks.
SHARD_ON_CPU = "tests/support/shard_on_cpu.py"
RUN = ["-m", "distca_hf.run", "--recipe"]
STEPS = 3
# SGD, so that weights show every gradient in proportion.
TRAINING = {
    **{"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0},
    **{"max_grad_norm": 0, "bf16": False, "dtype": "float32", "save_steps": 2, "report_to": "none"},
}


def words(**arguments: object) -> list[str]:
    return [word for name, value in arguments.items() for word in (f"--{name}", str(value))]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"'loss': '([^']+)'", printed)]


@pytest.mark.parametrize(
    ("recipe", "kind", "sizes", "more"),
    [
        ("experts", "qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, ()),
        ("tensor", "llama", {"tp_size": 2, "fsdp_size": 2}, (SHARD_ON_CPU,)),
    ],
)
def test_recipe_trains_and_saves_an_ordinary_model(
    recipe: str, kind: str, sizes: dict[str, int], more: tuple[str, ...], tmp_path: Path
) -> None:
    """Losses and weights are those of the same recipe in one process, whose model is whole."""
    model = save_word_model(tmp_path / "model", kind)
    texts = write_documents(tmp_path / "documents.jsonl", [*range(3, 62), 1500])  # the long one spans data ranks
    line = [*RUN, recipe, *words(model=model, dataset=texts, **TRAINING)]
    ranks = sizes["fsdp_size"] * sizes.get("tp_size", 1)
    use_cpu = [] if more else words(use_cpu=True)
    divided = words(output_dir="divided", distributed_config=json.dumps(sizes))
    printed = run_script(ranks, tmp_path, [*more, *line, *divided, *use_cpu])
    alone = run_script(
        1, tmp_path / "model", [*line, *words(output_dir="../whole", distributed_config="", use_cpu=True)]
    )

    losses, expected = losses_of(printed), losses_of(alone)
    assert len(losses) == len(expected) == STEPS
    assert losses == pytest.approx(expected, abs=1e-4), "as they are printed"
    initial, saved, whole = (weights_of(tmp_path / folder) for folder in ("model", "divided", "whole"))
    assert saved.keys() == whole.keys() == initial.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(
            saved[name], weight, rtol=0, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
        )
    assert any((saved[name] - initial[name]).abs().max() > 1e-3 for name in saved), "nothing was learnt"
    assert not list((tmp_path / "divided" / "checkpoint-2").glob("optimizer*"))
    assert weights_of(tmp_path / "divided" / "checkpoint-2").keys() == initial.keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "divided", attn_implementation="sdpa")
    assert again.num_parameters() == sum(weight.numel() for weight in initial.values())
    assert getattr(again.config, "distributed_config", None) is None


def test_sizes_reach_transformers(tmp_path: Path) -> None:
    """Which asks for as many processes."""
    model = save_word_model(tmp_path / "model")
    texts = write_documents(tmp_path / "documents.jsonl", [3, 4])
    line = [*RUN, "experts", *words(model=model, dataset=texts, use_cpu=True, output_dir=tmp_path)]

    with pytest.raises(AssertionError, match="The parallel mesh requires 3 processes, but world_size is 2"):
        run_script(2, tmp_path, [*line, *words(distributed_config=json.dumps({"fsdp_size": 3}))])


def test_weights_from_scratch_cannot_be_divided_as_they_are_loaded(tmp_path: Path) -> None:
    arguments = {"model": tmp_path, "dataset": "x", "from_scratch": True, "use_cpu": True, "output_dir": tmp_path}

    with pytest.raises(AssertionError, match="leave it or from_scratch out"):
        run_script(1, tmp_path, [*RUN, "experts", *words(**arguments)])
