"""Trainers whose rows begin with the same image, on two real ranks: losses, norms and weights are those of sdpa, and
layers compute prompts with their image once."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image as Picture
from test_padded_trainers import LEAST_TOKENS, WORLD, Divided, Result, arguments
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    CLIPImageProcessorPil,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.multimodal import GRID, IMAGE_TOKEN, document, multimodal_model
from support.ranks import run_ranks


STEPS = 3
SIDE, PATCH_SIDE = 64, 32
TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
)


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(3, IMAGE_TOKEN)) for _ in range(count))


def processor() -> LlavaProcessor:
    """Reads numbers as words, and images of 64 x 64 pixels as four tokens."""
    names = {**{str(number): number for number in range(IMAGE_TOKEN)}, "<image>": IMAGE_TOKEN}
    known = Tokenizer(models.WordLevel(names, unk_token="0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known, pad_token="0", eos_token="1", extra_special_tokens={"image_token": "<image>"}
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    of_tower = {
        "patch_size": PATCH_SIDE,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return LlavaProcessor(images, tokenizer, **of_tower, chat_template=TEMPLATE)


def picture(seed: int) -> Picture.Image:
    return Picture.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


def _saved_model(folder: Path, implementation: str) -> LlavaForConditionalGeneration:
    """References are loaded from its folder, too."""
    return LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation=implementation)


def _dpo(folder: Path, implementation: str) -> Trainer:
    count = 2 * WORLD * STEPS
    data = Dataset.from_dict(
        {
            "images": [[picture(row // 2)] for row in range(count)],
            # Pairs of rows have one prompt, and every second pair has another image than the one before.
            "prompt": [f"{words(30, row // 4)} <image> {words(60, row // 2)} " for row in range(count)],
            "chosen": [words(5 + row, 100 + row) for row in range(count)],
            "rejected": [words(9 + 2 * row, 200 + row) for row in range(count)],
        }
    )
    args = DPOConfig(**arguments(folder, max_length=None, max_steps=STEPS))
    return DPOTrainer(
        _saved_model(folder, implementation), args=args, train_dataset=data, processing_class=processor()
    )


def _grpo(folder: Path, implementation: str) -> Trainer:
    def sum_of_words(completions: list[Any], **_: Any) -> list[float]:
        return [sum(map(int, text[0]["content"].split())) / 1e4 for text in completions]

    settings = {"num_generations": 2 * WORLD, "max_completion_length": 24, "beta": 0.0, "temperature": 1.0}
    model = _saved_model(folder, implementation)
    model.generation_config.eos_token_id = list(range(1, IMAGE_TOKEN, 24))
    model.generation_config.suppress_tokens = list(range(IMAGE_TOKEN, model.config.text_config.vocab_size))
    prompts = [[{"role": "user", "content": words(70, row)}] for row in range(4)]
    return GRPOTrainer(
        model=model,
        reward_funcs=sum_of_words,
        args=GRPOConfig(**arguments(folder, max_steps=STEPS), **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts, "images": [[picture(row)] for row in range(4)]}),
        processing_class=processor(),
    )


def joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Padded rows, as a collator for Qwen2.5-VL makes them. Each has the image and the prompt of its number."""
    documents = [document(row["number"], 80, image_at=30) for row in rows]
    ids = [
        torch.cat([one["input_ids"][0], torch.tensor(row["answer"])]) for one, row in zip(documents, rows, strict=True)
    ]
    batch = {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True)}
    batch["attention_mask"] = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
    batch["pixel_values"] = torch.cat([one["pixel_values"] for one in documents])
    batch["image_grid_thw"] = torch.tensor([[1, *GRID]]).repeat(len(rows), 1)
    return batch


class Readings(TrainerCallback):
    """Counts batches that were planned ahead: all ranks had read them before their pass."""

    ahead = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if (watch := watch_of(getattr(model, "module", model))) is not None:
            self.ahead = watch.planner._step._last_number


def _own_collator(folder: Path, implementation: str) -> Trainer:
    rng = random.Random(0)
    rows = [
        {"number": row // 4, "answer": [rng.randrange(3, IMAGE_TOKEN) for _ in range(5 + 3 * row % 40)]}
        for row in range(4 * WORLD * STEPS)
    ]
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": 2}
    args = TrainingArguments(**arguments(folder, **settings, remove_unused_columns=False))
    model = multimodal_model("qwen2_5_vl", implementation)
    return Trainer(model, args, train_dataset=Dataset.from_list(rows), data_collator=joined)


TRAINERS: dict[str, Callable[[Path, str], Trainer]] = {"dpo": _dpo, "grpo": _grpo, "a collator": _own_collator}


def _train(folder: Path, implementation: str) -> dict[str, tuple[Result, int]]:
    results = {}
    for name, make in TRAINERS.items():
        torch.manual_seed(0)
        trainer = make(folder, implementation)
        for callback in (watched := Divided(), readings := Readings()):
            trainer.add_callback(callback)
        if implementation == "distca":
            distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS).attach(trainer)
        trainer.train()
        losses = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        results[name] = (losses, weights, watched.seen, watched.shared), readings.ahead
    return results


def _train_both(folder: Path) -> tuple[dict[str, tuple[Result, int]], ...]:
    return _train(folder, "sdpa"), _train(folder, "distca")


def test_trainers_with_images_have_the_losses_of_sdpa(tmp_path: Path) -> None:
    multimodal_model("llava", "sdpa").save_pretrained(tmp_path)
    (usual, ours), _ = run_ranks(WORLD, _train_both, tmp_path / "ranks", tmp_path)

    for name, ((steps, weights, _, shared), _) in ours.items():
        (expected, expected_weights, *_), _ = usual[name]
        assert len(steps) == STEPS, name
        for (loss, norm), (loss_of_sdpa, norm_of_sdpa) in zip(steps, expected, strict=True):
            assert loss == pytest.approx(loss_of_sdpa, rel=2e-6, abs=1e-5), name
            assert norm == pytest.approx(norm_of_sdpa, rel=5e-5, abs=1e-6), name
        for weight, value in expected_weights.items():
            torch.testing.assert_close(weights[weight], value, atol=2e-4, rtol=0, msg=f"{name}: {weight}")
        assert shared > 0, name
    assert ours["a collator"][1] == 2 * STEPS - 1
