"""Qwen 3.5, whose linear-attention layers carry a state from token to token, which travels with cut documents.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples qwen3_5)"

Self-contained: random documents, a tiny Qwen 3.5 with full attention in its last layer. Ranks get equal tokens and
equal work. A document may be cut: then keys of the full layer are sent, and states of the other one. On GPUs take
another accelerate recipe, `from_pretrained` and a tokenised dataset.
"""

import random

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Trainer, TrainingArguments

import distca_hf


GPU = torch.cuda.is_available()


def random_documents(count: int) -> Dataset:
    """Returns documents of 2 to 900 tokens, most of them short."""
    rng = random.Random(0)
    lengths = [min(900, max(2, int(rng.lognormvariate(4.0, 1.5)))) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths]})


def main() -> None:
    args = TrainingArguments(
        output_dir="qwen3_5_output",
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=GPU,
        use_cpu=not GPU,
    )
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    trainer = Trainer(model=model, args=args, train_dataset=random_documents(200))
    distca_hf.DistCAPlugin(tokens_per_rank=512).attach(trainer)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
