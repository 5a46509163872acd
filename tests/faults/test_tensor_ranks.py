"""Faults among tensor ranks: one that differs from the rank that holds the same tokens, ends, or gets a signal.

Four ranks, two data ranks of two tensor ranks each. The rank that does harm has not the tensor rank of rank 0.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.errors import ConfigError, PlanError, PlanMismatchError
from distca_hf.integrations.models.distributed_check import LOWEST_TENSOR
from support.commands import HANG_SECONDS
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks
from support.shard_on_cpu import let_accelerate_shard_on_cpu
from support.training import quiet_arguments
from support.versions import skip_before


CPU = torch.device("cpu")
HARM = 3
NAME = "rank 3 (data 1, tensor 1)"
LEFT = 128 + signal.SIGTERM


def load(folder: Path) -> Any:
    """Two tensor ranks of each data rank."""
    from transformers.distributed import DistributedConfig

    sizes = DistributedConfig(tp_size=2, fsdp_size=dist.get_world_size() // 2)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="distca", distributed_config=sizes)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_before(LOWEST_TENSOR, "older ones do not divide models by heads")
    folder = tmp_path_factory.mktemp("initial")
    tiny_model(num_hidden_layers=1).save_pretrained(folder)
    return folder


# --- one rank differs


def _pack(data_rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    lengths = (60, 20) if data_rank == 0 else (20, 20)
    documents = random_documents(2, seed=2 * data_rank + seed, lengths=lengths)
    ids = torch.tensor([token for document in documents for token in document])[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def _words(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def _differ(initial: Path) -> dict[str, str]:
    """What this rank is told where the last one differs; each time with a plugin of its own."""
    is_other = dist.get_rank() == HARM
    words, model = {}, load(initial).train()
    placed = {
        "dataset": {"dataset": random_dataset(20, seed=int(is_other))},
        "seed": {"seed": int(is_other)},
        "setting": {},
    }
    for name, changes in placed.items():
        settings = {"plans_in_flight": 8, "kv_residency": "keep" if name == "setting" and is_other else "refetch"}
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=200, **settings)  # type: ignore[arg-type]
        loader = plugin.dataloader(**({"dataset": random_dataset(20), "model": model} | changes))
        words[name] = _words(PlanMismatchError, lambda loader=loader: next(iter(loader)))
        plugin.close()
    plugin = distca_hf.DistCAPlugin()
    distca_hf.enable(model, plugin)
    data_rank = plugin.members.grid.data_rank
    batch = _pack(data_rank, seed=int(is_other))
    words["packs"] = _words(PlanMismatchError, lambda: model(**batch))
    distca_hf.enable(model, plugin)
    tokens = dict(_pack(data_rank))
    if is_other:  # of equal lengths, one token is another one
        tokens["input_ids"] = tokens["input_ids"].clone()
        tokens["input_ids"][0, 3] += 1
    words["tokens"] = _words(PlanMismatchError, lambda: model(**tokens))
    distca_hf.enable(model, plugin)
    shifted = dict(_pack(data_rank))
    shifted["shift_labels"] = shifted["labels"].roll(-1) if not is_other else torch.full_like(shifted["labels"], -100)
    words["labels"] = _words(PlanMismatchError, lambda: model(**shifted))
    loss = model(**_pack(data_rank)).loss
    words["alike"] = str(bool(loss.isfinite()))
    return words


def test_tensor_rank_that_differs_is_named(initial: Path, tmp_path: Path) -> None:
    by_rank = run_ranks(4, _differ, tmp_path, initial)

    for words in by_rank:
        assert f"on {NAME}" in words["dataset"]
        assert "contents of documents" in words["dataset"] or "lengths of documents" in words["dataset"]
        others = "ranks 0 (data 0, tensor 0), 1 (data 0, tensor 1) and 2 (data 1, tensor 0)"
        assert f"seed is 0 on {others}, 1 on {NAME}" in words["seed"]
        assert f"kv_residency is refetch on {others}, keep on {NAME}" in words["setting"]
        for name in ("packs", "tokens", "labels"):
            assert "tensor ranks of one data rank hold different batches, nothing was sent" in words[name]
            assert "on rank 2 (data 1, tensor 0), " in words[name]
            assert f"on {NAME}" in words[name]
        assert words["alike"] == "True"


def _disagree(initial: Path) -> dict[str, str]:
    """A loader, a model and a mesh that divide ranks in other ways."""
    model, mesh = load(initial), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dataset = random_dataset(20)

    def loader_before_the_model() -> None:
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=200)
        plugin.dataloader(dataset)
        distca_hf.enable(model, plugin)

    def another_mesh() -> None:
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=200)
        plugin.use_mesh(mesh, data="b", tensor="a")
        plugin.dataloader(dataset, model=model)

    def group() -> None:
        distca_hf.enable(model, distca_hf.DistCAPlugin(tokens_per_rank=200, group=mesh["a"]))

    same = distca_hf.DistCAPlugin(tokens_per_rank=200)
    same.use_mesh(mesh, data="a", tensor="b")
    distca_hf.enable(model, same)
    calls = (loader_before_the_model, another_mesh, group)
    words = {call.__name__: _words(ConfigError, call) for call in calls}
    other = distca_hf.DistCAPlugin(tokens_per_rank=200, ranks_per_node=2)
    batch = next(iter(other.dataloader(dataset)))  # of four data ranks
    words["another_plugin"] = _words(PlanError, lambda: model.train()(**batch))
    return words


def test_loader_and_model_with_different_grids_are_refused(initial: Path, tmp_path: Path) -> None:
    for words in run_ranks(4, _disagree, tmp_path, initial):
        refusal = words["loader_before_the_model"]
        assert "works on 4 ranks already" in refusal
        assert "is now given 2 data x 2 tensor ranks. Give plugin.dataloader the model" in refusal
        assert "works on 2 data x 2 tensor ranks already" in words["another_mesh"]
        assert "the plugin has a group, ranks" in words["group"]
        refusal = words["another_plugin"]
        assert "its loader works on 4 ranks, and ranks 0, 1, 2, 3 of the job share its documents" in refusal
        assert "the model works on 2 data x 2 tensor ranks" in refusal


# --- gradients


class Gathered(nn.Linear):
    """A linear layer whose weight is brought together when it is read."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        whole = self._parameters["weight"].redistribute(placements=[Replicate()])  # type: ignore[union-attr, operator]
        return whole.to_local(grad_placements=[Partial("avg")])


