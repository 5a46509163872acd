"""Experts that a token's number in the vocabulary chooses, and not its hidden state.

With random weights hidden states of long documents become alike, and so do their experts. How many tokens an expert
gets then depends on attention: on its made-up keys in `ideal`. Documents of random tokens have as many of each number,
so every expert gets as many tokens in all modes, and a token the same experts wherever it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


ROUTER = "TopKRouter"  # end of the names of Transformers' routers


class EvenExperts:
    """Replaces the choice of all routers of a model, and keeps their weights; in place. Exits if it has no router."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        routers = [module for module in causal_lm.modules() if type(module).__name__.endswith(ROUTER)]
        if not routers:
            raise SystemExit(f"--even-experts: {type(causal_lm).__name__} has no router of experts")
        self._ids = torch.empty(0, dtype=torch.int64)
        causal_lm.base_model.register_forward_pre_hook(self._note, with_kwargs=True)
        for layer, router in enumerate(routers):
            router.forward = partial(self._choose, router.forward, router, layer)

    def _note(self, _: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        self._ids = batch["input_ids"].reshape(-1)

    def _choose(
        self,
        forward: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
        router: Any,
        layer: int,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns logits and scores as they are, and other experts `[T, experts of a token]`."""
        *scores, experts = forward(hidden)
        count = experts.shape[-1]
        turns = self._ids[:, None] * count + torch.arange(count, device=experts.device)
        return *scores, ((turns + layer) % router.num_experts).to(experts.dtype)
