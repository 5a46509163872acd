"""Divided model: a Transformers checkpoint whose layers are divided into the parts of a pipeline.

    checkpoint ──outline, without weights──▶ checks, loader
        └───────load(part)──────────────▶ one part: a stage reads only its own weights

A part is a model of the same class with the same names. Modules that other parts run are replaced before weights are
read, so they need neither memory nor reads. `torch.distributed.pipelining` calls it:

    schedule.step(ids [M, T], position_ids [M, T], ..., plan [M, 1])          torch splits along the first dimension
        part(ids or hidden [1, T], position_ids [1, T], ..., plan [1, 1])     the number of a plan becomes the plan
            model(..., distca_plan=plan)                                      attention among ranks of this stage

A model is divided as a stack: modules before its layers, a list of layers, modules after them. Transformers declares
this for each class whose layers pass on hidden states and nothing else (`base_model_pp_plan`). The forward pass is
then tried without weights. If all modules of the stack pass their input on, hidden states must come out as the very
tensor that went in. A model that scales or adds something on the way would repeat it in each stage.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distca_hf.errors import ConfigError, PlanError, and_more
from distca_hf.integrations.models.check import check_model
from distca_hf.integrations.models.forward_watch import enable
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.integrations.models.structure import IMPLEMENTATION
from distca_hf.parallel_context import ParallelContext, numbered
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.runtime.live_plan import LivePlan, find_plan
from distca_hf.torch_private import schedule_that_runs


class PassThrough(nn.Module):
    """Replaces a module that another stage runs, and returns its first argument."""

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden


@dataclass(frozen=True)
class LayerStack:
    """Names of the modules of a model, in the order in which hidden states pass them."""

    before: tuple[str, ...]  # embeddings, and everything up to the first layer; the first stage runs them
    layers: str  # the list of layers
    num_layers: int
    after: tuple[str, ...]  # the last norm and the head; the last stage runs them

    @classmethod
    def of(cls, whole: PreTrainedModel) -> Self:
        """Finds the stack of a model. `whole` is on the meta device, with all layers, and is restored afterwards.
        Raises ConfigError if it cannot be divided into stages; says why."""
        name, config = type(whole).__name__, whole.config
        mixers = list(mixers_of(whole))
        if mixers:
            raise ConfigError(
                f"{name}: {mixers[0]} carries a state from token to token, and stages run only attention layers; "
                "train it without a pipeline"
            )
        stack = cls._written_down(whole)
        inside = tuple(f"{module}." for module in (*stack.before, stack.layers, *stack.after))
        outside = [weight for weight, _ in whole.named_parameters() if not weight.startswith(inside)]
        if outside:
            raise _no_plain_stack(name, f"{outside[0]} and {len(outside) - 1} more weights are outside of them")
        if getattr(config.get_text_config(), "output_router_logits", False):
            raise ConfigError(
                f"{name}: output_router_logits=True adds a loss of the routers of all layers, and no stage has them "
                "all; set it to False"
            )
        # Runs the model without its modules and weights: it must return its input.
        given = torch.empty((1, 2, config.get_text_config().hidden_size), device="meta", dtype=whole.dtype)
        positions = torch.zeros((1, 2), device="meta", dtype=torch.int64)
        removed = stack.keep(whole, range(0), is_first=False, is_last=False)
        try:
            with torch.no_grad():
                got = whole(
                    inputs_embeds=given, position_ids=positions, attention_mask=positions + 1, use_cache=False
                ).logits
        finally:
            for module_name, module in removed.items():
                whole.set_submodule(module_name, module)
        if got is not given and (got._base is not given or got.shape != given.shape):
            raise _no_plain_stack(
                name,
                f"its forward pass computes on hidden states outside of {', '.join((*stack.before, stack.layers))} "
                f"and {', '.join(stack.after)}, as scaled embeddings or logits do",
            )
        return stack

    @classmethod
    def _written_down(cls, whole: PreTrainedModel) -> Self:
        """Reads the stack from the configuration's class."""
        name, prefix = type(whole).__name__, whole.base_model_prefix
        config: PreTrainedConfig = whole.config
        plan, head = getattr(config, "base_model_pp_plan", None), whole.get_output_embeddings()
        if not plan or not hasattr(whole, prefix) or head is None:
            raise _no_plain_stack(name, f"{type(config).__name__} has no base_model_pp_plan")
        base = whole.base_model
        lists = [at for at, module in enumerate(plan) if isinstance(getattr(base, module, None), nn.ModuleList)]
        if len(lists) != 1:
            raise _no_plain_stack(name, f"its base_model_pp_plan has {len(lists)} lists of layers")
        names = [f"{prefix}.{module}" for module in plan]
        (head_name,) = (found for found, module in whole.named_modules() if module is head)
        layers = names[lists[0]]
        return cls(
            before=tuple(names[: lists[0]]),
            layers=layers,
            num_layers=len(whole.get_submodule(layers)),
            after=(*names[lists[0] + 1 :], head_name),
        )

    def keep(self, model: nn.Module, layers: range, *, is_first: bool, is_last: bool) -> dict[str, nn.Module]:
        """Replaces all modules that a stage does not run, in a model with all layers. Returns the modules that were
        replaced, by name.

        Args:
            layers: numbers of the layers that stay.
            is_first, is_last: whether the modules before the layers, and after them, stay.
        """
        gone = self.modules_of_others(layers, is_first=is_first, is_last=is_last)
        removed = {name: model.get_submodule(name) for name in gone}
        for name in gone:
            model.set_submodule(name, PassThrough())
        return removed

    def modules_of_others(self, layers: range, *, is_first: bool, is_last: bool) -> Sequence[str]:
        """Returns names of the modules that a stage does not run; arguments as in `keep`."""
        gone = [f"{self.layers}.{number}" for number in range(self.num_layers) if number not in layers]
        return [*gone, *([] if is_first else self.before), *([] if is_last else self.after)]


