"""Kernels that run on a CPU against exact attention in fp64, and the choice among all kernels."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels import reference, registry
from distca_hf.kernels.interface import (
    AttentionSpec,
    Gradients,
    Inputs,
    Kernel,
    Room,
    Saved,
    Spans,
    accumulation_dtype,
    spec_of,
)
from distca_hf.kernels.reference import BLOCK_ROWS, ReferenceKernel
from distca_hf.kernels.registry import KERNELS, OPTIONS, Operands, choose_kernel, chosen_kernel
from distca_hf.kernels.rows import merge_rows
from distca_hf.kernels.varlen import CpuKernel, TorchVarlenKernel


BOTH = pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuKernel()], ids=["reference", "cpu"])
SCALE = 0.37
SPEC = AttentionSpec(SCALE)
# Query heads, KV heads.
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}
# Query and key rows of each task.
TASKS = {
    "one": [(7, 7)],
    "several": [(5, 5), (1, 1), (9, 9)],
    "prefixed": [(3, 8), (1, 6), (4, 4), (2, 20)],
    "of one token": [(1, 1), (1, 1), (1, 1)],
    "one token, long prefix": [(1, 50)],
    "empty among others": [(0, 0), (3, 3), (0, 0), (0, 0), (2, 5), (0, 0)],
    "empty alone": [(0, 0)],
    "keys that nobody asks for": [(3, 3), (0, 4), (2, 6)],
    "only keys": [(0, 4)],
}


# The same where every query attends to all keys of its task, of which there may be fewer.
WITHOUT_MASK = {
    name: TASKS[name] for name in ("one", "several", "of one token", "keys that nobody asks for", "only keys")
} | {"more keys": [(3, 8), (1, 6), (2, 20)], "more queries": [(8, 3), (6, 1), (20, 2)]}


def spans_of(tasks: list[tuple[int, int]]) -> Spans:
    queries, keys = zip(*tasks, strict=True)
    offsets = [torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32) for rows in (queries, keys)]
    return Spans(*offsets, max(queries), max(keys))


@dataclass(frozen=True)
class Case:
    """Inputs of one call in `dtype`; exact results are computed from the rounded inputs."""

    tasks: list[tuple[int, int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    causal: bool = True
    softcap: float = 0.0

    @classmethod
    def draw(
        cls,
        tasks: list[tuple[int, int]],
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (8, 8),
        dtype: torch.dtype = torch.float64,
        causal: bool = True,
    ) -> "Case":
        generator = torch.Generator().manual_seed(len(tasks))
        queries, keys = (sum(rows) for rows in zip(*tasks, strict=True))
        (num_heads, groups), (dim, value_dim) = heads, dims
        shapes = [(queries, num_heads, dim), (keys, groups, dim), (keys, groups, value_dim)]
        shapes.append((queries, num_heads, value_dim))
        drawn = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
        return cls(tasks, *drawn, causal)

    @property
    def spans(self) -> Spans:
        return spans_of(self.tasks)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(SCALE, self.causal, softcap=self.softcap, deterministic=True)


@dataclass(frozen=True)
class Results:
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def exact(case: Case, alignment: str = "bottom-right") -> Results:
    """By definition, task by task, in fp64; gradients from autograd."""
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    shared = q.shape[1] // k.shape[1]
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    query = key = 0
    for queries, keys in case.tasks:
        rows, columns = slice(query, query + queries), slice(key, key + keys)
        scores = torch.einsum("tnh,snh->nts", q[rows], k[columns].repeat_interleave(shared, 1)) * SCALE
        first = keys - queries if alignment == "bottom-right" else 0
        seen = torch.arange(keys)[None] <= first + torch.arange(queries)[:, None]
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        scores = scores.masked_fill(~seen, float("-inf")) if case.causal else scores
        outs.append(torch.einsum("nts,snv->tnv", scores.softmax(-1), v[columns].repeat_interleave(shared, 1)))
        lses.append(scores.logsumexp(-1))
        query, key = query + queries, key + keys
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    gradients = torch.autograd.grad(out, (q, k, v), case.dout.double(), materialize_grads=True)
    return Results(out.detach(), lse.detach(), *gradients)


def computed(kernel: Kernel, case: Case) -> Results:
    """What a kernel writes into buffers full of NaN: a row it forgets is seen."""
    spans, precise = case.spans, accumulation_dtype(case.q.dtype)
    nan = float("nan")
    out = torch.full_like(case.dout, nan)
    lse = torch.full((case.q.shape[1], case.q.shape[0]), nan, dtype=precise)
    kernel.forward(Inputs(case.q, case.k, case.v), spans, case.spec, Room(out, lse))
    dq, dk, dv = (torch.full_like(x, nan) for x in (case.q, case.k, case.v))
    kernel.backward(case.dout, Saved(case.q, case.k, case.v, out, lse), Gradients(dq, dk, dv), spans, case.spec)
    return Results(out, lse, dq, dk, dv)


def differences(got: Results, expected: Results) -> dict[str, float]:
    """Largest difference of each result; NaN where the kernel wrote nothing."""
    pairs = {
        field.name: (getattr(got, field.name).double(), getattr(expected, field.name))
        for field in dataclasses.fields(Results)
    }
    assert all(left.shape == right.shape for left, right in pairs.values())
    return {name: float((left - right).abs().max()) if left.numel() else 0.0 for name, (left, right) in pairs.items()}


def assert_close(got: Results, expected: Results, tolerance: float = 1e-10) -> None:
    far = {name: value for name, value in differences(got, expected).items() if not value <= tolerance}
    assert not far


# --- against the definition


@BOTH
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("causal", "tasks"),
    [(True, tasks) for tasks in TASKS.values()] + [(False, tasks) for tasks in WITHOUT_MASK.values()],
)
def test_outputs_and_gradients_are_exact(
    kernel: Kernel, heads: tuple[int, int], causal: bool, tasks: list[tuple[int, int]]
) -> None:
    case = Case.draw(tasks, heads, causal=causal)

    assert_close(computed(kernel, case), exact(case))


@BOTH
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_elements_of_a_row_may_lie_apart(kernel: Kernel, name: str) -> None:
    """As hooks of saved tensors may bring them back; `dout` stands for the output, too, which lies as it does."""
    case = Case.draw([(5, 5), (2, 7)])
    apart = getattr(case, name).permute(2, 1, 0).contiguous().permute(2, 1, 0)

    assert_close(computed(kernel, dataclasses.replace(case, **{name: apart})), exact(case))


@BOTH
@pytest.mark.parametrize(
    ("causal", "tasks"),
    [
        (False, [(BLOCK_ROWS + 3, 300), (5, BLOCK_ROWS + 1)]),
        (True, [(5, 5), (BLOCK_ROWS + 3, BLOCK_ROWS + 300)]),
        (True, [(BLOCK_ROWS + 1,) * 2]),
    ],
    ids=str,
)
def test_tasks_longer_than_a_block_are_exact(kernel: Kernel, causal: bool, tasks: list[tuple[int, int]]) -> None:
    case = Case.draw(tasks, heads=(2, 1), dims=(4, 4), causal=causal)

    assert_close(computed(kernel, case), exact(case))


@BOTH
@pytest.mark.parametrize("dim", [1, 5, 16, 72, 320])
def test_any_head_dimension(kernel: Kernel, dim: int) -> None:
    case = Case.draw(TASKS["prefixed"], dims=(dim, dim))

    assert_close(computed(kernel, case), exact(case))


@BOTH
@pytest.mark.parametrize(
    ("dtype", "tolerance", "lse_tolerance"),
    [
        (torch.float64, 1e-10, 1e-10),
        (torch.float32, 2e-5, 2e-6),
        (torch.float16, 1e-2, 2e-4),
        (torch.bfloat16, 6e-2, 2e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("tasks", [TASKS["several"], TASKS["prefixed"], [(5, 5), (150, 380)]], ids=str)
def test_every_dtype_is_as_exact_as_it_can_be(
    kernel: Kernel, dtype: torch.dtype, tolerance: float, lse_tolerance: float, tasks: list[tuple[int, int]]
) -> None:
    """Log-sum-exps are kept in fp32 at least: they are far more exact than outputs of half precision."""
    case = Case.draw(tasks, dtype=dtype)
    got, expected = computed(kernel, case), exact(case)

    assert_close(got, expected, tolerance)
    assert differences(got, expected)["lse"] <= lse_tolerance
    assert {got.out.dtype, got.dq.dtype, got.dk.dtype, got.dv.dtype} == {dtype}


@BOTH
def test_large_scores_do_not_overflow(kernel: Kernel) -> None:
    """Scores of several hundred: their exponentials are beyond every dtype."""
    case = Case.draw(TASKS["prefixed"], dtype=torch.float64)
    case.q.mul_(40)
    case.k.mul_(40)

    assert_close(computed(kernel, case), exact(case), 1e-6)


def surrounded(x: torch.Tensor, heads: tuple[int, int] = (0, 0)) -> tuple[torch.Tensor, torch.Tensor]:
    """A larger tensor full of sevens, and a view of it that holds `x`: some of its tokens, and some of its heads."""
    tokens, of_all = x.shape[0], heads[0] + x.shape[1] + heads[1]
    whole = torch.full((tokens + 5, of_all, *x.shape[2:]), 7.0, dtype=x.dtype)
    view = whole[3:-2, heads[0] : heads[0] + x.shape[1]]
    view.copy_(x)
    return whole, view


def is_untouched_around(whole: torch.Tensor, view: torch.Tensor, heads: tuple[int, int]) -> bool:
    outside = torch.ones(whole.shape[:2], dtype=torch.bool)
    outside[3:-2, heads[0] : heads[0] + view.shape[1]] = False
    return bool((whole[outside] == 7).all())


def side_by_side(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and of values that lie as `[rows, G * H | G * V]`, as in the remote KV."""
    rows = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    width = k.shape[1] * k.shape[2]
    return rows[:, :width].unflatten(1, k.shape[1:]), rows[:, width:].unflatten(1, v.shape[1:])


