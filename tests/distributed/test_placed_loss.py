"""Head and loss on placed rows, and passes that begin at the backbone: weights and logs of training without distca."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.nn import functional
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import distca_hf
from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import shifted_labels
from distca_hf.integrations.models import placed_loss
from distca_hf.integrations.models.forward_watch import watch_of
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


trl_utils = pytest.importorskip("trl.trainer.utils")

STEPS, ACCUMULATION = 4, 2
# Rows of micro-batches: ranks are unequal, and every fourth row has no label.
LENGTHS = (90, 7, 12, 40, 5, 33, 61, 3, 20, 9, 70, 15)
IGNORED = -100
NUMBERS = ("loss", "grad_norm", "train_loss")


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS * 3]
    labels = [[IGNORED] * len(row) if n % 4 == 1 else [IGNORED, *row[1:]] for n, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def fused_forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    shift_labels: Any = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """As of Liger: no logits, and a loss of chunks of hidden states."""
    count, shifted = kwargs.get("num_items_in_batch"), shift_labels
    states = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    self.head_rows.append(states.shape[:-1].numel())
    if shifted is None:
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    chunks = zip(states.flatten(0, 1).split(16), shifted.flatten().split(16), strict=True)
    losses = [functional.cross_entropy(self.lm_head(part), at, reduction="sum") for part, at in chunks]
    return CausalLMOutputWithPast(loss=torch.stack(losses).sum() / count)


class ReadsLosses(Trainer):
    """A Trainer that sees the loss of its rank."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class CountsLabels(Trainer):
    """A Trainer that divides by the labels of its rank, although it is to average over ranks."""

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        counted = [batch["labels"][..., 1:].ne(IGNORED).sum() for batch in batch_samples]
        return torch.stack(counted).sum() * self.args.world_size


class Stops(TrainerCallback):
    """Ends a training between two logs, as a limit of time would."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == 2


class StopsUnseen(TrainerCallback):
    """Ends a training in a way that its source does not tell."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        setattr(control, "should_" + "training_stop", state.global_step == 2)


class Training(NamedTuple):
    """A training with a Trainer.

    Attributes:
        collator: makes its batches.
        trainer: class of the Trainer.
        is_fused: whether the model has a fused head.
        arguments: other arguments of the Trainer.
        callbacks: of the Trainer.
        places_loss: whether head and loss should run on placed rows, in every optimizer step.
    """

    collator: Callable[..., Any]
    trainer: type[Trainer] = Trainer
    is_fused: bool = False
    arguments: Mapping[str, Any] = MappingProxyType({})
    callbacks: tuple[type[TrainerCallback], ...] = ()
    places_loss: tuple[bool, ...] = (True,) * STEPS


