"""Measured steps and peaks of docs/benchmarks, in the words of `distca plan`'s estimates."""

from collections.abc import Mapping
from dataclasses import dataclass

from distca_hf.analysis.memory import GIB, Checkpointing
from distca_hf.analysis.request import PRESETS, ModelShape, ModelSize


LLAMA_8B, QWEN_4B = PRESETS["llama3-8b"], PRESETS["qwen3-4b"]
LAYERS = 4
STEP_PAGE, RUN_PAGE = "steps", "training"


def _size(model: ModelShape) -> ModelSize:
    """Returns the numbers of weights, which every model of the table has."""
    assert model.size is not None
    return model.size


def _few_layers(vocabulary: int, head: bool) -> ModelSize:
    """Returns four layers of an 8B Llama with an embedding, and with or without a head."""
    size = ModelSize.of_gated_layers(LLAMA_8B.heads, LAYERS, 4096, 14_336, 0)
    embedding = vocabulary * 4096 * (2 if head else 1)
    return ModelSize(
        layers=LAYERS,
        hidden_size=4096,
        vocabulary=vocabulary if head else 0,
        parameters=size.parameters + embedding,
        layer_parameters=size.layer_parameters,
        embedding_parameters=embedding,
    )


BACKBONE = _few_layers(128_256, head=False)  # scripts/benchmarks/attention_step.py
SMALL_VOCABULARY = _few_layers(32_000, head=True)  # scripts/benchmarks/training_run.py
LLAMA, QWEN = _size(LLAMA_8B), _size(QWEN_4B)

# Short documents of scripts/benchmarks/training_run.py have 512 to 8192 tokens; so many fill up a batch as here.
TRAINING = "131200,8x512,8x1024,8x2048,8x4096,8x8192,4016"
A, B, C = "65536,2x32768,4x16384,32x2048", "131072,96x4096", "65536,48x4096"
HALF_64K, HALF_128K = "65536,16x4096", "131072,32x4096"
KV_BUDGET_BYTES = 4 * GIB  # the default of `kv_budget_gib`
NVLINK, SLOW = "NVLink", "30 GB/s"


@dataclass(frozen=True)
class StepRow:
    """A step of packing alone, and one of placed documents.

    Attributes:
        page: in docs/benchmarks.
        links: between GPUs.
        num_ranks, documents, size: of the run; documents as "131072,96x4096".
        local_ms, placed_ms: median steps.
        checkpointing, local_checkpointing: of placed, and of packing alone.
        liger: Liger's norms, rotary embeddings and MLPs.
        whole: packing kept documents whole, though a rank then held more tokens than others.
    """

    page: str
    links: str
    num_ranks: int
    documents: str
    local_ms: float
    placed_ms: float
    size: ModelSize = BACKBONE
    checkpointing: Checkpointing = "recomputed"
    local_checkpointing: Checkpointing = "recomputed"
    liger: bool = False
    whole: bool = False


@dataclass(frozen=True)
class PeakRow:
    """Most memory that torch had given out at once.

    Attributes:
        page, num_ranks, documents, size, checkpointing, liger: as of a `StepRow`.
        way: "local", "placed", "fixed" (packs in order, tasks move), or "whole" (see `StepRow.whole`).
        gib: measured.
        optimizer_bytes: of its state, for each weight; 0 where no optimizer ran.
        kv_budget_bytes: most bytes of received rows that waited; 0 with `kv_residency="refetch"`, and in runs before
            2026-11-22, when no rows waited yet.
        tensor_ranks: of the ranks, that hold the same documents.
    """

    page: str
    num_ranks: int
    documents: str
    way: str
    gib: float
    size: ModelSize = BACKBONE
    checkpointing: Checkpointing = "recomputed"
    liger: bool = False
    optimizer_bytes: int = 0
    kv_budget_bytes: float = KV_BUDGET_BYTES
    tensor_ranks: int = 1


def _table(
    page: str, links: str, num_ranks: int, ms: Mapping[str, tuple[float, float]], liger: bool = False
) -> list[StepRow]:
    """Returns the rows of a page's table: milliseconds of packing alone and of placed documents, by documents."""
    return [
        StepRow(page, links, num_ranks, documents, local, placed, liger=liger)
        for documents, (local, placed) in ms.items()
    ]


