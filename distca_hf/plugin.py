"""The plugin, which users create: settings, and the functions that follow them.

Modules that need Transformers are imported on demand: a wrong setting is refused seconds sooner.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, overload

import torch

from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import StepShape
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.comm.rollcall import show_errors_once
from distca_hf.config import unknown_environment_settings
from distca_hf.data.streams import Stream, is_stream
from distca_hf.errors import ConfigError
from distca_hf.launched import launched_servers
from distca_hf.parallel_context import Annex, ParallelContext, numbered
from distca_hf.settings import described
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

log = get_logger(__name__)


@described
class DistCAPlugin(ParallelContext):
    """Core attention disaggregation for a training run.

    ```python
    DistCAPlugin().attach(trainer)                    # any Trainer, with its own batches
    distca_hf.enable(model, DistCAPlugin())           # any other loop, with its own batches
    plugin = DistCAPlugin(tokens_per_rank=65536)      # placed batches: for attach, or for enable and
    loader = plugin.dataloader(dataset, seed=0)
    ```
    """

    def __new__(cls, *unnamed: object, **settings: object) -> Self:
        show_errors_once()  # errors of wrong settings, too
        return super().__new__(cls, *unnamed, **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, meant in unknown_environment_settings().items():
            hint = f" (did you mean {meant}?)" if meant else ""
            log.warning("ignoring environment variable %s: unknown setting of distca_hf%s", name, hint)

    @cached_property
    def annex(self) -> Annex:
        """What attention servers add, if the job was launched with some."""
        if not sum(launched_servers()):
            return Annex(self)
        from distca_hf.servers.annex import ServersAnnex

        return ServersAnnex(self)

    @overload
    def dataloader(
        self,
        dataset: Stream,
        seed: int = 0,
        shuffle: bool = True,
        device: torch.device | str | None = None,
        prefetch: int | None = None,
        model: torch.nn.Module | None = None,
        micro_steps: int = 1,
        unlearnt_token: int | None = None,
    ) -> StreamLoader: ...

    @overload
    def dataloader(
        self,
        dataset: "Dataset",
        seed: int = 0,
        shuffle: bool = True,
        device: torch.device | str | None = None,
        prefetch: int | None = None,
        model: torch.nn.Module | None = None,
        micro_steps: int = 1,
        unlearnt_token: int | None = None,
        pipeline: StepShape | None = None,
        num_workers: int = 0,
    ) -> PlacedLoader: ...

    def dataloader(
        self,
        dataset: "Dataset | Stream",
        seed: int = 0,
        shuffle: bool = True,
        device: torch.device | str | None = None,
        prefetch: int | None = None,
        model: torch.nn.Module | None = None,
        micro_steps: int = 1,
        unlearnt_token: int | None = None,
        pipeline: StepShape | None = None,
        num_workers: int = 0,
    ) -> PlacedLoader | StreamLoader:
        """Returns placed micro-batches of a tokenised dataset, for this rank. A collective call: every rank makes it.

        Args:
            dataset: map-style `datasets.Dataset` with `input_ids`; see `data.documents.DocumentSource` for other
                columns. Or a stream, see `StreamLoader`.
            seed: decides the order of documents, with the epoch's number.
            shuffle: False keeps the dataset's order.
            device: for the batches; by default the one of the process group. "cuda" is the current GPU.
            prefetch: micro-batches to prepare ahead; by default the setting of this name.
            model: the model that batches are for. Further numbers per token that its forward pass takes
                (`token_type_ids`) are then placed with their tokens, and tokens that it does not know are refused. The
                heads of very long documents may be divided, too, and layers with sliding windows are balanced as well.
                States of its layers travel with cut documents. If one of them cannot travel, documents stay whole, and
                none may be longer than `tokens_per_rank`.
            micro_steps: micro-batches of an optimizer step (gradient accumulation): within a step, long documents
                train together, and fewer keys and values move.
            unlearnt_token: a token that is never a label, for example a pad token that also ends documents.
            pipeline: stages that these batches pass, a `distca_hf.Pipeline`; each has as many data ranks as this one.
                Then `micro_steps` is the number of micro-batches that a schedule runs in one optimizer step. Documents
                stay in their step, and are divided by attention work such that stages hardly wait. Every epoch has
                whole steps, and every batch `tokens_per_rank` rows. All stages give the same `model`: the whole one,
                before it is divided.
            num_workers: processes that draw rows, if the dataset has a transform (`set_transform`); with 0 the loop
                draws each micro-batch on demand.

        Raises:
            ConfigError: the plugin has no `tokens_per_rank`; several processes were launched, but no process group is
                initialised; the model is divided between ranks in a way that cannot train, or that differs from the
                present grid; or the pipeline cannot run this many micro-batches, has more parts than the model has
                layers, or other stages than the mesh.
            PackingError: the dataset cannot be packed; names row and numbers.
        """
        from distca_hf.integrations.models.decoder_layers import num_layers_of
        from distca_hf.integrations.models.distributed_check import follow_mesh
        from distca_hf.integrations.models.planner import planner_for, reading_for

        if model is not None:
            follow_mesh(model, self)
        target = self.device if device is None else numbered(device)
        if pipeline is not None:
            pipeline.check_grid(self.members.grid)
            pipeline.check(micro_steps, None if model is None else num_layers_of(model))
        planner = planner_for(model, self, self.annex.extra_ranks, pipeline)
        reading = reading_for(model, unlearnt_token, in_stages=pipeline is not None)
        transport = self.training_transport(target)
        if is_stream(dataset):
            if num_workers:
                raise ConfigError(
                    f"num_workers={num_workers} draw rows of a transform, and a stream has none; to read a stream in "
                    "worker processes, give each rank a StatefulDataLoader of torchdata for its own part"
                )
            return StreamLoader(
                *(dataset, planner, transport, self.thread_transport(), target),
                seed=seed,
                shuffle=shuffle,
                prefetch=prefetch,
                micro_steps=micro_steps,
                reading=reading,
            )
        loader = PlacedLoader(
            *(dataset, planner, transport, target),
            seed=seed,
            shuffle=shuffle,
            prefetch=prefetch,
            micro_steps=micro_steps,
            reading=reading,
            num_workers=num_workers,
        )
        loader.log_masks()
        return loader

    def attempts(
        self, model: torch.nn.Module, batches: Sequence[Mapping[str, Any]]
    ) -> Iterator[AbstractContextManager[object]]:
        """Yields attempts at an optimizer step in your own loop: one, and another for as long as an attention server
        was lost in the last.

        ```python
        for attempt in plugin.attempts(model, batches):
            with attempt:                                 # all sums of the step begin in here
                for batch in batches:
                    model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ```

        Before another attempt, gradients are discarded and random states restored. Collective: every rank makes the
        same attempts.

        Args:
            model: as the loop calls it, wrapped or not; must have no gradients of earlier steps.
            batches: all batches of the step on this rank.

        Raises:
            ConfigError: the model was not enabled, or is an engine of DeepSpeed; or an attempt was not entered.
            PeerLostError: servers were lost in four attempts.
        """
        return self.annex.attempts(model, batches)

    def attach(self, trainer: "Trainer") -> None:
        """Balances a Trainer: checks, metrics, and rows that are placed inside the model. Call it before
        `trainer.train()`.

        Dataset, sampler, collator, batch size and loss stay the Trainer's. From then on the model attends with distca,
        whatever attention it was loaded with. With `tokens_per_rank` the Trainer gets placed batches instead, as from
        `dataloader`.

        Raises:
            ConfigError: it is not a Trainer, or is set up in a way that would make the loss wrong.
            UnsupportedAttentionError: the model cannot run on distca.
        """
        from transformers import Trainer  # slow to import, and other loops do not need it

        from distca_hf.integrations.trainer.attach import attach

        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"attach takes a Trainer, not {type(trainer).__name__}; in your own loop call "
                "distca_hf.enable(model, plugin)"
            )
        attach(trainer, self)

    def detach(self, trainer: "Trainer") -> None:
        """Undoes `attach`: the Trainer makes its own batches again, and its model attends on each rank by itself.

        Methods, arguments, callbacks, and the model's hooks and settings are as they were before `attach`. Weights,
        optimizer and state stay as training left them.

        Raises:
            ConfigError: nothing is attached; the Trainer is training; or a method was replaced after `attach`.
        """
        from distca_hf.integrations.trainer.attach import detach

        detach(trainer)

    def on_init_end(self, *args: object, **kwargs: object) -> None:
        """Refuses to be a Trainer's callback, which is asked for this first."""
        raise ConfigError(
            "a DistCAPlugin is not a callback: call plugin.attach(trainer), or give "
            "callbacks=[distca_hf.DistCACallback(plugin)]"
        )
