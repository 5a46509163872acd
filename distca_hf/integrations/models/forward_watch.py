"""Forward watch: checks a model when it is enabled, and watches each of its forward passes from then on.

Hooks find or make the plan of every batch, and check its pass. Batches of `plugin.dataloader` bring their plan along.
For any other training batch, ranks agree here. Its plan is made ahead, or when the decoder begins.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import Batch, cache_of, check_mask_numbers, ids_checked, tokens_of
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.known_batch import TOKENS, completed
from distca_hf.batches.preview import RunReport
from distca_hf.batches.read_documents import DocumentReader, ReadDocuments, Reading, fill_empty, reading_of
from distca_hf.batches.reported_steps import ReportedSteps
from distca_hf.batches.square_masks import is_square, numbered_rows, tokens_in
from distca_hf.batches.written_batches import WrittenBatches, state_of
from distca_hf.comm.agreement import Announced, Occasion
from distca_hf.comm.averaging import check_averaging
from distca_hf.comm.grid import Grid
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.attention import LAYER_SETTINGS, LayerSettings
from distca_hf.integrations.checkpointing import RecomputedLayers
from distca_hf.integrations.mask import WATCH
from distca_hf.integrations.models.check import PositionLimits, check_model
from distca_hf.integrations.models.counted_rows import CountedRows, temper_by_position, temper_by_row
from distca_hf.integrations.models.decoder_borders import DecoderBorders
from distca_hf.integrations.models.decoder_layers import (
    head_groups_of,
    layer_masks_of,
    masks_of_layers,
    token_bytes_of,
    verdict_in_short,
)
from distca_hf.integrations.models.distributed_check import check_divided_heads, follow_mesh
from distca_hf.integrations.models.forward_check import ForwardCheck
from distca_hf.integrations.models.head_tiles import TiledAttention
from distca_hf.integrations.models.hooks import BackboneCalls, HiddenHook
from distca_hf.integrations.models.mixer_calls import MixerWatch
from distca_hf.integrations.models.placed_loss import PlacedLoss, label_count
from distca_hf.integrations.models.planner import predictable, step_flops, vocabulary_tokens_of
from distca_hf.integrations.models.sharing import Sharing, placeholders_of
from distca_hf.integrations.models.structure import (
    attend_with_distca,
    attention_layers,
    backbone_of,
    names_by_position,
    takes_use_cache,
    transformers_model,
    without_kinds_of_text,
)
from distca_hf.integrations.models.tiles import TiledMlp, tile, tiled_mlps, untile
from distca_hf.integrations.models.tower_borders import TowerBorders
from distca_hf.integrations.models.weights_check import is_due
from distca_hf.parallel_context import Members, ParallelContext
from distca_hf.runtime.forward_pass import PassFacts
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger


log = get_logger(__name__)


def watch_of(model: nn.Module | None) -> "ForwardWatch | None":
    """Returns the watch of a model; None if it is not enabled."""
    return getattr(model, WATCH, None)


class ForwardWatch:
    """Watches the forward passes of a model, through hooks on its outermost module."""

    def __init__(self, root: nn.Module, context: ParallelContext) -> None:
        self.root, self.context = root, context
        self.planner: GivenPlanner | None = None  # plans given batches; None before the first one
        inner = transformers_model(root)
        self.flops, self.report = step_flops(root), RunReport(context)
        # Dtype of attention in the latest batch with a plan; None before the first one.
        self.attention_dtype: torch.dtype | None = None
        self._class_name, self._written = type(inner).__name__, WrittenBatches()
        self._is_running, self._logged_cache, self._passes_with_gradients = False, False, 0
        self._read: ReadDocuments | None = None
        self._check = ForwardCheck(root, context)
        self.position_limits = self._check.position_limits
        self._counted, self.towers = CountedRows(inner), TowerBorders(inner)
        self._borders = DecoderBorders(inner, self.position_limits.has_table, self._counted, self._check.check_calls)
        self.loss = PlacedLoss(inner, root)
        self._at_backbone = BackboneCalls(inner, root, self._before, self._after, self.is_running)
        self._names, self._accepts_use_cache = names_by_position(root), takes_use_cache(inner)
        self._mixers = MixerWatch(inner, self._accepts_use_cache)
        # Images may stand in text as tokens that have no embedding.
        self._vocabulary_tokens = None if self._check.towers else vocabulary_tokens_of(root)
        of_model = not self._mixers.need_whole, self._borders.is_multimodal, self._vocabulary_tokens
        tensor_ranks = context.members.grid.shape[2]
        self._head_groups = head_groups_of(root, tensor_ranks, context.attention_kv_heads)
        self._token_bytes, self._layer_masks = token_bytes_of(root), layer_masks_of(root)
        window = min((mask.window_tokens for mask, _ in self._layer_masks if mask.window_tokens), default=None)
        of_batches = tensor_ranks > 1, window, context.shared_prefix_tokens
        of_images = placeholders_of(root), not self.towers.towers.stay, self._borders.takes_features
        self.reader = DocumentReader(self._mixers.lengths, *of_model, *of_batches, *of_images)
        self._sharing = Sharing(root, context, self._mixers)
        self._recomputed = RecomputedLayers(self._check.call_masks)
        self._mlps = tiled_mlps(inner, context.mlp_tokens) if context.mlp_tokens else []
        reported = context.report_every_steps, context.trace_file, self._token_bytes, self._layer_masks
        self.reported_steps = ReportedSteps(*reported)
        self._facts: PassFacts = {}
        self._handles = list[RemovableHandle]()

    def __deepcopy__(self, memo: dict[int, object]) -> "ForwardWatch":
        """Returns itself: a copied model keeps the watch of the original, which notices the copy."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickles as None: a model that is stored, or sent to another process, is not enabled there."""
        return type(None), ()

    def enter(self) -> None:
        """Adds the hooks, and begins to watch."""
        for part in {self.root, transformers_model(self.root)}:
            setattr(part, WATCH, self)
        self._handles = [
            self.root.register_forward_pre_hook(HiddenHook(self._before), with_kwargs=True),
            self.root.register_forward_hook(HiddenHook(self._after), with_kwargs=True),
        ]
        self._handles += temper_by_position(transformers_model(self.root))
        self._at_backbone.enter()  # before hooks that move rows
        for part in (self._mixers, self.towers, self._borders):
            part.enter()

    def leave(self, modules: Collection[nn.Module]) -> None:
        """Removes the hooks from modules of the model, or of a copy with copies of them; restores their functions."""
        is_original = transformers_model(self.root) in modules
        for module in {*modules, self.root} if is_original else modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for handle in self._handles:
                    hooks.pop(handle.id, None)
            if vars(module).get(WATCH) is self:
                delattr(module, WATCH)
            self._mixers.leave(module)
            temper_by_row(transformers_model(module))
            untile(module.modules())
            self._at_backbone.leave(backbone_of(transformers_model(module)))
        if is_original:
            for handle in self._handles:
                handle.remove()
            for of_original in (self._borders, self.towers, self._recomputed):
                of_original.leave()

    def is_up_to_date(self) -> bool:
        """Returns whether the masks of layers are unchanged since the model was enabled."""
        return self._check.masks == masks_of_layers(self.root)

    def forget_passes(self) -> None:
        """Makes the next pass count as the first one: layers may then have changed."""
        self._check.forget_passes()
        self._passes_with_gradients = 0

    def is_running(self) -> bool:
        return self._is_running

    def bookmark_given(self) -> Callable[[], None]:
        """Returns a function that forgets the plans of all given batches since this call, to plan them again."""
        return partial(setattr, self, "planner", None) if self.planner is None else self.planner.bookmark()

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if not any(isinstance(given.get(name), torch.Tensor) for name in TOKENS):
            return None  # a method runs instead of forward
        self._is_running = True
        tile(self._mlps, TiledMlp, self.context.mlp_tokens)
        tile(self._check.tiles, TiledAttention, self.context.attention_kv_heads)
        self._borders.end()
        self.towers.end()
        self.loss.begin(None)
        self._counted.begin({}, None, trains=False)
        batch = dict(without_kinds_of_text(given)) if self._check.drops_kinds else given
        batch = completed(batch, self._class_name)
        plan, args = batch.get("distca_plan"), args[len(self._names) :]
        is_given, trains = plan is None, module.training and torch.is_grad_enabled()
        members = self.context.members
        if trains and self._check.tiles:  # a cache would have all heads
            batch = batch | self._no_cache(batch)
        if is_given:
            if self._attends_locally(batch, members, trains, evaluates=not module.training):
                if module is self.root:
                    self._check.check_implementation(trains)
                if trains:
                    self._recomputed.prepare(module, self.context, has_peers=False)
                check_mask_numbers(numbered_rows(batch, self.reader.window_tokens))
                batch = batch | tokens_in(batch)
                with ids_checked(batch, self._vocabulary_tokens, waits=False):
                    batch = batch | self._mixers.keywords_of_local_pass(batch, trains)
                return None if batch.keys() == given.keys() and not is_square(given) else (args, batch)
            plan = self._plan_given(module, batch, trains)
            batch = batch | tokens_in(batch) | fill_empty(batch)
        if plan is None:
            self._borders.end()
            return args, batch | self._mixers.keywords_of_local_pass(batch, trains)
        if not isinstance(plan, LivePlan):
            raise PlanError(f"distca_plan is a {type(plan).__name__}, not a loader's plan; pass batches on unchanged")
        if not is_given:
            with Announced(plan.transport, plan.micro_batch, Occasion.ATTEND):
                self._check.check_model(module)
                self._prepare(module, plan.config, plan.transport.world_size)
        self._check.check_plan(plan)
        self.context.check_shares(members, plan.transport, plan.micro_batch)
        self._check.check_placed(batch, plan)
        plan = plan.for_pass()
        batch |= self._mixers.with_plan(batch, plan)
        self._begin(module, plan, members.grid, trains)
        counted = self._counted.begin(batch, plan, trains, tokens_of(batch).shape[1])
        batch = {**batch, "distca_plan": plan, **label_count(batch, plan), **self._no_cache(batch), **counted}
        return args, self.loss.place(batch, plan, self._borders) if self.loss.is_placed else batch

    def _prepare(self, module: nn.Module, config: DistCAConfig, world_size: int) -> None:
        """Prepares checkpointing, and the facts of a pass."""
        rows_wait = self._recomputed.prepare(module, self.context, has_peers=world_size > 1)
        self._passes_with_gradients += torch.is_grad_enabled()
        is_looked_at = torch.is_grad_enabled() and is_due(self._passes_with_gradients)
        if is_looked_at:  # the model may be wrapped at any time
            check_averaging(self.root, self.context.members)
            check_divided_heads(self.root, self.context)
        of_pass = {
            "gradients": torch.is_grad_enabled(),
            "training": module.training,
            "attention calls that are recomputed": sum(map(len, self._recomputed.regions)),
            "checkpointed modules that attend again": self._recomputed.again,
            "masks of their layers": self._recomputed.regions,
            "received rows wait for recomputation": rows_wait,
        }

        def facts() -> dict[str, object]:
            return {**config.shared_settings(), **of_pass, **self._check.facts(again=is_looked_at)}

        # Otherwise it is called at the first attention call, when the device is busy.
        self._facts = facts() if is_looked_at else facts

    def _begin(self, module: nn.Module, plan: LivePlan, grid: Grid, trains: bool) -> None:
        """Begins a pass for which `_prepare` was called."""
        calls, parts = self._check.num_calls, self._recomputed.parts
        layers = self._check.pass_layers(self._recomputed.regions)
        predict = partial(predictable, self.root, self.flops)
        trace = self.reported_steps.begin(plan, trains, lambda: predict(parts(module), grid))
        of_check = self._check.calls_before, trace, self._check.shared_state(grid)
        plan.begin_forward_pass(calls, self._facts, layers, *of_check)

    def _no_cache(self, batch: Batch) -> dict[str, bool]:
        """Returns `use_cache=False`, unless the caller chose a value: a cache would keep the keys of all layers."""
        if not self._accepts_use_cache or batch.get("use_cache") is not None:
            return {}
        if not self._logged_cache:
            self._logged_cache = True
            if getattr(transformers_model(self.root).config, "use_cache", False):
                log.debug("%s: config.use_cache=True is not followed for batches with a plan", self._class_name)
        return {"use_cache": False}

    def _attends_locally(self, batch: Batch, members: Members, trains: bool, evaluates: bool) -> bool:
        """Returns whether this rank attends to a batch without other ranks: if it is a single one, and documents share
        nothing; with a cache; or without training (evaluation, a teacher), unless `evaluate` is "distca"."""
        evaluates = evaluates and self.context.evaluate == "distca"
        # Tensor ranks of one data rank have nothing to exchange, but agree.
        one_rank = len(members.compute_ranks if trains else members.token_ranks) == len(members.layer_ranks) == 1
        local = not (trains or evaluates) or cache_of(batch) is not None
        if one_rank and not local:
            of_pass = self.reader, self._counted.has_noise(), self.loss.begin(batch)[0]
            read = self._read = self._sharing.found_on_one_rank(batch, *of_pass)
            return read is None or self._borders.counts_padding(read.padded)
        return one_rank or local

    def _plan_given(self, module: nn.Module, batch: Batch, trains: bool) -> LivePlan | None:
        """Returns the plan of a given batch; None if it stays padded on some rank. All ranks decide the same."""
        planner = self._planner_on(tokens_of(batch).device)
        prepare = partial(self._prepare, module, self.context, planner.world_size)
        with planner.announced():
            self._check.check_model(module)
            of_towers = self._check.images_wait(module.training), self._check.gradients_before_decoder()
            returning, reason = self.loss.begin(batch if trains and not self._mixers.need_whole else None)
            of_batch = batch, module.training, self._counted.has_noise
            own = self._sharing.why_unshared(*of_batch), self.towers.arguments(batch)
            if looks := is_due(self._passes_with_gradients + 1):  # at the model, and may refuse it
                prepare()

        def meanwhile(planned: Planned | None) -> None:
            if not looks:
                prepare()
            if returning != Returning.STATES:
                self.loss.prepare(batch, planned, self._borders)

        plan = planner.plan(batch, module.training, *of_towers, returning, meanwhile, *own)
        self.towers.begin(batch, planner.images)
        if plan is not None:
            self.loss.decide(planner.returning, planner.needing, reason)
        return plan

    def _planner_on(self, device: torch.device) -> GivenPlanner:
        """Returns the planner of given batches; makes it on the first call."""
        if self.planner is None:
            transport = self.context.training_transport(device)
            of_model = self._head_groups, self._token_bytes, self._layer_masks
            of_rows = self._read_and_open, not self._mixers.need_whole, self.flops
            more = self._mixers.halo_tokens, self.towers.planner(transport.rank)
            self.planner = GivenPlanner(self.context, transport, *of_model, *of_rows, *more)
        return self.planner

    def begin_step(self, readings: Sequence[Reading | None], step_batches: int, device: torch.device) -> None:
        """Plans ahead the batches that are known when a step begins; see `GivenPlanner.begin_step`."""
        self._sharing.following = readings
        if len(self.context.members.compute_ranks) > 1 or self._sharing.has_paid:
            self._planner_on(device).begin_step(readings, step_batches, device)

    def _read_and_open(self, batch: Batch) -> ReadDocuments:
        """Returns the documents of a batch, and opens the borders of the decoder for its pass."""
        if batch.get("use_cache") and not self._mixers.need_whole:
            raise UnsupportedAttentionError(
                f"{self._class_name} got use_cache=True, and rows are placed inside the model: the cache would hold "
                "keys of other ranks' rows. Leave use_cache out; or, to go on from the cache, give one on all ranks "
                "(past_key_values=DynamicCache()): then every rank attends to its own batch"
            )
        (read, self._read), state = (self._read, None), state_of(batch)
        read = read or ((reading := reading_of(batch, state)) and reading.documents) or self.reader.read(batch)
        self._written.expect(batch, state, read.checksums)
        self._borders.begin(read.padded, read.num_image_tokens, batch)
        return read

    def _after(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object) -> object:
        """Checks the attention calls of the pass, and compares them over ranks."""
        self._is_running = False
        self._borders.end()
        plan = kwargs.get("distca_plan")
        if plan is not None:
            self._check.check_calls(plan)
            self.attention_dtype = plan.attention_dtype
            trains = module.training and torch.is_grad_enabled()
            plan.end_forward_pass(trains)
            self._written.check_later(plan)
            if self.planner is not None:
                self.planner.end_pass()
            if trains and not self.report.written:
                (layers, attention), flops = self._recomputed.parts(module), self.flops
                cost = None if flops is None else flops.cost(recomputes_layers=layers, recomputes_attention=attention)
                self.report.begin(plan, cost, flops)
        elif not module.training:
            self._check.watch_evaluation(output, len(self.context.members.compute_ranks))
        self._sharing.read_ahead()  # the device is busy now
        self._mixers.check_ran()
        return self.loss.end(output if self.loss.is_placed else self._counted.end(output))