def padded(side: str, given: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Rows padded on a side."""
    longest = max(len(row["input_ids"]) for row in given)

    def pad(values: Sequence[int], number: int) -> list[int]:
        padding = [number] * (longest - len(values))
        return [*values, *padding] if side == "right" else [*padding, *values]

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in given]),
        "labels": torch.tensor([pad(row["labels"], IGNORED) for row in given]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in given]),
    }


NONE_PLACED = (False,) * STEPS
TRAININGS = {
    "packs": Training(DataCollatorWithFlattening()),
    "padded": Training(partial(padded, "right")),
    "padded left": Training(partial(padded, "left")),
    "fused head": Training(partial(padded, "right"), is_fused=True),
    "a log every three steps": Training(
        DataCollatorWithFlattening(), arguments={"logging_steps": 3}, places_loss=(True, True, True, False)
    ),
    "a callback that stops": Training(
        DataCollatorWithFlattening(), arguments={"logging_steps": 3}, callbacks=(Stops,), places_loss=(False, False)
    ),
    "a stop that nobody saw coming": Training(
        DataCollatorWithFlattening(),
        arguments={"logging_steps": 3},
        callbacks=(StopsUnseen,),
        places_loss=(True, True),
    ),
    "a class that sees losses": Training(DataCollatorWithFlattening(), ReadsLosses, places_loss=NONE_PLACED),
    "a class that counts labels": Training(DataCollatorWithFlattening(), CountsLabels, places_loss=NONE_PLACED),
    "ranks count their own labels": Training(
        DataCollatorWithFlattening(), arguments={"average_tokens_across_devices": False}, places_loss=NONE_PLACED
    ),
    "smoothed labels": Training(
        partial(padded, "right"), arguments={"label_smoothing_factor": 0.1}, places_loss=NONE_PLACED
    ),
}


class Result(NamedTuple):
    """What a rank saw of a training: its logs, weights, and rows that went through the head in each micro-batch."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    head_rows: list[int]


def train(training: Training, implementation: str, folder: Path) -> Result:
    model = tiny_model(implementation=implementation).to(torch.float64)
    if training.is_fused:
        model.forward = MethodType(fused_forward, model)
    settings = {
        "max_steps": STEPS,
        "logging_steps": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    args = TrainingArguments(
        output_dir=str(folder),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings | training.arguments,
    )
    given = {"data_collator": training.collator, "callbacks": [callback() for callback in training.callbacks]}
    trainer = training.trainer(model=model, args=args, train_dataset=rows(), **given)
    if implementation == "distca":
        distca_hf.DistCAPlugin().attach(trainer)
    model.head_rows = rows_of_head = list[int]()
    if not training.is_fused:
        usual = model.lm_head.forward  # a hook could read results, so that these would return

        def counted(hidden: torch.Tensor, usual: Any = usual) -> torch.Tensor:
            rows_of_head.append(hidden.shape[:-1].numel())
            return usual(hidden)

        model.lm_head.forward = counted
    trainer.train()
    logs = [{name: log[name] for name in NUMBERS if name in log} for log in trainer.state.log_history]
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return Result(logs, weights, rows_of_head)


def train_all(folder: Path, names: Sequence[str]) -> dict[str, tuple[Result, Result]]:
    return {
        name: (train(training, "distca", folder), train(training, "sdpa", folder))
        for name, training in TRAININGS.items()
        if name in names
    }


OF_THREE = ["packs", "padded", "padded left"]


@pytest.mark.parametrize(
    ("world", "names"), [(2, [name for name in TRAININGS if name not in OF_THREE]), (3, OF_THREE)], ids=["2", "3"]
)
def test_logs_and_weights_are_those_without_distca(world: int, names: Sequence[str], tmp_path: Path) -> None:
    by_rank = run_ranks(world, train_all, tmp_path / "run", tmp_path, names)

    for name in names:
        training = TRAININGS[name]
        for results in by_rank:
            ours, usual = results[name]
            logs = usual.logs
            if StopsUnseen in training.callbacks:  # its last steps are logged: train_loss is the mean of all ranks
                mean = sum(each[name][1].logs[-1]["train_loss"] for each in by_rank) / world
                logs = [{"loss": mean, "grad_norm": ours.logs[0]["grad_norm"]}, {"train_loss": mean}]
            assert len(ours.logs) == len(logs) >= 1
            for log, expected in zip(ours.logs, logs, strict=True):
                assert log == pytest.approx(expected, rel=2e-6), name
            for weight, values in usual.weights.items():
                assert (ours.weights[weight] - values).abs().max() < 2e-6, (name, weight)
        # Each rank's share of the rows of a micro-batch in its head, where rows were placed; else rows of its batch.
        for micro_batch in range(len(training.places_loss) * ACCUMULATION):
            ours_rows, usual_rows = (
                [results[name][way].head_rows[micro_batch] for results in by_rank] for way in (0, 1)
            )
            if training.places_loss[micro_batch // ACCUMULATION]:
                assert max(ours_rows) - min(ours_rows) <= max(2, 0.02 * sum(ours_rows)), (name, micro_batch)
            else:
                assert ours_rows == usual_rows, (name, micro_batch)


class JoinsPlanner(TrainerCallback):
    """Lets each step begin once its plan is made."""

    def on_step_begin(self, *given: Any, **kwargs: Any) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("distca-ahead"):
                thread.join()


def shifts_of_even_rows(folder: Path) -> int:
    """How often labels are shifted in a training in which rows stay."""
    row = list(range(3, 43))
    trainer = Trainer(
        model=tiny_model(implementation="distca", num_hidden_layers=1),
        args=TrainingArguments(**quiet_arguments(folder, max_steps=STEPS, logging_steps=STEPS, use_cpu=True)),
        train_dataset=Dataset.from_dict({"input_ids": [row] * 2 * STEPS, "labels": [row] * 2 * STEPS}),
        data_collator=default_data_collator,
        callbacks=[JoinsPlanner()],
    )
    distca_hf.DistCAPlugin().attach(trainer)
    shifted = list[object]()

    def shift(batch: dict[str, Any]) -> torch.Tensor | None:
        shifted.append(batch)
        return shifted_labels(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed_loss, "shifted_labels", shift)
        trainer.train()
    watch = watch_of(trainer.model)
    assert watch.planner.returning is Returning.LOSS
    assert not watch.planner.latest_moves.changes_rows
    return len(shifted)


def test_labels_are_shifted_only_if_rows_may_move(tmp_path: Path) -> None:
    """The first batch is not planned ahead."""
    assert run_ranks(2, shifts_of_even_rows, tmp_path / "run", tmp_path) == [1, 1]


def of_backbone(model: nn.Module, batch: dict[str, Any], head: str) -> torch.Tensor:
    """The loss of a program that calls the backbone of a model, and makes logits of it in chunks."""
    inner: Any = getattr(model, "module", model)
    given = {name: value for name, value in batch.items() if name != "labels"}
    if head == "forward":
        return inner.forward(**batch).loss
    if head == "positional":
        states = inner.model(given.pop("input_ids"), **given).last_hidden_state
    else:
        states = inner.model(**given).last_hidden_state
    labels = functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:].flatten()
    chunks = zip(states.flatten(0, 1).split(16), labels.split(16), strict=True)
    return torch.stack([functional.cross_entropy(inner.lm_head(x), at, reduction="sum") for x, at in chunks]).sum()


def redirected(model: nn.Module, batch: dict[str, Any], head: str) -> torch.Tensor:
    """As trainers of TRL do it: a method in place of forward, so that DDP takes part."""
    inner: Any = getattr(model, "module", model)
    forward = inner.forward

    def method(*args: Any, **kwargs: Any) -> torch.Tensor:
        inner.forward = forward
        return of_backbone(*args, **kwargs)

    inner.forward = method
    return model(inner, batch, head=head)


def padded_batch(rank: int) -> dict[str, torch.Tensor]:
    lengths = ((90, 7), (12,), (40, 5, 33))[rank]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    generator = torch.Generator().manual_seed(rank)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


WAYS = {"backbone": of_backbone, "redirected": redirected}
CALLS = [("redirected", "chunks"), ("redirected", "positional"), ("redirected", "forward"), ("backbone", "chunks")]


def call_backbone() -> list[tuple[float, dict[str, torch.Tensor], bool]]:
    """Loss, mean gradients, and whether rows crossed, of every way to call a model past its root."""
    results = []
    for way, head in CALLS:
        model = distca_hf.enable(model_in_training("distca"), distca_hf.DistCAPlugin())
        wrapped = nn.parallel.DistributedDataParallel(model) if way == "redirected" else model
        loss = WAYS[way](wrapped, padded_batch(dist.get_rank()), head)
        loss.backward()
        for weight in model.parameters():
            if way == "backbone":
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        watch = watch_of(model)
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        results.append((loss.item(), gradients, watch.planner.latest_moves.crosses and not watch.is_running()))
    return results


def model_in_training(implementation: str) -> PreTrainedModel:
    return tiny_model(implementation=implementation).to(torch.float64).train()


def test_backbone_that_is_called_directly_computes_placed_rows(tmp_path: Path) -> None:
    world = 3
    by_rank: Sequence[Any] = run_ranks(world, call_backbone, tmp_path)

    for call, (_, head) in enumerate(CALLS):
        model = model_in_training("sdpa")
        for rank, results in enumerate(by_rank):
            loss = of_backbone(model, padded_batch(rank), head)
            loss.backward()
            assert results[call][0] == pytest.approx(loss.item(), rel=1e-6)
        for _, gradients, crossed in (results[call] for results in by_rank):
            assert crossed
            for name, weight in model.named_parameters():
                expected = weight.grad / world
                assert (gradients[name] - expected).abs().max() <= 1e-6 * expected.abs().max(), (call, name)


# Tokens of ranks: an empty batch, and fewer tokens than ranks, so that some layers compute a row without a token.
FEW = {"an empty rank": (40, 0, 9), "fewer tokens than ranks": (2, 0, 0)}


def row_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(tokens)[None] % VOCABULARY
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(tokens)[None]}


class Pass(NamedTuple):
    """Loss and gradients of a rank, and whether it got logits."""

    loss: float
    gradients: dict[str, torch.Tensor]
    has_logits: bool


def compute_few(readers: tuple[int, ...]) -> list[Pass]:
    """Every pass of `FEW`; some ranks read more than the mean loss."""
    results, rank = [], dist.get_rank()
    for lengths in FEW.values():
        model = distca_hf.enable(model_in_training("distca"), distca_hf.DistCAPlugin())
        count = torch.tensor(sum(max(0, length - 1) for length in lengths))
        with watch_of(model).loss.read_as_sum("this rank reads logits" if rank in readers else ""):
            output = model(**row_of(lengths[rank]), num_items_in_batch=count)
        output.loss.backward()
        gradients = {}
        for name, weight in model.named_parameters():
            gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(gradients[name])
        results.append(Pass(output.loss.item(), gradients, output.logits is not None))
    return results


@pytest.mark.parametrize("readers", [(), (1,)])
def test_ranks_without_tokens_take_part_and_one_reader_of_logits_counts_for_all(
    readers: tuple[int, ...], tmp_path: Path
) -> None:
    by_rank: Sequence[list[Pass]] = run_ranks(3, compute_few, tmp_path, readers)

    for number, lengths in enumerate(FEW.values()):
        model, passes = model_in_training("sdpa"), [results[number] for results in by_rank]
        count = torch.tensor(sum(max(0, length - 1) for length in lengths))
        loss = sum(model(**row_of(length), num_items_in_batch=count).loss for length in lengths if length)
        loss.backward()
        largest = max(weight.grad.abs().max() for weight in model.parameters())
        assert sum(one.loss for one in passes) == pytest.approx(loss.item(), rel=1e-6)
        for one in passes:
            assert one.has_logits == bool(readers)
            for name, weight in model.named_parameters():
                assert (one.gradients[name] - weight.grad).abs().max() <= 1e-6 * largest, name


class Scored(NamedTuple):
    """Batches of ranks: rows of these lengths, padded on the right.

    Attributes:
        shifts: whether labels are shifted before.
        other_head: the rank whose pass makes logits; None if there is none.
    """

    lengths: tuple[tuple[int, ...], ...]
    shifts: bool = False
    other_head: int | None = None


SCORED = {
    "shifted before": Scored(((90, 7), (12,), (40, 5, 33)), shifts=True),
    "an empty rank": Scored(((33, 9), (), (7,))),
    "another head on one rank": Scored(((90, 7), (12,), (40, 5, 33)), other_head=1),
}


def out_of_memory(states: torch.Tensor) -> torch.Tensor:
    raise MemoryError


def score_tokens(implementation: str) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[int]]]:
    """Outputs, mean gradients, and rows in the head, of a model with a fused head of TRL; of all batches."""
    results, rank = [], dist.get_rank()
    for lengths, shifts, other_head in SCORED.values():
        is_fused = rank != other_head
        flag = {"fused_lm_head": True} if is_fused else {"use_cache": False}
        model = model_in_training(implementation)
        trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        in_head: list[int] = []
        decode = model.base_model.norm.forward
        model.base_model.norm.forward = lambda x, decode=decode, in_head=in_head: (
            in_head.append(x.shape[:-1].numel()) or decode(x)
        )
        if implementation == "distca":
            distca_hf.enable(model, distca_hf.DistCAPlugin())
        batch = rows_of(lengths[rank], rank)
        if shifts:
            batch["shift_labels"] = functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:].contiguous()
        values = {}
        if lengths[rank] or implementation == "distca":  # Transformers itself cannot compute an empty batch
            output = model(**batch, **flag, num_items_in_batch=torch.tensor(150))
            values = {name: value.detach().clone() for name, value in output.items() if lengths[rank]}
            # Anything may be made of the values of single tokens.
            read = (output.log_probs.exp().sum() + output.entropy.square().sum()) if is_fused else 0.0
            (read + output.loss).backward()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model.base_model.norm, "forward", out_of_memory)
                with pytest.raises(MemoryError):
                    model(**batch, **flag)
            if lengths[rank]:  # what that pass had decided is forgotten
                values["evaluated"] = model.eval()(**batch, fused_lm_head=True).log_probs.detach()
        gradients = {}
        for name, weight in model.named_parameters():
            gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(gradients[name])
        results.append((values, gradients, in_head[:1]))
    return results


