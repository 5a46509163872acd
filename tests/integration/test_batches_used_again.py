"""A loss that passes tokens of its batch to a model once more: to the student, with adapters or without, or a teacher.

Every combination has the numbers of the same loss on padded rows with sdpa, or is refused by name before the step.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import distca_hf
from distca_hf.errors import DistCAError
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks


DOCUMENTS = random_documents(6, seed=3, lengths=(5, 17, 30)) + random_documents(2, seed=4, lengths=(120,))
LABELS = sum(len(document) - 1 for document in DOCUMENTS)
CAPACITY_TOKENS = 512
KINDS = ("placed", "packs", "padded")
SECOND = ("student", "adapters off", "teacher sdpa", "teacher distca", "teacher enabled")
WHOLE, IDS = ("whole", "whole without cache"), ("ids and mask", "ids and positions")
GIVEN = (*WHOLE, *IDS, "embeddings and mask", "embeddings", "copied ids", "cut ids")
# A cross-entropy and its gradients, or why there is none.
Outcome = tuple[float, torch.Tensor] | str


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows padded on their right."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([[*row[name], *[number] * (longest - len(row[name]))] for row in rows])
        for name, number in fill.items()
    }
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return batch | {"attention_mask": torch.tensor(mask)}


def learnt(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Places whose next token is a label."""
    shifted = inputs.get("shift_labels")
    return (nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100) if shifted is None else shifted) != -100


def given(chosen: str, inputs: dict[str, Any], model: Any) -> dict[str, Any]:
    """What a second pass is given of a batch."""
    ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    embeddings = model.get_input_embeddings()(ids)
    return {
        "whole": inputs,
        "whole without cache": inputs | {"use_cache": False},
        "ids and mask": {"input_ids": ids, "attention_mask": mask},
        "ids and positions": {"input_ids": ids, "position_ids": positions},
        "embeddings and mask": {"inputs_embeds": embeddings, "attention_mask": mask},
        "embeddings": {"inputs_embeds": embeddings},
        "copied ids": {"input_ids": ids.clone(), "attention_mask": None if mask is None else mask.clone()},
        "cut ids": {"input_ids": ids[:, :-1], "attention_mask": None if mask is None else mask[:, :-1]},
    }[chosen]


class UsesBatchesAgain(Trainer):
    """Calls every second model with every choice of entries, before and after the loss of the first pass."""

    def __init__(self, teachers: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.teachers, self.outcomes = dict(teachers), dict[tuple[str, str], Outcome]()
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        student = self.accelerator.unwrap_model(model)
        before = {cell: self.logits_of(*cell, model, student, inputs) for cell in product(self.teachers, IDS)}
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        own = output.logits
        for cell in product(("student", "adapters off", *self.teachers), GIVEN):
            second = self.logits_of(*cell, model, student, inputs)
            self.outcomes[cell] = second if isinstance(second, str) else self.compare(own, second, inputs, student)
        for (name, chosen), second in before.items():
            first = second if isinstance(second, str) else self.compare(own, second, inputs, student)
            self.outcomes[f"{name}, called first", chosen] = first
        return (loss, output) if return_outputs else loss

    def logits_of(self, second: str, chosen: str, model: Any, student: Any, inputs: dict[str, Any]) -> Any:
        called = self.teachers.get(second, model)
        without: AbstractContextManager[object] = nullcontext()
        if second == "adapters off":
            without = student.disable_adapter()
        try:
            with torch.set_grad_enabled(second == "student"), without:
                return called(**given(chosen, inputs, student if called is model else called)).logits
        except DistCAError as error:
            return f"{type(error).__name__}: {error}"

    def compare(self, own: torch.Tensor, second: torch.Tensor, inputs: dict[str, Any], student: Any) -> Outcome:
        at = learnt(inputs)[:, : second.shape[1]]
        one, other = (logits[:, : at.shape[1]][at].log_softmax(-1) for logits in (own, second))
        apart = -(one.exp() * other).sum() / LABELS  # its gradient is not 0 where both agree
        weights = [weight for weight in student.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(apart, weights, retain_graph=True)
        numbers = torch.cat([apart.detach()[None], *[gradient.flatten() for gradient in gradients]])
        if dist.is_initialized():
            dist.all_reduce(numbers)
        return float(numbers[0]), numbers[1:].cpu()


def use_again(kind: str, folder: Path, use_cpu: bool = True) -> dict[tuple[str, str], Outcome]:
    """Trains one step."""
    attention, plugin = "sdpa", None
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind != "plain":
        kernel = "auto" if use_cpu else "reference"  # the only one for float32 on a GPU
        attention = "distca"
        tokens_per_rank = CAPACITY_TOKENS // world if kind == "placed" else 0
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens_per_rank, kernel=kernel)
    torch.manual_seed(5)
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    student = get_peft_model(tiny_model(implementation=attention, num_hidden_layers=2), adapters)
    names = ("sdpa", "distca") if use_cpu else ("sdpa",)  # a model that is not enabled takes the kernel of "auto"
    teachers = {name: tiny_model(implementation=name, num_hidden_layers=2).eval() for name in names}
    teachers["enabled"] = tiny_model(implementation="distca", num_hidden_layers=2).eval()
    if plugin is None:
        teachers = dict.fromkeys(teachers, teachers["sdpa"])
    else:
        distca_hf.enable(teachers["enabled"], plugin)
    for teacher in set(teachers.values()):
        teacher.requires_grad_(False).to("cpu" if use_cpu else "cuda")
        teacher.lm_head.weight.mul_(1.5)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=len(DOCUMENTS) // world,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=use_cpu,
    )
    trainer = UsesBatchesAgain(
        {f"teacher {name}": teacher for name, teacher in teachers.items()},
        model=student,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": DOCUMENTS, "labels": DOCUMENTS}),
        data_collator={"packs": DataCollatorWithFlattening(), "placed": None}.get(kind, padded),
        callbacks=[distca_hf.DistCACallback(plugin)] if kind == "padded" else [],
    )
    if kind in ("packs", "placed"):
        plugin.attach(trainer)
    trainer.train()
    return trainer.outcomes


