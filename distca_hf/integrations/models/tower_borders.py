"""Tower borders: lets ranks with less work compute images of others, and brings their features home.

    model(batch of this rank)
      backbone  ──▶ pixels of images that this rank computes ──▶ tower, projector ──▶ features
      ◀── features of this batch's images, which forward takes instead of pixels
      embedding, text decoder: as they are

A hook runs when the backbone begins. So all ranks, even without an image, run towers at the same point of a pass.
Ranks gather sizes with lengths of documents, and numbers of features here. Two exchanges send pixels and features, and
one sends gradients in backward. Each rank takes part, whether or not it holds or computes an image. If the work of
towers is even already, no pixels are sent, and forward computes them itself.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from distca_hf.arrays import IntArray
from distca_hf.batches.agreement import MEDIA_DTYPES
from distca_hf.batches.batch_documents import Batch, media_of, tokens_of
from distca_hf.batches.beginnings import IMAGES, VIDEOS
from distca_hf.batches.image_plans import ImageMoves, ImagePlan, ImagePlanner, ShownImages
from distca_hf.batches.images import OUTPUTS, PixelForm, check_all_hold, pixel_form
from distca_hf.comm.agreement import NO_FACTS, Facts, labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.hooks import Hook, Keywords
from distca_hf.integrations.models.image_features import (
    FeatureForm,
    Features,
    MovedFeatures,
    compute_features,
    towers_of,
)
from distca_hf.integrations.models.structure import backbone_of, names_by_position
from distca_hf.runtime.buckets import to_device
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import among_trainers
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import hidden_from_dynamo


log = get_logger(__name__)

# Where images are computed, in the log.
STAY = "images, videos and sounds are computed on the ranks where they arrived"
MOVE = "images are computed on ranks with less work"
# Why media of a class stay if its images may move.
UNKNOWN = "a batch holds sound, or images or videos in a form that cannot move"


class TowerBorders:
    """A hook on the backbone of one model. It does nothing in a pass whose images stay."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._backbone, self._class_name = backbone_of(model), type(model).__name__
        self._names, self.towers = names_by_position(self._backbone), towers_of(model)
        # Largest over mean work of ranks' towers in the latest batch whose images may move, before and after they
        # moved.
        self.imbalance = (1.0, 1.0)
        self._shown: ShownImages | None = None
        self._is_open, self._differentiates = False, False
        self._said, self._has_moved = set[str](), False
        self._handles: list[RemovableHandle] = []

    def enter(self) -> None:
        """Adds the hook. It runs after those that plan a batch."""
        if not self.towers.stay:
            self._handles = [self._backbone.register_forward_pre_hook(Hook(self._before), with_kwargs=True)]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def planner(self, rank: int) -> ImagePlanner | None:
        """Returns a planner of images for a rank, among those that hold rows; None if images stay."""
        towers = self.towers
        return None if towers.stay else ImagePlanner(towers.cost, towers.side, towers.has_frames, rank)

    def arguments(self, batch: Batch) -> Facts:
        """Returns what towers get in addition to images, and their dtype. It must be the same on all ranks."""
        if self.towers.stay:
            return NO_FACTS
        settings = sorted(self.towers.settings(batch).items())
        facts: dict[str, object] = {f"argument {name} of towers": value for name, value in settings}
        return Facts(facts | {"dtype of towers": self._cast(self._backbone)})

    def begin(self, batch: Batch, shown: ShownImages | None) -> None:
        """Opens the borders for a pass on a batch. `shown` is None if its images stay."""
        self._shown, self._is_open = shown, shown is not None
        self._differentiates = shown is not None and shown.train and torch.is_grad_enabled()
        if media_of(batch):
            self._say_once(STAY, self.towers.stay or ("" if self._is_open else UNKNOWN))

    def end(self) -> None:
        """Closes the borders: an earlier pass may have failed before its backbone."""
        self._shown, self._is_open = None, False

    def _say_once(self, how: str, why: str) -> None:
        """Logs where images are computed, once for each reason."""
        if why and how + why not in self._said:
            self._said.add(how + why)
            log.info("%s: %s: %s", self._class_name, how, why)

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Computes images. torch.compile traces this; it does nothing for a batch whose images stay."""
        if not self._is_open or kwargs.get("distca_plan") is None:
            return None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        changed = self._compute(module, kwargs["distca_plan"], given)
        return None if changed is None else (args[len(self._names) :], given | changed)

    # Outside of compiled graphs, because numbers of images and patches differ from batch to batch.
    @hidden_from_dynamo
    def _compute(self, backbone: nn.Module, plan: LivePlan, given: Keywords) -> Keywords | None:
        """Returns arguments of forward that replace pixels; None if images stay. A collective call.

        Raises:
            PackingError: ranks hold pixels of different forms; see `pixel_form`.
            UnsupportedAttentionError: the class returns other features than expected; see `_show_features`.
        """
        shown, self._shown, self._is_open = self._shown, None, False
        assert shown is not None
        if shown.even is not None:
            self.imbalance = shown.even, shown.even
            return None
        transport, where = among_trainers(plan.transport), f"micro-batch {plan.micro_batch}, images"
        planned, dtype, rank = shown.plan(), shown.dtype, transport.rank
        if (cast := self._cast(backbone)) is not None and cast.itemsize < dtype.itemsize:
            dtype = cast
        labels = labels_of(transport, Scope.ROWS)
        form = pixel_form(planned.images, dtype, labels, f"{transport.grid.name}, {where}")
        self._note(planned, transport, plan.micro_batch)
        if (moves := planned.moves) is None:
            return None
        units, device = planned.units, tokens_of(given).device
        pixels = _exchange_pixels(transport, given, form, planned.pixels, device, where)
        settings = self.towers.settings(given)
        features = compute_features(backbone, settings, pixels, units.sizes[moves.computed], form)
        of_features, tokens = _show_features(transport, features, moves, planned.rank_of, where)
        rows = tokens[units.held == rank]
        places, sent, received = moves.feature_rows(rows, tokens)
        way = RowsHome(transport, to_device(places, device), sent, received, where)
        if features is None:
            width = of_features.width * (1 + of_features.deep_layers)
            computed = torch.empty((0, width), dtype=of_features.dtype, device=device)
        else:
            computed = features.rows
        home = way.features(computed, self._differentiates)
        of_items = np.add.reduceat(rows, np.cumsum(units.of_items) - units.of_items) if len(rows) else rows
        return self._replaced(given, planned.images[rank].num_images, of_features, home, of_items.tolist())

    def _cast(self, backbone: nn.Module) -> torch.dtype | None:
        """Returns the dtype to which the class casts pixels first; None if it does not."""
        return attrgetter(self.towers.cast)(backbone) if self.towers.cast else None

    def _note(self, planned: ImagePlan, transport: Transport, number: int) -> None:
        """Notes and logs where images of a batch are computed. Raises PackingError if they stay, and only some ranks
        hold images, which others wait for."""
        self._say_once(STAY, planned.stay)
        if planned.stay:
            if planned.every_rank:
                check_all_hold(transport, [int(len(of.sizes) > 0) for of in planned.images], number)
            return
        self.imbalance = before, after = planned.imbalance
        if planned.moves is not None and not self._has_moved:
            self._has_moved = True
            shown = f"work of the busiest rank's tower {before:.2f} -> {after:.2f} times the mean"
            self._say_once(MOVE, f"{shown} (in the first uneven micro-batch)")

    def _replaced(
        self, given: Keywords, num_images: int, form: FeatureForm, rows: torch.Tensor, tokens: list[int]
    ) -> Keywords:
        """Returns arguments with the features of a batch's images and videos, and without pixels. On a rank that has
        none, features without rows let backward reach the exchange."""
        changed: Keywords = {media.values: None for media in (IMAGES, VIDEOS) if media.values in given}
        of_images, of_videos = rows.split([sum(tokens[:num_images]), sum(tokens[num_images:])])
        outputs = dict[str, MovedFeatures]()
        if num_images or (not tokens and self._differentiates):
            outputs["image"] = MovedFeatures.of(form, of_images, tokens[:num_images])
        if num_images < len(tokens):
            outputs["video"] = MovedFeatures.of(form, of_videos, tokens[num_images:])
        return changed | ({OUTPUTS: outputs} if outputs else {})


def _exchange_pixels(
    transport: Transport,
    given: Keywords,
    form: PixelForm,
    rows: tuple[IntArray, list[int], list[int]],
    device: torch.device,
    where: str,
) -> torch.Tensor:
    """Returns `[rows, ...]` pixels of the images that this rank computes. A collective call."""
    values = [x for media in (IMAGES, VIDEOS) if (x := given.get(media.values)) is not None and x.numel()]
    if not values:
        pixels = torch.empty((0, *form.room), dtype=form.dtype, device=device)
    else:
        pixels = (torch.cat(values) if len(values) > 1 else values[0]).to(form.dtype)
        missing = [size - has for size, has in zip(form.room, pixels.shape[1:], strict=True)]
        if any(missing):  # whole images get the same room on all ranks
            pixels = nn.functional.pad(pixels, (0, missing[2], 0, missing[1]))
    leaving, sent, received = rows  # rows to send, by destination; a row may leave several times
    pixels = pixels.flatten(1).index_select(0, to_device(leaving, device))
    arrived = transport.exchange(AllToAll(pixels, sent, received, f"{where}, pixels")).wait()
    return arrived.view(len(arrived), *form.room)


def _show_features(
    transport: Transport, features: Features | None, moves: ImageMoves, rank_of: IntArray, where: str
) -> tuple[FeatureForm, IntArray]:
    """Returns the form of features, and the number of rows of each unit of all ranks. A collective call. Raises
    UnsupportedAttentionError if a rank got another number of features than images, or features of another form.

    Args:
        features: what this rank has computed; None without images.
        rank_of: `[units]` rank that computes each.
    """
    values = [0] * 6
    if features is not None:
        form = features.form
        values = [len(features.tokens), len(features.rows), int(form.is_stacked), form.deep_layers, form.width]
        values += [MEDIA_DTYPES.index(form.dtype), *features.tokens]
    most = int(moves.of_ranks.max())
    values = (values + [0] * (6 + most - len(values)))[: 6 + most]
    shown = transport.gather(values, f"{where}, numbers of features").wait()
    tokens, first = np.zeros(len(rank_of), dtype=np.int64), next((row for row in shown if row[0]), shown[0])
    for rank, row in enumerate(shown):
        count, rows, units = row[0], row[1], int(moves.of_ranks[rank])
        if count != units or sum(row[6 : 6 + units]) != rows or (units and row[2:6] != first[2:6]):
            raise UnsupportedAttentionError(
                f"{transport.grid.name}, {where}: get_image_features returned {count} features, of {rows} rows in "
                f"all, for {units} images on rank {labels_of(transport, Scope.ROWS)[rank]}; expected a tensor for each"
            )
        mine = np.flatnonzero(rank_of == rank)  # none on a rank with a dummy
        tokens[mine] = row[6 : 6 + len(mine)]
    stacked, deep_layers, width, number = first[2:6]
    dtype = MEDIA_DTYPES[number]
    assert dtype is not None
    return FeatureForm(bool(stacked), deep_layers, width, dtype), tokens


@dataclass(frozen=True, eq=False)
class RowsHome:
    """Sends features home from the ranks that computed them."""

    transport: Transport
    places: torch.Tensor  # `[rows]` places of the rows that come home, in the order in which they come
    # `[ranks]` number of rows to and from each rank; further rows of this rank stay unused.
    sent: list[int]
    received: list[int]
    where: str

    def features(self, rows: torch.Tensor, differentiate: bool) -> torch.Tensor:
        """Returns `[rows of the batch, D]` from `[computed rows, D]`. A collective call. `differentiate` says whether
        gradients go back; the same on all ranks."""
        if not differentiate:
            return self.bring(rows.detach())
        anchor = rows.new_zeros((), dtype=torch.float32).requires_grad_()
        home: torch.Tensor = _Home.apply(self, anchor, rows)
        return home

    def bring(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends computed rows home, and returns what comes in the order of the batch."""
        asked = AllToAll(rows[: sum(self.sent)].contiguous(), self.sent, self.received, f"{self.where}, home")
        arrived = self.transport.exchange(asked).wait()
        return torch.empty_like(arrived).index_copy_(0, self.places, arrived)

    def take_back(self, gradients: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Sends gradients of the batch's rows to where these were computed; unused rows get zeros."""
        leaving = gradients.index_select(0, self.places)
        where = f"{self.where}, backward"
        arrived = self.transport.exchange(AllToAll(leaving, self.received, self.sent, where)).wait()
        if len(arrived) == num_rows:
            return arrived
        return torch.cat([arrived, arrived.new_zeros((num_rows - len(arrived), *arrived.shape[1:]))])


class _Home(torch.autograd.Function):
    """Sends features home; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, home: RowsHome, anchor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Brings features home. The anchor requires a gradient, so backward runs on ranks that computed nothing."""
        ctx.home, ctx.num_rows = home, len(rows)
        return home.bring(rows)

    @staticmethod
    @hidden_from_dynamo
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[Any, ...]:
        """Sends gradients to the ranks that computed the features."""
        return None, None, ctx.home.take_back(gradients, ctx.num_rows)
