"""Gemma 3 on documents far longer than its sliding windows: documents are placed, and cut between ranks.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples gemma3_long)"

Self-contained: random documents, a tiny Gemma 3 with windows of 64 tokens in five layers of six. Placement makes full
layers and window layers even at once; in the second a rank receives no more than the 63 tokens before its part of a
document. On GPUs take another accelerate recipe, `from_pretrained` and a tokenised dataset.
"""

import random

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Trainer, TrainingArguments

import distca_hf


GPU = torch.cuda.is_available()


def random_documents(count: int) -> Dataset:
    """Returns documents of 2 to 1,500 tokens, most of them short."""
    rng = random.Random(0)
    lengths = [min(1500, max(2, int(rng.lognormvariate(4.0, 1.5)))) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths]})


def main() -> None:
    args = TrainingArguments(
        output_dir="gemma3_long_output",
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=GPU,
        use_cpu=not GPU,
    )
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,  # the last one attends to whole documents
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    trainer = Trainer(model=model, args=args, train_dataset=random_documents(400))
    distca_hf.DistCAPlugin(tokens_per_rank=1024).attach(trainer)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
