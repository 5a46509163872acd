"""Numbers before times: output and gradients of every mode's attention against exact attention.

On documents of the same kind, only shorter, and through the very function that the model's layers call. bf16 may be
off by twice the error of attention written out in bf16 PyTorch (and rounding of the result), fp32 by 1e-5. `ideal`,
whose keys are made up in part, is compared with exact attention to these.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distca_hf.batches.given import GivenPlanner
from distca_hf.integrations.models.decoder_layers import head_groups_of, token_bytes_of
from distca_hf.testing import attend_documents
from lib.baselines.operators import MadeUpKeys, Work
from lib.documents import Documents
from lib.model import AttentionKind
from lib.modes import build_mode
from lib.place import Mode, Place
from lib.report import equal_losses
from lib.trainer_batches import Batch


NAMES = ("output", "dq", "dk", "dv")
Build = Callable[[str, Place, Documents], Mode]
LARGEST_DIFFERENCE = 1e-5  # of fp32, relative to the largest number


def check_modes(
    names: Sequence[str], place: Place, lengths: Sequence[int], build: Build = build_mode
) -> dict[str, dict[str, float]]:
    """Computes how far attention of each mode is from exact attention, on documents of so many tokens. A collective
    call.

    Returns:
        for every mode the largest error of all ranks and kinds of layers over the allowed one, of `output`, `dq`,
        `dk` and `dv`: up to 1 is right, and infinite if a number is NaN.
    """
    of_kinds = []
    for kind in place.shape.kinds:
        generator = torch.Generator().manual_seed(0)  # q, k, v and the gradient of the output, the same on all ranks
        shapes = [(sum(lengths), *width) for width in kind.widths]
        whole = [torch.randn(shape, generator=generator).to(place.device, place.dtype) for shape in shapes]
        exact, rounded = (_attend_exactly(whole, lengths, kind, dtype) for dtype in (torch.float32, place.dtype))
        # Tokens are numbered, one document after the other, so that no two rows are equal.
        numbered = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        modes = [build(name, place, numbered) for name in names]
        of_kinds.append([_errors(mode, place, kind, whole, exact, rounded) for mode in modes])
    # A maximum may leave out NaN.
    errors = torch.tensor(of_kinds, device=place.device).nan_to_num(nan=torch.inf).amax(0)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return {name: dict(zip(NAMES, row, strict=True)) for name, row in zip(names, errors.tolist(), strict=True)}


def check_numbers(errors: Mapping[str, Mapping[str, float]], losses: Mapping[str, float], dtype: torch.dtype) -> None:
    """Exits with 1 if an error of `check_modes` is above the allowed one, or losses of exact modes differ; names the
    modes, with their numbers."""
    wrong = {name: row for name, row in errors.items() if not all(error <= 1 for error in row.values())}
    if wrong:
        raise SystemExit(f"attention differs from exact attention; errors over the allowed ones: {wrong}")
    if not equal_losses([*losses.values()], dtype):
        raise SystemExit(f"losses of the same tokens differ: {losses}")


def _attend_exactly(
    whole: Sequence[torch.Tensor], lengths: Sequence[int], kind: AttentionKind, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns the output and gradients of attention by its definition, computed in `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in whole[:3])
    out = attend_documents(q, k, v, lengths, kind.scale, kind.window_tokens or None)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].to(dtype))]


def _errors(
    mode: Mode,
    place: Place,
    kind: AttentionKind,
    whole: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
) -> list[float]:
    """Returns the largest error of this rank's rows, of each of `NAMES`, over the allowed one."""
    with mode.running():
        [batch] = mode.batches
        rows = batch["input_ids"][0]
        held = [x[rows] for x in whole]
        results = attend_once(mode, place, kind, batch, held)
        if not mode.exact:
            rows, dtypes = slice(None), (torch.float32, place.dtype)
            exact, rounded = (_attend_made_up(batch["bench_work"], held, kind, dtype) for dtype in dtypes)
    return [
        ((result.float() - truth[rows]).abs().max() / _allowed(truth, plain)).item()
        for result, truth, plain in zip(results, exact, rounded, strict=True)
    ]


def _allowed(truth: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Returns the largest difference from the truth, given the result of plain PyTorch."""
    if plain.dtype == torch.float32:
        return LARGEST_DIFFERENCE * truth.abs().max()
    rounding = (truth.to(plain.dtype).float() - truth).abs().max()
    return 2 * (plain.float() - truth).abs().max() + 2 * rounding


def attend_once(
    mode: Mode, place: Place, kind: AttentionKind, batch: Batch, held: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the output `[T, N, V]` and the gradients of q, k and v in their shapes, as a layer of the model gets
    them for T tokens of a batch of the mode. `held` are q, k, v and the gradient of the output: `[T, N, H]`,
    `[T, G, H]`, `[T, G, V]` and `[T, N, V]`."""
    keywords = {name: value for name, value in batch.items() if name != "input_ids"}
    if mode.name in ("given", "moved"):  # attention of an enabled model, with tasks that move in place of rows
        groups, token_bytes = head_groups_of(place.model), token_bytes_of(place.model)
        planner = GivenPlanner(place.plugin(0), place.wires, groups, token_bytes)
        keywords["distca_plan"] = planner.plan(batch)
    if "distca_plan" in keywords:
        keywords["distca_plan"].begin_forward_pass(None, {})
    inputs = [x.transpose(0, 1)[None].requires_grad_() for x in held[:3]]
    attend = ALL_ATTENTION_FUNCTIONS[mode.implementation]
    keywords |= {"dropout": 0.0, "scaling": kind.scale, "sliding_window": kind.window_tokens or None}
    out, _ = attend(place.shape.layers[kind][0], *inputs, None, **keywords)
    gradients = torch.autograd.grad(out, inputs, held[3][None])
    return [out[0].detach(), *(gradient[0].transpose(0, 1) for gradient in gradients)]


def _attend_made_up(
    work: Work, held: Sequence[torch.Tensor], kind: AttentionKind, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns the output and gradients of a work's calls by definition, with its made-up keys, computed in `dtype`.
    `held` are q, k, v and the gradient of the output."""
    q, k, v, dout = held
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    outputs = []
    for call in work.calls:
        queries = leaves[0][call.queries]
        if isinstance(call.keys, MadeUpKeys):
            places = call.keys.places
            keys, values = (
                taken.to(dtype).index_copy(0, places, x[call.keys.rows])
                for taken, x in zip(call.keys.take(k.detach(), v.detach()), leaves[1:], strict=True)
            )
            # Tasks attend as the last queries of documents whose other queries do not matter.
            queries = queries.new_zeros(len(keys), *queries.shape[1:]).index_copy(0, places, queries)
        else:
            places = torch.arange(len(queries), device=q.device)
            keys, values = call.keys.take(leaves[1], leaves[2])
        lengths = [stop - start for start, stop in pairwise(call.spans.keys)]
        outputs.append(
            attend_documents(queries, keys, values, lengths, kind.scale, kind.window_tokens or None)[places]
        )
    rest = leaves[0].new_zeros(len(q) - work.rows, *outputs[0].shape[1:])
    out = torch.cat([*outputs, rest])
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]