def _average(_: Path) -> dict[str, str]:
    """Wrappers of a model that the user has divided: DDP over all data ranks is right, over all ranks it is not."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "stage"))

    def run(wrap: Callable[[nn.Module], nn.Module], **kinds: str) -> str:
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=200)
        plugin.use_mesh(mesh, **(kinds or {"data": "dp", "stages": "stage"}))  # type: ignore[arg-type]
        model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
        batch, wrapped = _pack(plugin.members.grid.data_rank), wrap(model)
        try:
            wrapped(**batch).loss.backward()
        except ConfigError as error:
            return str(error)
        finally:
            plugin.close()
        return ""

    def shard(model: Any, over: Any) -> nn.Module:
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        return fully_shard(model, mesh=over)

    def divide(model: Any) -> nn.Module:
        """Divides attention along the mesh's last dimension."""
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
            "self_attn.o_proj": RowwiseParallel()
        }
        for layer in model.model.layers:
            parallelize_module(layer, mesh["stage"], plan)
        return model

    def parametrise(model: Any) -> nn.Module:
        """Shards weights of attention as SimpleFSDP does: the class brings them together where they are read."""
        over = init_device_mesh("cpu", (4,))
        for layer in model.model.layers:
            for name in "qkvo":
                linear = getattr(layer.self_attn, f"{name}_proj")
                linear._parameters["weight"] = nn.Parameter(distribute_tensor(linear.weight.data, over, [Shard(0)]))
                linear.__class__ = Gathered
        return model

    def run_flat(shard: Callable[[nn.Module], nn.Module]) -> str:
        """All ranks hold other documents."""
        plugin = distca_hf.DistCAPlugin(tokens_per_rank=200)
        model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
        shard(model)(**_pack(dist.get_rank())).loss.backward()
        plugin.close()
        return ""

    ddp = nn.parallel.DistributedDataParallel
    return {
        "flat": run_flat(lambda model: shard(model, None)),  # FSDP2 chooses its mesh
        "parametrised": run_flat(parametrise),
        "tensor": run(lambda model: shard(divide(model), mesh["dp"]), data="dp", tensor="stage"),
        "tensor for data": run(divide, data="stage", tensor="dp"),
        "fsdp over tensor": run(lambda model: shard(model, mesh["stage"]), data="dp", tensor="stage"),
        "ddp over data": run(lambda model: ddp(model, process_group=mesh["dp"].get_group())),
        "ddp over all": run(ddp),
        "fsdp over data": run(lambda model: shard(model, mesh["dp"])),
        "fsdp over all": run(lambda model: shard(model, init_device_mesh("cpu", (4,)))),
    }


