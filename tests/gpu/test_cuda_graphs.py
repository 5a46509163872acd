"""Models compiled for CUDA graphs: numbers of sdpa, and a refusal where torch cannot record."""

import pytest
import torch
from torch import nn

import distca_hf
from support.compiling import forget_graphs
from support.data import random_dataset
from support.models import VOCABULARY, tiny_model


pytestmark = pytest.mark.gpu

LENGTHS = (40, 20, 10)


def _model(implementation: str, **config: object) -> nn.Module:
    return tiny_model(implementation=implementation, head_dim=64, **config).to("cuda", torch.bfloat16)


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()


def test_generation_with_a_static_cache_gives_the_tokens_of_sdpa() -> None:
    """Transformers compiles it with `mode="reduce-overhead"` by itself."""
    forget_graphs()
    how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    expected = _model("sdpa", initializer_range=0.3).eval().generate(_ids(10), **how)
    model = _model("distca", initializer_range=0.3).eval()
    for _ in range(2):
        assert torch.equal(model.generate(_ids(10), **how), expected)


def test_layers_train_on_packs_of_one_rank() -> None:
    forget_graphs()
    ids, losses = _ids(sum(LENGTHS)), []
    positions = torch.cat([torch.arange(tokens) for tokens in LENGTHS])[None].cuda()
    for compiled in (False, True):
        model = distca_hf.enable(_model("distca"), distca_hf.DistCAPlugin()).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if compiled:
            for layer in model.model.layers:
                layer.compile(mode="reduce-overhead")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            loss = model(input_ids=ids, position_ids=positions, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=2e-3)


def test_batches_with_a_plan_are_refused() -> None:
    forget_graphs()
    model, plugin = _model("distca"), distca_hf.DistCAPlugin(tokens_per_rank=192)
    distca_hf.enable(model, plugin)
    batch = next(iter(plugin.dataloader(random_dataset(20), model=model)))
    for layer in model.model.layers:
        layer.compile(mode="reduce-overhead")
    with pytest.raises(Exception, match="compiled for CUDA graphs"):
        model(**{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch.items()})
