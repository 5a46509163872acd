"""A Llama on a pipeline: stages of several data ranks each, with `torch.distributed.pipelining`.

    torchrun --nproc-per-node 4 "$(distca examples pipeline)"                          2 stages x 2 data ranks, 1F1B
    torchrun --nproc-per-node 4 "$(distca examples pipeline)" --chunks 2 --recompute   interleaved, with checkpointing
    torchrun --nproc-per-node 8 "$(distca examples pipeline)" --stages 4 --shard --model MODEL --dataset TOKENISED

Runs on GPUs, or on CPUs if there are none. By default it trains a tiny Llama on random documents. A dataset is a
folder that `tokenise_texts.py` wrote. Every stage reads its own weights of a checkpoint of Transformers, and writes
its own file of another one. Core attention is shared by the data ranks of a stage. `--save-every 100` saves the
training. After a stop, run the same command with `--resume`.
"""

import argparse
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import AutoModelForCausalLM, LlamaConfig

import distca_hf
from distca_hf import Pipeline
from distca_hf.pipelines.stages import (
    DividedModel,
    ModelPart,
    StepInputs,
    StepLoss,
    check_schedule,
    load_training,
    parts_of_stage,
    save_parts,
    save_training,
)


def count(text: str) -> int:
    """Returns a whole number above 0, as `type` of an argument."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stages", type=count, default=2, help="stages; the other dimension is data ranks")
    parser.add_argument(
        "--chunks", type=count, default=1, help="parts of the model on each stage; 2 and more interleave"
    )
    parser.add_argument("--micro-batches", type=count, default=4, help="of an optimizer step")
    parser.add_argument("--tokens-per-rank", type=count, default=1024, help="tokens of a micro-batch per data rank")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing; attention is not repeated")
    parser.add_argument("--shard", action="store_true", help="FSDP2 among the data ranks of a stage, in place of DDP")
    parser.add_argument("--model", help="folder or name of a checkpoint; a tiny Llama by default")
    parser.add_argument("--dataset", help="folder with a tokenised dataset; random documents by default")
    parser.add_argument("--steps", type=count, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=count, metavar="STEPS", help="save the training; never by default")
    parser.add_argument("--resume", action="store_true", help="go on from the last save in the output folder")
    parser.add_argument("--output", type=Path, default=Path("pipeline_output"))
    return parser.parse_args()


def random_documents(count: int) -> Dataset:
    """Returns documents of 2 to 1,500 tokens, most of them short."""
    rng = random.Random(0)
    lengths = [min(1500, max(2, int(rng.lognormvariate(4.0, 1.5)))) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths]})


def tiny_llama(folder: Path) -> str:
    """Writes a checkpoint with random weights, on the first rank; returns its folder."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    dist.barrier()
    return str(folder)


def in_parallel(part: ModelPart, mesh: DeviceMesh, shard: bool) -> nn.Module:
    """Returns a part whose gradients are averaged over the data ranks of its stage."""
    if not shard:
        return nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group())
    # Weights are gathered, and layers compute, in the dtype that stages exchange; gradients are added in fp32.
    policy = MixedPrecisionPolicy(param_dtype=part.hidden_dtype, reduce_dtype=torch.float32)
    for layer in part.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(part, mesh=mesh, mp_policy=policy)
    return part


def clip(parameters: list[nn.Parameter], most: float, stages: dist.ProcessGroup) -> float:
    """Scales gradients of all stages down to a norm of at most `most`; returns the norm that they had."""
    norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    dist.all_reduce(squared, group=stages)
    nn.utils.clip_grads_with_norm_(parameters, most, squared.sqrt())
    return float(squared.sqrt())


def endless(loader: distca_hf.PlacedLoader) -> Iterator[dict[str, Any]]:
    """Yields micro-batches of one epoch after the other; with a pipeline every epoch has whole steps."""
    while True:
        yield from loader


def print_step(number: int, step: StepInputs, losses: list[torch.Tensor], norm: float, mesh: DeviceMesh) -> None:
    """Prints a step's loss, a mean over data ranks, and the balance of each micro-batch; for the last stage."""
    total = torch.stack(losses).sum().detach()
    dist.all_reduce(total, group=mesh.get_group("data"))
    if mesh.get_local_rank("data") == 0:
        balance = ", ".join(f"{plan.facts.imbalance:.3f}" for plan in step.plans)
        mean = float(total) / mesh["data"].size()
        print(f"step {number}: loss {mean:.5f}, gradient norm {norm:.3f}, max/mean work {balance}", flush=True)


def main() -> None:
    args = arguments()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Not bound to the device: transfers of a rank would all be in one stream, and wait for each other.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (args.stages, dist.get_world_size() // args.stages)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("stage", "data"))
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=args.tokens_per_rank)
    plugin.use_mesh(mesh, data="data", stages="stage")

    # 1. This stage's parts of the model.
    pipeline = Pipeline(args.stages, args.chunks)
    schedule_class: Any = ScheduleInterleaved1F1B if args.chunks > 1 else Schedule1F1B
    model = DividedModel(args.model or tiny_llama(args.output / "initial"), pipeline)
    # Weights are in fp32. DDP's layers compute under autocast; FSDP2 casts weights itself.
    half = torch.bfloat16 if device.type == "cuda" else None
    dtypes = {"hidden_dtype": half} if args.shard else {"autocast_dtype": half}
    numbers = parts_of_stage(schedule_class, pipeline, mesh.get_local_rank("stage"))
    parts = [model.load(number, plugin, **dtypes).train() for number in numbers]
    if args.recompute:
        for part in parts:
            part.model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = [in_parallel(part, mesh["data"], args.shard) for part in parts]
    check_schedule(schedule_class, pipeline, args.micro_batches, wrapped)

    # 2. A schedule of torch that runs them.
    group = mesh.get_group("stage")
    stages = [
        PipelineStage(module, part.number, pipeline.num_parts, device, **part.examples(), group=group)
        for part, module in zip(parts, wrapped, strict=True)
    ]
    loss = StepLoss(parts[-1])
    given = stages if args.chunks > 1 else stages[0]
    schedule = schedule_class(given, args.micro_batches, loss_fn=loss, scale_grads=False)

    # 3. Optimizer steps.
    dataset = Dataset.load_from_disk(args.dataset) if args.dataset else random_documents(400)
    for_stages = {"pipeline": pipeline, "micro_steps": args.micro_batches}
    loader = plugin.dataloader(dataset, seed=0, model=model.outline, **for_stages)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate)
    rates = CosineAnnealingLR(optimizer, args.steps)
    training_folder = args.output / "training"
    if args.resume:
        load_training(parts, optimizer, training_folder, plugin, loader=loader, rates=rates)
    batches = endless(loader)
    for number in range(rates.last_epoch, args.steps):  # after the steps that were made before a stop
        step = StepInputs.of(list(islice(batches, args.micro_batches)))
        loss.begin(step)
        losses: list[torch.Tensor] = []
        schedule.step(
            *step.arguments(parts), **step.keywords, target=step.target(parts), losses=losses, return_outputs=False
        )
        norm = clip(parameters, 1.0, group)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if losses:  # on the last stage
            print_step(number, step, losses, norm, mesh)
        if args.save_every and (number + 1) % args.save_every == 0:
            save_training(parts, optimizer, training_folder, plugin, loader=loader, rates=rates)

    # 4. An ordinary checkpoint.
    save_parts(parts, args.output, plugin)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