def test_gradients_are_averaged_over_data_ranks_alone(tmp_path: Path) -> None:
    for words in run_ranks(4, _average, tmp_path, tmp_path):
        assert words["ddp over data"] == words["fsdp over data"] == words["tensor"] == words["flat"] == ""
        assert words["parametrised"] == ""
        assert "self_attn.q_proj.weight is divided between ranks" in words["tensor for data"]
        assert "they would exchange rows of different heads" in words["tensor for data"]
        assert "the device mesh of " in words["fsdp over tensor"]
        assert "share documents: losses count the labels of these" in words["fsdp over tensor"]
        for name, wrapper in (("ddp over all", "DistributedDataParallel"), ("fsdp over all", "the device mesh of ")):
            assert wrapper in words[name]
            assert "averages gradients over ranks 0, 1, 2, 3 of the job, and ranks" in words[name]
            assert "share documents" in words[name]


# --- a Trainer


class Tap(TrainerCallback):
    """Changes weights of one rank in the fourth step: a part that its tensor neighbour holds, too, and one of its
    own."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if dist.get_rank() == HARM and state.global_step == 3:
            for name in ("input_layernorm", "self_attn.q_proj"):
                model.get_parameter(f"model.layers.0.{name}.weight").to_local().data.view(-1)[3] += 1


def _with_trainer(initial: Path, folder: Path) -> dict[str, str]:
    """Errors of Trainers, and the first weight of the optimizer's that a step has changed after an evaluation."""
    from accelerate.state import AcceleratorState
    from peft import LoraConfig, get_peft_model

    let_accelerate_shard_on_cpu()

    def trainer(model: Any, **settings: Any) -> Trainer:
        AcceleratorState._reset_state()
        dataset = random_dataset(40)
        arguments = {"max_steps": 4, "learning_rate": 0.01, "save_only_model": True, **settings}
        args = TrainingArguments(**quiet_arguments(folder, **arguments))
        return Trainer(model=model, args=args, train_dataset=dataset, eval_dataset=dataset)

    def attach(trainer: Trainer) -> None:
        debug = distca_hf.Debug(check_weights_every_steps=2)
        distca_hf.DistCAPlugin(tokens_per_rank=200, evaluate="distca", debug=debug).attach(trainer)

    saving = trainer(load(initial), save_strategy="steps", save_steps=2)
    attach(saving)
    saving.evaluate()
    before = saving.model.model.embed_tokens.weight.to_local().detach().clone()
    saving.add_callback(Tap())
    words = {"weights": _words(PlanMismatchError, saving.train)}
    words["moved"] = str(bool((saving.model.model.embed_tokens.weight.to_local() != before).any()))
    saved = folder / "checkpoint-2"
    words["resume"] = _words(ConfigError, lambda: saving.train(resume_from_checkpoint=str(saved)))
    for targets in (["q_proj"], ["down_proj"]):
        adapted = get_peft_model(load(initial), LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
        words[targets[0]] = _words(ConfigError, lambda adapted=adapted: attach(trainer(adapted)))
    return words


def test_trainer_is_stopped_by_name_where_divided_weights_go_wrong(initial: Path, tmp_path: Path) -> None:
    outcomes = start_ranks(4, _with_trainer, tmp_path / "ranks", initial, tmp_path / "out")
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4, outcomes[0].output

    for outcome in outcomes:
        words = outcome.result
        assert re.search(r"step 4: weights or buffers differ between ranks: 1 of [56], ", words["weights"])
        assert "first model.layers.0.input_layernorm.weight, whose checksum is " in words["weights"]
        assert "on rank 2 (data 1, tensor 0), " in words["weights"]
        assert f"on {NAME}. " in words["weights"]
        assert "rank 0 (data 0" not in words["weights"].partition("checksum")[2]
        assert words["moved"] == "True"
        assert "checkpoint-2 holds only weights, of step 2, and Transformers" in words["resume"]
        assert "cannot resume" in words["resume"]
        assert "call train() without resume_from_checkpoint" in words["resume"]
        assert "self_attn.q_proj has an adapter, and is divided between 2 tensor ranks (colwise)" in words["q_proj"]
        assert "mlp.down_proj has an adapter, and is divided between 2 tensor ranks (rowwise)" in words["down_proj"]
    # Transformers 5.19 has the embeddings whole on tensor ranks, and later ones divide them.
    said = re.compile(r"[89] of 12 parameters are sharded \(FSDP, ZeRO-3\) so that every rank holds another part")
    assert [len(said.findall(outcome.output)) for outcome in outcomes] == [1, 0, 0, 0]


# --- one rank ends


def _end(initial: Path) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=200)
    model = load(initial).train()
    loader = plugin.dataloader(random_dataset(40), model=model)
    distca_hf.enable(model, plugin)
    for step, batch in enumerate(loader):
        if step == 1 and dist.get_rank() == HARM:
            raise ArithmeticError("first cause")
        model(**batch).loss.backward()


