"""TRL's `DPOTrainer`, which pads its batches: their rows are placed inside the model, without padding.

    accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples dpo)"

Self-contained: random preferences of numbers as words, a tiny Llama. `attach` leaves batches, losses and the reference
model as they are. On GPUs take another accelerate recipe, `from_pretrained` and a dataset of preferences. TRL's other
trainers are attached to alike.
"""

import copy
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import distca_hf


GPU = torch.cuda.is_available()


def random_preferences(count: int) -> Dataset:
    """Returns prompts with two answers, of 2 to 200 words, most of them short."""
    rng = random.Random(0)

    def words() -> str:
        return " ".join(str(rng.randrange(2, 256)) for _ in range(min(200, 2 + int(rng.lognormvariate(3.0, 1.2)))))

    return Dataset.from_dict({column: [words() for _ in range(count)] for column in ("prompt", "chosen", "rejected")})


def number_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose words are the numbers below 256."""
    known = Tokenizer(models.WordLevel({str(number): number for number in range(256)}, unk_token="0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="0", eos_token="1")


def main() -> None:
    args = DPOConfig(
        output_dir="dpo_output",
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=GPU,
        use_cpu=not GPU,
        gradient_checkpointing=False,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),  # the reference; TRL loads it by itself if a model has a name
        args=args,
        train_dataset=random_preferences(64),
        processing_class=number_tokenizer(),
    )
    distca_hf.DistCAPlugin().attach(trainer)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
