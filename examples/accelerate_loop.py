"""A plain Accelerate loop on placed micro-batches, with gradient accumulation.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples accelerate_loop)"

Self-contained: random documents, a tiny Llama, a few steps. Every label of a step counts once, whichever rank and
micro-batch holds it.
"""

import random
from contextlib import nullcontext
from itertools import islice

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

import distca_hf


STEPS, ACCUMULATION = 5, 3


def random_documents(count: int) -> Dataset:
    """Returns documents of 2 to 1,500 tokens, most of them short."""
    rng = random.Random(0)
    lengths = [min(1500, max(2, int(rng.lognormvariate(4.0, 1.5)))) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths]})


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")

    plugin = distca_hf.DistCAPlugin(tokens_per_rank=2048 // accelerator.num_processes)
    distca_hf.enable(model, plugin)
    loader = plugin.dataloader(random_documents(400), seed=0, model=model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    batches = iter(loader)
    for step in range(STEPS):
        micro_batches = list(islice(batches, ACCUMULATION))
        labels = sum(batch["distca_plan"].label_tokens for batch in micro_batches)
        loss_sum = torch.zeros((), device=accelerator.device)
        for batch in micro_batches:
            last = batch is micro_batches[-1]
            with nullcontext() if last else accelerator.no_sync(model):
                loss = model(**batch, num_items_in_batch=labels / accelerator.num_processes).loss
                accelerator.backward(loss)
            loss_sum += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balance = ", ".join(f"{batch['distca_plan'].facts.imbalance:.3f}" for batch in micro_batches)
        accelerator.print(
            f"step {step}: loss {accelerator.reduce(loss_sum, 'mean').item():.5f}, max/mean work {balance}"
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
