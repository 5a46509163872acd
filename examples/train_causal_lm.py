"""Trains a causal language model on a tokenised dataset with Trainer; distca is three lines of it.

    accelerate launch --config_file recipes/accelerate/fsdp2_8gpu.yaml -m distca_hf.run \
        --recipe recipes/train/llama3_8b_128k.yaml examples/train_causal_lm.py --dataset DATASET

Without a recipe every argument of `TrainingArguments` and below can be given on the command line, and settings of
distca as DISTCA_<FIELD>. On CPUs add `--use_cpu true`.
"""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed

import distca_hf


@dataclass
class ScriptArguments:
    """What to train, and on what."""

    model: str = field(metadata={"help": "name or folder of a model; with from_scratch its configuration is enough"})
    dataset: str = field(metadata={"help": "folder written by datasets.Dataset.save_to_disk, with input_ids"})
    from_scratch: bool = field(default=False, metadata={"help": "begin with random weights"})
    dtype: str = field(default="float32", metadata={"help": "dtype of the weights; bf16=true computes in bf16 anyway"})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    script, args = parser.parse_args_into_dataclasses()

    set_seed(args.seed)  # random weights must be the same on every rank
    load = {"attn_implementation": "distca", "dtype": getattr(torch, script.dtype)}
    if script.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script.model), **load)
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model, **load)

    trainer = Trainer(model=model, args=args, train_dataset=Dataset.load_from_disk(script.dataset))
    distca_hf.DistCAPlugin().attach(trainer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:  # checkpoints may be sharded, the model is wanted whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
