"""Documents that begin with the same tokens, in batches of any rank: layers compute these once, and losses and
gradients are those of every row by itself."""

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

import distca_hf
from distca_hf.batches.read_documents import Reading, mark
from distca_hf.errors import DistCAError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.layout import Layout, Topology
from distca_hf.placement.given import place_given
from distca_hf.planning import folds
from distca_hf.planning.fragments import Fragments
from distca_hf.prefixes import SharedPrefixes
from support.given_batches import (
    Batch,
    Gradients,
    Loss,
    gradients_of,
    in_double,
    of_all_hidden_states,
    of_logits,
    own_loss,
    with_embeddings,
)
from support.models import VOCABULARY, plain_attention, tiny_config
from support.ranks import run_ranks
from support.rows_of_documents import packed, padded, words
from support.thorough import is_thorough
from support.versions import states_travel
from support.wide_models import FAMILIES, wide_model


LEAST_TOKENS = 16


def compiled(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager" if is_thorough() else "eager")


def sharded(model: PreTrainedModel) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def continuing(prompt: torch.Tensor, *answers: int, seed: int = 100) -> list[torch.Tensor]:
    """Documents of a prompt and answers of these lengths."""
    return [torch.cat([prompt, words(length, seed + at)]) for at, length in enumerate(answers)]


@dataclass
class Case:
    """A model and the batches of ranks; further ranks have the last one.

    Attributes:
        least_shared: tokens that are not computed twice, at least, on two ranks; 0: none is shared.
        most: largest difference of a gradient, in its largest number.
        says: beginning of the log's reason if nothing is shared.
        trained: returns whether a parameter of this name is trained.
        divides_heads: whether ranks divide the heads of states, whatever that costs.
    """

    batches: Sequence[Batch]
    least_shared: int
    kind: str = "llama"
    loss: Loss = own_loss
    most: float = 1e-12
    prepare: Callable[[PreTrainedModel], object] = lambda model: None
    wrap: Callable[[PreTrainedModel], nn.Module] = nn.parallel.DistributedDataParallel
    changes: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    trained: Callable[[str], bool] = lambda name: True
    divides_heads: bool = False

    def model(self, implementation: str) -> PreTrainedModel:
        torch.manual_seed(0)
        if self.kind in FAMILIES:
            sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
            model = wide_model(self.kind, implementation, **sizes)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.trained(name))
            return model
        if self.kind == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY}
            config = GPT2Config(**sizes, attn_pdrop=0, **({"embd_pdrop": 0, "resid_pdrop": 0} | self.changes))
        else:
            config = tiny_config(self.kind, **self.changes)
        experts = {"experts_implementation": "eager"} if self.kind in ("qwen3_moe", "gpt_oss", "minimax") else {}
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, **experts)
        return model.to(torch.float64).train()

    def batch(self, rank: int) -> Batch:
        return dict(self.batches[min(rank, len(self.batches) - 1)])


def checkpointed(reentrant: bool) -> Callable[[PreTrainedModel], object]:
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant})


PROMPT, OTHER = words(150, 1), words(90, 2)
TURN = torch.cat([PROMPT, words(70, 3)])
PAIR = continuing(PROMPT, 20, 33)
GROUP = continuing(PROMPT, 5, 90, 41, 2)
LONG = continuing(words(400, 4), 3, 9)
TREE = [
    *continuing(PROMPT, 20),
    *continuing(TURN, 9, 30, 4),
    *continuing(torch.cat([TURN, words(60, 5)]), 8, 9),
    PROMPT,
]
LABELS = torch.where(torch.arange(2 * len(PAIR[0])).view(2, -1) % 3 > 0, words(2 * len(PAIR[0]), 10).view(2, -1), -100)
# 128 + 16 of 150 tokens are multiples of blocks.
PREFIX = 144


def changed(document: torch.Tensor, at: int) -> torch.Tensor:
    return torch.cat([document[:at], (document[at : at + 1] + 1) % VOCABULARY, document[at + 1 :]])


def at_positions(*first: int) -> Batch:
    """Rows of equal tokens after so much padding, which positions count."""
    batch = padded([torch.cat([words(begin, 11), TURN]) for begin in first])
    for row, begin in enumerate(first):
        batch["attention_mask"][row, :begin], batch["labels"][row, : begin + 1] = 0, -100
    return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand(len(first), -1)}


