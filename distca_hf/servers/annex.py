"""Annex: what attention servers add to a training that was launched with some. The plugin loads it.

If an attention server is lost during an optimizer step, the Trainer runs the micro-batches of the step again. The
annex replaces `training_step` on the instance. After the last backward pass of a step, and before Trainer clips
gradients, ranks agree whether the step counts (`servers.redo`). Trainer sees one step, with the loss, norm and sums of
the run that counts.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import OptimizerNames

from distca_hf.comm.averaging import named_ranks
from distca_hf.comm.grid import Grid
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.distributed import divided_by_transformers
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.integrations.trainer.callback import add_metrics
from distca_hf.integrations.trainer.check import makes_batches_in_steps
from distca_hf.launched import launched_servers
from distca_hf.parallel_context import Annex, ParallelContext, numbered
from distca_hf.servers.posted_plans import TrainerTransport
from distca_hf.servers.redo import Batch, RepeatableStep, Restore, attempts, refuse_steps, served_transport
from distca_hf.servers.served_plans import Servers
from distca_hf.servers.speeds import Reading
from distca_hf.settings import values_of


# Relative speed of an attention server until it is measured: as fast as a trainer.
UNMEASURED_SPEED = 1.0
# DeepSpeed's optimizers whose gradients can be discarded; others wrap them, and step at other times.
STAGES_1_AND_2 = "DeepSpeedZeroOptimizer"
UNDOABLE = (STAGES_1_AND_2, "DeepSpeedZeroOptimizer_Stage3")
# Types of attributes in which trainers collect numbers of micro-batches.
NUMBERS, CONTAINERS = (bool, int, float), (list, deque, set, dict, defaultdict, Counter)
# Sums to which Trainer itself adds between two micro-batches: that code does not run again.
SUMS_OF_THE_LOOP = ("current_flos",)


class ServersAnnex(Annex):
    """Attention servers of this job. Raises ConfigError if a setting does not work with servers."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._served: dict[torch.device, TrainerTransport] = {}
        if context.debug.check_exchanges:
            raise ConfigError(
                "debug.check_exchanges compares only exchanges of trainers, and attention servers take part in them; "
                "leave one of the two out"
            )
        if context.deterministic and not context.server_speed:
            raise ConfigError(
                "deterministic=True asks for the same gradients in all runs, and server_speed=0 measures speeds, "
                "which differ from run to run and divide attention between trainers and servers: give a server_speed"
            )
        if not context.members.are_the_job:
            raise ConfigError(
                f"attention servers serve all ranks of a job, and the group of the plugin is "
                f"{named_ranks(context.members.group)}; leave group out"
            )

    @property
    def extra_ranks(self) -> Servers:
        """The servers that were launched."""
        per_node = launched_servers()
        # Trainers' nodes come first, as in their topology. A node with only servers has more servers than these.
        in_order = sorted(range(len(per_node)), key=lambda node: per_node[node] > min(per_node))
        nodes = tuple(in_order.index(node) for node, count in enumerate(per_node) for _ in range(count))
        speeds = (self._context.server_speed or UNMEASURED_SPEED,) * len(nodes)
        return Servers(speeds, self._context.trainers_attend, nodes)

    def check_grid(self, grid: Grid) -> None:
        raise ConfigError(
            f"attention servers serve ranks that differ only in data, and these are {grid.in_words()}; leave the "
            "servers out, or train without tensor and pipeline parallelism"
        )

    def transport(self, device: torch.device) -> TrainerTransport:
        """Returns the transport that reaches servers; the first call opens it, and is collective."""
        among_trainers, device, timeouts = self._context.transport(device), numbered(device), self._context.timeouts
        served = self._served.get(device)
        if served is None or served.among_trainers is not among_trainers:
            served = self._served[device] = TrainerTransport(
                among_trainers,
                device,
                self.extra_ranks,
                values_of(self._context, DistCAConfig),
                timeouts.exchange_seconds,
                timeouts.agreement_seconds,
                timeouts.heartbeat_limit_seconds,
            )
        return served

    def cannot_attach(self, trainer: Trainer) -> Iterable[str]:
        return cannot_redo(trainer)

    def attach(self, trainer: Trainer, attachment: Attachment) -> None:
        RedoneSteps(trainer, self._context).install(attachment)

    def attempts(
        self, model: torch.nn.Module, batches: Sequence[Mapping[str, Any]]
    ) -> Iterator[AbstractContextManager[object]]:
        return attempts(model, batches, self._context)

    def close(self) -> None:
        with ExitStack() as ends:
            for transport in self._served.values():
                ends.callback(transport.close)
            self._served.clear()


