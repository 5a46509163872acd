"""One rank differs from the others, from the beginning or after the first step: noticed before the next optimizer
step, or harmless.

Every difference is a function that changes rank 1 alone. Documents are so long that all of them are cut between ranks.
"""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn

import distca_hf
from distca_hf.batches import agreement as facts
from distca_hf.data import collate
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks
from support.thorough import is_thorough


DIFFERENT = 1
STEPS = 3
LENGTH = 150


def _tokens_per_rank() -> int:
    """Documents fit on all ranks together, and on no rank alone."""
    return -(-LENGTH // dist.get_world_size()) + 3


@dataclass
class Training:
    """All that may differ on one rank.

    Attributes:
        columns: of the dataset.
        settings: of the plugin.
        shuffle: argument of the loader.
        autocast: dtype of autocast, if there is any.
        model: to be enabled.
        embed: makes embeddings of the first tokens with another module, as of images.
    """

    columns: dict[str, list[list[int]]]
    settings: dict[str, Any] = field(default_factory=lambda: {"tokens_per_rank": _tokens_per_rank()})
    shuffle: bool = True
    autocast: torch.dtype | None = None
    model: nn.Module = field(default_factory=lambda: tiny_model(num_hidden_layers=3).train())
    plugin: Any = None
    embed: bool = False


Change = Callable[[Training], None]


def _swap_layers(training: Training) -> None:
    layers = training.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _leave_out_a_layer(training: Training) -> None:
    training.model.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states


def _freeze(training: Training) -> None:
    """Gradients reach the uppermost layer alone."""
    training.model.requires_grad_(False)
    training.model.model.layers[2].requires_grad_(True)


def _take_another_model_s_config(training: Training) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(training.model.config, attn_implementation="sdpa")


def _set_version(training: Training) -> None:
    facts.__version__ = "0.0.1"
    facts._versions.cache_clear()


def _set_torch(training: Training) -> None:
    facts.version = lambda name: "1.0"
    facts._versions.cache_clear()


def _checkpoint(training: Training) -> None:
    training.model.gradient_checkpointing_enable({"use_reentrant": False})


def _checkpoint_all_layers_but(spared: int) -> Change:
    def change(training: Training) -> None:
        _checkpoint(training)
        for number, layer in enumerate(training.model.model.layers):
            layer.gradient_checkpointing = number != spared

    return change


def _compute_a_layer_in_float16(training: Training) -> None:
    """Its rows have as many bytes as those of other ranks in bfloat16."""
    attention = training.model.model.layers[1].self_attn
    attention.forward = torch.autocast("cpu", torch.float16)(attention.forward)


def _compute_a_layer_in_float32(training: Training) -> None:
    """Its rows have twice as many bytes as those of other ranks in bfloat16."""
    attention = training.model.model.layers[1].self_attn
    forward = attention.forward

    @torch.autocast("cpu", enabled=False)
    def in_float32(hidden_states: torch.Tensor, position_embeddings: Any, **others: Any) -> Any:
        return forward(hidden_states.float(), tuple(x.float() for x in position_embeddings), **others)

    attention.forward = in_float32


def _shorten_windows(training: Training) -> None:
    for layer in training.model.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 8


def _change_scale(training: Training) -> None:
    training.model.model.layers[1].self_attn.scaling *= 2


def _scale_frequencies(training: Training) -> None:
    training.model.model.rotary_emb.inv_freq *= 1 + 1e-6


def _change_a_weight(training: Training) -> None:
    training.model.lm_head.weight.data[0, 0] += 1e-6


def _replace_plugin(training: Training) -> None:
    training.plugin = distca_hf.DistCAPlugin(tokens_per_rank=_tokens_per_rank(), kv_residency="refetch")
    distca_hf.enable(training.model, training.plugin)


def _shuffle_rows(training: Training) -> None:
    training.columns = {name: rows[::-1] for name, rows in training.columns.items()}


def _change_tokens(training: Training) -> None:
    training.columns["input_ids"] = [[token ^ 1 for token in row] for row in training.columns["input_ids"]]


def _change_labels(training: Training) -> None:
    training.columns["labels"] = [[-100] * 9 + row[9:] for row in training.columns["labels"]]


def _change_masks(training: Training) -> None:
    training.columns["completion_mask"] = [[0] * 9 + [1] * (len(row) - 9) for row in training.columns["input_ids"]]


def _change_what_no_sample_sees(training: Training) -> None:
    """Changes all documents but the first, which is the sample."""
    collate.MOST_DOCUMENTS = 1
    for row in training.columns["input_ids"][1:]:
        row[1:-1] = [token ^ 1 for token in row[1:-1]]


def _set(**values: Any) -> Change:
    def change(training: Training) -> None:
        for name, value in values.items():
            setattr(training, name, value)

    return change


def _set_config(**values: Any) -> Change:
    def change(training: Training) -> None:
        for name, value in values.items():
            setattr(training.model.config, name, value)

    return change


# Change, and words of the error on some rank; None for a change that is harmless.
FROM_THE_BEGINNING: dict[str, tuple[Change, str | None]] = {
    "rows in another order": (_shuffle_rows, "contents of documents is"),
    "other tokens": (_change_tokens, "contents of documents is"),
    "other labels": (_change_labels, "contents of documents is"),
    "other masks": (_change_masks, "contents of documents is"),
    "tokens that no sample sees": (_change_what_no_sample_sees, "hold other tokens or labels around token"),
    "loader does not shuffle": (_set(shuffle=False), "shuffle is True on {others}, False on rank 1"),
    "settings": (
        lambda t: t.settings.update(kv_residency="refetch"),
        "kv_residency is auto on {others}, refetch on rank 1",
    ),
    "settings of a group": (
        lambda t: t.settings.update(timeouts=distca_hf.Timeouts(exchange_seconds=299)),
        "timeouts.exchange_seconds is 300.0 on {others}, 299.0 on rank 1",
    ),
    "ranks of a node, as launched": (
        lambda t: os.environ.update(LOCAL_WORLD_SIZE="1"),  # rows would come in other chunks
        "ranks_per_node is",
    ),
    "settings of one rank": (lambda t: t.settings.update(prefetch=5), None),
    "version of distca_hf": (_set_version, "distca_hf is"),
    "version of torch": (_set_torch, "torch is"),
    "model config": (_set_config(rope_theta=123.0), "config.rope_theta is"),
    "another window": (
        lambda t: setattr(t, "model", tiny_model("gemma3", sliding_window=8).train()),
        "sliding windows of attention layers is no window (1), a window of 16 tokens (2) on {others}, no window (1), "
        "a window of 8 tokens (2) on rank 1",
    ),
    "softcap": (_set_config(attn_logit_softcapping=20.0), "config.attn_logit_softcapping is"),
    "scale": (_change_scale, "modules and their settings is"),
    "another window in modules": (_shorten_windows, "sliding windows of attention layers is"),
    "dropout of attention": (
        lambda t: setattr(t, "model", tiny_model(num_hidden_layers=3, attention_dropout=0.1).train()),
        "attention dropout 0.1 is not computed",
    ),
    "dropout elsewhere": (
        lambda t: t.model.model.layers[0].mlp.add_module("dropout", nn.Dropout(0.1)),
        "modules and their settings is",
    ),
    "layer count": (
        lambda t: setattr(t, "model", tiny_model(num_hidden_layers=2).train()),
        "attention layers is 3 on {others}, 2 on rank 1",
    ),
    "layer order": (_swap_layers, "names and numbers of attention layers is"),
    "mode of a layer": (lambda t: t.model.model.layers[1].eval(), "modules and their settings is"),
    "rotary frequencies": (_scale_frequencies, "buffer model.rotary_emb.inv_freq is"),
    "weights": (_change_a_weight, "weight lm_head.weight is"),
    "dtype": (lambda t: t.model.to(torch.bfloat16), "dtypes of parameters is"),
    "autocast": (_set(autocast=torch.bfloat16), "dtypes that attention computes in is"),
    "dtype of a layer": (
        _compute_a_layer_in_float16,
        "dtypes that layer 1 attends in is torch.bfloat16 on {others}, torch.float16 on rank 1",
    ),
    "dtype of a layer, of more bytes": (
        _compute_a_layer_in_float32,
        "dtypes that layer 1 attends in is torch.bfloat16 on {others}, torch.float32 on rank 1",
    ),
    "frozen layers": (_freeze, "parameters and which of them are trained is"),
    "checkpointing that saves attention": (_checkpoint, None),
    "embeddings of another module": (_set(embed=True), "attention calls with gradients is 1 on {others}, 3 on rank 1"),
}
AFTER_THE_FIRST_STEP: dict[str, tuple[Change, str | None]] = {
    "attention implementation": (
        lambda t: t.model.set_attn_implementation("sdpa"),
        "its config now says attn_implementation='sdpa'",
    ),
    "a config that another model shares": (
        _take_another_model_s_config,
        "another model was made from model.config",
    ),
    "settings": (
        lambda t: vars(t.plugin).update(kv_residency="keep"),  # past the lock of settings
        "kv_residency is auto on {others}, keep on rank 1",
    ),
    "another plugin of other settings": (_replace_plugin, None),
    "another window": (
        _shorten_windows,
        "the layer attends with a window of 8 tokens, and with a window of 16 tokens in",
    ),
    "scale": (_change_scale, "scales, softcaps and sinks of the layers that attend is"),
    "training mode": (lambda t: t.model.eval(), "training is True on {others}, False on rank 1"),
    "layer order": (_swap_layers, "order of the layers that attend is"),
    "weights of its own step": (_change_a_weight, "weight lm_head.weight is"),
    "layer count": (_leave_out_a_layer, "2 attention calls of LlamaForCausalLM came through distca, and 3 did"),
    "dtype": (lambda t: t.model.to(torch.bfloat16), "dtypes that attention computes in is"),
    "autocast": (_set(autocast=torch.float16), "dtypes that attention computes in is"),
    "dtype of a layer": (
        _compute_a_layer_in_float16,
        "layer 1, forward: the layer attends in torch.float16, and in torch.bfloat16 in the pass before",
    ),
    "dtype of a layer, of more bytes": (
        _compute_a_layer_in_float32,
        "layer 1, forward: the layer attends in torch.float32, and in torch.bfloat16 in the pass before",
    ),
    "frozen layers": (_freeze, "parameters and which of them are trained is"),
    "model config": (_set_config(hidden_act="relu"), "config.hidden_act is"),
    "checkpointing that saves attention": (_checkpoint, None),
}
LATER = ("later", "compiled")
# Changes after the second step: after the first one ranks compare weights by their names.
AFTER_THE_SECOND_STEP = ("layer order",)
# Rows of one rank have other sizes than the others expect: every rank says so, and none ends in an abort of gloo.
SHOWN_BY_ALL = "dtype of a layer, of more bytes"
# Found out by the layers' own calls.
OF_CALLS = ["layer order", "another window"] if is_thorough() else ["layer order"]
RECOMPUTING = {"checkpointed_attention": "recompute", "kv_residency": "refetch"}
WITH_RECOMPUTATION: dict[str, tuple[Change, str | None]] = {
    "checkpointing": (_checkpoint, "attention calls that are recomputed is 0 on {others}, 3 on rank 1"),
    "checkpointing of other layers": (
        _checkpoint_all_layers_but(1),
        "checkpointed modules that attend again is [0, 2, 3] on {others}, [0, 1, 3] on rank 1",
    ),
}
# When ranks begin to differ, or in which training.
CHANGES = {
    "first": FROM_THE_BEGINNING,
    "later": AFTER_THE_FIRST_STEP,
    "compiled": AFTER_THE_FIRST_STEP,
    "recomputed": WITH_RECOMPUTATION,
}


def _steps_before(group: str, name: str) -> int:
    """Steps that all ranks take alike."""
    return (2 if name in AFTER_THE_SECOND_STEP else 1) if group in LATER else 0


def _training(settings: dict[str, Any]) -> Training:
    """The training that all ranks but one run."""
    documents = random_documents(8, lengths=(LENGTH,))
    columns = {"input_ids": documents, "labels": copy.deepcopy(documents)}
    columns["completion_mask"] = [[0] * 5 + [1] * (LENGTH - 5) for _ in documents]
    training = Training(columns, settings={"tokens_per_rank": _tokens_per_rank()} | settings)
    training.model.config.output_hidden_states = False
    return training


def _run(folder: Path, group: str, name: str, batches: str) -> list[float]:
    """Trains; writes down the number of finished steps. Returns losses, mean over ranks."""
    change, rank = CHANGES[group][name][0], dist.get_rank()
    training = _training(RECOMPUTING if group == "recomputed" else {})
    if name == "tokens that no sample sees":
        collate.MOST_DOCUMENTS = 1
    if name == "embeddings of another module":
        _freeze(training)
    if "window" in name:
        training.model = tiny_model("gemma3").train()
    if name.startswith("dtype of a layer"):
        training.autocast = torch.bfloat16
    if name == "checkpointing of other layers":
        _checkpoint_all_layers_but(0)(training)
    if group not in LATER and rank == DIFFERENT:
        change(training)
    training.plugin = distca_hf.DistCAPlugin(**training.settings)
    dataset = Dataset.from_dict(training.columns)
    placed = training.plugin.dataloader(dataset, seed=1, shuffle=training.shuffle) if batches == "placed" else None
    distca_hf.enable(training.model, training.plugin)
    if group == "compiled":
        for layer in training.model.model.layers:
            layer.compile(backend="eager")
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    losses = []
    for step, batch in zip(range(STEPS), placed if placed is not None else _packs(dataset, rank), strict=False):
        if step == _steps_before(group, name) and group in LATER and rank == DIFFERENT:
            change(training)
        with _autocast(training.autocast):
            loss = training.model(**_embedded(training, batch)).loss
        loss.backward()
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"steps-{rank}").write_text(str(step + 1))
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def _packs(dataset: Dataset, rank: int) -> Iterator[dict[str, Any]]:
    """A long document on {others}, short ones elsewhere, so that tasks move."""
    for row in dataset["input_ids"]:
        ids = torch.tensor(row if rank == 0 else row[:20])[None]
        yield {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(ids.shape[1])[None]}


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _embedded(training: Training, batch: dict[str, Any]) -> dict[str, Any]:
    if not training.embed:
        return batch
    embeddings = training.model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    return {name: value for name, value in batch.items() if name != "input_ids"} | {"inputs_embeds": embeddings}