def test_tensor_rank_that_ends_is_named_by_all_others(initial: Path, tmp_path: Path) -> None:
    outcomes = start_ranks(4, _end, tmp_path, initial)

    assert [outcome.exit_code for outcome in outcomes] == [1] * 4
    for outcome in outcomes[:HARM]:
        assert f"{NAME} left: ArithmeticError: first cause" in outcome.output


# --- one rank gets a signal


class Wait(TrainerCallback):
    """Writes steps down, and goes on after the second one when the signal was sent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self._folder / f"steps-{dist.get_rank()}").write_text(str(state.global_step))
        while state.global_step == 2 and not (self._folder / "sent").exists():
            time.sleep(0.01)


def _train_until_signal(batches: str, initial: Path, folder: Path) -> None:
    let_accelerate_shard_on_cpu()
    args = TrainingArguments(**quiet_arguments(folder / "out", max_steps=30, seed=3, per_device_train_batch_size=2))
    is_placed, dataset = batches == "placed", random_dataset(120, lengths=(9, 17, 60))
    trainer = Trainer(
        model=load(initial),
        args=args,
        train_dataset=dataset,
        data_collator=None if is_placed else DataCollatorWithFlattening(),
    )
    distca_hf.DistCAPlugin(tokens_per_rank=150 if is_placed else 0).attach(trainer)
    trainer.callback_handler.callbacks.insert(0, Wait(folder))
    try:
        trainer.train()
    except SystemExit as leaving:
        os._exit(int(str(leaving.code)))


@pytest.mark.parametrize(("batches", "data_ranks"), [("placed", 2), ("packs", 1)])
def test_all_ranks_leave_after_the_same_step(batches: str, data_ranks: int, initial: Path, tmp_path: Path) -> None:
    """SIGTERM on one tensor rank alone; Transformers cannot resume such a model, so weights are saved."""
    folder, harmed = tmp_path / "run", 2 * data_ranks - 1
    folder.mkdir()

    def send(processes: list[Any]) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        steps = folder / f"steps-{harmed}"
        while not steps.is_file() or steps.read_text() != "2":
            assert time.monotonic() < deadline, "no training to interrupt"
            time.sleep(0.01)
        os.kill(processes[harmed].pid, signal.SIGTERM)
        time.sleep(0.05)
        (folder / "sent").touch()

    outcomes = start_ranks(2 * data_ranks, _train_until_signal, tmp_path, batches, initial, folder, meanwhile=send)

    assert [outcome.exit_code for outcome in outcomes] == [LEFT] * 2 * data_ranks, outcomes[0].output
    steps = {(folder / f"steps-{rank}").read_text() for rank in range(2 * data_ranks)}
    assert len(steps) == 1
    place = NAME if data_ranks == 2 else "rank 1 (tensor 1)"
    assert f"SIGTERM on {place}; saving a checkpoint and leaving" in outcomes[0].output
    assert outcomes[0].output.count("save_on_signal saves only weights") == 1
    said = f"{data_ranks} data x 2 tensor ranks" + " x 150 tokens per data rank" * (batches == "placed") + " on 1 node"
    assert [said in outcome.output for outcome in outcomes] == [True, *[False] * (2 * data_ranks - 1)]
    checkpoint = folder / "out" / f"checkpoint-{steps.pop()}"
    assert (
        AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters()
        == tiny_model(num_hidden_layers=1).num_parameters()
    )
    assert not (checkpoint / "optimizer.pt").exists()
