"""Models that attend locally and are compiled as a whole: no graph breaks, one graph for all lengths, same numbers.

Nothing here is compiled to kernels, which takes a C++ compiler many seconds: `test_compiled_packs.py` does, for placed
batches.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import distca_hf
from distca_hf.errors import PackingError
from support.compiling import forget_graphs, graph_breaks, graphs_made
from support.models import VOCABULARY, tiny_model


BATCH = 2
KINDS = ("whole rows", "mask of ones", "padded", "packed", "offsets")


def _batches(kind: str) -> Iterator[dict[str, Any]]:
    """Other lengths in every batch."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (10, 17, 24):
        ids = torch.randint(3, VOCABULARY, (BATCH, tokens), generator=generator)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
        begins = tokens // 3
        if kind in ("mask of ones", "padded"):
            batch["attention_mask"] = torch.ones_like(ids)
        if kind == "padded":
            batch["attention_mask"][0, tokens - begins :] = 0
        if kind in ("packed", "offsets"):
            positions = torch.cat([torch.arange(begins), torch.arange(tokens - begins)])
            batch["position_ids"] = positions.expand(BATCH, tokens)
        if kind == "offsets":
            offsets = [0, begins, tokens, tokens + begins, 2 * tokens]
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor(offsets, dtype=torch.int32)
        yield batch


def _numbers(model: nn.Module, run: Any, kind: str, train: bool) -> list[torch.Tensor]:
    """Losses, and gradients of the embeddings if there are any."""
    model.train(train)
    numbers = []
    for batch in _batches(kind):
        model.zero_grad()
        with torch.set_grad_enabled(train):
            loss = run(**batch).loss
        numbers.append(loss.detach())
        if train:
            loss.backward()
            numbers.append(model.get_input_embeddings().weight.grad.clone())
    return numbers


@pytest.mark.parametrize(
    ("kind", "train"),
    [*((kind, False) for kind in KINDS), ("packed", True)],  # documents are found alike in training
)
def test_whole_models_are_one_graph(kind: str, train: bool) -> None:
    """None of its shapes depends on documents: else torch cannot record it as CUDA graphs, or records one more for
    every length. Graphs run as they are; `test_layers_break_no_graph` lowers them."""
    forget_graphs()
    # A second layer takes seconds: it has one where documents must be found.
    model = tiny_model(num_hidden_layers=2 if kind in ("padded", "packed") else 1)
    distca_hf.enable(model, distca_hf.DistCAPlugin())
    expected = _numbers(model, model, kind, train)
    unknown: list[object] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            unknown.extend(free_unbacked_symbols(node.meta.get("example_value")))
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=look)

    # Floats of the model are inputs of its graph until some operator needs a number; then torch makes the graph once
    # more, with numbers. One kind comes to its graph on this way, the others begin with numbers.
    with torch._dynamo.config.patch(specialize_float=kind != "packed"):
        torch.testing.assert_close(_numbers(model, compiled, kind, train), expected)
    assert graphs_made() == 1
    assert unknown == []


def test_layers_break_no_graph() -> None:
    """As documented, without further arguments; checkpointing finds documents again."""
    forget_graphs()
    model = tiny_model(num_hidden_layers=2)
    expected = _numbers(model, model, "padded", train=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")

    torch.testing.assert_close(_numbers(model, model, "padded", train=True), expected)
    assert graph_breaks() == []
    assert graphs_made() <= 2


def test_compiled_generation_with_a_static_cache_gives_the_tokens_of_sdpa() -> None:
    forget_graphs()
    model, same = (tiny_model(implementation=how, initializer_range=0.3).double().eval() for how in ("distca", "sdpa"))
    batch = next(_batches("whole rows"))
    batch = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    batch["attention_mask"][0, :3] = 0
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "disable_compile": True}
    expected = same.generate(**batch, **how)
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="eager")
    model.forward = functools.wraps(model.forward)(compiled)

    assert torch.equal(model.generate(**batch, cache_implementation="static", **how), expected)
    assert graphs_made() == 2, "one for the prompt, one for all tokens"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"position_ids": torch.arange(3, 13).expand(BATCH, 10)}, PackingError),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32)}, PackingError),
    ],
    ids=["cut document", "offsets of other rows"],
)
def test_what_is_refused_is_refused_in_graphs_too(given: dict[str, Any], error: type[Exception]) -> None:
    forget_graphs()
    model = tiny_model(num_hidden_layers=1).eval()
    batch = {"input_ids": next(_batches("packed"))["input_ids"], "use_cache": False} | given
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(error):
            run(**batch)