def _run_unchanged(folder: Path, batches: str) -> list[float]:
    FROM_THE_BEGINNING["nothing"] = (lambda training: None, None)
    return _run(folder, "first", "nothing", batches)


# With packs the model's plugin makes the plans: other settings there are those above. A model that evaluates on one
# rank alone waits for nobody, and others wait for it until their deadline: see test_slow_rank.
OF_PACKS = [name for name in AFTER_THE_FIRST_STEP if name not in ("another plugin of other settings", "training mode")]
CASES = [
    *(("first", name, "placed") for name in FROM_THE_BEGINNING),
    *(("later", name, "placed") for name in AFTER_THE_FIRST_STEP),
    *(("compiled", name, "placed") for name in OF_CALLS),
    *(("recomputed", name, "placed") for name in WITH_RECOMPUTATION),
    # Packs and placed batches are compared by the same code.
    *(("later", name, "packs") for name in (OF_PACKS if is_thorough() else OF_PACKS[::5])),
]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[float]]:
    """Losses of a training in which no rank differs, by number of ranks and kind of batches."""

    @functools.cache
    def losses(world_size: int, batches: str) -> list[float]:
        folder = tmp_path_factory.mktemp("usual")
        result: list[float] = run_ranks(world_size, _run_unchanged, folder, folder, batches)[0]
        return result

    return losses


