"""Model classes that neither Transformers nor distca_hf knows: one that works, and some that must be refused."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward


class StrangeConfig(LlamaConfig):
    """A Llama of another name."""

    model_type = "strange"


class StrangeForCausalLM(LlamaForCausalLM):
    """A class that only its name tells from a Llama."""

    config_class = StrangeConfig


class Talking(StrangeForCausalLM):
    """A class that prints as it is built."""

    def __init__(self, config: StrangeConfig) -> None:
        super().__init__(config)
        print("built")  # noqa: T201


class Rolling(nn.Module):
    """An MLP that adds to every token the one before, which its structure does not show."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + x.roll(1, dims=1))


class RollingForCausalLM(StrangeForCausalLM):
    """A class whose MLPs mix tokens."""

    def __init__(self, config: StrangeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Rolling(layer.mlp)


class Convolving(Rolling):
    """An MLP with a convolution over neighbouring tokens."""

    def __init__(self, mlp: nn.Module, hidden_size: int) -> None:
        super().__init__(mlp)
        self.conv = nn.Conv1d(hidden_size, hidden_size, 3, padding=2)


class ConvolvingForCausalLM(StrangeForCausalLM):
    """A class whose MLPs hold convolutions."""

    def __init__(self, config: StrangeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Convolving(layer.mlp, config.hidden_size)


class BiasedAttention(nn.Module):
    """Attention that asks for a bias of its scores, in its call alone."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        for name, part in attention.named_children():
            self.add_module(name, part)
        self.config, self.layer_idx, self.is_causal = attention.config, attention.layer_idx, True
        self.head_dim, self.num_key_value_groups = attention.head_dim, attention.num_key_value_groups

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        bias = q.new_ones(1)
        given = {} if self.config._attn_implementation != "distca" else {"score_bias": bias}
        out, weights = attention_interface(
            self, q, k, v, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, **given, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class BiasedForCausalLM(StrangeForCausalLM):
    """A class whose attention asks for what is not computed."""

    def __init__(self, config: StrangeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = BiasedAttention(layer.self_attn)
