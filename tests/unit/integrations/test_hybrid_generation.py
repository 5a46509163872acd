"""Generation by models whose layers carry a state from token to token: the tokens of sdpa, also of padded rows."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import distca_hf
from support.models import VOCABULARY, tiny_model


ROWS, TOKENS, NEW_TOKENS = 2, 12, 6


def prompts(padding: int) -> dict[str, torch.Tensor]:
    """Rows of random tokens, of which the first begins with padding."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def continued(model: PreTrainedModel, **given: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return tokens


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("evaluate", ["local", "distca"])
@pytest.mark.parametrize("trains", [False, True])
def test_generation_gives_the_tokens_of_sdpa(trains: bool, evaluate: Any, padding: int) -> None:
    model, plain = (tiny_model("qwen3_5", name).train(trains) for name in ("distca", "sdpa"))
    distca_hf.enable(model, distca_hf.DistCAPlugin(evaluate=evaluate), longest_document_tokens=64)

    assert torch.equal(continued(model, **prompts(padding)), continued(plain, **prompts(padding)))


def test_a_pass_that_goes_on_from_a_cache_has_the_logits_of_one() -> None:
    model = tiny_model("qwen3_5").eval()
    distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=64)
    ids = prompts(0)["input_ids"]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        rest = model(ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache).logits

    torch.testing.assert_close(rest[:, 0], whole[:, -1], rtol=1e-4, atol=1e-5)
