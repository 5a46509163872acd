"""Trains a causal language model with Trainer on texts or on a tokenised dataset; distca is three lines of it.

    distca train llama3_8b_128k --dataset documents.jsonl

Without a recipe all arguments of `TrainingArguments` and `ScriptArguments` go on the command line, and settings of
distca are variables DISTCA_<FIELD>; DISTCA_TOKENS_PER_RANK has to be there. On CPUs add `--use_cpu true --bf16
false`. A copy needs tokenise_texts.py.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenise_texts import check_documents, load_documents, refuse_missing, tokenise
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
from transformers.distributed import DistributedConfig

import distca_hf


@dataclass
class ScriptArguments:
    """Model and dataset of the training."""

    model: str = field(metadata={"help": "name or folder of a model; with from_scratch its configuration is enough"})
    dataset: str = field(
        metadata={
            "help": "texts (.jsonl, .parquet, .csv, .txt, or a dataset of the Hub with a column text), or a folder "
            "written by datasets.Dataset.save_to_disk with input_ids"
        }
    )
    test_size: float = field(
        default=0.0, metadata={"help": "share of the documents to evaluate on (with the setting evaluate=distca)"}
    )
    from_scratch: bool = field(default=False, metadata={"help": "begin with random weights"})
    dtype: str = field(default="float32", metadata={"help": "dtype of the weights; bf16=true computes in bf16 anyway"})
    distributed_config: str = field(
        default="",
        metadata={
            "help": "sizes of transformers.distributed.DistributedConfig as JSON, such as "
            '{"fsdp_size": 8, "ep_size": 8}: how the weights are divided as they are loaded; launch without FSDP then'
        },
    )


ARGUMENTS = (ScriptArguments, TrainingArguments)  # `distca train` reads them before it starts processes


def load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Loads the model's tokenizer; None if it has none, which is enough for a tokenised dataset."""
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def check(script: ScriptArguments) -> None:
    """Ends with a message if files are missing or wrong. `distca train` calls it before it starts processes."""
    if not isinstance(getattr(torch, script.dtype, None), torch.dtype):
        raise SystemExit(f"--dtype {script.dtype} is not a dtype of torch; write float32 or bfloat16")
    if not 0 <= script.test_size < 1:
        raise SystemExit(f"--test_size {script.test_size:g} is a share of the documents, from 0 to below 1")
    if script.distributed_config:
        if script.from_scratch:
            raise SystemExit("distributed_config divides weights as they are loaded; leave it or from_scratch out")
        try:
            DistributedConfig(**json.loads(script.distributed_config))
        except (TypeError, ValueError) as error:
            raise SystemExit(f"--distributed_config {script.distributed_config}: {error}") from error
    refuse_missing("model", script.model)
    folder = Path(script.model)
    if folder.exists() and not (folder / "adapter_config.json").exists():
        try:
            AutoConfig.from_pretrained(script.model, trust_remote_code=False)  # else it asks at the terminal
        except Exception as error:  # of the file, or of a model that Transformers does not have
            raise SystemExit(f"the model in {folder} cannot be loaded: {' '.join(str(error).split())}") from error
        if not script.from_scratch and not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
            raise SystemExit(
                f"{folder} holds a configuration and no weights; --from_scratch true begins with random ones"
            )
    columns = check_documents(script.dataset)
    if "text" in columns and "input_ids" not in columns and folder.exists() and load_tokenizer(script.model) is None:
        raise SystemExit(f"{script.dataset} holds texts, and {script.model} has no tokenizer for them")


def main() -> None:
    usage = "%(prog)s --model MODEL --dataset DATASET --output_dir FOLDER [--ARGUMENT VALUE ...]"
    parser = HfArgumentParser(ARGUMENTS, usage=usage, allow_abbrev=False)
    script, args = parser.parse_args_into_dataclasses()
    check(script)
    plugin = distca_hf.DistCAPlugin()
    if not plugin.tokens_per_rank:
        raise SystemExit("documents are placed here: give tokens_per_rank in a recipe, or DISTCA_TOKENS_PER_RANK")

    set_seed(args.seed)  # random weights must be the same on every rank
    load = {"attn_implementation": "distca", "dtype": getattr(torch, script.dtype)}
    if script.distributed_config:
        load["distributed_config"] = DistributedConfig(**json.loads(script.distributed_config))
    if script.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script.model), **load)
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model, **load)

    tokenizer = load_tokenizer(script.model)
    with args.main_process_first():  # the other ranks read the cache that the first has written
        documents = load_documents(script.dataset)
        if "input_ids" not in documents.column_names:
            if tokenizer is None:
                raise SystemExit(f"{script.dataset} holds texts, and {script.model} has no tokenizer for them")
            documents = tokenise(documents, tokenizer)
    data = documents.train_test_split(script.test_size, seed=args.seed) if script.test_size else {"train": documents}

    trainer = Trainer(
        model, args, train_dataset=data["train"], eval_dataset=data.get("test"), processing_class=tokenizer
    )
    plugin.attach(trainer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:  # checkpoints may be sharded; the model is saved whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    if script.test_size:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