def masked(*tokens: slice) -> Batch:
    """Rows of equal tokens; these of them are masked out."""
    batch = padded([TURN] * len(tokens))
    for row, at in enumerate(tokens):
        batch["attention_mask"][row, at], batch["labels"][row, at] = 0, -100
        batch["labels"][row, batch["attention_mask"][row].argmax()] = -100
    return batch


def random_tree(seed: int) -> list[Batch]:
    """Rows of four ranks, most of which branch off from another one, up to three times."""
    rng = random.Random(seed)
    rows, depth = [words(rng.randint(60, 200), 1000 * seed)], {0: 0}
    while len(rows) < 10:
        parent = rng.choice([row for row, level in depth.items() if level < 3])
        begin = rows[parent][: rng.randint(20, len(rows[parent]))] if rng.random() < 0.9 else rows[0][:0]
        depth[len(rows)] = depth[parent] + 1 if len(begin) else 0
        rows.append(torch.cat([begin, words(rng.randint(1, 120), 1000 * seed + len(rows))]))
    rng.shuffle(rows)
    return [packed(rows[:2]), padded(rows[2:5], learnt_from=rng.randint(1, 50)), padded(rows[5:9]), packed(rows[9:])]


CASES = {
    "pairs": Case([padded(PAIR), padded([*continuing(OTHER, 12, 5), words(30, 6)])], PREFIX + 80),
    "pairs, padded left": Case(
        [padded(PAIR, "left"), padded(continuing(OTHER, 12, 5), "left")], PREFIX + 80, most=1e-6
    ),
    "a group on two ranks": Case([padded(GROUP[:1]), padded(GROUP[1:])], 3 * PREFIX),
    "packs": Case([packed([words(9, 7), *GROUP[:2]]), packed([*GROUP[2:], words(60, 8)])], 3 * PREFIX),
    "a pack and rows": Case([packed(GROUP[:2]), padded([*GROUP[2:], words(60, 8)])], 3 * PREFIX),
    "a prompt longer than a rank's share": Case([padded(LONG), padded([words(7, 9)])], 384),
    "a tree": Case([padded(TREE[:3]), padded(TREE[3:])], 5 * 128 + 3 * 64),
    "the same row twice, and a prefix that is a row": Case([padded([*PAIR, PAIR[0]]), padded([PROMPT])], 3 * 128),
    "even ranks": Case([padded(GROUP[:2])], 3 * PREFIX),
    "labels of prompts": Case([padded(PAIR, learnt_from=140), padded(PAIR)], 3 * PREFIX),
    "windows": Case([padded(PAIR), padded([*GROUP])], 5 * PREFIX, "gemma3"),
    "windows and sinks": Case([padded(PAIR), padded([*GROUP])], 5 * PREFIX, "gpt_oss"),
    "chunks": Case([padded(PAIR), padded([*GROUP])], 5 * PREFIX, "llama4"),
    "experts with their loss": Case(
        [padded(PAIR), padded(GROUP)],
        5 * PREFIX,
        "qwen3_moe",
        changes={"output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "all hidden states": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, loss=of_all_hidden_states),
    "logits": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, loss=of_logits),
    "a table of positions": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, "gpt2"),
    "checkpointed": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, prepare=checkpointed(reentrant=False)),
    "reentrant": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, prepare=checkpointed(reentrant=True)),
    "compiled": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, prepare=compiled),
    "sharded": Case([padded(PAIR), padded(GROUP)], 5 * PREFIX, loss=of_logits, wrap=sharded),
    "embeddings of the caller": Case([padded(PAIR), padded(GROUP)], 0, loss=with_embeddings),
    "prompts too short": Case([padded(continuing(PROMPT[:15], 40, 5, seed=seed)) for seed in (100, 200, 300)], 0),
    "other kinds of tokens": Case(
        [padded(PAIR) | {"token_type_ids": torch.zeros(2, 183, dtype=torch.int64)}],
        0,
        "gpt2",
        says="the batch has token_type_ids, which may differ",
    ),
    "a random model": Case(
        [padded(PAIR)], 0, "gpt2", most=2.0, changes={"resid_pdrop": 0.1}, says="transformer.h.0.attn.resid_dropout"
    ),
    "rows that differ in labels": Case([padded([PAIR[0]] * 2) | {"labels": LABELS}, padded([PAIR[0]])], 2 * PREFIX),
    "equal tokens at other positions": Case([at_positions(2, 7), at_positions(14, 3), at_positions(9, 11)], 0),
    "equal tokens at equal positions": Case([at_positions(7, 7), at_positions(7, 7)], 3 * 208),
    "equal tokens with other masks": Case([masked(slice(0), slice(100, None)), masked(slice(30, None))], 80 + 16),
    "equal tokens that begin later": Case(
        [masked(slice(5), slice(9)), masked(slice(7)), masked(slice(8))], 0, most=1e-6
    ),
    "prompts that differ at their ends": Case(
        [padded([PAIR[0], changed(PAIR[1], 149)]), padded([changed(PAIR[0], 143), changed(PAIR[1], 15)])], PREFIX + 80
    ),
    **{
        f"random tree {seed}": Case(random_tree(seed), 16, kind)
        for seed, kind in enumerate(("llama", "gemma3", "gpt_oss", "llama4"))
    },
    "states that cannot travel": Case([packed(PAIR)], 0, "minimax", most=1e-5, says="layers carry a state"),
}


