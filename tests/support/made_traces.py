"""Traces as a training would write them, without a training."""

from dataclasses import replace
from pathlib import Path

from distca_hf.traces import (
    CallTrace,
    HeadSizes,
    LayersTrace,
    MemoryUse,
    ModelSizes,
    PassPart,
    PredictedCosts,
    RankTrace,
    Spent,
    file_name,
)


GIB = 2**30
KERNELS = (Spent.LOCAL, Spent.REMOTE)


def llama_layers(layers: int) -> ModelSizes:
    """Some layers of an 8B Llama, checkpointed, with attention's outputs saved."""
    heads = HeadSizes(window_tokens=0, query=32, key_value=8, dim=128, value_dim=128, groups=8)
    return ModelSizes(
        heads=(heads,),
        hidden_size=4096,
        layers=layers,
        layer_weights=layers * 218_103_808,
        head_weights=128_256 * 4096,
        backward_share=1.0,
        liger=False,
        recomputes_layers=True,
        recomputes_attention=False,
        tensor_ranks=1,
    )


def made_trace(rank: int, ranks: int, step: int = 100, layers: int = 2, slow_rank: int | None = None) -> RankTrace:
    """The trace of one rank. Before, the first rank has most work. The kernels of a slow rank take 1.3 times as long,
    and the others wait for it."""
    mean = 4.0e8
    work_before = tuple(mean * (3.0 - 2.0 * other / max(1, ranks - 1)) for other in range(ranks))
    slow = 1.3 if rank == slow_rank else 1.0
    waits_us = 20.0 if slow > 1 or slow_rank is None else 600.0
    calls = []
    for part, factor, numbers in (
        (PassPart.FORWARD, 1.0, range(layers)),
        (PassPart.BACKWARD, 2.5, reversed(range(layers))),
    ):
        for layer in numbers:
            spans = (
                (Spent.SEND, 50.0),
                (Spent.LOCAL, 2000.0 * factor * slow + layer),
                (Spent.WAIT, waits_us * factor + rank),
                (Spent.REMOTE, 500.0 * factor * slow),
                (Spent.COMBINE, 30.0),
            )
            calls.append(CallTrace(part, layer, 0, 9000.0 * len(calls), spans))
    neighbours = [other for other in range(max(0, rank - 2), min(ranks, rank + 3)) if other != rank]
    return RankTrace(
        step=step,
        micro_batch=step - 1,
        written=1.0e9 + step,
        rank=rank,
        num_ranks=ranks,
        servers=(),
        stage=0,
        chunk=0,
        tensor_rank=0,
        device="NVIDIA H200",
        ranks_per_node=8,
        placed=True,
        places_rows=False,
        fingerprint=f"{step:016x}",
        documents=300,
        num_tokens=ranks * 65536,
        longest_document_tokens=120_000,
        tokens=65536,
        kinds=(LayersTrace(0, layers, ((8_192, 0, 0),) * 8),),
        work_before=work_before,
        work=tuple(mean * (1.0 + 0.001 * (other % 3)) for other in range(ranks)),
        tokens_before=(65536,) * ranks,
        layer_tokens=(65536,) * ranks,
        step_work_before=(),
        step_work=(),
        speeds=(),
        sent_bytes=tuple((other, 1_000_000 * (1 + (rank + other + step) % 9)) for other in neighbours),
        received_bytes=tuple((other, 1_000_000 * (1 + (rank + other + step) % 9)) for other in neighbours),
        calls=tuple(calls),
        pass_seconds=9e-3 * len(calls),
        step_seconds=10e-3 * len(calls),
        is_complete=True,
        memory=MemoryUse("GPU", 58 * GIB + rank * GIB // 8, 66 * GIB, 141 * GIB),
        costs=PredictedCosts("H200", 1e-7, 1e-11, 2.5e-11),
        model=llama_layers(layers),
        profile="",
    )


def of_given(trace: RankTrace) -> RankTrace:
    """The trace as if batches were given, and their rows placed inside: the first rank has half of all work."""
    mean, others = float(trace.num_tokens), trace.num_ranks - 1
    counts = (trace.num_tokens // 2, *(trace.num_tokens // 2 // others,) * others)
    work = (mean * trace.num_ranks / 2, *(mean * trace.num_ranks / 2 / others,) * others)
    even = {"step_work": (mean,) * trace.num_ranks, "layer_tokens": trace.tokens_before}
    return replace(trace, placed=False, places_rows=True, tokens_before=counts, step_work_before=work, **even)


def write_run(
    folder: Path, ranks: int, steps: int = 1, layers: int = 2, slow_rank: int | None = None, given: bool = False
) -> Path:
    """Writes the traces of a run, of every hundredth step; of batches that were given, if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        traces = [made_trace(rank, ranks, 100 * (step + 1), layers, slow_rank) for step in range(steps)]
        traces = [of_given(trace) if given else trace for trace in traces]
        (folder / file_name(rank)).write_text("".join(f"{trace.line()}\n" for trace in traces))
    return folder


def write_served_run(folder: Path, ranks: int = 2) -> Path:
    """Writes the traces of trainers and of servers 0 and 3, to each of which every trainer sends 1 MB. Trainers wait
    in every call, because server 3 takes 1.4 times as long as they do, for half of their work."""
    folder.mkdir(parents=True, exist_ok=True)
    trainers = [made_trace(rank, ranks, slow_rank=ranks + 3) for rank in range(ranks)]
    work, speeds = (4.0e8,) * (ranks + 1) + (2.0e8,), (1.0,) * (ranks + 1) + (0.5,)
    shared = {"servers": (0, 3), "work": work, "speeds": speeds}
    for trace in trainers:
        sent_bytes = (*trace.sent_bytes, (ranks, 1_000_000), (ranks + 1, 1_000_000))
        line = replace(trace, **shared, sent_bytes=sent_bytes).line()  # type: ignore[arg-type]
        (folder / file_name(trace.rank)).write_text(line)
    for place, (server, factor) in enumerate(((0, 0.8), (3, 1.4))):
        calls = [
            replace(call, spans=tuple((use, us * factor if use in KERNELS else us) for use, us in call.spans))
            for call in trainers[0].calls
        ]
        own = {"rank": ranks + place, "tokens": 0, "calls": tuple(calls), "sent_bytes": (), "received_bytes": ()}
        served = replace(trainers[0], **shared, **own)  # type: ignore[arg-type]
        (folder / file_name(server, is_server=True)).write_text(served.line())
    return folder
