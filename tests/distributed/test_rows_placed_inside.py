"""Rows placed inside the model: every rank's own batch gives the gradients of data parallelism without distca."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.mixers import LOWEST_STATES
from support.given_batches import (
    Batch,
    Gradients,
    Loss,
    draw,
    gradients_of,
    of_all_hidden_states,
    own_loss,
    packed,
    padded,
    train_all_drawn,
    with_embeddings,
    with_images,
    worst_of,
)
from support.log_lines import KeptLines
from support.models import VOCABULARY, tiny_config
from support.multimodal import multimodal_model
from support.ranks import run_ranks
from support.versions import TRANSFORMERS
from support.wide_models import wide_model


Make = Callable[[str], PreTrainedModel]
# Lengths of the documents of each rank: unequal tokens, and the first document is longer than the mean of ranks.
LENGTHS = ([200, 31, 7], [9, 5], [40], [3, 3, 17])


class Case(NamedTuple):
    """A model and the batches of all ranks.

    Attributes:
        make: makes the model, given an attention implementation.
        batches: of at least as many ranks as any run has.
        loss: of a model on a batch; by default the model's own.
        most: largest difference of a gradient, in its largest number.
        prepare: changes a model that was enabled.
        alone: batches with the same documents, row by row, which are trained on without distca; by default `batches`.
        in_double: whether what the model computes in float32 is computed in float64, too.
        crosses: whether rows go to other ranks: batches are not even.
    """

    make: Make
    batches: Sequence[Batch]
    loss: Loss | None = None
    most: float = 1e-13
    prepare: Callable[[PreTrainedModel], object] = lambda model: None
    alone: Sequence[Batch] = ()
    in_double: bool = False
    crosses: bool = True

    def precision(self) -> AbstractContextManager[object]:
        """Returns a context for the passes of the model."""
        return patch.object(torch.Tensor, "float", torch.Tensor.double) if self.in_double else nullcontext()


def of_config(
    config: PreTrainedConfig, implementation: str, kind: Any = AutoModelForCausalLM, **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=implementation, **changes)
    return model.to(torch.float64).train()


def tiny(kind: str = "llama", model_kind: Any = AutoModelForCausalLM, **changes: Any) -> Make:
    """Makes a tiny model in float64."""
    experts = {"experts_implementation": "eager"} if kind in ("qwen3_moe", "gpt_oss") else {}
    return lambda implementation: of_config(tiny_config(kind, **changes), implementation, model_kind, **experts)


def hybrid(implementation: str) -> PreTrainedModel:
    return wide_model("qwen3_5", implementation, vocab_size=VOCABULARY, max_position_embeddings=512)


def gpt2(implementation: str) -> PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY}
    return of_config(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0), implementation, AutoModel)


def qwen_vl(model_type: str, implementation: str) -> PreTrainedModel:
    return multimodal_model(model_type, implementation).to(torch.float64)


def of_backbone(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss of a model without a head."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    states = model(**given, use_cache=False).last_hidden_state
    return (states * (batch["labels"] != -100)[..., None]).square().sum()


def of_classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of classes of rows."""
    rows = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return model(**rows, labels=batch["input_ids"][:, 0] % 3, use_cache=False).loss


