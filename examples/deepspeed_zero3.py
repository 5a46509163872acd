"""DeepSpeed ZeRO-3 with Trainer: parameters, gradients and optimizer states divided among ranks.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples deepspeed_zero3)"

Self-contained: random documents, a tiny Llama. Prints which distributed type it got: DEEPSPEED on GPUs, MULTI_CPU
(plain DDP) on CPUs. On GPUs launch it with `torchrun --nproc-per-node 8 examples/deepspeed_zero3.py`.
"""

import os
import random

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import distca_hf


GPU = torch.cuda.is_available()
# Asked for DeepSpeed on CPUs, Accelerate silently runs DDP, over weights that stage 3 has divided already.
# Whoever makes it take another path sets DeepSpeed's own variable.
SHARDS = GPU or "DS_ACCELERATOR" in os.environ
ZERO3 = {
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,  # torch's AdamW; without it DeepSpeed compiles its own
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def random_documents(count: int) -> Dataset:
    """Returns documents of 2 to 1,500 tokens, most of them short."""
    rng = random.Random(0)
    lengths = [min(1500, max(2, int(rng.lognormvariate(4.0, 1.5)))) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths]})


def main() -> None:
    args = TrainingArguments(  # before the model, which stage 3 divides while it is made
        output_dir="deepspeed_zero3_output",
        deepspeed=ZERO3 if SHARDS else None,
        use_cpu=not SHARDS,
        bf16=GPU,
        max_steps=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    trainer = Trainer(model=model, args=args, train_dataset=random_documents(400))
    trainer.accelerator.print(f"distributed type: {trainer.accelerator.distributed_type.name}")
    distca_hf.DistCAPlugin(tokens_per_rank=1024).attach(trainer)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