def tree_of_three(seed: int) -> list[Batch]:
    """Documents of three ranks, most of which continue another one from any of its tokens on."""
    rng = random.Random(seed)
    documents = [words(rng.randint(60, 260), seed)]
    for number in range(8):
        begin = rng.choice(documents) if rng.random() < 0.8 else words(0, 0)
        begin = begin[: rng.randint(0, min(len(begin), 300))]
        documents.append(torch.cat([begin, words(rng.randint(1, 80), 100 * seed + number)]))
    rng.shuffle(documents)
    return [padded(documents[first : first + 3]) for first in (0, 3, 6)]


# Ranks are even as they are, and the third one has neither a prefix nor what follows one.
WITHOUT = [continuing(PROMPT, 50), [*continuing(PROMPT, 50, seed=200), words(144, 10)], [words(200, 11)]]
# Families whose states differ in kind, and what is trained of each.
KINDS = {
    "qwen3_next": "only A_log is",
    "bamba": "only A_log is",
    "jamba": "everything is",
    "lfm2": "only embeddings are",
}
TRAINED: dict[str, Callable[[str], bool]] = {
    "everything is": lambda name: True,
    "only A_log is": lambda name: name.endswith(("A_log", "conv.weight")),
    "only embeddings are": lambda name: "embed" in name,
}


def cases_of(family: str) -> dict[str, Case]:
    """Cases of a family of hybrids."""
    is_reentrant, seed = len(family) % 2 == 0, len(family)
    cases = {"a tree": Case([padded(TREE[:3]), padded(TREE[3:])], 5 * 128 + 3 * 64)}
    cases["another"] = Case(tree_of_three(seed), 1, prepare=checkpointed(is_reentrant))
    if family in KINDS or is_thorough():
        cases["ranks divide heads"] = Case(tree_of_three(seed + 1), 1, divides_heads=True)
    if family in ("qwen3_next", "bamba") or is_thorough():
        cases["a prompt longer than a rank's share"] = Case([padded(LONG), padded([words(7, 9)])], 384)
    for name in TRAINED if is_thorough() else [KINDS[family]] if family in KINDS else []:
        saves = checkpointed(reentrant=False) if name == "only A_log is" else Case.prepare
        batches = [*map(padded, WITHOUT)]
        cases[f"one rank without, {name} trained"] = Case(batches, PREFIX, prepare=saves, trained=TRAINED[name])
    return {f"{family}, {name}": replace(case, kind=family) for name, case in cases.items()}


CASES |= {name: case for family in FAMILIES for name, case in cases_of(family).items()}


def alone(name: str, rank: int) -> tuple[float, Gradients]:
    """Loss and gradients of a rank's batch without distca."""
    return _alone(name, min(rank, len(CASES[name].batches) - 1))