def cannot_redo(trainer: Trainer) -> Iterator[str]:
    """Yields reasons why a step of this Trainer cannot run again: it would be taken with gradients of zeros."""
    accelerator = trainer.accelerator
    remedy = "and a step in which an attention server is lost could not be undone; use another, or no servers"
    if makes_batches_in_steps(trainer):
        yield f"{type(trainer).__name__} makes its batches inside of a step, {remedy}"
    optimizer = OptimizerNames(trainer.args.optim).value
    if optimizer in ("lomo", "adalomo") or "layerwise" in optimizer:
        yield f"optim={optimizer!r} steps inside backward, {remedy}"
    given = type(trainer.optimizer)
    if given.__module__.startswith("lomo_optim"):
        yield f"{given.__name__} steps inside backward, {remedy}"
    if accelerator.mixed_precision == "fp16":
        yield f"fp16 scales gradients by earlier ones, {remedy} (bf16, for example)"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if accelerator.state.deepspeed_plugin.zero_stage == 0:
            yield f"DeepSpeed's stage 0 keeps gradients where they cannot be discarded, {remedy} (stages 1 to 3)"


class RedoneSteps(TrainerCallback):
    """Optimizer steps of a Trainer, which may run again."""

    def __init__(self, trainer: Trainer, context: ParallelContext) -> None:
        self.count = self._logged = 0
        self._busy_before = Reading()
        self._trainer, self._context = trainer, context
        self._run_micro_batch = trainer.training_step
        self._step: RepeatableStep | None = None
        self._micro_batches: list[tuple[Batch, torch.Tensor | int | None]] = []

    def install(self, attachment: Attachment) -> None:
        attachment.replace(self._trainer, "training_step", self._training_step)
        attachment.add_callback(self, first=True)

    def on_step_begin(self, *event: object, **kwargs: object) -> None:
        """Forgets an unfinished step, which another callback has interrupted."""
        self._micro_batches.clear()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Adds how many steps ran again since the last log, how many servers there are and were lost, and the share of
        time in which servers computed."""
        if logs is None or "loss" not in logs or self._context.metrics != "all":
            return
        transport = served_transport(self._context, args.device)
        metrics = {
            "distca/redone_steps": float(self.count - self._logged),
            "distca/servers": float(len(transport.members)),
            "distca/servers_lost": float(transport.servers_lost),
        }
        busy = transport.speeds.busy.since(self._busy_before).busy_fraction
        if busy is not None:
            metrics |= {"distca/server_busy_fraction": busy}
        self._logged, self._busy_before = self.count, transport.speeds.busy
        add_metrics(metrics, logs, state)

    def _training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Runs a micro-batch. The last one of a step returns once the step counts."""
        if not self._micro_batches:
            self._step = self._begin()
        self._micro_batches.append((copy(inputs), num_items_in_batch))
        loss = self._run(model, inputs, num_items_in_batch)
        if not self._trainer.accelerator.sync_gradients:
            return loss
        assert self._step is not None
        while not self._step.counts():
            self.count += 1
            if self._engine is None:
                model.zero_grad()
            else:
                _discard_sharded_gradients(self._engine.optimizer)
            loss = self._run_again(model)
        self._micro_batches.clear()
        if self._engine is not None:
            self._engine.step()
        return loss

    def _begin(self) -> RepeatableStep:
        """Begins a step before its first micro-batch."""
        trainer = self._trainer
        device = trainer.args.device
        transport, watch = served_transport(self._context, device), watch_of(trainer.model)
        assert watch is not None
        optimizer = None if self._engine is None else type(self._engine.optimizer).__name__
        if optimizer is not None and optimizer not in UNDOABLE:
            raise ConfigError(
                f"DeepSpeed trains with {optimizer}, and a step in which an attention server is lost could not be "
                f"undone; use a configuration that makes a {' or a '.join(UNDOABLE)} (stages 1 to 3), or no servers"
            )
        keep = [watch.bookmark_given, lambda: _keep_sums(trainer)]
        return RepeatableStep(transport, f"optimizer step {trainer.state.global_step + 1}", device, keep)

    def _run(self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        assert self._step is not None
        with refuse_steps(), _held(self._engine), self._step.left_by_errors():
            return self._run_micro_batch(model, inputs, num_items_in_batch)

    def _run_again(self, model: nn.Module) -> torch.Tensor:
        """Runs all micro-batches of the step as Trainer does, and returns the loss of the last one."""
        trainer, last = self._trainer, len(self._micro_batches) - 1
        for number, (inputs, num_items_in_batch) in enumerate(self._micro_batches):
            trainer.accelerator.gradient_state._set_sync_gradients(number == last)
            with nullcontext() if number == last else self._without_sync(model):
                loss = self._run(model, copy(inputs), num_items_in_batch)
            if number == last:
                return loss
            # Trainer sums up the losses that it logs; this is how it adds one.
            if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
                trainer._tr_loss += trainer._tr_loss / (
                    1 + trainer.state.global_step - trainer._globalstep_last_logged
                )
            else:
                trainer._tr_loss += loss
        raise AssertionError

    def _without_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Returns the context in which Trainer runs all micro-batches of a step except the last one."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if self._engine is not None or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        if divided_by_transformers(trainer.model) and hasattr(model, "set_requires_gradient_sync"):
            return trainer._defer_fsdp_gradient_reduction()
        return accelerator.no_sync(model=model)

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine; None without DeepSpeed."""
        wrapped = getattr(self._trainer.accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapped is None else wrapped.engine


def _discard_sharded_gradients(optimizer: Any) -> None:
    """Discards gradients of DeepSpeed's optimizer, as its stages 1 and 2 do themselves after an overflow."""
    optimizer.zero_grad()
    if type(optimizer).__name__ != STAGES_1_AND_2:
        return
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer._release_preflattened_grad_buffers()
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID


@contextmanager
def _held(engine: Any) -> Iterator[None]:
    """Lets DeepSpeed's engine compute gradients without a step: Accelerate asks for both in one call."""
    if engine is None:
        yield
        return
    engine.step = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del engine.step


def _keep_sums(trainer: Trainer) -> Restore:
    """Keeps the loss that Trainer sums up, and all numbers and containers that are attributes of this trainer.

    Trainers collect metrics in these: mappings of lists, counts of tokens, sums of losses, positions in a buffer.
    """
    loss = trainer._tr_loss.clone()
    attributes = {name: value for name, value in vars(trainer).items() if name not in SUMS_OF_THE_LOOP}
    sums = {name: value for name, value in attributes.items() if type(value) in (*NUMBERS, *CONTAINERS)}
    contents = [(container, copy(container)) for value in sums.values() for container in _containers_in(value)]

    def restore() -> None:
        trainer._tr_loss.copy_(loss)
        vars(trainer).update(sums)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)

    return restore


def _containers_in(value: Any) -> Iterator[Any]:
    """Yields a container, and the containers in a mapping. They are restored in place: other code may refer to
    them."""
    if type(value) not in CONTAINERS:
        return
    yield value
    if isinstance(value, dict):
        for inner in value.values():
            yield from _containers_in(inner)
