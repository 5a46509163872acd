"""What Transformers computes from the number of rows: noise of embeddings, and losses that are means over rows."""

import copy
import importlib.util
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.neftune import neftune_post_forward_hook

import distca_hf
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.counted_rows import MEANS_OVER_ROWS
from support.data import random_documents
from support.given_batches import packed, padded
from support.models import SIZES, tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


ALPHA = 5.0
# Documents of one token each, so that its number tells the document.
LENGTHS = {3: 150, 4: 20, 5: 9, 6: 40}
DATASET = Dataset.from_dict({"input_ids": [[token] * tokens for token, tokens in LENGTHS.items()]})
# Noise by document, each as `[tokens that this rank holds, hidden size]`.
Noise = dict[int, torch.Tensor]


def noise_of(embeddings: nn.Module, seen: list[Noise]) -> None:
    """Notes the noise of every pass; 0 in padding."""

    def note(module: nn.Embedding, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        noise, ids = (output - module.weight[args[0]]).detach()[0], args[0][0]
        seen.append({token: noise[ids == token] for token in ids.unique().tolist()})

    embeddings.register_forward_hook(note)


def in_a_loop(folder: Path) -> list[Noise]:
    """Noise of a pass of training, and of one of evaluation, with the hook as its documentation adds it."""
    plugin, seen = distca_hf.DistCAPlugin(tokens_per_rank=128, pad_to_multiple_of=128), list[Noise]()
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
    model.model.embed_tokens.neftune_noise_alpha = ALPHA
    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
    noise_of(model.model.embed_tokens, seen)
    batch = next(iter(plugin.dataloader(DATASET)))
    model(**batch)
    model.eval()(**batch)
    return seen


def on_padded_rows(folder: Path) -> list[Noise]:
    """Noise of a batch of two documents on each rank, which is one pack inside of the model."""
    plugin, seen = distca_hf.DistCAPlugin(), list[Noise]()
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
    model.model.embed_tokens.neftune_noise_alpha = ALPHA
    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
    noise_of(model.model.embed_tokens, seen)
    ids = torch.tensor([[3] * 100, [4] * 60 + [0] * 40])
    model(input_ids=ids, attention_mask=(ids > 0).long(), labels=ids.where(ids > 0, -100)).loss.backward()
    return seen


def test_padded_rows_have_the_noise_of_padded_rows(tmp_path: Path) -> None:
    for (noise,) in run_ranks(2, on_padded_rows, tmp_path, tmp_path):
        assert {token: len(one) for token, one in noise.items()} == {3: 100, 4: 60}, "a pack inside of the model"
        for one in noise.values():
            check_bounds(one, 100)


def bound_of(row_tokens: int) -> float:
    return ALPHA / math.sqrt(row_tokens * SIZES["hidden_size"])


def check_bounds(noise: torch.Tensor, row_tokens: int) -> None:
    bound = bound_of(row_tokens)
    assert 0.9 * bound < float(noise.abs().max()) <= bound * 1.0001
    assert float(noise.mean()) == pytest.approx(0, abs=0.1 * bound)


def test_noise_of_a_document_is_that_of_a_row_of_its_own(tmp_path: Path) -> None:
    ranks = run_ranks(2, in_a_loop, tmp_path, tmp_path)

    for noise, of_evaluation in ranks:
        assert all(not one.count_nonzero() for one in of_evaluation.values())
        for token, tokens in LENGTHS.items():
            if token in noise:
                check_bounds(noise[token], tokens)
        assert noise.get(0, torch.zeros(1)).count_nonzero() == 0, "padding"
    first, second = (noise[3] for noise, _ in ranks)
    assert len(first) + len(second) == LENGTHS[3], "one document must be cut"
    both = min(len(first), len(second))
    assert not torch.equal(first[:both], second[:both]), "parts of a document have noise of their own"


class NotesNoise(TrainerCallback):
    """Notes noise while a Trainer trains: it adds its hook right before."""

    def __init__(self) -> None:
        self.seen = list[Noise]()

    def on_train_begin(self, *given: Any, model: Any, **others: Any) -> None:
        noise_of(model.model.embed_tokens, self.seen)


@pytest.mark.parametrize("kind", ["placed", "packs"])
def test_trainer_adds_noise_until_training_ends(kind: str, tmp_path: Path) -> None:
    """Packs of others have the noise of their row."""
    model, notes = tiny_model(num_hidden_layers=1), NotesNoise()
    settings = {"neftune_noise_alpha": ALPHA, "per_device_train_batch_size": 4, "use_cpu": True, "max_steps": 2}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**quiet_arguments(tmp_path, **settings)),
        train_dataset=DATASET.add_column("labels", DATASET["input_ids"]),
        data_collator=None if kind == "placed" else DataCollatorWithFlattening(),
        callbacks=[notes],
    )
    distca_hf.DistCAPlugin(tokens_per_rank=256 if kind == "placed" else 0).attach(trainer)
    trainer.train()

    assert len(notes.seen) == 2
    for noise in notes.seen:
        for token, tokens in LENGTHS.items():
            row_tokens = tokens if kind == "placed" else sum(LENGTHS.values())
            assert float(noise[token].abs().max()) <= 1.0001 * bound_of(row_tokens)
        check_bounds(noise[3], LENGTHS[3] if kind == "placed" else sum(LENGTHS.values()))
    assert len(model.model.embed_tokens._forward_hooks) == 1, "that of this test"
    assert not hasattr(model.model.embed_tokens, "neftune_noise_alpha")


