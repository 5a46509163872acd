"""What came from other ranks is kept until backward within a budget, on all ranks alike; the rest is fetched again."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distca_hf
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan, PlanFacts
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.retention import HeldLayers, Retention, kept_bytes, received_bytes
from distca_hf.testing import run_ranks
from support.checkpointing import checkpointing_arguments
from support.data import random_dataset
from support.models import tiny_model
from support.parity import SPEC, live_plan
from support.plans import NUM_RANKS, divided, placed, striped


HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 4
KEY_BYTES = 4 * KV_HEADS * (DIM + VALUE_DIM)
QUERY_BYTES = 4 * HEADS * (DIM + VALUE_DIM + 1)
GIB = 2**30


def tensors(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(tokens, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plan_of(facts: dict[str, Any], **settings: Any) -> LivePlan:
    """A live plan of which nothing but facts and settings is looked at."""
    live = live_plan(place([5], 1), LocalTransport(), DistCAConfig(**settings))
    numbers: dict[str, Any] = {
        "num_documents": 1,
        "longest_document_tokens": 5,
        "work": (),
        "work_before": (),
        "key_rows_sent": (),
    }
    planned = live.planned._replace(facts=PlanFacts(**numbers | facts))
    live = LivePlan(0, planned, live.transport, live.config)
    live.kinds.of(SPEC).retention = Retention(live.config, live.facts)
    return live


RECEIVED = {"key_rows_received": (10, 700, 0), "remote_query_rows": (90, 20, 0)}
MOST = max(10 * KEY_BYTES + 90 * QUERY_BYTES, 700 * KEY_BYTES + 20 * QUERY_BYTES)


# --- the decision


@pytest.mark.parametrize("layers", [1, 3, 32])
@pytest.mark.parametrize(("spare", "keeps"), [(0, True), (1, True), (-1, False)])
def test_auto_keeps_what_fits_the_budget_in_all_layers_that_hold_something(
    layers: int, spare: int, keeps: bool
) -> None:
    live = plan_of(RECEIVED, kv_budget_gib=(layers * MOST + spare) / GIB)
    live.retention(SPEC).layers = HeldLayers(saved=layers)

    assert kept_bytes(live.facts, *tensors(5)) == MOST
    assert live.retention(SPEC).keeps_received(*tensors(5)) == keeps
    live.retention(SPEC).layers = HeldLayers(saved=0 if not keeps else 100)
    assert live.retention(SPEC).keeps_received(*tensors(5)) == keeps, "backward must know what forward did"


@pytest.mark.parametrize(("setting", "keeps"), [("keep", True), ("refetch", False)])
def test_other_settings_do_not_look_at_the_budget(setting: str, keeps: bool) -> None:
    for budget in (0.0, 100.0):
        live = plan_of(RECEIVED, kv_residency=setting, kv_budget_gib=budget)
        assert live.retention(SPEC).keeps_received(*tensors(5)) == keeps
        assert live.retention(SPEC).waits_for_recomputation(*tensors(5)) == keeps


def test_without_a_budget_only_nothing_is_kept() -> None:
    assert not plan_of(RECEIVED, kv_budget_gib=0).retention(SPEC).keeps_received(*tensors(5))
    nothing_received = plan_of({"key_rows_received": (0,), "remote_query_rows": (0,)}, kv_budget_gib=0)
    assert nothing_received.retention(SPEC).keeps_received(*tensors(5))


@pytest.mark.parametrize(
    ("setting", "room_bytes", "recomputed", "keeps"),
    [
        ("auto", 2 * MOST, False, True),
        ("auto", 2 * MOST - 1, False, False),
        ("auto", math.inf, True, False),
        ("keep", math.inf, False, True),
        ("keep", math.inf, True, False),
        ("refetch", math.inf, False, False),
    ],
)
def test_attention_servers_keep_what_they_have_room_for(
    setting: Residency, room_bytes: float, recomputed: bool, keeps: bool
) -> None:
    """And nothing of a pass that is run again before it is differentiated."""
    retention = Retention(DistCAConfig(kv_residency=setting), plan_of(RECEIVED).facts, room_bytes)
    retention.layers = HeldLayers(0, 2, 1) if recomputed else HeldLayers(2)
    assert retention.keeps_received(*tensors(5)) == keeps
    assert not retention.waits_for_recomputation(*tensors(5))


def test_too_little_room_on_servers_is_said() -> None:
    """In one text for micro-batches of about one size: Python shows each text once."""
    texts = []
    for key_rows in (700, 701):
        facts = plan_of({"key_rows_received": (key_rows,), "remote_query_rows": (0,)}).facts
        retention = Retention(DistCAConfig(kv_residency="keep"), facts, 700 * KEY_BYTES - 1)
        with pytest.warns(UserWarning, match="ranks without tokens have room for") as shown:
            assert not retention.keeps_received(*tensors(5))
        texts.append(str(shown[0].message))
    assert texts[0] == texts[1]
    room, upper = map(int, re.findall(r"room for (\d+) bytes .* up to (\d+);", texts[0])[0])
    assert room == 700 * KEY_BYTES - 1
    assert upper // 2 < 700 * KEY_BYTES <= upper


def test_a_plan_may_be_used_for_inference_before_training() -> None:
    """Reference log-probabilities on the batch that is trained on next."""
    live = plan_of({"key_rows_received": (0,), "remote_query_rows": (0,)}, kv_residency="refetch", kernel="reference")
    inputs = tensors(5)
    with torch.inference_mode():
        expected, *_ = flash_attn(*inputs, SPEC, live.handle)
    out, *_ = flash_attn(*inputs, SPEC, live.handle)
    out.sum().backward()

    assert torch.equal(out, expected)
    assert inputs[0].grad is not None


@pytest.mark.parametrize("make", [placed, divided, striped])
def test_facts_say_what_the_rank_that_receives_most_keeps(make: Callable[[int], Plan]) -> None:
    """All ranks decide by them, also one that receives nothing."""
    for plan in map(make, range(4)):

        def run(transport: Transport, plan: Plan = plan) -> tuple[int, int]:
            config = DistCAConfig(kernel="reference", kv_residency="keep")
            live = live_plan(plan.layout, transport, config, plan=plan)
            held = tensors(int(plan.layout.rank_rows[transport.rank]))
            _, _, *kept = flash_attn(*held, SPEC, live.handle)
            return kept_bytes(live.facts, *held), sum(x.nbytes for x in kept)

        told, kept = zip(*run_ranks(NUM_RANKS, run), strict=True)
        assert {*told} == {max(kept)}


# --- what waits for recomputation


def test_the_budget_counts_received_rows_of_all_calls() -> None:
    most = 700 * KEY_BYTES + 20 * 4 * HEADS * DIM
    for spare, waits in ((0, True), (-1, False)):
        live = plan_of(RECEIVED, kv_budget_gib=(7 * most + spare) / GIB)
        live.retention(SPEC).layers = HeldLayers(saved=0, recomputed=7, together=1)

        assert received_bytes(live.facts, *tensors(5)) == most
        assert live.retention(SPEC).waits_for_recomputation(*tensors(5)) == waits
        live.retention(SPEC).layers = HeldLayers(saved=0, recomputed=1000, together=1)
        assert live.retention(SPEC).waits_for_recomputation(*tensors(5)) == waits  # the first layer decides for all


@pytest.mark.parametrize(
    ("layers", "kept_at_once"), [(HeldLayers(5, 2, 1), 6), (HeldLayers(5, 4, 2), 7), (HeldLayers(0, 4, 4), 4)]
)
def test_layers_that_are_not_recomputed_count_beside_those_of_one_region(
    layers: HeldLayers, kept_at_once: int
) -> None:
    received = received_bytes(plan_of(RECEIVED).facts, *tensors(5))
    beside = layers.saved * MOST + layers.recomputed * received
    for spare, fits in ((0, True), (-1, False)):
        live = plan_of(RECEIVED, kv_budget_gib=(kept_at_once * MOST + spare) / GIB)
        live.retention(SPEC).layers = layers
        assert live.retention(SPEC).keeps_received(*tensors(5)) == fits

        live = plan_of(RECEIVED, kv_budget_gib=(max(kept_at_once * MOST, beside) + spare) / GIB)
        live.retention(SPEC).layers = layers
        assert live.retention(SPEC).waits_for_recomputation(*tensors(5)) == fits


# --- layers that count


SAVED, RECOMPUTED = HeldLayers(saved=4), HeldLayers(saved=0, recomputed=4, together=1)


def trained_layers(model: nn.Module, setting: Any) -> tuple[int, HeldLayers]:
    """Attention calls of a step of an enabled model, recomputed ones as well, and its full layers as they count."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192, checkpointed_attention=setting)
    batch = next(iter(plugin.dataloader(random_dataset())))
    distca_hf.enable(model, plugin)(**batch).loss.backward()
    return batch["distca_plan"].forward_pass.calls, batch["distca_plan"].retention(SPEC).layers