def _no_plain_stack(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be divided into stages: {reason}. A stage runs embeddings, layers that pass hidden states on, "
        "and a norm and a head, of a class whose configuration has a base_model_pp_plan; train it without a pipeline"
    )


class Examples(TypedDict):
    """Arguments of `PipelineStage` by name: shapes and dtypes of a part's input and output, on the meta device."""

    input_args: torch.Tensor
    output_args: torch.Tensor


class ModelPart(nn.Module):
    """One part of a divided model, for `PipelineStage`, wrapped (DDP, FSDP2) or not.

    Args:
        model: enabled; modules of other parts pass their input on.
        layers: the model's layers that are in this part.
        number: number of the part.
        pipeline: the pipeline to which the part belongs.
        rows: tokens of a micro-batch on this rank, including padding; torch needs one shape for all.
        autocast_dtype: dtype in which layers compute; None: that of their weights.
        hidden_dtype: dtype of the hidden states that stages send; None: that of the weights.

    Attributes:
        chunk: number of the part on its stage.
        is_first, is_last: whether it has the embeddings, the head.
        checks_schedule: whether the next call checks the schedule that makes it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        number: int,
        pipeline: Pipeline,
        rows: int,
        autocast_dtype: torch.dtype | None = None,
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layers, self._autocast_dtype = tuple(layers), autocast_dtype
        self.model, self.number, self.rows = model, number, rows
        self.num_parts, (_, self.chunk) = pipeline.num_parts, pipeline.place_of(number)
        self.is_first, self.is_last = number == 0, number == pipeline.num_parts - 1
        self._hidden = 1, rows, model.config.get_text_config().hidden_size
        self.hidden_dtype = hidden_dtype or model.dtype
        self.checks_schedule = False

    def __call__(self, *given: torch.Tensor, plan: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """Runs the part on one micro-batch. Reads the plan's number before FSDP2's hooks move it to a GPU, where
        reading would wait.

        Args:
            given: `[1, T]` int64 tokens for the first part, `[1, T, hidden size]` for the others.
            plan: `[1, 1]` int64 number of the plan, on the host.
            columns: `position_ids` and `attention_mask`, int64 `[1, T]`.

        Returns:
            `[1, T, hidden size]`, or `[1, T, vocabulary]` logits of the last part.

        Raises:
            PlanError: it is not one micro-batch, or does not have the shape that stages exchange.
            ConfigError: the schedule would change gradients, or compute none.
        """
        schedule, self.checks_schedule = schedule_that_runs() if self.checks_schedule else None, False
        where = f"part {self.number}: {'' if schedule is None else schedule.name}"
        if schedule is not None and schedule.scale_grads:
            raise ConfigError(
                f"{where} was made with scale_grads=True, torch's default, and divides gradients by its "
                "micro-batches; the loss was divided by the labels of all of them already. Make it with "
                "scale_grads=False, on all stages"
            )
        if schedule is not None and not schedule.has_loss:
            raise ConfigError(
                f"{where} was made without loss_fn, so that it runs no backward pass on this stage: give it a loss on "
                "all stages; only the last one calls it"
            )
        if plan.numel() != 1:
            raise PlanError(
                f"part {self.number}: torch gave {plan.numel()} micro-batches at once: schedule.step got another "
                "number of them than the schedule was made for (n_microbatches)"
            )
        if plan.device.type != "cpu":
            raise PlanError(
                f"part {self.number}: the number of a plan came on {plan.device}, and reading it would wait for the "
                "GPU; wrap parts in DistributedDataParallel without device_ids"
            )
        live = find_plan(int(plan)).of_part(self.chunk)
        output: torch.Tensor = super().__call__(*given, plan=live, **columns)
        return output

    def forward(
        self, given: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor, plan: LivePlan
    ) -> torch.Tensor:
        """Runs the layers; see `__call__`."""
        where = f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}, part {self.number}"
        if position_ids.shape != (1, self.rows):
            raise PlanError(
                f"{where}: a batch of {tuple(position_ids.shape)} rows, and stages exchange (1, {self.rows}); give "
                "plugin.dataloader pipeline=..., or pad_to_multiple_of=tokens_per_rank"
            )
        tokens = {"input_ids": given} if self.is_first else {"inputs_embeds": given}
        columns = {"position_ids": position_ids, "attention_mask": attention_mask}
        with torch.autocast(given.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None):
            output: torch.Tensor = self.model(**tokens, **columns, distca_plan=plan, return_dict=True).logits
        if not self.is_last and (output.shape != self._hidden or output.dtype != self.hidden_dtype):
            raise PlanError(
                f"{where}: hidden states are {tuple(output.shape)} in {output.dtype}, and the next stage receives "
                f"{self._hidden} in {self.hidden_dtype}: keep the dtype that the model was loaded in, or give "
                "DividedModel.load the hidden_dtype that layers compute in"
            )
        # Schedules that divide backward detach outputs in place, which views do not allow.
        return output.clone() if output._is_view() else output

    def examples(self) -> Examples:
        """Returns `input_args` and `output_args` of `PipelineStage`: without them torch would run the model once to
        find shapes. They require gradients, because torch sends none back for outputs that do not."""
        tokens = torch.empty((1, self.rows), dtype=torch.int64, device="meta")
        hidden = torch.empty(self._hidden, dtype=self.hidden_dtype, device="meta", requires_grad=True)
        vocabulary = self.model.config.get_text_config().vocab_size
        computed = self._autocast_dtype or self.hidden_dtype
        logits = torch.empty((1, self.rows, vocabulary), dtype=computed, device="meta", requires_grad=True)
        return {"input_args": tokens if self.is_first else hidden, "output_args": logits if self.is_last else hidden}


class DividedModel:
    """A causal language model of Transformers, divided into the parts of a pipeline.

    Args:
        checkpoint: a folder, or a name on the Hub, as `from_pretrained` takes it.
        pipeline: stages, and chunks on each of them.
        dtype: of the weights.

    Attributes:
        outline: the whole model on the meta device, for `plugin.dataloader(model=...)`: placement needs all layers.
        stack: its modules in order.

    Raises:
        ConfigError: the model cannot be divided like this; says why, and what to do.
    """

    def __init__(self, checkpoint: str | Path, pipeline: Pipeline, dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint, self.pipeline, self.dtype = str(checkpoint), pipeline, dtype
        config = AutoConfig.from_pretrained(self.checkpoint)
        with torch.device("meta"):
            self.outline = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
        head, name = self.outline.get_output_embeddings(), type(self.outline).__name__
        if head is not None and getattr(head, "weight", None) is self.outline.get_input_embeddings().weight:
            raise ConfigError(
                f"{name}: tie_word_embeddings=True, and its embeddings are on stage 0 and its head on stage "
                f"{pipeline.num_stages - 1}: each would train separate weights. Train it without a pipeline; or "
                "untie them first (a copy of the weights, and tie_word_embeddings=False in config.json)"
            )
        self.stack = LayerStack.of(self.outline)
        pipeline.check(pipeline.num_stages, self.stack.num_layers)  # with the fewest micro-batches that fill it

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
            autocast_dtype: in which its layers compute, bfloat16 for weights in float32; None: the weights' dtype.
            hidden_dtype: of hidden states that stages send; None: the weights' dtype. If FSDP2 casts weights
                (`MixedPrecisionPolicy`), give its `param_dtype`, without autocast.

        Raises:
            ConfigError: the checkpoint lacks weights, or has them in other shapes; ranks have other stages; or the
                plugin has no tokens_per_rank.
            UnsupportedAttentionError: the model cannot run on distca.
        """
        grid = plugin.members.grid
        if grid.shape[0] != self.pipeline.num_stages or grid.shape[2] != 1:
            raise ConfigError(
                f"{grid.name}: the pipeline has {self.pipeline.num_stages} stages of whole layers, and the plugin "
                f"works on {grid.in_words()}; give it a mesh of stages and data ranks, with plugin.use_mesh(mesh, "
                "data=..., stages=...)"
            )
        plugin.check_places("a pipeline")
        tokens, device = plugin.tokens_per_rank, numbered(plugin.device)
        check_model(self.outline, tokens * len(plugin.members.token_ranks), plugin.kernel, device)
        model = self.read(number)
        enable(model.to(device), plugin)
        layers = [model.get_submodule(f"{self.stack.layers}.{layer}") for layer in self._layers_of(number)]
        return ModelPart(model, layers, number, self.pipeline, tokens, autocast_dtype, hidden_dtype)

    def read(self, number: int) -> PreTrainedModel:
        """Reads the weights of one part into a model on the host that is not enabled.

        Raises:
            ConfigError: the checkpoint lacks weights, or has them in other shapes.
        """
        whole, stack, layers = type(self.outline), self.stack, self._layers_of(number)
        ends = {"is_first": number == 0, "is_last": number == self.pipeline.num_parts - 1}

        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            whole.__init__(self, *args, **kwargs)
            stack.keep(self, layers, **ends)

        # Leaves other parts out when it is initialised, without memory; `from_pretrained` reads weights afterwards.
        others = [rf"^{re.escape(name)}\." for name in stack.modules_of_others(layers, **ends)]
        added = {"__init__": init, "__module__": whole.__module__, "_keys_to_ignore_on_load_unexpected": others}
        part_class: Any = type(whole.__name__, (whole,), added)
        model, seen = part_class.from_pretrained(
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
        layers_of_parts = self.pipeline.layers_of_parts(self.stack.num_layers)
        begin = sum(layers_of_parts[:number])
        return range(begin, begin + layers_of_parts[number])
