"""Programs of every kind compute the same with attention servers: two trainers alone, and beside one server. Every
step is reported, and the server traces the calls that trainers do."""

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import DataCollatorWithFlattening

import distca_hf
from distca_hf.launched import launched_servers
from distca_hf.trace_file import read_trace
from distca_hf.traces import file_name
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough


STEPS = 2
Batch = dict[str, Any]
Plugin = distca_hf.DistCAPlugin
Numbers = list[float]


def new_plugin(**settings: Any) -> Plugin:
    return Plugin(tokens_per_rank=96, **settings)


def placed(plugin: Plugin, **options: Any) -> Iterator[Batch]:
    yield from islice(plugin.dataloader(random_dataset(), **options), STEPS)


def packs(seed: int, lengths: tuple[int, ...]) -> Batch:
    """Long documents on rank 0, short ones on rank 1."""
    documents = random_documents(2, seed, lengths)
    return dict(DataCollatorWithFlattening()([{"input_ids": ids, "labels": ids} for ids in documents]))


def of_this_rank(seed: int) -> Batch:
    return packs(seed, (90, 60) if dist.get_rank() == 0 else (9, 17))


def mean(value: torch.Tensor) -> float:
    value = value.detach().double().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def gradient(model: nn.Module) -> float:
    """A number that depends on all gradients, averaged over ranks; they are cleared."""
    total = sum(
        (p.grad.double() * torch.linspace(-1, 1, p.numel(), dtype=torch.float64).view_as(p)).sum()
        for p in model.parameters()
        if p.grad is not None
    )
    model.zero_grad()
    return mean(torch.as_tensor(total))


def norms(model: nn.Module) -> Numbers:
    """The norm of each weight's gradient, averaged over ranks; they are cleared. No terms cancel, as they do in
    `gradient`: that keeps one digit in bf16, and CPUs round in different ways."""
    found = []
    for weight in model.parameters():
        assert weight.grad is not None
        averaged = weight.grad.double()
        dist.all_reduce(averaged)
        found.append(averaged.norm().item() / dist.get_world_size())
    model.zero_grad()
    return found


def step(model: nn.Module, batch: Batch) -> Numbers:
    loss = model(**batch).loss
    loss.backward()
    return [mean(loss), gradient(model)]


def enabled(plugin: Plugin, **changes: Any) -> nn.Module:
    return distca_hf.enable(tiny_model(num_hidden_layers=2, **changes), plugin).train()


def loop(plugin: Plugin, trained: nn.Module, **options: Any) -> Numbers:
    """A step on a placed batch, and one on packs."""
    return step(trained, next(placed(plugin, **options))) + step(trained, of_this_rank(0))


# --- programs


def retained_graphs() -> Numbers:
    plugin = new_plugin()
    model, numbers = enabled(plugin), []
    for batch in [*placed(plugin), of_this_rank(0)]:
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        numbers += [mean(loss), gradient(model)]
    return numbers


def evaluated_between_steps() -> Numbers:
    plugin = new_plugin()
    model, numbers = enabled(plugin), []
    ids = torch.arange(3, 9)[None]
    for seed, batch in enumerate(placed(plugin)):
        numbers += step(model, batch)
        model.eval()
        with torch.no_grad():
            numbers.append(mean(model(**of_this_rank(seed)).loss))
        numbers.append(float(model.generate(ids, max_new_tokens=3, do_sample=False).sum()))
        model.train()
        numbers += step(model, of_this_rank(seed))
    return numbers


def evaluated_together() -> Numbers:
    plugin = new_plugin(evaluate="distca")
    model, numbers = enabled(plugin), []
    for seed, batch in enumerate(placed(plugin)):
        numbers += step(model, of_this_rank(seed))
        model.eval()
        with torch.no_grad():
            numbers.append(mean(model(**of_this_rank(seed)).loss))
            numbers.append(mean(model(**batch).loss))
        numbers += step(model, of_this_rank(seed + 5))
        model.train()
        numbers += step(model, batch)
    return numbers


