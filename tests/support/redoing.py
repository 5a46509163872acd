"""Training in which steps are failed and run again, with a script in the place of attention servers."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distca_hf.comm.grid import Grid
from distca_hf.servers.served_plans import Servers
from distca_hf.servers.speeds import ServerSpeeds
from support.data import random_dataset
from support.models import tiny_model
from support.training import SEED, computing_arguments, quiet_arguments, sft_trainer


CAPACITY_TOKENS = 192
# Logged numbers that are times, follow from them, or count bytes that were sent once more.
NOT_REPEATED = ("second", "runtime", "_ms", "slowest", "mbytes")


class Script:
    """Says in which runs of a step a server is lost, counted over a training; in place of a transport.

    Attributes:
        runs: that began so far.
    """

    rank = servers_lost = 0
    grid = Grid.flat(range(1), 0)
    members = ()
    speeds = ServerSpeeds(Servers((1.0,)), False, torch.device("cpu"))

    def __init__(self, failed: Collection[int] = (), from_call: int = 3) -> None:
        self.failed, self.from_call = failed, from_call
        self.runs = self._calls = 0

    def begin_step(self) -> None:
        self.runs, self._calls = self.runs + 1, 0

    def leave_step(self) -> None: ...

    def end_step(self) -> bool:
        return self.runs not in self.failed

    def breaks_call(self) -> bool:
        """Counts an attention call; True from the one on that a server is lost in."""
        self._calls += 1
        return self.runs in self.failed and self._calls >= self.from_call


class ScriptedContext:
    """A plugin whose attention servers are a script."""

    def __init__(self, plugin: Any, script: Script | None) -> None:
        self.metrics, self.device, self._script = plugin.metrics, torch.device("cpu"), script

    def training_transport(self, device: torch.device) -> Script | None:
        return self._script


# Metrics that differ where servers were lost.
OF_SERVERS = ("distca/redone_steps", "distca/servers", "distca/servers_lost")


def break_attention(script: Script, replace: Callable[[Any, str, Any], None], harm: float = 0.0) -> None:
    """Lets attention give `harm`, forward and backward, where the script says that a server is lost."""
    from distca_hf.runtime import op

    attend, attend_backward = op.attend, op.attend_backward

    def broken_attend(*arguments: Any) -> Any:
        out, lse, kept = attend(*arguments)
        return (torch.full_like(out, harm), lse, kept) if script.breaks_call() else (out, lse, kept)

    def broken_backward(*arguments: Any) -> Any:
        gradients = attend_backward(*arguments)
        return tuple(torch.full_like(x, harm) for x in gradients) if script.breaks_call() else gradients

    replace(op, "attend", broken_attend)
    replace(op, "attend_backward", broken_backward)


def draws_random_numbers(model: nn.Module) -> None:
    """Adds dropout to a model, and factors from the generators of Python and NumPy."""

    def drop(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return factor * nn.functional.dropout(out, 0.1, module.training)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(drop)


def initial_model() -> nn.Module:
    """The model that every training begins with."""
    model = tiny_model(num_hidden_layers=2)
    draws_random_numbers(model)
    return model


def collecting_trainer() -> type[Any]:
    """A Trainer that collects numbers in each of the ways in which those of TRL do, and logs them."""
    from transformers import Trainer

    class CollectingTrainer(Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._stored_metrics: Any = defaultdict(lambda: defaultdict(list))
            self._texts, self._counts = {"losses": deque(maxlen=3)}, {"kept": Counter[str]()}
            self._loss_total, self._micro_batches = 0.0, 0

        def training_step(self, *arguments: Any) -> torch.Tensor:
            loss = super().training_step(*arguments)
            self._stored_metrics["train"]["loss"].append(loss.mean())
            self._texts["losses"].append(f"{loss:.6f}")
            self._counts["kept"]["all"] += 1
            self._loss_total, self._micro_batches = self._loss_total + loss.item(), self._micro_batches + 1
            return loss

        def floating_point_ops(self, inputs: object) -> int:
            return 1  # Trainer's own loop adds these up

        def log(self, logs: dict[str, Any], *arguments: Any) -> None:
            stored = {
                name: [x.item() for x in values] for name, values in self._stored_metrics.pop("train", {}).items()
            }
            collected = {"texts": list(self._texts["losses"]), "counts": dict(self._counts["kept"]), "stored": stored}
            sums = {"loss_total": self._loss_total, "micro_batches": self._micro_batches, "flos": self.current_flos}
            super().log(logs | collected | sums, *arguments)

    return CollectingTrainer


def train_with_script(
    script: Script | None,
    folder: Path,
    wrap: str = "none",
    accumulation: int = 1,
    loop: str = "trainer",
    packs: bool = False,
    steps: int = 4,
    model: nn.Module | None = None,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Trains with a Trainer; returns its logs without times, and the weights after it."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    import distca_hf
    from distca_hf.integrations.trainer.attachment import Attachment
    from distca_hf.servers.annex import RedoneSteps

    arguments = quiet_arguments(
        folder,
        max_steps=steps,
        gradient_accumulation_steps=accumulation,
        optim="adamw_torch",
        seed=SEED,
        logging_steps=2,
        **computing_arguments(wrap.removesuffix(" offloaded"), "", "LlamaDecoderLayer"),
    )
    if wrap.endswith("offloaded"):
        arguments["deepspeed"]["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        arguments["deepspeed"]["zero_force_ds_cpu_optimizer"] = False
    model, dataset = model or initial_model(), random_dataset(count=50)
    if loop == "sft":
        trainer = sft_trainer(model, dataset, max_length=None, **arguments)
    elif loop == "collecting":
        trainer = collecting_trainer()(model=model, args=TrainingArguments(**arguments), train_dataset=dataset)
    else:
        collator = {"data_collator": DataCollatorWithFlattening()} if packs else {}
        trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=dataset, **collator)
    world_size = trainer.args.world_size
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=0 if packs else CAPACITY_TOKENS // world_size, metrics="all")
    plugin.attach(trainer)
    if script is not None:
        attachment = Attachment.of(trainer)
        assert attachment is not None
        RedoneSteps(trainer, ScriptedContext(plugin, script)).install(attachment)  # type: ignore[arg-type]
    trainer.train()
    return [untimed(log) for log in trainer.state.log_history], weights_of(trainer.model)


def untimed(log: dict[str, float]) -> dict[str, float]:
    """A log without times and bytes."""
    return {name: value for name, value in log.items() if not any(part in name for part in NOT_REPEATED)}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model, or the shards of them that this rank has."""
    weights = {}
    for name, weight in model.named_parameters():
        shard = getattr(weight, "ds_tensor", weight)  # DeepSpeed's
        weights[name] = (shard.to_local() if hasattr(shard, "to_local") else shard).detach().clone()
    return weights


def assert_equal_training(
    one: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    other: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
) -> None:
    """Logs and weights are equal bit for bit."""
    assert [_without_redone(log) for log in one[0]] == [_without_redone(log) for log in other[0]]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


def _without_redone(log: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in log.items() if name not in OF_SERVERS}