# --- losses


def bamba(attention: str = "distca") -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2}
    state = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
    config = BambaConfig(**sizes, **state, attn_layer_indices=[1], z_loss_coefficient=0.1, initializer_range=0.2)
    return BambaForCausalLM._from_config(config, attn_implementation=attention).train()


@pytest.mark.parametrize("return_dict", [True, False])
def test_means_over_rows_leave_padding_out(return_dict: bool) -> None:
    documents = random_documents(3, lengths=(30,))
    ids, plain, model = torch.tensor(documents), bamba("sdpa"), bamba()
    expected = plain(input_ids=ids, labels=ids)
    expected.loss.backward()

    plugin = distca_hf.DistCAPlugin(tokens_per_rank=128)
    distca_hf.enable(model, plugin)
    batch = next(iter(plugin.dataloader(Dataset.from_dict({"input_ids": documents}), shuffle=False, model=model)))
    loss, logits = model(**batch, return_dict=return_dict)[:2]
    loss.backward()

    assert batch["input_ids"].shape == logits.shape[:2] == (1, 128)
    torch.testing.assert_close(logits[0, :90], expected.logits.flatten(0, 1), atol=1e-5, rtol=1e-5)
    assert logits[0, 90:].count_nonzero() == 0
    torch.testing.assert_close(loss, expected.loss)
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_experts_are_balanced_without_padding_where_the_mask_is_left_out() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1, output_router_logits=True)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=256)
    distca_hf.enable(model, plugin)
    batch = next(iter(plugin.dataloader(DATASET)))
    expected = model(**batch).aux_loss.item()
    del batch["attention_mask"]

    assert model(**batch).aux_loss.item() == expected


def test_no_other_loss_of_transformers_counts_rows() -> None:
    """Terms that classes add to their losses, by their source: of experts, which get a mask, of images or sound, and
    those that are known here."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    outside_text = {"csm", "granite_docling", "higgs_audio_v2", "moshi", "vibevoice"}
    terms, without_mask = set(), set()
    for path in folder.glob("*/modeling_*.py"):
        source = path.read_text()
        if not re.search(r"class \w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)\b", source):
            continue
        if "is_encoder_decoder" in source or path.parent.name in outside_text:
            continue
        found = re.findall(r"^ +loss (?:\+=|= loss \+) (.*)$", source, re.MULTILINE)
        terms |= {(path.parent.name, term) for term in found if "aux_loss" not in term and "start_loss" not in term}
        for call in re.findall(r"= load_balancing_loss_func\((.*?)\n            \)", source, re.DOTALL):
            if "attention_mask" not in call:
                without_mask.add(path.parent.name)

    assert terms <= {("bamba", f"self.{MEANS_OVER_ROWS[0]} * z_loss")}
    assert not without_mask


def test_queries_of_llama_4_are_tempered_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """In packs as in rows, in copies and after another `enable`; beyond a chunk not with a cache."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    lengths, usual = [40, 16, 17, 1], tiny_model("llama4", "sdpa").double().eval()
    model = distca_hf.enable(tiny_model("llama4").double().eval(), distca_hf.DistCAPlugin())
    expected = usual(**padded(lengths, 0), use_cache=False).loss
    for one in (model, copy.deepcopy(model), distca_hf.enable(model, distca_hf.DistCAPlugin())):
        for batch in (packed(lengths, 0), packed(lengths, 0, "offsets"), padded(lengths, 0)):
            assert one(**batch, use_cache=False).loss.item() == pytest.approx(expected.item(), rel=1e-13)

    layer = model.model.layers[-1].self_attn
    assert not layer.attn_temperature_tuning
    assert pickle.loads(pickle.dumps(layer.attn_temperature_tuning)) is True
    ids = padded([12], 0)["input_ids"]
    short = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **short), usual.generate(ids, **short))
    with pytest.raises(UnsupportedAttentionError, match=r"chunks of 16 tokens, and .* cache is at token 17"):
        model.generate(ids, max_new_tokens=8, do_sample=False)
