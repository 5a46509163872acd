"""GPT-OSS with LoRA adapters from PEFT: its sinks are frozen, its windows stay; saves only the adapter.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples gpt_oss_lora)"

Self-contained: random documents, a tiny GPT-OSS with windows of 64 tokens in every second layer. On GPUs take another
accelerate recipe, `from_pretrained` and a tokenised dataset. The argument is the folder to write to.
"""

import random
import sys

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GptOssConfig, Trainer, TrainingArguments

import distca_hf


GPU = torch.cuda.is_available()


def random_documents(count: int) -> Dataset:
    """Returns documents of 2 to 1,500 tokens, most of them short."""
    rng = random.Random(0)
    lengths = [min(1500, max(2, int(rng.lognormvariate(4.0, 1.5)))) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[rng.randrange(256) for _ in range(length)] for length in lengths]})


def main(output: str) -> None:
    args = TrainingArguments(
        output_dir=output,
        max_steps=4,
        learning_rate=1e-3,
        ddp_find_unused_parameters=False,  # frozen weights need no gradient anyway
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=GPU,
        use_cpu=not GPU,
    )
    torch.manual_seed(0)  # the same weights and adapters on every rank
    config = GptOssConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(model, adapters)  # before attach: the wrapped model trains

    trainer = Trainer(model=model, args=args, train_dataset=random_documents(400))
    distca_hf.DistCAPlugin(tokens_per_rank=1024).attach(trainer)
    trainer.train()
    trainer.save_model()  # of a PEFT model the adapter
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpt_oss_lora_output")