@pytest.mark.parametrize(
    ("form", "setting", "layers"),
    [
        ("", "save", SAVED),
        ("", "recompute", SAVED),
        ("non-reentrant", "save", SAVED),
        ("non-reentrant", "offload", SAVED),
        ("non-reentrant", "recompute", RECOMPUTED),
        ("reentrant", "save", RECOMPUTED),
        ("selective", "recompute", SAVED),
    ],
)
def test_layers_whose_attention_is_recomputed_count_once(form: str, setting: Any, layers: HeldLayers) -> None:
    model = tiny_model(num_hidden_layers=4).train()
    arguments = checkpointing_arguments(form)
    if arguments["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(arguments["gradient_checkpointing_kwargs"])

    assert trained_layers(model, setting) == (4 + layers.recomputed, layers)


def test_layers_of_one_region_count_together() -> None:
    """A wrapper of torch around two layers, and one around the attention of a third."""
    model = tiny_model(num_hidden_layers=4).train()
    first, second, third, fourth = model.model.layers
    third.self_attn = checkpoint_wrapper(third.self_attn)
    model.model.layers = nn.ModuleList([checkpoint_wrapper(Both(first, second)), third, fourth])
    model.config.num_hidden_layers = 3

    assert trained_layers(model, "recompute") == (7, HeldLayers(saved=1, recomputed=3, together=2))


class Both(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        return self.second(self.first(x, **others), **others)