def of_two_passes(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Two passes before one backward pass, on two halves of a padded batch."""
    rows = len(batch["input_ids"]) // 2
    halves = ({name: value[part] for name, value in batch.items()} for part in (slice(rows), slice(rows, None)))
    return sum((model(**half, use_cache=False).loss for half in halves), torch.zeros(()))


def rows_of_images(kind: str, images: Sequence[bool], side: str) -> list[Batch]:
    """Padded rows of a multimodal model, of which some ranks' have an image."""
    return [
        with_images(kind, (12, 8) if rank else (60, 9), 10 * rank, has_image, side)
        for rank, has_image in enumerate(images)
    ]


def per_rank(make: Callable[..., Batch], *arguments: Any, lengths: Sequence[Sequence[int]] = LENGTHS) -> list[Batch]:
    return [make(of_rank, rank, *arguments) for rank, of_rank in enumerate(lengths)]


def in_another_order(lengths: Sequence[int], rank: int) -> Batch:
    """A padded batch with kinds of tokens; on rank 1 its columns have another order, and positions another dtype."""
    batch = padded(lengths, rank, "right")
    batch["token_type_ids"] = batch["input_ids"] % 3
    if rank == 1:
        batch["position_ids"] = torch.arange(max(lengths), dtype=torch.int32)[None]
    return dict(reversed(batch.items())) if rank == 1 else batch


def checkpointed(reentrant: bool) -> Callable[[PreTrainedModel], object]:
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def frozen_tower(make: Make) -> Make:
    def frozen(implementation: str) -> PreTrainedModel:
        model = make(implementation)
        model.model.visual.requires_grad_(False)
        return model

    return frozen


QWEN_VL = {kind: partial(qwen_vl, kind) for kind in ("qwen2_5_vl", "qwen3_vl")}
PACKS = per_rank(packed)
# One document of exactly a chunk, and some that end where one does, or a token later.
OF_CHUNKS = ([160], [16, 32], [17], [15, 1])
CASES = {
    "packs": Case(tiny(), PACKS),
    "offsets": Case(tiny(), per_rank(packed, "offsets")),
    "a document longer than all others": Case(tiny(), per_rank(packed, lengths=([300], [11, 9], [5], [2]))),
    "two tokens on each rank": Case(tiny(), per_rank(packed, lengths=([2], [2, 30], [2], [2]))),
    "a rank without tokens": Case(tiny(), per_rank(packed, lengths=([200, 31], [], [3], []))),
    "padded right": Case(tiny(), per_rank(padded, "right")),
    "padded left": Case(tiny(), per_rank(padded, "left"), most=1e-6),  # sdpa counts padding in float32 angles
    "padded on both sides, windows": Case(tiny("gemma3"), per_rank(padded, "both"), most=1e-5),
    "rows without a mask": Case(tiny(), per_rank(padded, "none", lengths=([60, 60], [9], [9, 9, 9], [4]))),
    "one rank packs, others pad": Case(tiny(), [PACKS[0], *per_rank(padded, "right")[1:]]),
    "tied embeddings": Case(tiny(tie_word_embeddings=True), PACKS),
    "embeddings of the caller": Case(tiny(), per_rank(padded, "right"), with_embeddings),
    "all hidden states": Case(tiny(), per_rank(padded, "right"), of_all_hidden_states),
    "without a head": Case(tiny(model_kind=AutoModel), per_rank(padded, "right"), of_backbone),
    "classes of rows": Case(
        tiny(model_kind=AutoModelForSequenceClassification, num_labels=3, pad_token_id=0),
        per_rank(padded, "right"),
        of_classes,
    ),
    "two passes before backward": Case(
        tiny(), per_rank(padded, "right", lengths=([90, 20, 7, 8], [9, 5], [40, 4], [3, 3, 17, 2])), of_two_passes
    ),
    "windows": Case(tiny("gemma3"), PACKS, most=1e-5),  # its norms are float32
    **{
        f"chunks, {name}": Case(tiny("llama4"), batches, None, 1e-12, prepare, per_rank(padded, lengths=lengths), True)
        for name, batches, lengths, prepare in (
            ("packs", PACKS, LENGTHS, lambda model: None),
            ("packs, checkpointed", PACKS, LENGTHS, checkpointed(reentrant=False)),
            ("padded", per_rank(padded, "right"), LENGTHS, lambda model: None),
            ("one long document", per_rank(packed, lengths=OF_CHUNKS), OF_CHUNKS, lambda model: None),
        )
    },
    **{
        # In double: losses are summed in another order than those of padded rows.
        f"states, {name}": Case(
            hybrid, batches, None, 1e-12, prepare, per_rank(padded, "right", lengths=lengths), True
        )
        for name, batches, lengths, prepare in (
            ("packs", PACKS, LENGTHS, lambda model: None),
            ("padded", per_rank(padded, "right"), LENGTHS, lambda model: None),
            ("packs, checkpointed", PACKS, LENGTHS, checkpointed(reentrant=False)),
            ("packs, reentrant", PACKS, LENGTHS, checkpointed(reentrant=True)),
        )
    },
    "states, even rows": Case(hybrid, per_rank(padded, "right", lengths=([30, 30],) * 4), most=1e-12, crosses=False),
    "windows and sinks": Case(tiny("gpt_oss"), per_rank(padded, "right"), most=1e-5),
    "experts with their loss, a rank without tokens": Case(
        tiny("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5),
        per_rank(packed, lengths=([200, 31], [], [3, 9, 20], [9, 5])),
        most=1e-12,
    ),
    "a table of positions, columns of another order": Case(gpt2, per_rank(in_another_order), of_backbone, 1e-12),
    "checkpointed": Case(tiny(), PACKS, prepare=checkpointed(reentrant=False)),
    "checkpointed, reentrant": Case(tiny(), PACKS, prepare=checkpointed(reentrant=True)),
    **{
        f"{kind}, {name}": Case(make, rows_of_images(kind, images, side), most=1e-12)
        for kind, make in QWEN_VL.items()
        for name, images, side in (
            ("image on rank 0", (True, False, False, False), "right"),
            ("images on all, padded left", (True, True, True, True), "left"),
            ("no images", (False, False, False, False), "right"),
        )
    },
    "qwen3_vl, frozen tower": Case(
        frozen_tower(QWEN_VL["qwen3_vl"]), rows_of_images("qwen3_vl", (False, True, False, True), "right"), most=1e-12
    ),
}
if TRANSFORMERS < Version(LOWEST_STATES):  # rows of hybrids stay
    CASES = {name: case for name, case in CASES.items() if not name.startswith("states, ")}


@cache
def of_batches(name: str) -> list[tuple[float, Gradients]]:
    """Loss and gradients of every batch of a case, without distca."""
    case, results = CASES[name], []
    model = case.make("eager" if name == "windows and sinks" else "sdpa")
    for batch in case.alone or case.batches:
        with case.precision():
            loss = (case.loss or own_loss)(model, batch) if batch["input_ids"].numel() else None
            if loss is not None:
                loss.backward()
        results.append((0.0 if loss is None else loss.item(), gradients_of(model)))
        model.zero_grad()
    return results


def expected(name: str, world: int) -> tuple[list[float], Gradients]:
    """Losses of all ranks, and mean gradients, without distca."""
    losses, gradients = zip(*of_batches(name)[:world], strict=True)
    return list(losses), {weight: sum(one[weight] for one in gradients) / world for weight in gradients[0]}


def _train(names: Sequence[str]) -> dict[str, tuple[float, Gradients, tuple[int, ...], tuple[int, ...], bool]]:
    """Loss of this rank, mean gradients, tokens of all ranks before and after, and whether rows crossed."""
    results, plugin = {}, distca_hf.DistCAPlugin()
    for name in names:
        case = CASES[name]
        model = distca_hf.enable(case.make("distca"), plugin)
        case.prepare(model)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters="image" in name)
        batch = case.batches[dist.get_rank()]
        with case.precision():
            loss = (case.loss or own_loss)(wrapped, batch)
            loss.backward()
        planner = watch_of(model).planner
        counts = planner.history[-1].tokens_before, planner.history[-1].tokens
        results[name] = (loss.item(), gradients_of(model), *counts, planner.latest_moves.crosses)
    plugin.close()
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_are_those_of_data_parallelism(
    world: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    by_rank = run_ranks(world, _train, tmp_path, list(CASES))

    for name, case in CASES.items():
        losses, gradients = expected(name, world)
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for rank, results in enumerate(by_rank):
            loss, ours, before, after, crosses = results[name]
            assert crosses == case.crosses, name
            if crosses:
                assert max(after) <= max(1, sum(after) // world + 1) <= max(before), name
            assert loss == pytest.approx(losses[rank], rel=max(1e-12, case.most)), (name, rank)
            worst = max(
                ((ours[weight] - gradient).abs().max() / max(gradient.abs().max(), 1e-6 * largest)).item()
                for weight, gradient in gradients.items()
            )
            record_property(name, worst)
            assert worst <= case.most, (name, rank, worst)


# Seeds of random batches for each number of ranks, with every kind of model and what may be frozen.
DRAWS = {2: (0, 6, 7, 11, 13, 15), 3: (17, 20), 4: (23, 24)}


@pytest.mark.parametrize("world", DRAWS)
def test_random_batches_have_the_gradients_of_data_parallelism(world: int, tmp_path: Path) -> None:
    by_rank = run_ranks(world, train_all_drawn, tmp_path, DRAWS[world])

    for seed in DRAWS[world]:
        steps, drawn = [of_rank[seed] for of_rank in by_rank], draw(seed, world)
        assert max(worst_of(steps)) <= drawn.most, (seed, str(drawn), steps)


def _documents_sought(kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
    """How often Transformers looks for packed documents in a training pass, and in one of evaluation."""
    sought: dict[str, tuple[int, int]] = {}
    for kind in kinds:
        model = distca_hf.enable(tiny(kind)("distca"), distca_hf.DistCAPlugin())
        batch = packed(LENGTHS[dist.get_rank()], 0)
        number = []
        for trains in (True, False):
            with patch.object(torch, "diff", wraps=torch.diff) as diff:
                model.train(trains)(**batch, use_cache=False)
            number.append(sum("prepend" in call.kwargs for call in diff.call_args_list))
        sought[kind] = (number[0], number[1])
    return sought


def test_passes_with_a_plan_do_not_ask_the_device_for_documents(tmp_path: Path) -> None:
    """The host would wait for the device in every pass."""
    kinds = ["llama", "mistral", "qwen3"]
    for sought in run_ranks(2, _documents_sought, tmp_path, kinds):
        assert sought == dict.fromkeys(kinds, (0, 1))


class Scaled(nn.Module):
    """A module of the program around a module of the decoder."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(hidden_states)


def _lines_with_readers(adds: str) -> list[str]:
    """Warnings in steps without a hook or module of the program, and with one inside the decoder."""
    logging.getLogger("distca_hf").addHandler(kept := KeptLines())
    kept.setLevel(logging.WARNING)
    model = distca_hf.enable(tiny()("distca"), distca_hf.DistCAPlugin())
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(8):
        if step == 2:
            if adds == "module":
                model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
            else:
                getattr(model.model.layers[1].mlp, adds)(lambda module, args, output: None)
        own_loss(wrapped, packed(LENGTHS[dist.get_rank()], step)).backward()
        kept.lines.append(f"step {step}")
    return kept.lines


READERS = {
    "register_forward_hook": "a hook of test_rows_placed_inside on layers.1.mlp in LlamaForCausalLM sees",
    "register_full_backward_hook": "a hook of test_rows_placed_inside on layers.1.mlp in LlamaForCausalLM sees",
    "module": "layers.1.mlp, a Scaled of test_rows_placed_inside, in LlamaForCausalLM sees",
}


@pytest.mark.parametrize("adds", READERS)
def test_what_may_read_tokens_of_all_ranks_brings_one_warning(adds: str, tmp_path: Path) -> None:
    """It is inside the decoder: a loss that a hook computes would change, and means over tokens."""
    steps = [f"step {number}" for number in range(8)]
    first, second = run_ranks(2, _lines_with_readers, tmp_path, adds)

    assert second == steps
    warning = next(line for line in first if line not in steps)
    assert warning.startswith(READERS[adds])
    assert first == [*steps[:3], warning, *steps[3:]]


def _gradient_of_a_gradient() -> str:
    """What a loss with a penalty on gradients of inputs brings. Weights would miss the penalty's gradients."""
    model = distca_hf.enable(tiny()("distca"), distca_hf.DistCAPlugin())
    batch = packed(LENGTHS[dist.get_rank()], 0)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    loss = model(**batch, inputs_embeds=embeddings, use_cache=False).loss
    (gradient,) = torch.autograd.grad(loss, embeddings, create_graph=True)
    with pytest.raises(RuntimeError) as error:
        (loss + gradient.square().sum()).backward()
    return str(error.value)


def test_gradients_of_gradients_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, _gradient_of_a_gradient, tmp_path):
        assert "differentiate twice" in message
