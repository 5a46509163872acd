"""The plan in a batch: the same object everywhere, found by number, let go of in time."""

import gc

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

import distca_hf
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, PlanMismatchError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.runtime.forward_pass import ForwardPass
from distca_hf.runtime.layer_kinds import Planned, PlannedLater
from distca_hf.runtime.live_plan import LivePlan, find_plan
from distca_hf.runtime.retention import HeldLayers, PassLayers
from distca_hf.testing import LoopbackTransport, run_ranks
from support.data import random_dataset
from support.models import tiny_model
from support.parity import live_plan


LAYOUT = Layout.from_segments([5, 3], [[(0, 0, 5), (1, 0, 3)]])


def _plan(**settings: int) -> LivePlan:
    return live_plan(LAYOUT, LocalTransport(), DistCAConfig(**settings))


def test_wrappers_pass_the_same_object_on() -> None:
    plan = _plan()
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "distca_plan": plan}

    # FSDP2 and DDP prepare a model's arguments with these two.
    (moved,) = _to_kwargs((), batch, torch.device("meta"), False)[1]
    assert moved["distca_plan"] is plan
    assert _apply_to_tensors(lambda tensor: tensor.to("meta"), batch)["distca_plan"] is plan


def test_trainer_and_accelerate_pass_the_same_object_on(tmp_path) -> None:
    from accelerate.utils import send_to_device
    from transformers import Trainer, TrainingArguments

    plan = _plan()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=tiny_model(num_hidden_layers=1), args=args)

    assert trainer._prepare_inputs({"input_ids": torch.zeros(1, 8), "distca_plan": plan})["distca_plan"] is plan
    assert send_to_device({"distca_plan": plan}, "cpu")["distca_plan"] is plan


def test_chunks_of_a_stage_have_passes_of_their_own() -> None:
    plan = _plan()
    plan.begin_forward_pass(1, {})
    other = plan.of_part(1)
    other.begin_forward_pass(2, {})
    handle = other.handle

    assert plan.of_part(0) is plan
    assert plan.of_part(1) is other
    assert find_plan(handle) is other
    assert plan.handle != handle
    assert (plan.forward_pass.num_calls, other.forward_pass.num_calls) == (1, 2)
    assert other.kinds is not plan.kinds
    assert other.use is plan.use
    assert (other.kinds.num_rows, other.fingerprint) == (plan.kinds.num_rows, plan.fingerprint)


def test_a_plan_is_found_as_long_as_somebody_holds_it() -> None:
    held = _plan(plans_in_flight=1)
    handle = held.handle
    _plan(plans_in_flight=1)
    assert find_plan(handle) is held

    del held
    gc.collect()
    with pytest.raises(PlanError, match=rf"plan {handle} is gone.*plans_in_flight"):
        find_plan(handle)


def test_the_newest_plans_are_kept_when_nobody_else_holds_them() -> None:
    handles = [_plan(plans_in_flight=3).handle for _ in range(5)]
    gc.collect()

    for handle in handles[:2]:
        with pytest.raises(PlanError):
            find_plan(handle)
    assert [find_plan(handle).handle for handle in handles[2:]] == handles[2:]


@pytest.mark.parametrize(
    ("calls", "layers"),
    [("FFFBFB", [0, 1, 1, 1, 0, 0]), ("FFBBBB", [0, 1, 1, 0, 1, 0])],
    ids=["recomputed", "retained"],
)
def test_places_name_the_layer_also_in_recomputed_and_backward_calls(calls: str, layers: list[int]) -> None:
    plan = _plan()
    plan.begin_forward_pass(num_calls=2, facts={})
    begin = {"F": plan.forward_pass.begin_forward, "B": plan.forward_pass.begin_backward}

    assert [begin[call]().split(", ")[1] for call in calls] == [f"layer {layer}" for layer in layers]


