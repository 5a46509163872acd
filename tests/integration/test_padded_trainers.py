"""Trainers of Transformers and TRL with their own batches, on two real ranks: losses, norms and weights are those of
sdpa, documents longer than a rank's mean are divided, and prompts of several answers are computed once."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDConfig, GKDTrainer

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.given_batches import in_double
from support.models import VOCABULARY, tiny_config, tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.training import quiet_arguments


KINDS = ("llama", "gemma3") if is_thorough() else ("llama",)
WORLD = 2
STEPS = 10 if is_thorough() else 3
ROWS = 2 * STEPS  # two epochs
# Of answers, in turn: one is longer than all others together.
LENGTHS = (20, 4, 9, 30, 6, 200, 3, 12)

# Of any logged number, and of weights after all steps. All is computed in float64: DPO's loss has a tenth of a row's
# summed log probabilities, about 600, and RLOO's their difference, which float32 rounds to 6e-5.
LARGEST_DIFFERENCE = 1e-11
# Shortest prompt that is shared.
LEAST_TOKENS = 16
# Logged numbers of all steps, weights after them, whether a long document was divided, and tokens that were not
# computed twice.
Result = tuple[list[dict[str, float]], dict[str, torch.Tensor], bool, int]


class Divided(TrainerCallback):
    """Watches for a step in which tokens move and this rank's batch has a document longer than a rank's mean."""

    seen, shared = False, 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if (watch := watch_of(getattr(model, "module", model))) is not None:
            moves = watch.planner.latest_moves
            self.seen |= moves.crosses and len(moves.positions) > 0 and moves.positions.max() >= moves.num_placed
            self.shared = watch.planner.totals.shared_tokens


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(3, VOCABULARY)) for _ in range(count))


def rows(*columns: str) -> Dataset:
    """Prompts and answers; `completion` has a label that says whether it is liked."""
    made: dict[str, list[Any]] = {
        column: [words(LENGTHS[(row + 3 * at) % len(LENGTHS)], ROWS * at + row) for row in range(ROWS)]
        for at, column in enumerate(columns)
    }
    if "completion" in columns:
        made["label"] = [row % 3 == 0 for row in range(ROWS)]
    return Dataset.from_dict(made)


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    known = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="0", eos_token="1", **settings)


def save_models(kind: str, folder: Path) -> Path:
    """Writes a language model, which references are loaded from, too, and one with a head for rewards."""
    tiny_model(kind, "sdpa", num_hidden_layers=2, pad_token_id=0, eos_token_id=1).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = tiny_config(kind, num_hidden_layers=2, pad_token_id=0, eos_token_id=1, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    return folder


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    quiet = quiet_arguments(folder, per_device_train_batch_size=2, max_steps=STEPS, use_cpu=True)
    return {**quiet, "gradient_checkpointing": False, **changes}


def adapters(lora: bool, task: str = "CAUSAL_LM") -> LoraConfig | None:
    return LoraConfig(task_type=task, r=4, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None


def _language_model(folder: Path, implementation: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation=implementation)


def _preferences(
    trainer: type[Trainer],
    config: type[Any],
    columns: Sequence[str],
    folder: Path,
    implementation: str,
    lora: bool = False,
    **settings: Any,
) -> Trainer:
    data = rows("prompt", *columns)
    if trainer is RewardTrainer:
        data = data.add_column("margin", [0.1 * row for row in range(ROWS)])
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "reward", attn_implementation=implementation
        )
    else:
        model = _language_model(folder, implementation)
    args = config(**arguments(folder, max_length=None, **settings))
    peft = adapters(lora, "SEQ_CLS" if trainer is RewardTrainer else "CAUSAL_LM")
    return trainer(model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=peft)


def _policy(
    trainer: type[Trainer],
    config: type[Any],
    folder: Path,
    implementation: str,
    lora: bool = False,
    generations: int = WORLD,
    **settings: Any,
) -> Trainer:
    def sum_of_words(completions: list[str], **_: Any) -> list[float]:
        # Hardly ever equal, since Adam makes large steps of rounding errors.
        return [sum(map(int, text.split())) / 1e4 for text in completions]

    args = config(
        **arguments(folder, per_device_train_batch_size=1, **settings),
        num_generations=generations,
        max_completion_length=24,
        beta=0.1,
        temperature=1.0,
    )
    model = _language_model(folder, implementation)
    model.generation_config.eos_token_id = list(range(1, VOCABULARY, 24))  # so that lengths of completions differ
    return trainer(
        model=model,
        reward_funcs=sum_of_words,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [words(90, row) for row in range(ROWS)]}),
        processing_class=tokenizer(padding_side="left"),
        peft_config=adapters(lora),
    )


def _trainer(
    folder: Path, implementation: str, streams: bool = False, loss: Callable[..., Any] | None = None, **settings: Any
) -> Trainer:
    """Transformers' own, whose collator pads."""
    rng = random.Random(0)
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(4 * ROWS)]
    data = Dataset.from_dict({"input_ids": [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]})
    args = TrainingArguments(**arguments(folder, **settings))
    return Trainer(
        _language_model(folder, implementation),
        args,
        train_dataset=data.to_iterable_dataset() if streams else data,
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        compute_loss_func=loss,
    )


