"""Trains a causal language model with Trainer on texts or on a tokenised dataset; distca is three lines of it.

    distca train llama3_8b_128k --dataset documents.jsonl

Without a recipe every argument of `TrainingArguments` and below can be given on the command line, and settings of
distca as DISTCA_<FIELD>. On CPUs add `--use_cpu true`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import distca_hf


FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass
class ScriptArguments:
    """What to train, and on what."""

    model: str = field(metadata={"help": "name or folder of a model; with from_scratch its configuration is enough"})
    dataset: str = field(
        metadata={
            "help": "file (.jsonl, .parquet, .csv, .txt) or dataset of the Hub with a column text, or folder written "
            "by datasets.Dataset.save_to_disk with input_ids"
        }
    )
    test_size: float = field(
        default=0.0, metadata={"help": "share of the documents to evaluate on (with the setting evaluate=distca)"}
    )
    from_scratch: bool = field(default=False, metadata={"help": "begin with random weights"})
    dtype: str = field(default="float32", metadata={"help": "dtype of the weights; bf16=true computes in bf16 anyway"})


def load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None if it has none, which a tokenised dataset allows."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None


def load_documents(name: str, tokenizer: PreTrainedTokenizerBase | None) -> Dataset:
    """The dataset of this name, tokenised: whole documents, each with its end, without padding."""
    path = Path(name)
    if path.is_dir():
        dataset = Dataset.load_from_disk(name)
    elif path.is_file():
        dataset = load_dataset(FORMATS[path.suffix], data_files=name, split="train")
    else:
        dataset = load_dataset(name, split="train")
    if "text" not in dataset.column_names:
        return dataset
    if tokenizer is None:
        raise SystemExit(f"{name} holds texts, and the model has no tokenizer that can be loaded: save one beside it")

    def tokenise(rows):
        end = tokenizer.eos_token_id
        ids = tokenizer(rows["text"])["input_ids"]
        return {"input_ids": [[*document, *([end] if document[-1:] != [end] else [])] for document in ids]}

    return dataset.map(tokenise, batched=True, remove_columns=dataset.column_names)


def main() -> None:
    usage = "%(prog)s --model MODEL --dataset DATASET --output_dir FOLDER [--ARGUMENT VALUE ...]"
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments), usage=usage).parse_args_into_dataclasses()

    set_seed(args.seed)  # random weights must be the same on every rank
    load = {"attn_implementation": "distca", "dtype": getattr(torch, script.dtype)}
    if script.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script.model), **load)
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model, **load)
    tokenizer = load_tokenizer(script.model)

    with args.main_process_first():  # the other ranks read what the first has written
        documents = load_documents(script.dataset, tokenizer)
    data = {"train": documents, "test": None}
    if script.test_size:
        data = documents.train_test_split(script.test_size, seed=args.seed)
    trainer = Trainer(model, args, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer)
    distca_hf.DistCAPlugin().attach(trainer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:  # checkpoints may be sharded, the model is wanted whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    if script.test_size:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
