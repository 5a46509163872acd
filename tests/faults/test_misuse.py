"""What is easily done wrong on several ranks is refused before a step is taken, with what to do."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

import distca_hf
from distca_hf.errors import ConfigError, DistCAError, PackingError
from support.apart import hurry
from support.data import random_dataset
from support.given_batches import Batch, made_model, packed, padded, with_images
from support.models import tiny_model
from support.multimodal import multimodal_model
from support.ranks import run_ranks, start_ranks
from support.versions import fsdp_trains_on_cpus, ignores_cpu_count


CPU = torch.device("cpu")


def _train_without_the_plan() -> tuple[int, float]:
    """A collator or wrapper that knows only tensors has dropped the plan of a document that is on both ranks: it is
    found again, but not where the tensors were copied, too."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
    batch = next(iter(plugin.dataloader(random_dataset(1, lengths=(150,)))))
    losses = [model(**batch).loss.item()]
    del batch["distca_plan"]
    losses.append(model(**batch).loss.item())
    positions = batch["position_ids"][0].tolist()
    begins = [right for left, right in pairwise([-2, *positions]) if right != left + 1]
    words = f"begin a document at position {max(begins)} instead of 0.* must be passed on with its distca_plan"
    copies = {name: value.clone() for name, value in batch.items()} | {"input_ids": batch["input_ids"] + 1}
    with pytest.raises(PackingError, match=words):
        model(**copies)
    plain, names = tiny_model(implementation="sdpa", num_hidden_layers=1).eval(), ("input_ids", "position_ids")
    with pytest.raises(PackingError, match=words):
        plain(**{name: batch[name].clone() for name in names}, use_cache=False)
    return max(begins), losses[1] - losses[0]


def test_placed_batch_that_lost_its_plan_is_refused_where_a_document_is_cut(tmp_path: Path) -> None:
    for begins, difference in run_ranks(2, _train_without_the_plan, tmp_path):
        assert begins > 0, "the document must be cut"
        assert difference == 0


def _open_transport_beside_accelerate() -> int:
    assert Accelerator().distributed_type == DistributedType.MULTI_CPU
    return distca_hf.DistCAPlugin().transport(CPU).world_size


def test_ranks_that_accelerate_trains_together_are_accepted(tmp_path: Path) -> None:
    assert run_ranks(2, _open_transport_beside_accelerate, tmp_path) == [2, 2]


def _open_transport_beside_accelerate_that_was_not_told_to_use_the_cpu() -> str:
    """Accelerate looks for a GPU, finds none, and trains every process alone."""
    del os.environ["ACCELERATE_USE_CPU"]
    assert Accelerator().distributed_type == DistributedType.NO
    with pytest.raises(ConfigError) as caught:
        distca_hf.DistCAPlugin().transport(CPU)
    return str(caught.value)


@ignores_cpu_count
@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate would find a GPU")
def test_ranks_that_accelerate_does_not_train_together_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, _open_transport_beside_accelerate_that_was_not_told_to_use_the_cpu, tmp_path):
        assert "2 processes are in the process group, but Accelerate trains 1 together" in message
        assert "use_cpu=True" in message


def _evaluate_without_the_plan(folder: Path) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    batch = next(iter(plugin.dataloader(random_dataset(1, lengths=(150,)))))
    teacher = tiny_model(num_hidden_layers=1).eval()
    with torch.no_grad():
        teacher(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    (folder / "evaluated").touch()


def test_cut_document_without_its_plan_is_refused_in_evaluation_too(tmp_path: Path) -> None:
    outcomes = start_ranks(2, _evaluate_without_the_plan, tmp_path, tmp_path)

    assert all("a placed batch arrived in a model that was not enabled" in outcome.output for outcome in outcomes)
    assert not (tmp_path / "evaluated").exists()


def _train_another_model_on_the_same_batch() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model, other = distca_hf.enable(tiny_model(), plugin), tiny_model()
    batch = next(iter(plugin.dataloader(random_dataset(1, lengths=(150,)))))
    model(**batch).loss.backward()
    other(**batch)


def test_model_that_was_not_enabled_is_refused_after_one_that_was(tmp_path: Path) -> None:
    for outcome in start_ranks(2, _train_another_model_on_the_same_batch, tmp_path):
        assert outcome.exit_code == 1
        assert "arrived in a model that was not enabled" in outcome.output


def _attach_where_sharding_was_asked_for_in_vain(folder: Path) -> str:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, fsdp=True)
    trainer = Trainer(model=tiny_model(), args=args, train_dataset=random_dataset())
    with pytest.raises(ConfigError) as caught:
        distca_hf.DistCAPlugin(tokens_per_rank=96).attach(trainer)
    return str(caught.value)


@fsdp_trains_on_cpus
def test_fsdp_that_accelerate_does_not_run_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, _attach_where_sharding_was_asked_for_in_vain, tmp_path, tmp_path):
        assert "FSDP was asked for, but Accelerate runs DistributedType.MULTI_CPU" in message