def _shifted_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (num_items_in_batch or len(labels))


def _sft(folder: Path, implementation: str, one_prompt: bool = False, **settings: Any) -> Trainer:
    args = SFTConfig(**arguments(folder, max_length=None, **settings))
    data = rows("prompt", "completion").remove_columns("label")
    if one_prompt:
        data = data.map(lambda row: {"prompt": words(90, 7)})
    model = _language_model(folder, implementation)
    return SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer())


def _distillation(
    trainer: type[Trainer], config: type[Any], data: Dataset, folder: Path, implementation: str, **settings: Any
) -> Trainer:
    """With a teacher of other weights, so that gradients are no noise."""
    teacher, generator = _language_model(folder, "sdpa"), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    words = tokenizer(padding_side="left", chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    return trainer(
        _language_model(folder, implementation),
        teacher_model=teacher,
        args=config(**arguments(folder, **settings)),
        train_dataset=data,
        processing_class=words,
    )


def _conversations() -> Dataset:
    data, roles = rows("prompt", "completion"), ("user", "assistant")
    texts = zip(data["prompt"], data["completion"], strict=True)
    return Dataset.from_dict(
        {
            "messages": [
                [{"role": role, "content": text} for role, text in zip(roles, of_row, strict=True)] for of_row in texts
            ]
        }
    )


OWN_BATCHES = {"accelerator_config": {"dispatch_batches": False}}
IN_PARTS = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
_dpo = partial(_preferences, DPOTrainer, DPOConfig, ("chosen", "rejected"))
_reward = partial(_preferences, RewardTrainer, RewardConfig, ("chosen", "rejected"))
_grpo, _rloo = partial(_policy, GRPOTrainer, GRPOConfig), partial(_policy, RLOOTrainer, RLOOConfig)
_kto = partial(_preferences, KTOTrainer, KTOConfig, ("completion",))
# With models of two kinds.
TRAINERS: dict[str, Callable[[Path, str], Trainer]] = {
    "dpo": partial(_dpo, **IN_PARTS),
    **({"kto": _kto, "grpo": _grpo} if is_thorough() else {}),
}
# Whose batches have several answers to a prompt.
WITH_PROMPTS = ("dpo", "reward", "grpo", "rloo", "sft, one prompt")
OF_TIME = re.compile(r"time|per_second")
THOROUGH_TRAINERS: dict[str, Callable[[Path, str], Trainer]] = {
    "dpo, lora": partial(_dpo, lora=True),
    "reward": partial(_reward, gradient_checkpointing=True),
    "rloo, lora": partial(_rloo, lora=True),
}
# With one kind of model.
MORE_TRAINERS: dict[str, Callable[[Path, str], Trainer]] = {
    **(THOROUGH_TRAINERS if is_thorough() else {"kto": _kto}),
    "reward, lora": partial(_reward, lora=True, **IN_PARTS),
    "grpo, lora": partial(_grpo, lora=True, generations=4, **IN_PARTS),
    "rloo": partial(_rloo, generations=4, **IN_PARTS),
    "accumulation": partial(_trainer, gradient_accumulation_steps=2, gradient_checkpointing=True),
    "a stream": partial(_trainer, streams=True, per_device_train_batch_size=1, **OWN_BATCHES),
    "a loss of one's own": partial(_trainer, loss=_shifted_loss),
    "label smoothing": partial(_trainer, label_smoothing_factor=0.1),
    "sft, padding-free": partial(_sft, padding_free=True),
    "sft, one prompt": partial(_sft, one_prompt=True),
    "gkd": lambda folder, implementation: _distillation(
        GKDTrainer, GKDConfig, _conversations(), folder, implementation, max_length=512, lmbda=0.0
    ),
    # It calls the model's backbone.
    "distillation": lambda folder, implementation: _distillation(
        DistillationTrainer, DistillationConfig, rows("prompt"), folder, implementation, max_completion_length=40
    ),
}


@contextmanager
def all_in_double(trainer: Trainer) -> Iterator[None]:
    """Lets models, their losses and TRL's fused heads compute in float64."""

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    for model in ("model", "ref_model", "teacher_model"):
        if getattr(trainer, model, None) is not None:
            getattr(trainer, model).double()
    with ExitStack() as precise:
        precise.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)  # of the empty tensor that KTO makes on a rank without liked answers
        precise.enter_context(in_double())
        for module in ("chunked_logprob", "chunked_divergence"):
            precise.enter_context(patch(f"trl.kernels.{module}.torch", Torch()))
        yield


