"""Decoder borders: rows move in at the beginning of a model's text decoder, and home at its end.

    model(batch of this rank, [B, L])
      decoder  ──▶ tokens placed on this rank, [1, T] ──▶ embedding, layers, norm ──▶ hidden states [1, T, D]
      ◀── rows of its own batch, [B, L, D], zeros in padding
    towers, head, loss, pooling: as they are

Sampler, collator, images, losses and metrics see only the rows of their own batch. If batches are even, nothing is
sent: padding is only removed and restored. A pass that returns no hidden states has its first border at the root, and
nothing moves at the decoder (`placed_loss`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.read_documents import PaddedRows
from distca_hf.comm.agreement import Announced, Occasion
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.mask import RowMask
from distca_hf.integrations.models.counted_rows import CountedRows, scales_rotated, tempers_queries
from distca_hf.integrations.models.decoder_columns import (
    APART,
    DEEP,
    DEEP_MASK,
    NUMBERS,
    REPLACED_BY_PLAN,
    Columns,
    PackedColumns,
)
from distca_hf.integrations.models.hooks import Hook, unknown_class, unknown_hook
from distca_hf.integrations.models.structure import attention_layers, backbone_of, names_by_position, text_decoder
from distca_hf.integrations.models.weights_check import is_due
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import among_trainers
from distca_hf.runtime.row_moves import DeviceRowMoves, PassRows
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import hidden_from_dynamo, register_first_hook


log = get_logger(__name__)

# Name of the length of each token's original row, which is a column only in transit.
ROW_TOKENS = "distca_row_tokens"
# Number of forms of batches whose columns are remembered. Few occur; each new one costs one more agreement.
REMEMBERED_FORMS = 64


class DecoderBorders:
    """Hooks around the text decoder of a model. They do nothing in a pass whose rows do not move."""

    def __init__(
        self,
        model: PreTrainedModel,
        has_position_table: bool,
        counted: CountedRows,  # gets the lengths of tokens' original rows
        # Checks the attention calls of a pass; called before results move home.
        check_calls: Callable[[LivePlan], None],
    ) -> None:
        decoder = text_decoder(model)
        self._decoder = backbone_of(model) if decoder is model else decoder
        # Whether the decoder is part of a model with towers, and may get features of images.
        self.is_multimodal = decoder is not model
        self._names = names_by_position(self._decoder)
        self.takes_features = DEEP in self._names  # whether it also gets features of images for its first layers
        self._class_name, self._counts = type(model).__name__, "looks positions up in a table"
        if not has_position_table:
            layers = attention_layers(model).values()
            scales = "scales queries and keys after their rotation" if any(map(scales_rotated, layers)) else ""
            self._counts = "tempers queries by position" if any(map(tempers_queries, layers)) else scales
        self._counted, self._check_calls = counted, check_calls
        self._handles: list[RemovableHandle] = []
        # Names of the decoder's inputs and of the batch: only what the model made besides may be a vector.
        self._is_open, self._image_tokens, self._known = False, 0, frozenset(self._names)
        self._rows: PassRows | None = None
        self._packed: PackedColumns | None = None
        self._columns: dict[tuple[int, ...], Columns] = {}
        self._crossings, self._has_warned = 0, False

    def enter(self) -> None:
        """Adds the hooks. If the decoder is the whole model, they run after the hook that plans its batch, and before
        the one that ends its pass."""
        self._handles = [
            self._decoder.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            register_first_hook(self._decoder, Hook(self._after)),
        ]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def counts_padding(self, padded: PaddedRows | None) -> bool:
        """Returns whether rows begin with padding, which the model's positions would count."""
        counts = padded is not None and padded.is_left_padded and not padded.has_own_positions
        return bool(self._counts) and counts

    def begin(self, padded: PaddedRows | None, image_tokens: int = 0, of_caller: Iterable[str] = ()) -> None:
        """Opens the borders for a pass on a given batch. Raises UnsupportedAttentionError if rows begin with padding,
        which the model's positions would count.

        Args:
            padded: places of the tokens, if rows are padded.
            image_tokens: number of tokens that may be of images, also in padding.
            of_caller: names of what the model was given.
        """
        self._is_open, self._image_tokens, self._known = True, image_tokens, frozenset((*self._names, *of_caller))
        if self.counts_padding(padded):
            raise UnsupportedAttentionError(
                f"{self._class_name} {self._counts}, and rows are padded on the left: Transformers would count their "
                "padding, too. Pad on the right (tokenizer.padding_side), or give position_ids "
                "that begin at 0 in every row"
            )

    def end(self) -> None:
        """Closes the borders: a pass has ended, or its batch stays as it is."""
        self._is_open, self._rows, self._packed = False, None, None

    def take_rows(self) -> PassRows | None:
        """Closes the borders, and returns the rows that moved in at the root; None if they stayed."""
        rows = self._rows
        self.end()
        return rows

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        """Moves rows in. torch.compile traces this; it does nothing for a batch that is already placed."""
        if not self._is_open or kwargs.get("distca_plan") is None:
            return None
        placed = self._move_in(kwargs["distca_plan"], dict(zip(self._names, args, strict=False)) | kwargs)
        return None if placed is None else (args[len(self._names) :], placed)

    def _after(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object) -> object:
        """Moves results home."""
        plan = kwargs.get("distca_plan")
        return self._move_home(plan, output) if self._is_open and plan is not None else None

    def pack(self, moves: DeviceRowMoves, batch: Batch) -> None:
        """Packs the columns of a batch for `move_in`, while the host waits for other ranks."""
        tokens = tokens_of(batch)
        if tokens.numel() == moves.positions.shape[0]:  # a rank without tokens gets a row of padding
            self._packed = PackedColumns.of(moves, batch, tokens.shape, self._moving(batch, tokens))

    def move_in(self, plan: LivePlan, moves: DeviceRowMoves, batch: Batch) -> dict[str, Any]:
        """Returns the inputs of this rank's layers. A collective call. Raises the errors of `_columns_of`."""
        given, tokens = {**batch}, tokens_of(batch)
        batch_size, length = tokens.shape
        if moves.on_host.crosses:
            self._warn_of_readers()
        rows = PassRows(
            moves,
            among_trainers(plan.transport),
            (batch_size, length),
            f"micro-batch {plan.micro_batch}",
            plan.forward_pass.begin_backward_of_rows,
        )
        self._rows, packed, self._packed = rows, self._packed, None
        if packed is None or self._counted.is_noisy or not packed.are_of(moves, given):
            packed = PackedColumns.of(moves, given, tokens.shape, self._moving(given, tokens))
        columns = self._columns_of(plan, packed, given, crosses=moves.on_host.crosses)
        moving = packed.with_positions(columns.position_rows)
        placed = dict(zip(moving, rows.move_in(list(moving.values()), columns.differentiate), strict=True))
        for name in (name for name in given if name in REPLACED_BY_PLAN):
            given[name] = None
        widths = [columns.position_rows, *[1] * len(packed.whole)]
        at, *others = placed.pop(NUMBERS).T.contiguous().split_with_sizes(widths)
        given["position_ids"] = at if columns.position_rows == 1 else at[:, None]
        given |= zip(packed.whole, others, strict=True)
        if (row_tokens := given.pop(ROW_TOKENS, None)) is not None:
            self._counted.place(row_tokens[0])
        if columns.deep_layers:
            deep, is_image = rows.move_images_in(_dense_deep(given, columns.deep_layers), columns.differentiate)
            given |= {DEEP: list(deep.unbind(1)), DEEP_MASK: is_image[None]}
        return given | {name: value[None] for name, value in placed.items()}

    # Outside of compiled graphs, because the number of tokens differs from batch to batch. Callers that no compiler
    # traces do without, which is quicker.
    @hidden_from_dynamo
    def _move_in(self, plan: LivePlan, batch: Batch) -> dict[str, Any] | None:
        """Returns the inputs of this rank's layers; None if the rows of a batch stay as they are."""
        moves = plan.planned.rows_to_move
        return None if moves is None else self.move_in(plan, moves, batch)

    @hidden_from_dynamo
    def _move_home(self, plan: LivePlan, output: object) -> object:
        rows, self._rows = self._rows, None
        if rows is None:
            return None
        self._check_calls(plan)  # if a rank left out a layer, its rows would arrive in that layer of others
        found = {id(value): value for value in _of_tokens(output, rows.num_placed)}
        return _replaced(output, dict(zip(found, rows.move_home(list(found.values())), strict=True)))

    def _moving(self, given: Batch, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns entries with a value per token, without positions and features of images; sorted by name, the same
        order on all ranks."""
        moving = {
            name: value
            for name, value in sorted(given.items())
            if name not in APART and isinstance(value, torch.Tensor) and value.shape[:2] == tokens.shape
            if name in self._known or not _is_vector(value)
        }
        if self._counted.is_noisy and "input_ids" in moving:  # embeddings are looked up inside
            moving[ROW_TOKENS] = tokens.new_full(tokens.shape, tokens.shape[1], dtype=torch.int64)
        return moving

    def _columns_of(self, plan: LivePlan, packed: PackedColumns, given: Batch, crosses: bool) -> Columns:
        """Returns the columns that move. Ranks agree on them if the form of their batches is new, unless nothing is
        sent: a rank without padding has already returned, and would not take part. Raises PlanError if this rank's
        columns differ from those that ranks agreed on for batches of this form."""
        now = packed.columns
        known = self._columns.get(plan.planned.batch_forms) if crosses else now
        if known is not None and not (
            now.described == known.described
            and now.position_rows in (1, known.position_rows)
            and now.deep_layers in (0, known.deep_layers)
            and now.differentiate <= known.differentiate
        ):
            are, were = now.facts, known.facts
            shown = "; ".join(
                f"{name} is {are.get(name, 'missing')} (was {were.get(name, 'missing')})"
                for name in were | are
                if are.get(name) != were.get(name)
            )
            raise PlanError(
                f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}: inputs of the decoder differ from "
                f"those in an earlier batch of the same form: {shown}; nothing was sent. Give the model the same "
                "inputs in every pass on such a batch"
            )
        where = f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}"
        if known is not None:
            self._check_known(given, where)
            return known
        with Announced(plan.transport, plan.micro_batch, Occasion.MOVE):
            self._check_known(given, where)
            facts = {**plan.forward_pass.facts, **_of_inputs(now, given)}
        if len(self._columns) >= REMEMBERED_FORMS:
            self._columns.clear()
        return self._columns.setdefault(plan.planned.batch_forms, now.agreed(facts, plan))

    def _warn_of_readers(self) -> None:
        """Warns once of a hook or module inside the decoder that may compute something of several tokens, since these
        are not those of its batch. Looks in the first, second, fourth ... pass in which rows cross, because programs
        add hooks late."""
        self._crossings += 1
        if self._has_warned or not is_due(self._crossings):
            return
        for name, module in self._decoder.named_modules():
            if module is self._decoder:
                continue
            if written := unknown_hook(module):
                reader = f"a hook of {written} on {name}"
            elif (found := unknown_class(module)) is not None:
                reader = f"{name}, a {found.__name__} of {found.__module__},"
            else:
                continue
            self._has_warned = True
            log.warning(
                "%s in %s sees tokens that come from all ranks, as [1, tokens, ...] without padding: if it computes "
                "something of several tokens, this changes its results. Read hidden states that return to the rows of "
                "the batch instead (output_hidden_states=True)",
                reader,
                self._class_name,
            )
            return

    def _check_known(self, given: Batch, where: str) -> None:
        """Checks that masks are of causal documents, that every tensor of tokens has one value per token, and that
        tokens of all features of images were found. Lets tensors pass that the decoder does not name, with values for
        rows, such as a loss may have."""
        masks = given.get("attention_mask")
        for mask in masks.values() if isinstance(masks, Mapping) else (masks,):
            refusal = mask.refusal if isinstance(mask, RowMask) else None
            if isinstance(mask, torch.Tensor) and mask.ndim > 2:
                refusal = (
                    f"got an attention_mask of shape {[*mask.shape]}; give zeros and ones of shape [batch, tokens]"
                )
            if refusal is not None:
                raise UnsupportedAttentionError(f"{where}: {self._class_name}: {refusal}")
        if (features := given.get(DEEP)) and len(features[0]) > self._image_tokens:
            raise UnsupportedAttentionError(
                f"{where}: the decoder of {self._class_name} gets features of {len(features[0])} tokens of images, "
                f"and input_ids hold {self._image_tokens} that are image_token_id or video_token_id of the config. "
                "Give both as one processor made them"
            )
        batch_size, length = shape = tokens_of(given).shape
        gets = f"{where}: the decoder of {self._class_name} gets"
        for name, value in given.items():
            if name in APART or value is None:
                continue
            if isinstance(value, torch.Tensor):
                if value.shape[:2] == shape or value.numel() <= 1 or (name not in self._known and _is_vector(value)):
                    continue
                is_of_tokens = length in value.shape[1:] or value.shape[:1] == (batch_size * length,)
                if is_of_tokens or name in self._names:
                    raise UnsupportedAttentionError(
                        f"{gets} {name} of shape {[*value.shape]}, and tokens of shape {[*shape]}: it is not known "
                        "how to move it with the tokens. Leave it out, or give it one value per token"
                    )
            elif name in self._names and isinstance(value, (dict, list, tuple)):
                if any(map(torch.is_tensor, value.values() if isinstance(value, dict) else value)):
                    raise UnsupportedAttentionError(
                        f"{gets} {name}, a {type(value).__name__} of tensors: it is not known how to move these "
                        "with the tokens. Train on text, or without distca_hf"
                    )


def _is_vector(value: torch.Tensor) -> bool:
    """Returns whether an input has the shape of one vector for all rows, as a model may make (`t_cond` of Voxtral)."""
    return value.ndim == 2 and value.shape[0] == 1 and value.is_floating_point()


def _of_inputs(columns: Columns, given: Batch) -> dict[str, object]:
    """Returns facts about the columns and flags of a pass, by name in messages."""
    flags = {
        name: value
        for name, value in given.items()
        if isinstance(value, bool | str) or (name.startswith("output_") and value is not None)
    }
    named = sorted({**columns.in_words, **flags}.items())
    return {f"input {name} of the decoder": value for name, value in named}


def _dense_deep(given: Batch, layers: int) -> torch.Tensor:
    """Returns `[places, layers, D]` features of images, zeros for tokens of text."""
    embeds_BTD = given["inputs_embeds"]
    dense_BTLD = embeds_BTD.new_zeros((*embeds_BTD.shape[:2], layers, embeds_BTD.shape[-1]))
    if given.get(DEEP) is not None:
        features = torch.stack([value.to(dense_BTLD) for value in given[DEEP]], dim=1)
        dense_BTLD = dense_BTLD.index_put(given[DEEP_MASK].nonzero(as_tuple=True), features)
    return dense_BTLD.flatten(0, 1)


def _of_tokens(output: Any, tokens: int) -> Iterator[torch.Tensor]:
    """Yields all tensors in an output with rows for tokens: `[1, T, D]`, `[N, 1, T, D]` and `[T, D]`."""
    if isinstance(output, torch.Tensor):
        if (output.shape[-3:-1] == (1, tokens) and output.ndim < 5) or output.shape[:-1] == (tokens,):
            yield output
    elif isinstance(output, dict | tuple | list):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _of_tokens(value, tokens)


def _replaced(output: Any, homes: Mapping[int, torch.Tensor]) -> Any:
    """Returns an output with some tensors, given by `id`, replaced."""
    if isinstance(output, dict):  # Transformers' outputs are dictionaries, and keep their class
        for name, value in output.items():
            output[name] = _replaced(value, homes)
        return output
    if isinstance(output, tuple | list):
        return type(output)(_replaced(value, homes) for value in output)
    return homes.get(id(output), output)