# By kind, what must not be refused: an enabled model has its numbers, and on padded rows any model.
ENABLED = ("student", "adapters off", "teacher enabled", "teacher enabled, called first")
ANY = (*ENABLED, "teacher distca", "teacher distca, called first", "teacher sdpa", "teacher sdpa, called first")
RIGHT = {
    "placed": {*product(ENABLED, (*WHOLE, *IDS, "embeddings and mask"))},
    "packs": {
        *product(ENABLED, (*WHOLE, *IDS, "copied ids", "cut ids")),
        *product(ANY[4:6], (*WHOLE, "ids and positions")),
        ("teacher sdpa", "whole without cache"),
    },
    "padded": {*product(ANY, GIVEN)},
}


def check(
    kind: str, outcomes: Mapping[tuple[str, str], Outcome], plain: Mapping[tuple[str, str], Outcome], most: float
) -> None:
    """Compares the outcomes of a rank with those on padded rows."""
    refused = "placed batch|not enabled|as many tokens" if kind == "placed" else "got tokens of a pack|as many tokens"
    seen = {plain[second, "whole"][0] for second in SECOND if (second, "whole") in plain}
    assert len(seen) == 3, "adapters and teachers must change the numbers"
    assert outcomes.keys() == plain.keys()
    for cell, outcome in outcomes.items():
        if isinstance(outcome, str):
            assert cell not in RIGHT[kind], (cell, outcome)
            assert re.search(refused, outcome), (cell, outcome)
            continue
        (apart, gradients), (expected, of_plain) = outcome, plain[cell]
        assert apart == pytest.approx(expected, abs=most), cell
        torch.testing.assert_close(gradients, of_plain, atol=most, rtol=10 * most, msg=str(cell))
        assert of_plain.norm() > 1e-2, cell


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    folder = tmp_path_factory.mktemp("plain")
    return run_ranks(1, use_again, folder, "plain", folder)[0]


@pytest.mark.parametrize(("kind", "world"), [*((kind, 2) for kind in KINDS), ("placed", 1)])
def test_second_passes_are_those_on_padded_rows_or_refused(
    kind: str, world: int, plain: dict[tuple[str, str], Outcome], tmp_path: Path
) -> None:
    for outcomes in run_ranks(world, use_again, tmp_path, kind, tmp_path):
        check(kind, outcomes, plain, most=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_second_passes_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """Tensors that were copied to the device lead to their batch, too."""
    plain = use_again("plain", tmp_path, use_cpu=False)
    check(kind, use_again(kind, tmp_path, use_cpu=False), plain, most=1e-5)