@cache
def _alone(name: str, rank: int) -> tuple[float, Gradients]:
    case = CASES[name]
    plain = FAMILIES[case.kind].plain if case.kind in FAMILIES else plain_attention(case.kind)
    model, batch = case.model(plain), case.batch(rank)
    if "position_ids" in batch and batch["input_ids"].shape[0] == 1:  # a pack: sdpa knows no documents
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
        batch = padded([batch["input_ids"][0, start:stop] for start, stop in pairwise(starts)])
    with in_double():
        loss = case.loss(model, batch)
        loss.backward()
    return loss.item(), gradients_of(model)


def _train(names: Sequence[str]) -> dict[str, tuple[float, Gradients, int, int, list[str]]]:
    """Loss of this rank, mean gradients, shared tokens, tokens that layers computed, and lines of the log."""
    results, plugin = {}, distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    for name in names:
        case, lines = CASES[name], list[str]()
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("distca_hf").addHandler(handler)
        model = distca_hf.enable(case.model("distca"), plugin)
        case.prepare(model)
        wrapped = case.wrap(model)
        least_bytes = -math.inf if case.divides_heads else folds.LEAST_SAVED_BYTES
        with in_double(), patch.object(folds, "LEAST_SAVED_BYTES", least_bytes):
            loss = case.loss(wrapped, case.batch(dist.get_rank()))
            loss.backward()
        logging.getLogger("distca_hf").removeHandler(handler)
        facts = watch_of(model).planner.history[-1]
        gradients = {
            weight: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for weight, gradient in gradients_of(model).items()
        }
        assert (case.wrap is sharded) == any(isinstance(weight, DTensor) for weight in model.parameters())
        results[name] = loss.item(), gradients, facts.shared_tokens, sum(facts.tokens), lines
    plugin.close()
    return results


# Compiling takes seconds of every rank.
ON_ONE_RANK = ["compiled"]


@pytest.mark.parametrize(
    "name", ["a tree", "packs", "experts with their loss", "reentrant", "prompts too short", *ON_ONE_RANK]
)
def test_one_rank_computes_shared_prefixes_once(name: str) -> None:
    check_one_rank(name)


@states_travel
@pytest.mark.parametrize("family", FAMILIES if is_thorough() else KINDS)
def test_one_rank_computes_states_of_shared_prefixes_once(family: str) -> None:
    check_one_rank(f"{family}, a tree")


def check_one_rank(name: str) -> None:
    """Compares two steps on one rank with one on every row alone."""
    case, plugin = CASES[name], distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    model = distca_hf.enable(case.model("distca"), plugin)
    case.prepare(model)

    losses = []
    for _ in range(2):
        model.zero_grad()
        with in_double():
            losses.append(case.loss(model, case.batch(1)))
            losses[-1].backward()

    planner = watch_of(model).planner
    assert (planner is not None) == (case.least_shared > 0)
    assert planner is None or planner.totals.shared_tokens > 0
    loss, expected = alone(name, 1)
    assert [one.item() for one in losses] == pytest.approx([loss, loss], rel=1e-12)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for weight, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[weight], rtol=0, atol=1e-12 * largest)
    plugin.close()


def test_one_rank_moves_no_rows_for_less_than_a_tenth_of_its_tokens() -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    model = distca_hf.enable(Case([], 0).model("distca"), plugin)
    planned = []
    for answers in ((60, 70), (50, 60), (60, 70)):  # 16 of 164, of 144, of 164 tokens are shared
        own_loss(model, padded(continuing(PROMPT[: LEAST_TOKENS + 1], *answers))).backward()
        planner = watch_of(model).planner
        planned.append(0 if planner is None else len(planner.history))
    assert planned == [0, 1, 1]
    plugin.close()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_are_those_of_every_row_alone(world: int, tmp_path: Path) -> None:
    names = [name for name, case in CASES.items() if case.kind not in FAMILIES]
    if world == 4:  # the last two ranks may have one batch, and then share all of it
        names = [name for name in names if CASES[name].least_shared or CASES[name].says]
    trees = [name for name in names if "tree" in name]
    some = {2: [name for name in names if name not in ON_ONE_RANK], 3: [*trees, "packs", "sharded"], 4: trees}
    check(world, names if is_thorough() else some[world], tmp_path)


