"""A model as Transformers divides it between ranks: expert and tensor parallelism, and FSDP2 over the other ranks.

Tensor ranks hold the same tokens, and a part of every layer: heads, columns and rows. They exchange activations in
every layer and mode.

With experts tokens travel to the ranks of these and back, in every layer, forward and backward. So ranks wait for each
other there in every mode, also in `local` and `ideal`, and the host reads split sizes back from the device. Experts
get the same tokens in all exact modes, and nearly the same in `ideal`: modes differ only in attention.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from distca_hf.integrations.models.distributed_check import LOWEST_TENSOR, LOWEST_WHOLE_EXPERTS
from lib.model import Backbone


# Lowest Transformers for each size, and the option that asks for it.
LOWEST = {"ep_size": LOWEST_WHOLE_EXPERTS, "tp_size": LOWEST_TENSOR, "dp_replicate_size": LOWEST_WHOLE_EXPERTS}

ROUTER = "TopKRouter"  # end of the names of Transformers' routers


def is_divided(options: argparse.Namespace) -> bool:
    """Returns whether Transformers divides experts or layers of the model between ranks."""
    return bool(options.ep_size > 1 or options.tp_size > 1)


def data_ranks(options: argparse.Namespace) -> int:
    """Returns how many ranks, or groups of tensor ranks, hold other documents; exits if the sizes do not divide the
    ranks."""
    ranks = dist.get_world_size()
    for name in ("tp_size", "ep_size"):
        if ranks % (getattr(options, name) * options.dp_replicate_size):
            sizes = f"--{name.replace('_', '-')} {getattr(options, name)} x"
            raise SystemExit(f"{sizes} --dp-replicate-size {options.dp_replicate_size} do not divide {ranks} ranks")
    return ranks // int(options.tp_size)


class DividedBackbone(Backbone):
    """A causal language model without its head, divided when it was made.

    FSDP2's root is the causal language model, so that is what runs; in place of the head it has one that does nothing.
    """

    def hidden_states(self, **batch: Any) -> torch.Tensor:
        """Returns `[1, T, hidden size]` outputs of the last layer, after the last norm."""
        hidden: torch.Tensor = self.causal_lm(**{"use_cache": False, **batch}).logits
        return hidden


def build_divided_model(config: PreTrainedConfig, options: argparse.Namespace) -> PreTrainedModel:
    """Returns the model without its head, and with random weights that are made on the ranks that hold them. Exits if
    this Transformers does not train rightly so.

    Weights are fp32 and layers compute in `dtype`, to which FSDP2 casts. Transformers lets it sum gradients in fp32.
    If there are only tensor ranks, nothing is sharded: weights have that dtype then.
    """
    sizes = {name: getattr(options, name) for name in LOWEST if getattr(options, name) > 1}
    for name in sizes:
        if Version(transformers.__version__) < Version(LOWEST[name]):
            option = f"--{name.replace('_', '-')}"
            raise SystemExit(f"{option} needs Transformers {LOWEST[name]}, this is {transformers.__version__}")
    from transformers.distributed import DistributedConfig  # older ones have none

    torch.manual_seed(0)
    whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        self.set_output_embeddings(nn.Identity())  # before anything is divided
        self.tp_plan = {name: style for name, style in self.tp_plan.items() if not name.startswith("lm_head")}

    headless: Any = type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})
    causal_lm: PreTrainedModel = headless.from_pretrained(
        None,
        config=config,
        state_dict={},  # of which all weights are missing, so that they are initialised
        dtype=torch.float32 if data_ranks(options) > 1 else options.dtype,
        attn_implementation="distca",
        distributed_config=DistributedConfig(
            fsdp_size=data_ranks(options) // options.dp_replicate_size,
            **sizes,
            fsdp_mixed_precision=options.dtype == torch.bfloat16,
        ),
    )
    return causal_lm.train()


class EvenExperts:
    """Lets a token's number in the vocabulary choose its experts, and not its hidden state; keeps weights of routers;
    in place. Exits if the model has no router.

    With random weights hidden states of long documents become alike, and so do their experts. How many tokens an
    expert gets then depends on attention: on its made-up keys in `ideal`. Documents of random tokens have as many of
    each number, so every expert gets as many tokens in all modes, and a token the same experts wherever it is.
    """

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