def two_models_at_once() -> Numbers:
    plugin = new_plugin()
    models, numbers = (enabled(plugin), enabled(plugin, num_attention_heads=2, num_key_value_heads=1)), []
    for batch in [*placed(plugin), of_this_rank(0)]:
        losses = [model(**batch).loss for model in models]
        for loss in losses:
            loss.backward()
        for loss, model in zip(losses, models, strict=True):
            numbers += [mean(loss), gradient(model)]
    return numbers


def with_a_teacher() -> Numbers:
    plugin = new_plugin()
    student, teacher = enabled(plugin), enabled(plugin, num_attention_heads=2).eval().requires_grad_(False)
    numbers = []
    for batch in [*placed(plugin), of_this_rank(0)]:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        with torch.no_grad():
            taught = teacher(**inputs).logits
        output = student(**batch)
        loss = output.loss + (output.logits - taught).square().sum() * 1e-3
        loss.backward()
        numbers += [mean(loss), gradient(student)]
    return numbers


def plugins_in_turn_and_at_once() -> Numbers:
    first = new_plugin()
    model, numbers = enabled(first), []
    numbers += loop(first, model)
    second = new_plugin(server_speed=0.3)
    other = enabled(second)
    for batch, same in zip(placed(first), placed(second), strict=True):
        numbers += step(model, batch) + step(other, same)
    losses = [model(**of_this_rank(1)).loss, other(**of_this_rank(2)).loss]
    for loss in losses:
        loss.backward()
    numbers += [gradient(model), gradient(other)]
    first.close()
    numbers += loop(second, other)
    third = pickle.loads(pickle.dumps(copy.deepcopy(second)))
    second.close()
    return numbers + loop(third, enabled(third))


def settings() -> Numbers:
    numbers: Numbers = []
    for given in (
        {"server_speed": 0.3, "trainers_attend": not launched_servers()},
        {"server_speed": 4.0, "deterministic": True},
    ):
        plugin = new_plugin(**given)
        numbers += loop(plugin, enabled(plugin))
        plugin.close()
    return numbers


def kinds_of_attention() -> Numbers:
    plugin, numbers = new_plugin(), []
    for groups, dtype in ((4, torch.float32), (1, torch.float64)):
        model = enabled(plugin, num_key_value_heads=groups).to(dtype)
        numbers += loop(plugin, model, model=model)
    return numbers