def enable(model: nn.Module, plugin: ParallelContext, longest_document_tokens: int | None = None) -> nn.Module:
    """Checks a model and watches its forward passes. Call it before wrapping the model (DDP, FSDP,
    `accelerator.prepare`).

    The model trains on any packed or padded batch, with any loss: rows are placed inside the model to give ranks equal
    work. Its text then attends with distca, whatever attention it was loaded with; towers keep their own. With batches
    of `plugin.dataloader`, `model(**batch)` also returns a loss whose mean over ranks is the mean over all labels of
    the global micro-batch. For that, this fills in `num_items_in_batch`, unless the caller passes one (for
    accumulation, say).

    Args:
        model: a Transformers model, or a PEFT model around one.
        plugin: settings, and the transport between ranks. A model that is enabled again follows the new plugin.
        longest_document_tokens: longest document that the model will see. It decides whether some rotary embeddings
            are accepted. Default: data ranks x `tokens_per_rank`; if that is unset, what the model's positions reach.

    Returns:
        The same model.

    Raises:
        UnsupportedAttentionError: the model would compute something other than its own attention; gives all reasons.
        ConfigError: the model is divided between ranks in a way that cannot train, or differently from the plugin's
            earlier loaders and models.
    """
    follow_mesh(model, plugin)
    longest = longest_document_tokens or plugin.tokens_per_rank * len(plugin.members.token_ranks)
    limits = PositionLimits(transformers_model(model))
    longest = longest or limits.longest_tokens or limits.trained_tokens or sys.maxsize
    check_model(model, longest, plugin.kernel, plugin.device, given_batches=not plugin.tokens_per_rank)
    inner = transformers_model(model)
    watch = watch_of(inner)
    if watch is None or watch.root is not model or watch.context is not plugin or not watch.is_up_to_date():
        if watch is not None:
            log.info("%s was enabled before; from now on it follows this plugin", type(inner).__name__)
            watch.leave({model, inner})
        watch = ForwardWatch(model, plugin)
        watch.enter()
        log.info("%s", verdict_in_short(inner))
    attend_with_distca(inner)
    watch.forget_passes()
    for number, layer in enumerate(attention_layers(inner).values()):
        settings = plugin.kernel, plugin.deterministic, torch.tensor(number, device="cpu"), watch.is_running
        setattr(layer, LAYER_SETTINGS, LayerSettings(*settings))
    return model
