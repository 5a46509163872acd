"""TRL's SFTTrainer with packing: its packs stay as they are, and their rows are placed inside the model.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples sft_packing)"

Self-contained: generated texts, a tokenizer of their words, a tiny Llama. On GPUs take another accelerate recipe.
Without `packing=True` its padded batches train alike.
"""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distca_hf


WORDS = ["<pad>", "<end>", *(f"word{number}" for number in range(126))]
GPU = torch.cuda.is_available()


def generated_texts(count: int) -> Dataset:
    """Returns texts of 5 to 500 words, most of them short."""
    rng = random.Random(0)
    lengths = [min(500, max(5, int(rng.lognormvariate(4.0, 1.2)))) for _ in range(count)]
    return Dataset.from_dict({"text": [" ".join(rng.choices(WORDS[2:], k=length)) for length in lengths]})


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    args = SFTConfig(
        output_dir="sft_packing_output",
        packing=True,
        max_length=512,
        per_device_train_batch_size=2,
        dataloader_drop_last=True,  # or ranks repeat packs at the end of an epoch
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=GPU,
        use_cpu=not GPU,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    trainer = SFTTrainer(model=model, args=args, train_dataset=generated_texts(200), processing_class=word_tokenizer())
    distca_hf.DistCAPlugin().attach(trainer)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