def bytes_of(plugin: Plugin, model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Bytes that a trainer sends in forward, and in backward, on average."""
    transport = plugin.training_transport(torch.device("cpu"))
    begin = transport.traffic.bytes_sent
    loss = model(**batch).loss
    middle = transport.traffic.bytes_sent
    loss.backward()
    return mean(torch.tensor(middle - begin)), mean(torch.tensor(transport.traffic.bytes_sent - middle))


def kept_on_servers() -> Numbers:
    """Rows that servers keep are not sent for backward. A second backward pass needs them once more."""
    numbers, sent = [], {}
    for kv_residency in ("auto", "keep", "refetch"):
        plugin = new_plugin(kv_residency=kv_residency)
        model = enabled(plugin)
        numbers += loop(plugin, model)
        if launched_servers():
            sent[kv_residency] = bytes_of(plugin, model, of_this_rank(0))
        plugin.close()
    if launched_servers():
        assert sent["auto"] == sent["keep"]
        assert sent["keep"][0] == sent["refetch"][0] > 0
        assert sent["keep"][1] < 0.8 * sent["refetch"][1], sent
    return numbers


def few_tokens() -> Numbers:
    """Nothing moves to a server; or a rank has no tokens."""
    plugin = new_plugin()
    model, numbers = enabled(plugin), []
    for lengths in ((2,), (3,)):
        numbers += step(model, packs(0, lengths))
    empty = {"input_ids": torch.zeros(1, 0, dtype=torch.int64), "position_ids": torch.zeros(1, 0, dtype=torch.int64)}
    empty["labels"] = empty["input_ids"]
    labels = 60.0
    for lengths in ((30,), (1,)):
        batch = packs(0, lengths) if dist.get_rank() else empty
        numbers += step(model, {**batch, "num_items_in_batch": labels})
    for batch in islice(plugin.dataloader(random_dataset(12, lengths=(2, 3))), 2):
        numbers += step(model, batch)
    return numbers


def checkpointed() -> Numbers:
    numbers = []
    ways = (True, "recompute"), (False, "save"), (False, "recompute"), (False, "offload")
    for reentrant, attention in ways if is_thorough() else ways[:2]:
        plugin = new_plugin(checkpointed_attention=attention, kv_residency="auto" if reentrant else "keep")
        model = enabled(plugin)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        numbers += loop(plugin, model)
        plugin.close()
    return numbers


def compiled() -> Numbers:
    plugin = new_plugin()
    model = enabled(plugin)
    model.model.layers[0].compile(backend="eager")
    return step(model, of_this_rank(0)) + step(model, of_this_rank(0))


def in_bf16() -> Numbers:
    plugin = new_plugin()
    model = enabled(plugin)
    numbers = []
    with torch.autocast("cpu", torch.bfloat16):
        for batch in (next(placed(plugin)), of_this_rank(0)):
            loss = model(**batch).loss
            loss.backward()
            numbers += [mean(loss), *norms(model)]
    return numbers


PROGRAMS: dict[str, Callable[[], Numbers]] = {
    program.__name__: program
    for program in (
        retained_graphs,
        evaluated_between_steps,
        evaluated_together,
        two_models_at_once,
        with_a_teacher,
        plugins_in_turn_and_at_once,
        settings,
        kinds_of_attention,
        kept_on_servers,
        few_tokens,
        checkpointed,
        compiled,
        in_bf16,
    )
}


def run_programs(folder: Path) -> dict[str, Numbers]:
    numbers, os.environ["DISTCA_REPORT_EVERY_STEPS"] = {}, "1"
    for name, program in PROGRAMS.items():
        os.environ["DISTCA_REPORT_FOLDER"] = str(folder / name)
        numbers[name] = program()
    return numbers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of the runs without a server, and with one."""
    return [tmp_path_factory.mktemp("programs") for _ in range(2)]


@pytest.fixture(scope="module")
def numbers(folders: list[Path]) -> list[dict[str, Numbers]]:
    return [run_ranks(2, run_programs, folder, folder, servers=servers)[0] for servers, folder in enumerate(folders)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_servers_change_no_number(program: str, numbers: list[dict[str, Numbers]]) -> None:
    alone, served = (of[program] for of in numbers)

    assert len(alone) > STEPS
    rounding = 5e-3 if program == "in_bf16" else 1e-6
    assert served == pytest.approx(alone, rel=10 * rounding, abs=rounding)


def calls_by_pass(file: Path) -> dict[tuple[object, ...], list[tuple[object, ...]]]:
    """The calls of every traced pass that is complete: part, layer and window of each."""
    traces = [read_trace(line, file.name) for line in file.read_text().splitlines()]
    return {
        (trace.step, trace.micro_batch, trace.fingerprint): [
            (call.part, call.layer, call.window_tokens) for call in trace.calls
        ]
        for trace in traces
        if trace.is_complete
    }


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_server_traces_the_calls_of_trainers(
    program: str, numbers: list[dict[str, Numbers]], folders: list[Path]
) -> None:
    assert not list((folders[0] / program).glob("server-*"))
    trainer, server = (calls_by_pass(folders[1] / program / file_name(0, is_server)) for is_server in (False, True))

    assert trainer
    assert {key: server.get(key) for key in trainer} == trainer
