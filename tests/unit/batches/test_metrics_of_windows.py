"""Metrics and the preview of models with sliding windows: every layer counts with its own mask."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.preview import PlacedData
from distca_hf.config import DistCAConfig
from distca_hf.cost import LayerMasks, Mask, imbalance
from distca_hf.data.epochs import EpochPacker
from distca_hf.integrations.models.decoder_layers import layer_masks_of
from distca_hf.integrations.models.planner import step_flops
from distca_hf.placement.place import work_in_order
from distca_hf.planning.kinds import PlanTotals, RoutedKinds, imbalance_of_layers
from distca_hf.planning.plan import PlanFacts
from support.readings import READING


LAYERS, HEADS, DIM, WINDOW = 6, 2, 8, 16
LENGTHS = np.array([150, 40, 30, 17, 9, 5, 3, 2])
RANKS = 4


def tiny_gemma() -> torch.nn.Module:
    """Returns a Gemma 3 of six layers, the last of which is full."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": DIM, "sliding_window": WINDOW}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **sizes, **heads))


def facts_of(masks: LayerMasks, lengths: np.ndarray = LENGTHS) -> PlanFacts:
    """Returns the facts of a micro-batch, as training has them."""
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=64, pad_to_multiple_of=1), RANKS, layer_masks=masks)
    plan = planner.plan(lengths)
    facts = RoutedKinds.of(plan, 0, 1, masks, lambda mask: work_in_order(lengths, RANKS, mask)).facts
    assert imbalance_of_layers(plan, masks) == pytest.approx(facts.imbalance)
    return facts


def test_operations_of_attention_are_the_sum_over_layers() -> None:
    """Two products of queries' dimensions for each pair, in forward; three times as many with backward."""
    model = tiny_gemma()
    masks, flops = layer_masks_of(model), step_flops(model)
    assert masks == ((Mask(), 1), (Mask(WINDOW), 5))
    assert flops is not None
    totals = PlanTotals().plus(facts_of(masks))
    full = sum(n * (n + 1) // 2 for n in LENGTHS.tolist())
    windows = sum(min(query + 1, WINDOW) for n in LENGTHS.tolist() for query in range(n))
    attention = flops.useful(0, totals.pairs)

    # Means over layers are whole numbers of every rank: a pair is rounded away at most.
    by_hand = 3 * 2 * 2 * DIM * HEADS * (full + 5 * windows)
    assert by_hand * (1 - 1e-3) < attention <= by_hand
    assert attention < 0.5 * 3 * 2 * 2 * DIM * HEADS * LAYERS * full


def test_log_has_the_balance_of_both_kinds() -> None:
    masks = layer_masks_of(tiny_gemma())
    facts = facts_of(masks)
    (full, _), (window, _) = facts.kinds
    short = facts_of(masks, np.array([WINDOW] * 8))  # no document is longer than the window: one kind of layers
    totals = PlanTotals().plus(facts).plus(short)
    metrics = replace(READING, totals=totals).all(0)

    assert (full.window_tokens, window.window_tokens, facts.window_tokens) == (None, WINDOW, None)
    assert window.imbalance > full.imbalance
    assert metrics["distca/imbalance_full"] == full.imbalance
    assert metrics["distca/imbalance_window"] == window.imbalance
    assert metrics["distca/imbalance"] == pytest.approx((facts.imbalance + short.imbalance) / 2)
    assert full.imbalance < facts.imbalance < window.imbalance


@pytest.mark.parametrize("masks", [((Mask(), 4),), ((Mask(WINDOW), 4),)])
def test_one_kind_of_layers_has_no_figures_of_its_own(masks: LayerMasks) -> None:
    metrics = replace(READING, totals=PlanTotals().plus(facts_of(masks))).all(0)

    assert not {"distca/imbalance_full", "distca/imbalance_window"} & metrics.keys()


def test_preview_counts_the_masks_of_the_model() -> None:
    masks = ((Mask(), 1), (Mask(WINDOW), 5))
    config = DistCAConfig(tokens_per_rank=70, ranks_per_node=RANKS, pad_to_multiple_of=1)
    planner = PlacedPlanner(config, RANKS, layer_masks=masks)
    packed = planner.regroup(EpochPacker(LENGTHS, planner.capacity_tokens).epoch(0), LENGTHS, 1)
    preview = PlacedData(planner, LENGTHS, packed, 0, 1, packed.num_micro_batches).preview
    facts = facts_of(masks)
    work = {mask: work_in_order(LENGTHS[packed.micro_batch(0)], RANKS, mask) for mask, _ in masks}
    pairs = [count * work[mask].sum() for mask, count in masks]
    before = np.average([imbalance(work[mask]) for mask, _ in masks], weights=pairs)

    assert preview.pairs.tolist() == pytest.approx([sum(pairs) / LAYERS])
    assert preview.pairs[0] == pytest.approx(sum(facts.work), rel=1e-3)
    assert preview.imbalance_before.tolist() == pytest.approx([before])
    assert preview.imbalance.tolist() == pytest.approx([facts.imbalance])