@pytest.mark.parametrize(("group", "name", "batches"), CASES)
def test_no_rank_takes_a_step_with_one_that_differs(
    group: str, name: str, batches: str, usual: Callable[[int, str], list[float]], tmp_path: Path
) -> None:
    done = _steps_before(group, name)
    words = CHANGES[group][name][1]
    # A few on three ranks, the same in every run; not those that compile, which takes seconds of each rank.
    world_size = 3 if group != "compiled" and len(name) % 4 == 0 else 2
    outcomes = start_ranks(world_size, _run, tmp_path, tmp_path, group, name, batches)
    if words is None:
        assert [outcome.exit_code for outcome in outcomes] == [0] * world_size, outcomes
        assert outcomes[0].result == pytest.approx(usual(world_size, batches), abs=1e-6)
        return
    expected = words.format(others={2: "rank 0", 3: "ranks 0 and 2"}[world_size])
    assert [outcome.exit_code for outcome in outcomes] == [1] * world_size, outcomes
    shown = [expected in outcome.output for outcome in outcomes]
    assert all(shown) if name == SHOWN_BY_ALL else any(shown), "\n".join(outcome.output for outcome in outcomes)
    for rank in range(world_size):
        steps = tmp_path / f"steps-{rank}"
        assert (int(steps.read_text()) if steps.is_file() else 0) == done
