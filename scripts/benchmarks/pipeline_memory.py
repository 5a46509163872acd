"""Compares the peak memory of a pipeline's stages with the estimate of `distca simulate --pipeline`.

    torchrun --nproc-per-node 4 scripts/benchmarks/pipeline_memory.py --layers 16 --tokens-per-rank 65536
    torchrun --nproc-per-node 2 scripts/benchmarks/pipeline_memory.py --device cpu --preset tiny --tokens-per-rank 256

Stages are those of `pipeline_step.py`, but data ranks shard weights by FSDP2 in bf16, as the estimate has them, and
there is no state of an optimizer. Documents are shaped and placed. One line for every stage of every schedule: most
bytes that torch had given out at once in a step, of the data rank that had most, behind a step to warm up; and the
estimate (`StageMemory`) for the bytes that ranks exchanged. On a CPU only the estimate is shown.
"""

import argparse
import gc
import shutil
from collections.abc import Iterator

import datasets
import torch
import torch.distributed as dist

import distca_hf
from distca_hf import Pipeline
from distca_hf.analysis.find_model import read_model
from distca_hf.analysis.memory import GIB, TrainingSetup
from distca_hf.analysis.simulate.model import SimulatedModel
from distca_hf.analysis.simulate.stages import StageMemory
from distca_hf.pipelines.stages import StepInputs
from lib.header import machine_facts
from lib.options import on_all_ranks
from lib.parser import parser_of
from lib.pipeline.inputs import StepSetup, add_pipeline, write_model
from lib.pipeline.stages import Stages
from lib.tables import head, row


COLUMNS = ("schedule", "stage", "measured GiB", "estimated GiB", "estimated ÷ measured")


def main() -> None:
    parser = parser_of(__doc__)
    add_pipeline(parser, folder="pipeline_memory_output")
    on_all_ranks(measure, parser.parse_args(), bind=False)


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Measures one schedule after the other; rank 0 prints.

    Raises:
        ConfigError: a schedule cannot run.
        SystemExit: the folder is there already, or numbers of ranks do not fit.
    """
    datasets.disable_progress_bars()
    setup = StepSetup.open(options, device)
    if dist.get_rank() == 0:
        write_model(options.folder, setup.config, device)
        facts = [
            *machine_facts(device),
            f"{setup.config.model_type}, {setup.config.num_hidden_layers} layers, vocabulary {options.vocabulary}",
            f"{options.stages} stages x {setup.mesh['data'].size()} data ranks",
            f"{options.micro_batches} micro-batches of {options.tokens_per_rank} tokens per data rank",
        ]
        print(f"{'; '.join(facts)}\n")
        print(head(COLUMNS, text_columns=2), flush=True)
    dist.barrier()
    tokens = options.tokens_per_rank
    settings = {"tokens_per_rank": tokens, "pad_to_multiple_of": tokens, "prefetch": options.micro_batches}
    plugin = distca_hf.DistCAPlugin(**settings)
    plugin.use_mesh(setup.mesh, data="data", stages="stage")
    try:
        for pipeline in setup.pipelines:
            for line in stage_lines(options, plugin, setup, pipeline, device):
                if dist.get_rank() == 0:
                    print(line, flush=True)
            gc.collect()  # before the next parts are read
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(options.folder)


def stage_lines(
    options: argparse.Namespace,
    plugin: distca_hf.DistCAPlugin,
    inputs: StepSetup,
    pipeline: Pipeline,
    device: torch.device,
) -> Iterator[str]:
    """Yields a line of the table for every stage, after two steps. A collective call."""
    stages = Stages(options.folder, plugin, pipeline, inputs.mesh, device, options.micro_batches, shard=True)
    loader = plugin.dataloader(
        inputs.documents, shuffle=False, model=stages.outline, pipeline=pipeline, micro_steps=options.micro_batches
    )
    batches = list(loader)
    step = StepInputs.of(batches)
    stages.step(step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stages.step(step)
    model = SimulatedModel.of(read_model(options.folder / "config.json", tries=False))
    rows = max(max(batch["distca_plan"].facts.key_rows_received) for batch in batches)
    received_bytes = rows * model.heads.token_bytes(2).key_value
    setup = TrainingSetup(stages.data_ranks, optimizer_bytes=0)
    size, sizes = model.size.decoder(model.heads), (options.micro_batches, options.tokens_per_rank, received_bytes)
    memory = StageMemory(size, setup, pipeline, *sizes)
    peaks = peaks_of_stages(options.stages, inputs.mesh.get_local_rank("stage"), device)
    name = "1F1B" if pipeline.chunks == 1 else f"interleaved, {pipeline.chunks} chunks"
    for stage, peak_bytes in enumerate(peaks):
        estimated = memory.of_stage(stage)
        measured = (f"{peak_bytes / GIB:.2f}", f"{estimated / peak_bytes:.3f}") if peak_bytes else ("-", "-")
        yield row([name, str(stage), measured[0], f"{estimated / GIB:.2f}", measured[1]])


def peaks_of_stages(num_stages: int, stage: int, device: torch.device) -> list[int]:
    """Returns the most bytes that a rank of each stage had been given at once; 0 on a CPU. A collective call."""
    peaks = torch.zeros(num_stages, dtype=torch.int64, device=device)
    if device.type == "cuda":
        peaks[stage] = torch.cuda.max_memory_allocated(device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return [int(peak) for peak in peaks]


if __name__ == "__main__":
    main()