def test_two_calls_of_one_checkpointed_region_have_names_of_their_own() -> None:
    """How many calls a region has is known from the second one on."""
    plan = _plan()
    plan.begin_forward_pass(num_calls=6, facts={})
    calls = plan.forward_pass
    forward = [calls.begin_forward() for _ in range(6)]
    backward = []
    for _ in range(3):
        region = [calls.begin_forward(), calls.begin_forward(), calls.begin_backward(), calls.begin_backward()]
        assert len(set(region)) == 4
        backward.append([place.split(", ", 1)[1] for place in region])

    assert [place.split(", ")[1] for place in forward] == [f"layer {layer}" for layer in range(6)]
    assert backward[0][1] == "layer 5, call 2 of its checkpointed region, forward"
    assert backward[1] == ["layer 2, forward", "layer 3, forward", "layer 3, backward", "layer 2, backward"]
    assert backward[2] == ["layer 0, forward", "layer 1, forward", "layer 1, backward", "layer 0, backward"]


def test_the_first_step_names_its_layers_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is known when forward has ended, before any of them is recomputed."""
    places: list[tuple[int, str]] = []
    place = ForwardPass._place
    monkeypatch.setattr(ForwardPass, "_place", lambda *given: places.append(given[1:]) or place(*given))
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192, checkpointed_attention="recompute")
    model = distca_hf.enable(tiny_model(num_hidden_layers=3), plugin).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**next(iter(plugin.dataloader(random_dataset())))).loss.backward()

    forward = [(layer, "forward") for layer in range(3)]
    backward = [(layer, phase) for layer in (2, 1, 0) for phase in ("forward", "backward")]
    assert places == forward + backward


def test_wrong_number_of_rows_names_both_numbers() -> None:
    plan = _plan()
    q = torch.randn(7, 2, 8)
    with pytest.raises(PlanError, match=r"7 rows.*8"):
        torch.ops.distca.flash_attn(q, q, q, [*AttentionSpec(0.3)], plan.handle, None, False, None)


def test_a_plan_that_is_made_later_is_made_once_when_it_is_asked_for() -> None:
    planned, made = _plan().planned, list[Planned]()

    def make() -> Planned:
        made.append(planned)
        return planned

    plan = LivePlan(0, PlannedLater(5, make), LocalTransport(), DistCAConfig())
    plan.begin_forward_pass(7, {}, PassLayers(7))
    assert plan.longest_document_tokens == 5
    assert not made

    assert plan.facts is planned.facts
    other = plan.of_part(1)
    assert (plan.kinds.num_rows, other.kinds.num_rows, plan.fingerprint) == (8, 8, planned.fingerprint)
    assert made == [planned]


@pytest.mark.parametrize("later", [False, True])
def test_layers_of_a_pass_are_known_whenever_its_plan_is_made(later: bool) -> None:
    planned, spec = _plan().planned, AttentionSpec(1.0)
    given = PlannedLater(5, lambda: planned) if later else planned
    plan = LivePlan(0, given, LocalTransport(), DistCAConfig())
    if not later:
        assert plan.retention(spec).layers == HeldLayers(saved=1)
    plan.begin_forward_pass(7, {}, PassLayers(7))

    assert plan.retention(spec).layers == HeldLayers(saved=7)


def test_plans_that_differ_between_ranks_are_noticed_before_the_first_exchange() -> None:
    """Also where each rank makes its plan later."""

    def run(transport: LoopbackTransport) -> None:
        planned = _plan().planned
        own = planned._replace(fingerprint=planned.fingerprint + transport.rank)
        plan = LivePlan(0, PlannedLater(5, lambda: own), transport, DistCAConfig())
        plan.begin_forward_pass(1, {})
        q = torch.randn(8, 2, 8)
        torch.ops.distca.flash_attn(q, q, q, [*AttentionSpec(0.3)], plan.handle, None, False, None)

    with pytest.raises(PlanMismatchError, match="fingerprint of the plan"):
        run_ranks(2, run)