@BOTH
@pytest.mark.parametrize("around", [(0, 0), (2, 0), (0, 3), (4, 2)], ids=["all heads", "last", "first", "between"])
@pytest.mark.parametrize("store", [True, False], ids=["keys side by side", "keys of some heads"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_views_into_larger_tensors_are_read_and_written_in_place(
    kernel: Kernel, causal: bool, store: bool, around: tuple[int, int]
) -> None:
    """As the runtime has them: queries are some tokens and heads of a layer's; so are local keys, while those of the
    remote KV lie beside their values; log-sum-exps are `[T, N]`, and the kernel gets them transposed."""
    tasks = TASKS["prefixed"] if causal else WITHOUT_MASK["more queries"]
    case = Case.draw(tasks, causal=causal)
    nan, precise = float("nan"), accumulation_dtype(case.q.dtype)
    lse = torch.full(case.q.shape[:2], nan, dtype=precise)
    wholes, views = zip(
        *(surrounded(x, around) for x in (case.q, case.dout, torch.full_like(case.dout, nan), case.q * nan, lse)),
        strict=True,
    )
    q, dout, out, dq, lse = views
    if store:
        (k, v), (dk, dv) = side_by_side(case.k, case.v), side_by_side(case.k * nan, case.v * nan)
    else:
        of_keys = [surrounded(x, around) for x in (case.k, case.v, case.k * nan, case.v * nan)]
        wholes, views = (*wholes, *(whole for whole, _ in of_keys)), (*views, *(view for _, view in of_keys))
        k, v, dk, dv = (view for _, view in of_keys)
    kernel.forward(Inputs(q, k, v), case.spans, case.spec, Room(out, lse.T))
    kernel.backward(dout, Saved(q, k, v, out, lse.T), Gradients(dq, dk, dv), case.spans, case.spec)

    assert_close(Results(out, lse.T, dq, dk, dv), exact(case))
    assert all(is_untouched_around(whole, view, around) for whole, view in zip(wholes, views, strict=True))


@BOTH
@pytest.mark.parametrize("broken", ["q", "k", "v", "dout"])
def test_nan_in_one_document_stays_there(kernel: Kernel, broken: str) -> None:
    """All other documents are computed bit for bit as if nothing had happened."""
    tasks = [(5, 5), (3, 9), (6, 6)]
    rows = {"q": slice(5, 8), "dout": slice(5, 8), "k": slice(5, 14), "v": slice(5, 14)}
    case = Case.draw(tasks)
    sound = computed(kernel, case)
    getattr(case, broken)[rows[broken]] = float("nan")
    got = computed(kernel, case)

    for name in ("out", "dq"):
        outside = torch.ones(14, dtype=torch.bool)
        outside[rows["q"]] = False
        assert torch.equal(getattr(got, name)[outside], getattr(sound, name)[outside])
    assert torch.equal(got.lse[:, outside], sound.lse[:, outside])
    for name in ("dk", "dv"):
        outside = torch.ones(20, dtype=torch.bool)
        outside[rows["k"]] = False
        assert torch.equal(getattr(got, name)[outside], getattr(sound, name)[outside])
    assert got.dq[rows["q"]].isnan().any() or broken == "v"


# --- merge


# Query rows, keys before them, and their document's: the prefix is attended apart, without a mask.
PARTS = {"one": [(3, 8)], "several": [(4, 9), (1, 2), (6, 30)], "long prefix": [(2, 500)]}


def near_and_far(case: Case) -> tuple[Case, Case]:
    """The causal squares at the ends of the tasks, and what comes before them."""
    near, far, first = [], [], 0
    for queries, keys in case.tasks:
        border = first + keys - queries
        far += range(first, border)
        near += range(border, first + keys)
        first += keys
    squares, prefixes = [(queries, queries) for queries, _ in case.tasks], [(q, keys - q) for q, keys in case.tasks]
    return (
        Case(squares, case.q, case.k[near], case.v[near], case.dout),
        Case(prefixes, case.q, case.k[far], case.v[far], case.dout, causal=False),
    )


@BOTH
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tasks", PARTS.values(), ids=PARTS)
def test_merged_attention_is_that_to_all_keys(kernel: Kernel, heads: tuple[int, int], tasks: Any) -> None:
    case = Case.draw(tasks, heads)
    near, far = (computed(kernel, part) for part in near_and_far(case))
    out, lse = near.out.clone(), near.lse.T.clone()
    merge_rows(out, lse, far.out, far.lse)

    expected = exact(case)
    assert (out - expected.out).abs().max() <= 1e-12
    assert (lse.T - expected.lse).abs().max() <= 1e-12


@BOTH
@pytest.mark.parametrize("tasks", PARTS.values(), ids=PARTS)
def test_gradients_of_both_parts_are_parts_of_the_whole(kernel: Kernel, tasks: Any) -> None:
    """Each from the output and the log-sum-exp of the whole row."""
    case = Case.draw(tasks)
    whole, parts = exact(case), near_and_far(case)
    dq = torch.zeros_like(case.q)
    gradients = []
    for part in parts:
        part_dq, dk, dv = (torch.full_like(x, float("nan")) for x in (part.q, part.k, part.v))
        saved = Saved(part.q, part.k, part.v, whole.out, whole.lse)
        kernel.backward(part.dout, saved, Gradients(part_dq, dk, dv), part.spans, part.spec)
        dq += part_dq
        gradients.append((dk, dv))

    assert (dq - whole.dq).abs().max() <= 1e-12
    for of_whole, of_parts in zip((whole.dk, whole.dv), zip(*gradients, strict=True), strict=True):
        near, far = near_and_far(dataclasses.replace(case, k=of_whole, v=of_whole))
        assert (of_parts[0] - near.k).abs().max() <= 1e-12
        assert (of_parts[1] - far.k).abs().max() <= 1e-12


@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize("around", [(0, 0), (2, 1)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merge_is_its_formula_in_place(heads: int, around: tuple[int, int], dtype: torch.dtype) -> None:
    """Shares of the softmax's denominators; rounded once, and nothing beside the given heads is touched."""
    generator = torch.Generator().manual_seed(heads)
    precise = accumulation_dtype(dtype)
    near, far = (torch.randn(9, heads, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    near_lse, far_lse = (3 * torch.randn(9, heads, generator=generator, dtype=torch.float64).to(precise) for _ in "ab")
    (wholes, out), (lses, lse) = surrounded(near, around), surrounded(near_lse, around)
    merge_rows(out, lse, far, far_lse.T.contiguous())

    weights = [part.double().exp().unsqueeze(-1) for part in (near_lse, far_lse)]
    expected = (weights[0] * near.double() + weights[1] * far.double()) / sum(weights)
    unit = torch.finfo(dtype).eps
    assert (out.double() - expected).abs().max() <= 16 * unit
    assert (lse.double() - sum(weights).squeeze(-1).log()).abs().max() <= 16 * torch.finfo(precise).eps
    assert is_untouched_around(wholes, out, around)
    assert is_untouched_around(lses, lse, around)


@pytest.mark.parametrize(("near", "far"), [(1e4, -1e4), (-1e4, 1e4), (800.0, 800.0), (-800.0, -800.0)])
def test_merge_takes_log_sum_exps_of_any_size(near: float, far: float) -> None:
    """Their exponentials are beyond every dtype; the smaller part may vanish."""
    out, far_out = torch.full((1, 1, 2), 2.0), torch.full((1, 1, 2), 4.0)
    lse, far_lse = torch.full((1, 1), near), torch.full((1, 1), far)
    merge_rows(out, lse, far_out, far_lse)

    expected = 3.0 if near == far else 2.0 if near > far else 4.0
    assert out.flatten().tolist() == pytest.approx([expected] * 2, rel=1e-4)
    assert lse.item() == pytest.approx(max(near, far) + (0.6931472 if near == far else 0))


@BOTH
def test_results_without_room_are_contiguous_and_the_same(kernel: Kernel) -> None:
    case = Case.draw(next(iter(PARTS.values())))
    q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = kernel.forward(Inputs(q, case.k, case.v), case.spans, case.spec)
    expected = computed(kernel, case)

    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)


def test_rows_behind_the_last_one_are_not_merged() -> None:
    with pytest.raises(ValueError, match="rows 7 to 10 to that of 9 rows"):
        merge_rows(torch.zeros(9, 2, 3), torch.zeros(9, 2), torch.zeros(3, 2, 3), torch.zeros(2, 3), 7)


# --- choice


CPU_OPERANDS = Operands("cpu", None, torch.float32, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64)
GPU_OPERANDS = Operands("cuda", 9, torch.bfloat16, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No flash-attention package, whatever this machine has; kernels chosen meanwhile are forgotten."""
    missing = {
        name: dataclasses.replace(entry, module=entry.module and f"absent_{name}.interface")
        for name, entry in KERNELS.items()
    }
    for name, entry in missing.items():
        monkeypatch.setitem(KERNELS, name, entry)
    chosen_kernel.cache_clear()
    yield
    chosen_kernel.cache_clear()


def refusal(name: str, operands: Operands) -> str:
    with pytest.raises(UnsupportedAttentionError) as refused:
        choose_kernel(name, operands, SPEC)
    return str(refused.value)


def test_auto_takes_the_fastest_kernel_that_is_installed(
    nothing_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(name: str, package: ModuleType) -> Kernel:
        made.append(name)
        return ReferenceKernel()

    for name in ("flash2", "flash3", "flash4"):
        entry = dataclasses.replace(KERNELS[name], module="json", make=partial(make, name))
        monkeypatch.setitem(KERNELS, name, entry)
        chosen_kernel.cache_clear()
        choose_kernel("auto", GPU_OPERANDS, SPEC)
    chosen_kernel.cache_clear()
    choose_kernel("auto", dataclasses.replace(GPU_OPERANDS, value_dim=32), SPEC)

    assert made == ["flash2", "flash3", "flash4", "flash4"]


def _fails(package: ModuleType) -> Kernel:
    raise ImportError("libcute.so: undefined symbol\nsecond line")


def test_kernel_that_fails_is_replaced_by_the_next_one_with_a_line_that_names_both(
    nothing_installed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(KERNELS, "flash4", dataclasses.replace(KERNELS["flash4"], module="json", make=_fails))

    assert isinstance(choose_kernel("auto", GPU_OPERANDS, SPEC), TorchVarlenKernel)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "kernel torch_varlen, not a faster one: flash4 fails: ImportError: libcute.so: undefined symbol" in line
    assert "flash3 is not installed (from sources" in line
    assert "second line" not in line


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("ImportError('libcute.so: undefined symbol')", "flash4 fails: ImportError: libcute.so: undefined symbol"),
        (
            "ModuleNotFoundError('No module named einops', name='einops')",
            "flash4 fails: ModuleNotFoundError: No module",
        ),
    ],
)
def test_kernel_whose_package_does_not_import_is_replaced(
    raised: str,
    told: str,
    nothing_installed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Built for another torch, say, or without one of its own dependencies."""
    package = f"broken_{abs(hash(raised))}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = dataclasses.replace(KERNELS["flash4"], module=f"{package}.cute.interface")
    monkeypatch.setitem(KERNELS, "flash4", entry)

    assert isinstance(choose_kernel("auto", GPU_OPERANDS, SPEC), TorchVarlenKernel)
    assert told in caplog.text
    assert told.removeprefix("flash4 ") in refusal("flash4", GPU_OPERANDS)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("cannot compile for this machine"), "fails: RuntimeError: cannot compile for this machine"),
        (None, "is wrong: its output is off by 30%"),
    ],
)
def test_kernel_that_fails_or_is_wrong_on_its_first_tokens_is_replaced(
    error: Exception | None,
    told: str,
    nothing_installed: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its results are compared, not only computed."""

    def try_out(kernel: Kernel, operands: Operands, spec: AttentionSpec) -> str | None:
        if not isinstance(kernel, CpuKernel):
            return None
        if error:
            raise error
        return "its output is off by 30%"

    monkeypatch.setattr(registry, "try_out", try_out)
    assert isinstance(choose_kernel("auto", CPU_OPERANDS, SPEC), ReferenceKernel)
    assert f"reference, not a faster one: cpu {told}" in caplog.text
    assert f"kernel='cpu' cannot be used: cpu {told}" in refusal("cpu", CPU_OPERANDS)


def test_reference_is_only_taken_on_a_gpu_when_asked_for(nothing_installed: None) -> None:
    operands = dataclasses.replace(GPU_OPERANDS, dtype=torch.float32)

    assert isinstance(choose_kernel("reference", operands, SPEC), ReferenceKernel)
    message = refusal("auto", operands)
    assert "reference is exact but slow" in message


def test_refusal_of_auto_names_the_job_and_every_kernel_with_its_reason(nothing_installed: None) -> None:
    message = refusal("auto", dataclasses.replace(GPU_OPERANDS, head_dim=512, value_dim=512))

    assert "head_dim=512" in message
    for name in KERNELS:
        assert re.search(rf"\b{name}\b", message)
    assert "flash2 has head dimensions up to 256, the model has 512" in message
    assert "torch_varlen has head dimensions up to 256, the model has 512" in message
    assert "ffpa is not installed (pip install ffpa-attn)" in message
    assert "cpu runs on cpu, tensors are on cuda" in message


@pytest.mark.parametrize(
    ("name", "operands", "parts"),
    [
        ("torch_varlen", {"head_dim": 512, "value_dim": 512}, ["up to 256", "512"]),
        ("torch_varlen", {"head_dim": 64, "value_dim": 264}, ["up to 256", "264"]),
        ("torch_varlen", {"head_dim": 60, "value_dim": 60}, ["multiples of 8", "60 and 60"]),
        ("torch_varlen", {"head_dim": 64, "value_dim": 36}, ["multiples of 8", "64 and 36"]),
        ("torch_varlen", {"head_dim": 64, "value_dim": 32}, ["equal key and value dimensions", "64 and 32"]),
        ("torch_varlen", {"dtype": torch.float32}, ["torch.bfloat16, torch.float16", "torch.float32"]),
        ("torch_varlen", {"compute_capability": 7}, ["compute capability", "8, 9", "7"]),
        ("torch_varlen", {"device_type": "cpu", "compute_capability": None}, ["runs on cuda", "on cpu"]),
        ("cpu", {}, ["runs on cpu", "on cuda"]),
        ("cpu", {"device_type": "cpu", "value_dim": 32}, ["equal key and value dimensions", "64 and 32"]),
        ("cpu", {"device_type": "cpu", "dtype": torch.int64}, ["torch.float64", "torch.int64"]),
        ("reference", {"dtype": torch.float8_e4m3fn}, ["torch.float32", "torch.float8_e4m3fn"]),
        ("flash4", {}, ["is not installed (pip install flash-attn-4)"]),
        ("flash3", {}, ["is not installed (from sources, the folder hopper"]),
        ("flash2", {}, ["is not installed (pip install flash-attn --no-build-isolation)"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kernel_asked_for_by_name_is_refused_with_the_reason(
    nothing_installed: None, name: str, operands: dict[str, object], parts: list[str]
) -> None:
    message = refusal(name, dataclasses.replace(GPU_OPERANDS, **operands))

    for part in [f"kernel={name!r}", "kernel='auto'", *parts]:
        assert part in message


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_heads_that_do_not_divide_are_refused(name: str) -> None:
    message = refusal(name, dataclasses.replace(CPU_OPERANDS, num_heads=6, num_kv_heads=4))

    assert "6 query heads" in message
    assert "4 KV heads" in message


def test_choosing_on_a_cpu_imports_no_flash_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"imported {name}")

    chosen_kernel.cache_clear()
    monkeypatch.setattr(registry.importlib, "import_module", refuse)
    assert isinstance(choose_kernel("auto", CPU_OPERANDS, SPEC), CpuKernel)


# --- how to attend


# Options by the calls that ask for them.
ASKED = {
    "window_tokens": SPEC._replace(window_tokens=128),
    "one_sided_window": SPEC._replace(window_tokens=128, causal=False),
    "softcap": SPEC._replace(softcap=30.0),
}
WINDOWS = {"window_tokens", "one_sided_window"}
COMPUTED = {
    "flash4": WINDOWS | {"softcap"},
    "flash3": WINDOWS | {"softcap"},
    "flash2": WINDOWS | {"softcap"},
    "torch_varlen": WINDOWS,
    "ffpa": set(),
    "cpu": set(),
    "reference": set(OPTIONS),
}


def operands_for(name: str) -> Operands:
    able = KERNELS[name].capabilities
    dim = max(GPU_OPERANDS.head_dim, able.min_head_dim)
    return dataclasses.replace(GPU_OPERANDS, device_type=able.device_type or "cpu", head_dim=dim, value_dim=dim)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_a_kernel_does_not_compute_are_refused_by_name(name: str, option: str) -> None:
    capabilities, operands, spec = KERNELS[name].capabilities, operands_for(name), ASKED[option]
    unable = dataclasses.replace(capabilities, options=capabilities.options - {option})
    able = dataclasses.replace(capabilities, options=frozenset({option}))

    assert capabilities.refusal(operands, SPEC) is None
    assert unable.refusal(operands, spec) == f"does not compute {option}"
    assert able.refusal(operands, spec) is None
    assert (capabilities.refusal(operands, spec) is None) == (option in COMPUTED[name])


@pytest.mark.parametrize("option", ["window_tokens", "one_sided_window", "softcap"])
@pytest.mark.parametrize(
    ("generation", "dim", "refused"),
    [(9, 256, False), (10, 256, True), (11, 256, True), (10, 128, False), (12, 256, False)],
)
def test_flash4_lacks_options_on_some_gpus(option: str, generation: int, dim: int, refused: bool) -> None:
    capabilities = KERNELS["flash4"].capabilities
    operands = dataclasses.replace(GPU_OPERANDS, compute_capability=generation, head_dim=dim, value_dim=dim)
    told = f"does not compute {option} with head dimension 256 on compute capability {generation}"

    assert capabilities.refusal(operands, ASKED[option]) == (told if refused else None)
    assert capabilities.refusal(operands, SPEC) is None


def test_refusals_name_options_with_their_values_and_what_each_kernel_lacks(nothing_installed: None) -> None:
    spec = SPEC._replace(window_tokens=4096, softcap=50.0)
    with pytest.raises(UnsupportedAttentionError) as refused:
        choose_kernel("auto", GPU_OPERANDS, spec)

    message = str(refused.value)
    assert message.startswith("window_tokens=4096, softcap=50.0: no attention kernel for Operands(")
    for part in ("flash4 is not installed", "flash2 is not installed", "torch_varlen does not compute softcap"):
        assert part in message
    with pytest.raises(
        UnsupportedAttentionError, match="cpu does not compute window_tokens and softcap; kernel='auto'"
    ):
        choose_kernel("cpu", CPU_OPERANDS, spec)


@pytest.mark.parametrize(
    ("changes", "spec", "chosen"),
    [
        *(
            ({"dtype": getattr(torch, name)}, SPEC, CpuKernel)
            for name in ("float32", "float64", "bfloat16", "float16")
        ),
        *(({"head_dim": key, "value_dim": value}, SPEC, ReferenceKernel) for key, value in ((64, 32), (16, 24))),
        *(({}, ASKED[option], ReferenceKernel) for option in OPTIONS),
    ],
    ids=str,
)
def test_auto_on_a_cpu_takes_the_reference_for_what_the_cpu_kernel_lacks(
    changes: dict[str, Any], spec: AttentionSpec, chosen: type[Kernel]
) -> None:
    assert isinstance(choose_kernel("auto", dataclasses.replace(CPU_OPERANDS, **changes), spec), chosen)


def test_every_optional_field_of_a_spec_is_an_option() -> None:
    """A field that is neither read by all kernels nor an option would be ignored."""
    of_all_kernels = {"scale", "causal", "deterministic"}
    assert set(AttentionSpec._fields) == of_all_kernels | {"chunked"} | set(OPTIONS) - {"one_sided_window"}
    with pytest.raises(UnsupportedAttentionError, match="computes whole tasks"):
        choose_kernel("auto", CPU_OPERANDS, AttentionSpec(1.0, window_tokens=16, chunked=True))


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.125), AttentionSpec(2, False, deterministic=True), AttentionSpec(0.1, True, 128, 30.0)],
    ids=str,
)
def test_spec_crosses_an_operator_unchanged(spec: AttentionSpec) -> None:
    """As the floats that the dispatcher makes of its numbers, too."""
    for numbers in ([*spec], [float(number) for number in spec]):
        arrived = spec_of(*numbers)
        assert arrived == spec
        assert [type(field) for field in arrived] == [float, bool, int, float, bool, bool]


def test_kernel_is_chosen_once_for_all_scales_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[AttentionSpec] = []
    monkeypatch.setattr(registry, "try_out", lambda kernel, operands, spec: tried.append(spec))
    chosen_kernel.cache_clear()
    for scale in (0.1, 0.2):
        for deterministic in (True, False):
            choose_kernel("cpu", CPU_OPERANDS, AttentionSpec(scale, deterministic=deterministic))
    for window_tokens in (1, 128, 4096):
        choose_kernel("reference", CPU_OPERANDS, AttentionSpec(0.1, window_tokens=window_tokens))
    chosen_kernel.cache_clear()

    assert tried == [AttentionSpec(1.0), AttentionSpec(1.0, window_tokens=reference.WINDOW_TOKENS)]