def _train_with_a_new_layer() -> None:
    model = distca_hf.enable(tiny_model(), distca_hf.DistCAPlugin())
    model.model.layers[1] = tiny_model().model.layers[1]
    model(**_pack(model))


def test_layer_that_is_new_since_its_model_was_enabled_is_named(tmp_path: Path) -> None:
    for outcome in start_ranks(2, _train_with_a_new_layer, tmp_path):
        assert outcome.exit_code == 1
        assert "LlamaAttention of layer 1: a batch with a plan arrived in" in outcome.output
        assert "in a layer that is new since then" in outcome.output


def _pack(model: nn.Module, **columns: torch.Tensor) -> Batch:
    """A batch of this rank; that of rank 0 is longer, so that rows move."""
    return packed((120, 30) if dist.get_rank() == 0 else (5, 9), dist.get_rank()) | columns


def _embedded(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The same with embeddings, changed on rank 1."""
    batch = _pack(model)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids"))
    return batch | {"inputs_embeds": change(embeddings) if dist.get_rank() else embeddings}


def _on_rank_1(model: nn.Module, columns: Callable[[Batch], Batch]) -> Batch:
    batch = _pack(model)
    return batch | columns(batch) if dist.get_rank() else batch


def _with_positions(model: nn.Module) -> Batch:
    """Rows of text of a multimodal model with three numbers per position, and four on rank 1."""
    batch = with_images("qwen2_5_vl", [12] if dist.get_rank() else [60, 9], 3, False, "right")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch | {"position_ids": positions.expand(4 if dist.get_rank() else 3, -1, -1)}


def _of_one_row(model: nn.Module) -> Batch:
    batch = _pack(model)
    return {name: column[0] for name, column in batch.items()} if dist.get_rank() else batch


def _with_pairs(model: nn.Module) -> Batch:
    """Rows with a mask of pairs of tokens."""
    batch = padded([9] if dist.get_rank() else [40] * 3, 0, "none")
    rows, length = batch["input_ids"].shape
    return batch | {"attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool)}


def _with_kinds(model: nn.Module) -> Batch:
    """Rows in which Gemma 3 lets tokens of images see later ones."""
    batch = padded([9, 5] if dist.get_rank() else [40, 90], 0)
    ids = batch["input_ids"] % 50 + 3
    return batch | {"input_ids": ids, "token_type_ids": (torch.arange(ids.shape[1]) // 2 == 1).long().expand_as(ids)}


def _with_half_images(model: nn.Module) -> Batch:
    """Rows with images, of half the precision on rank 1."""
    batch = with_images("qwen3_vl", [60, 9], dist.get_rank(), True, "right")
    return batch | {"pixel_values": batch["pixel_values"].half()} if dist.get_rank() else batch


def _evaluated(model: nn.Module) -> Batch:
    """A batch that rank 1 evaluates."""
    torch.set_grad_enabled(model.train(dist.get_rank() == 0).training)
    return _pack(model)


# Kind of a model, its batch on each rank, and what ranks are told, by name.
OTHER_INPUTS: dict[str, tuple[str, Callable[[nn.Module], Batch], str]] = {
    "a column on one rank": (
        "gpt2",
        lambda model: _on_rank_1(model, lambda batch: {"token_type_ids": batch["input_ids"] % 3}),
        "input token_type_ids of the decoder is missing on rank 0, torch.int64 [] on rank 1",
    ),
    "embeddings on one rank": (
        "llama",
        lambda model: _embedded(model, lambda x: x) if dist.get_rank() else _pack(model),
        "input input_ids of the decoder is torch.int64 [] on rank 0, missing on rank 1",
    ),
    "dtype": (
        "llama",
        lambda model: _embedded(model, torch.Tensor.float),
        "input inputs_embeds of the decoder is torch.float64 [64] on rank 0, torch.float32 [64] on rank 1",
    ),
    "width": (
        "llama",
        lambda model: _embedded(model, lambda x: x[..., :32]),
        "input inputs_embeds of the decoder is torch.float64 [64] on rank 0, torch.float64 [32] on rank 1",
    ),
    "a flag on one rank": (
        "llama",
        lambda model: _on_rank_1(model, lambda _: {"output_hidden_states": True}),
        "input output_hidden_states of the decoder is missing on rank 0, True on rank 1",
    ),
    "a flag that is a number": (
        "llama",
        lambda model: _on_rank_1(model, lambda _: {"output_hidden_states": 1}),
        "input output_hidden_states of the decoder is missing on rank 0, 1 on rank 1",
    ),
    "numbers per position": ("qwen2_5_vl", _with_positions, "numbers per position is 3 on rank 0, 4 on rank 1"),
    "a tensor of other tokens": (
        "gpt2",
        lambda model: _on_rank_1(model, lambda batch: {"token_type_ids": batch["input_ids"][:, 1:] % 3}),
        "gets token_type_ids of shape [1, 13], and tokens of shape [1, 14]",
    ),
    "a mask of other tokens": (
        "llama",
        lambda model: _on_rank_1(model, lambda batch: {"attention_mask": torch.ones_like(batch["input_ids"][:, 1:])}),
        "attention_mask of shape (1, 13) does not fit tokens of shape (1, 14)",
    ),
    "offsets in a list": (
        "llama",
        lambda model: _on_rank_1(model, lambda _: {"cu_seq_lens_q": [0, 5, 14]}),
        "cu_seq_lens_q is a list, and must be a tensor",
    ),
    "other documents by seq_idx": (
        "llama",
        lambda model: _on_rank_1(model, lambda _: {"seq_idx": torch.tensor([[0] * 6 + [1] * 8])}),
        "token 5: a document begins there by cu_seq_lens_q or position_ids, and goes on by seq_idx",
    ),
    "tokens without rows": ("llama", _of_one_row, "input_ids of shape (14,) must have the shape [batch, tokens]"),
    "images of another dtype": ("qwen3_vl", _with_half_images, "are torch.float64 on rank 0, torch.float16 on rank 1"),
    "a cache": ("llama", lambda model: _on_rank_1(model, lambda _: {"use_cache": True}), "got use_cache=True, and"),
    "an evaluation": ("llama", _evaluated, "a pass with gradients is True on rank 0, False on rank 1"),
    "a mask of pairs": ("llama", _with_pairs, "give zeros and ones of shape [batch, tokens]"),
    "a mask of images": ("gemma3_images", _with_kinds, "combines its causal mask with another one (for images"),
}


def _give_other_inputs(folder: Path) -> dict[str, tuple[str, int]]:
    """What this rank is told of each, and how many rows were sent."""
    told = {}
    for name, (kind, make, _) in OTHER_INPUTS.items():
        plugin = distca_hf.DistCAPlugin(evaluate="distca")
        model = multimodal_model("gemma3").double() if kind == "gemma3_images" else made_model(kind, "distca")
        distca_hf.enable(model, plugin)
        with torch.enable_grad(), pytest.raises(DistCAError) as caught:
            model(**{"use_cache": False} | make(model))
        told[name] = str(caught.value), plugin.transport(CPU).traffic.exchanges
        plugin.close()
    return told


def test_ranks_whose_decoders_get_other_inputs_are_told_which(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _give_other_inputs, tmp_path, tmp_path)

    for name, (_, _, words) in OTHER_INPUTS.items():
        messages = [told[name][0] for told in by_rank]
        assert any(words in message for message in messages), messages
        assert all(words in message or "rank 1 could not do its part" in message for message in messages), messages
        assert all(", micro-batch 0: " in message for message in messages), messages
        assert [told[name][1] for told in by_rank] == [0, 0], name


def _train_apart(what: str, folder: Path) -> None:
    """Rank 1 does something else in the second step."""
    hurry()
    model = distca_hf.enable(made_model("gpt2", "distca"), distca_hf.DistCAPlugin())
    wrapped, is_apart = nn.parallel.DistributedDataParallel(model), dist.get_rank() == 1
    for step in range(3):
        batch = _pack(model)
        batch["token_type_ids"] = batch["input_ids"] % 3
        if is_apart and step == 1 and what == "other columns":
            batch["token_type_ids"] = batch["token_type_ids"][:, 1:]
        if is_apart and step == 2 and what == "no batch":
            break
        loss = wrapped(**batch, use_cache=False).loss
        if is_apart and step == 1 and what == "a loss of something else":
            loss = torch.ones((), requires_grad=True) * 2
        if not (is_apart and step == 1 and what == "no backward"):
            loss.backward()
        (folder / f"steps-{dist.get_rank()}").write_text(str(step + 1))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "other columns",
            "of the same form: token_type_ids is missing (was torch.int64 []); nothing was sent",
        ),
        ("a loss of something else", "differentiate micro-batch 1 on rank 0, plan micro-batch 2 on rank 1"),
        ("no backward", "differentiate micro-batch 1 on rank 0, plan micro-batch 2 on rank 1"),
        ("no batch", "micro-batch 2, agreement to plan"),
    ],
)
def test_a_rank_that_trains_on_something_else_is_named(what: str, words: str, tmp_path: Path) -> None:
    outcomes = start_ranks(2, _train_apart, tmp_path, what, tmp_path)

    assert [outcome.exit_code for outcome in outcomes] == [1, 1], outcomes
    assert any(words in outcome.output for outcome in outcomes), "\n".join(outcome.output for outcome in outcomes)
    assert all("rank 1" in outcome.output for outcome in outcomes), outcomes
    assert int((tmp_path / "steps-0").read_text()) == 1 + (what == "no batch"), outcomes