def test_one_of_three_ranks_has_no_fragments_if_it_is_meant_to() -> None:
    home = Layout.from_packs([[*map(len, documents)] for documents in WITHOUT])
    spans = [[(0, 0, 200)], [(0, 0, PREFIX), (1, PREFIX, 200)], [(2, 0, 144)], [(3, 0, 200)]]
    layout = home.sharing(SharedPrefixes.of_spans(spans, range(4)))

    assert place_given(layout, Topology(3, 3)) is layout
    groups = [Fragments.of(layout, rank, 3).groups for rank in range(3)]
    assert [{name: one.tolist() for name, one in group.items()} for group in groups] == [
        {"whole": [], "followed": [PREFIX], "last": [56]},
        {"whole": [144], "followed": [], "last": [56]},
        {"whole": [200], "followed": [], "last": []},
    ]


@states_travel
@pytest.mark.parametrize("family", FAMILIES if is_thorough() else KINDS)
def test_states_go_to_all_documents_that_continue_a_prefix(family: str, tmp_path: Path) -> None:
    on_one_rank = [] if is_thorough() else [f"{family}, a tree"]
    check(3 if family in KINDS else 2, [name for name in cases_of(family) if name not in on_one_rank], tmp_path)


def check(world: int, names: Sequence[str], folder: Path) -> None:
    """Compares steps on ranks with those on every row alone."""
    by_rank = run_ranks(world, _train, folder, names)

    for name in names:
        case = CASES[name]
        losses, expected = zip(*(alone(name, rank) for rank in range(world)), strict=True)
        tokens = sum(int(case.batch(rank).get("attention_mask", torch.ones(1)).sum()) for rank in range(world))
        for rank, results in enumerate(by_rank):
            loss, ours, shared, computed, lines = results[name]
            assert shared >= case.least_shared, name
            assert (shared > 0) == (case.least_shared > 0), name
            if "attention_mask" in case.batch(0) and "attention_mask" in case.batch(1):
                assert computed == tokens - shared, name
            said = [line for line in lines if "begin alike" in line]
            assert len(said) == (rank == 0 and bool(case.says)), (name, said)
            assert all(case.says in line for line in said), (name, said)
            if case.most > 1:  # random
                continue
            assert loss == pytest.approx(losses[rank], rel=max(1e-12, case.most)), (name, rank)
            mean = {weight: sum(one[weight] for one in expected) / world for weight in expected[0]}
            largest = max(gradient.abs().max().item() for gradient in mean.values())
            for weight, gradient in mean.items():
                worst = (ours[weight] - gradient).abs().max() / max(gradient.abs().max(), 1e-6 * largest)
                assert worst <= case.most, (name, rank, weight, worst)


def _train_on_all_written() -> dict[tuple[str, str], list[str]]:
    return {written: _train_on_written(*written) for written in WRITTEN}


def _train_on_written(column: str, how: str) -> list[str]:
    """Errors of three passes, before the second of which rank 1 writes to a column that was read."""
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=LEAST_TOKENS)
    model = distca_hf.enable(Case([], 0).model("distca"), plugin)
    reader, errors = watch_of(model).reader, []
    for step in range(3):
        batch = padded(GROUP)
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        reading = Reading(reader, batch)
        mark(batch, reading)
        assert reading.documents is not None
        if step == 1 and dist.get_rank() == 1:
            written = batch[column]
            written = {"data": written.data, "numpy": torch.from_numpy(written.numpy()), "tensor": written}[how]
            written[0, len(GROUP[0]) - 1] = 0
        try:
            own_loss(model, batch).backward()
            errors.append("")
        except DistCAError as error:
            errors.append(str(error))
    plugin.close()
    return errors


# Columns, and how they are written to.
WRITTEN = [
    *(("input_ids", how) for how in ("data", "numpy", "tensor")),
    *((column, "data") for column in ("position_ids", "attention_mask", "labels")),
]


def test_columns_that_are_written_to_unseen_are_noticed_in_the_next_pass(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _train_on_all_written, tmp_path)
    for column, how in WRITTEN:
        of_ranks = [errors[column, how] for errors in by_rank]
        assert [errors[:2] for errors in of_ranks] == 2 * [["", ""]]
        said = [errors[2] for errors in of_ranks]
        if how == "tensor":
            assert said == ["", ""]
        else:
            assert f"micro-batch 2: the checksum of {column} in micro-batch 1 is " in said[1]
            assert "rank 1" in said[0]