STEPS = [
    *_table(STEP_PAGE, NVLINK, 4, {A: (1917, 1369), B: (5856, 2918), C: (1913, 1227)}),
    *_table(STEP_PAGE, SLOW, 4, {A: (1979, 1488), B: (5839, 3012), C: (1977, 1354), "64x4096": (1057, 1063)}),
    *_table(STEP_PAGE, NVLINK, 2, {HALF_64K: (1914, 1456)}),
    *_table(STEP_PAGE, NVLINK, 2, {HALF_64K: (1905, 1445), HALF_128K: (5843, 3907)}),
    *_table(STEP_PAGE, SLOW, 2, {HALF_64K: (1970, 1521), HALF_128K: (5915, 3980)}),
    *_table(STEP_PAGE, NVLINK, 4, {A: (1897, 1348), B: (5823, 2886), C: (1886, 1201), "64x4096": (929, 933)}),
    *_table(STEP_PAGE, SLOW, 4, {A: (1950, 1420), B: (5816, 2930), C: (1948, 1272)}),
    *_table(STEP_PAGE, NVLINK, 4, {A: (1755, 1201), B: (5545, 2587), C: (1747, 1052)}, liger=True),
    *_table(STEP_PAGE, SLOW, 4, {A: (1846, 1322), B: (5600, 2682), C: (1847, 1182)}, liger=True),
    StepRow(RUN_PAGE, NVLINK, 4, TRAINING, 6026, 1949, SMALL_VOCABULARY, whole=True),
    StepRow(RUN_PAGE, SLOW, 4, TRAINING, 6036, 2242, SMALL_VOCABULARY, whole=True),
    StepRow(RUN_PAGE, NVLINK, 4, TRAINING, 6046, 1695, SMALL_VOCABULARY, "saved", whole=True),
    StepRow(RUN_PAGE, SLOW, 4, TRAINING, 6067, 1849, SMALL_VOCABULARY, "saved", whole=True),
    StepRow(RUN_PAGE, NVLINK, 4, TRAINING, 6068, 1684, SMALL_VOCABULARY, "saved", whole=True),
]

PEAKS = [
    PeakRow(RUN_PAGE, 4, A, "local", 21.8),
    PeakRow(RUN_PAGE, 4, A, "placed", 22.4),
    PeakRow(RUN_PAGE, 4, A, "fixed", 22.9),
    PeakRow(RUN_PAGE, 4, B, "local", 40.1),
    PeakRow(RUN_PAGE, 4, B, "placed", 41.8),
    PeakRow(RUN_PAGE, 4, B, "fixed", 41.4),
    PeakRow(RUN_PAGE, 4, C, "local", 21.8),
    PeakRow(RUN_PAGE, 4, C, "placed", 22.5),
    PeakRow(RUN_PAGE, 4, C, "fixed", 22.3),
    PeakRow(RUN_PAGE, 2, HALF_64K, "local", 23.7),
    PeakRow(RUN_PAGE, 2, HALF_64K, "placed", 23.7, kv_budget_bytes=0),
    PeakRow(RUN_PAGE, 2, HALF_64K, "fixed", 23.7, kv_budget_bytes=0),
    PeakRow(RUN_PAGE, 2, HALF_64K, "placed", 24.4),
    PeakRow(RUN_PAGE, 2, HALF_64K, "fixed", 25.0),
    PeakRow(RUN_PAGE, 2, HALF_64K, "placed", 25.2, checkpointing="saved"),
    PeakRow(RUN_PAGE, 2, HALF_64K, "fixed", 26.3, checkpointing="saved"),
    PeakRow(RUN_PAGE, 4, TRAINING, "whole", 58.5, SMALL_VOCABULARY, optimizer_bytes=8),
    PeakRow(RUN_PAGE, 4, TRAINING, "placed", 29.5, SMALL_VOCABULARY, optimizer_bytes=8, kv_budget_bytes=0),
    PeakRow(RUN_PAGE, 4, TRAINING, "placed", 31.5, SMALL_VOCABULARY, "saved", optimizer_bytes=8, kv_budget_bytes=0),
    PeakRow(RUN_PAGE, 4, TRAINING, "placed", 32.6, SMALL_VOCABULARY, "saved", optimizer_bytes=8, kv_budget_bytes=0),
    PeakRow(RUN_PAGE, 4, "262144", "placed", 69, LLAMA, "saved", True, 8),
    PeakRow(RUN_PAGE, 4, "262144,64x4096", "placed", 111, LLAMA, "saved", True, 8),
    PeakRow(RUN_PAGE, 4, "262144,64x4096", "placed", 87, QWEN, "saved", True, 8),
    PeakRow(RUN_PAGE, 4, "262144", "placed", 53, QWEN, "saved", True, 8),
    PeakRow(RUN_PAGE, 4, "262272,42x4096", "placed", 96.0, LLAMA, "saved", True, 8),
    PeakRow(RUN_PAGE, 4, "524288", "placed", 109.1, LLAMA, "saved", True, 8),
    PeakRow(RUN_PAGE, 4, HALF_64K, "local", 14.4, tensor_ranks=2),
    PeakRow(RUN_PAGE, 4, HALF_64K, "placed", 14.6, tensor_ranks=2),
    PeakRow(RUN_PAGE, 4, HALF_64K, "fixed", 14.9, tensor_ranks=2),
    PeakRow(RUN_PAGE, 4, HALF_128K, "local", 26.7, tensor_ranks=2),
    PeakRow(RUN_PAGE, 4, HALF_128K, "placed", 27.4, tensor_ranks=2),
    PeakRow(RUN_PAGE, 4, HALF_128K, "fixed", 28.1, tensor_ranks=2),
]