def rows_of(lengths: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
    """Rows padded on the right, some of whose tokens are not learnt; a batch without a token if there are none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths, default=1), dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, :length], labels[row, 2:length] = 1, ids[row, 2:length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_values_of_a_fused_head_return_to_the_tokens_they_are_of(tmp_path: Path) -> None:
    by_rank: Sequence[Any] = run_ranks(3, score_tokens, tmp_path / "distca", "distca")
    usual: Sequence[Any] = run_ranks(3, score_tokens, tmp_path / "sdpa", "sdpa")

    for number, name in enumerate(SCORED):
        rows = [count for results in by_rank for count in results[number][2]]
        assert len(rows) == len(by_rank)
        assert max(rows) - min(rows) <= 1, name  # ranks have equally many in their heads
        for ours, theirs in zip(by_rank, usual, strict=True):
            (values, gradients, _), (expected, expected_gradients, _) = ours[number], theirs[number]
            assert values.keys() == expected.keys()
            for key, value in expected.items():
                assert values[key].shape == value.shape, (name, key)
                assert torch.allclose(values[key].double(), value.double(), rtol=1e-6, atol=1e-6), (name, key)
            largest = max(gradient.abs().max() for gradient in expected_gradients.values())
            for key, gradient in expected_gradients.items():
                assert (gradients[key] - gradient).abs().max() <= 1e-6 * largest, (name, key)