def _train(folder: Path, implementation: str, kind: str) -> dict[str, Result]:
    results = {}
    for name, make in (TRAINERS | MORE_TRAINERS if kind == "llama" else TRAINERS).items():
        torch.manual_seed(0)
        trainer = make(folder, implementation)
        trainer.add_callback(divided := Divided())
        if implementation == "distca":
            distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS).attach(trainer)
        with all_in_double(trainer):
            trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        results[name] = trainer.state.log_history, weights, divided.seen, divided.shared
    return results


def _train_all(folder: Path) -> list[dict[str, dict[str, Result]]]:
    """By kind of model: with sdpa, before this process has attached anything, and with distca."""
    return [{kind: _train(folder / kind, attention, kind) for kind in KINDS} for attention in ("sdpa", "distca")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, dict[str, Result]]]]:
    """What ranks have trained. One set of processes imports all trainers."""
    folder = tmp_path_factory.mktemp("trainers")
    for kind in KINDS:
        save_models(kind, folder / kind)
    results: list[list[dict[str, dict[str, Result]]]] = run_ranks(WORLD, _train_all, folder / "ranks", folder)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_have_the_losses_of_sdpa(kind: str, trained: list[list[dict[str, dict[str, Result]]]]) -> None:
    (usual, ours), (_, of_other_rank) = ([of_kinds[kind] for of_kinds in of_rank] for of_rank in trained)

    for name, (logs, weights, divided, shared) in ours.items():
        expected, expected_weights, *_ = usual[name]
        assert len(logs) == len(expected) == STEPS + 1, name  # one is of the whole training
        for number, (log, of_sdpa) in enumerate(zip(logs, expected, strict=True)):
            for key, value in of_sdpa.items():
                if OF_TIME.search(key) or (number == 0 and key == "rewards/accuracies"):  # all rewards are 0 there
                    continue
                expected_value = pytest.approx(value, rel=LARGEST_DIFFERENCE, abs=LARGEST_DIFFERENCE)
                assert log[key] == expected_value, (name, number, key)
        assert len({log["grad_norm"] for log in logs[:-1]}) > STEPS / 2, name
        for weight, value in expected_weights.items():
            torch.testing.assert_close(
                weights[weight], value, atol=LARGEST_DIFFERENCE, rtol=0, msg=f"{name}: {weight}"
            )
        assert divided or of_other_rank[name][2], name
        assert (shared > 0) == name.startswith(WITH_PROMPTS), (name, shared)
