"""Divided model: a Transformers checkpoint whose layers are divided into the parts of a pipeline.

    checkpoint ──outline, without weights──▶ checks, loader
        └───────load(part)──────────────▶ one part: a stage reads no weights but its own

A part is a model of the same class with the same names. Modules that other parts run are replaced before weights are
read, so that neither memory nor files are touched for them.
"""

import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from distca_hf.data.pipelines import Pipeline
from distca_hf.errors import ConfigError, and_more
from distca_hf.integrations.models.check import IMPLEMENTATION, check_model
from distca_hf.integrations.models.forward_watch import enable
from distca_hf.integrations.stages.model_part import ModelPart
from distca_hf.integrations.stages.stack import LayerStack
from distca_hf.parallel_context import ParallelContext, numbered


class DividedModel:
    """A causal language model of Transformers, divided into the parts of a pipeline.

    Args:
        checkpoint: a folder, or a name on the Hub, as `from_pretrained` takes it.
        pipeline: stages, and chunks on each of them.
        dtype: of the weights.

    Attributes:
        outline: the whole model on the meta device, for `plugin.dataloader(model=...)`: placement follows all layers.
        stack: its modules in order.

    Raises:
        ConfigError: the model cannot be divided like this; says why, and what to do.
    """

    def __init__(self, checkpoint: str | Path, pipeline: Pipeline, dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint, self.pipeline, self.dtype = str(checkpoint), pipeline, dtype
        config = AutoConfig.from_pretrained(self.checkpoint)
        with torch.device("meta"):
            self.outline = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
        self._check_tied()
        self.stack = LayerStack.of(self.outline)
        pipeline.check(pipeline.num_stages, self.stack.num_layers)  # with the fewest micro-batches that fill it

    def _check_tied(self) -> None:
        """Refuses embeddings that are the head's weights as well: the first and the last stage would each train their
        own.

        Raises:
            ConfigError: they are.
        """
        head = self.outline.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is self.outline.get_input_embeddings().weight:
            raise ConfigError(
                f"{type(self.outline).__name__}: tie_word_embeddings=True, and its embeddings are on stage 0 and its "
                f"head on stage {self.pipeline.num_stages - 1}: each would train weights of its own. Train it without "
                "a pipeline; or untie them first (a copy of the weights, and tie_word_embeddings=False in config.json)"
            )

    def load(
        self,
        number: int,
        plugin: ParallelContext,
        autocast_dtype: torch.dtype | None = None,
        hidden_dtype: torch.dtype | None = None,
    ) -> ModelPart:
        """Reads the weights of one part, and enables it for training.

        Args:
            number: of the part; see `parts_of_stage`.
            plugin: settings, and the ranks that run this part together.
            autocast_dtype: in which its layers compute, bfloat16 for weights in float32; None: in the weights' own.
            hidden_dtype: of hidden states that stages send; None: the weights' own. Where FSDP2 casts weights
                (`MixedPrecisionPolicy`), its `param_dtype`, without autocast.

        Raises:
            ConfigError: the checkpoint lacks weights, or has them in other shapes; ranks are other stages; or the
                plugin has no tokens_per_rank.
            UnsupportedAttentionError: the model cannot run on distca.
        """
        self._check_grid(plugin)
        plugin.check_places("a pipeline")
        tokens, device = plugin.tokens_per_rank, numbered(plugin.device)
        check_model(self.outline, tokens * len(plugin.members.token_ranks), plugin.kernel, device)
        model = self.read(number)
        enable(model.to(device), plugin)
        layers = [model.get_submodule(f"{self.stack.layers}.{layer}") for layer in self._layers_of(number)]
        return ModelPart(model, layers, number, self.pipeline, tokens, autocast_dtype, hidden_dtype)

    def read(self, number: int) -> PreTrainedModel:
        """Reads the weights of one part, on the host, into a model that is not enabled.

        Raises:
            ConfigError: the checkpoint lacks weights, or has them in other shapes.
        """
        model, seen = self._class_of_part(number).from_pretrained(
            self.checkpoint,
            attn_implementation=IMPLEMENTATION,
            dtype=self.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below
        )
        wrong = [f"{name} is missing" for name in sorted(seen["missing_keys"])]
        wrong += [f"{name} is {tuple(there)} and not {tuple(here)}" for name, there, here in seen["mismatched_keys"]]
        if wrong:
            raise ConfigError(
                f"{self.checkpoint}, part {number}: {wrong[0]}{and_more(len(wrong) - 1)}; give a checkpoint of "
                f"{type(model).__name__} with all of its weights"
            )
        return cast(PreTrainedModel, model)

    def _layers_of(self, number: int) -> range:
        return self.stack.layers_of(number, self.pipeline.layers_of_parts(self.stack.num_layers))

    def _check_grid(self, plugin: ParallelContext) -> None:
        """Checks that the ranks are as many stages as the pipeline has.

        Raises:
            ConfigError: they are not.
        """
        grid = plugin.members.grid
        if grid.shape[0] != self.pipeline.num_stages or grid.shape[2] != 1:
            raise ConfigError(
                f"{grid.name}: the pipeline has {self.pipeline.num_stages} stages of whole layers, and the plugin "
                f"works on {grid.in_words()}; give it a mesh of stages and data ranks, with plugin.use_mesh(mesh, "
                "data=..., stages=...)"
            )

    def _class_of_part(self, number: int) -> type[PreTrainedModel]:
        """Returns the model's class, made to leave other parts out when it is initialised: `from_pretrained` does so
        without memory, and reads weights afterwards."""
        whole, stack, layers = type(self.outline), self.stack, self._layers_of(number)
        ends = {"is_first": number == 0, "is_last": number == self.pipeline.num_parts - 1}

        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            whole.__init__(self, *args, **kwargs)
            stack.keep(self, layers, **ends)

        others = stack.modules_of_others(layers, **ends)
        return type(
            whole.__name__,
            (whole,),
            {
                "__init__": init,
                "__module__": whole.__module__,
                "_keys_to_ignore_on_load_unexpected": [rf"^{re.escape(name)}\." for name in others],
            },
        )
