"""Tokenises texts into a folder that `distca plan` and training read: whole documents, each with its end, no padding.

    python "$(distca examples tokenise_texts)" MODEL documents.jsonl tokenised

Texts are a file (.jsonl, .json, .parquet, .csv with a column `text`; .txt with a document on every line) or a dataset
of the Hub. MODEL is the name or folder of a model with a tokenizer. No GPU is needed.
"""

import sys
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase


FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_documents(name: str) -> Dataset:
    """Loads a folder that `Dataset.save_to_disk` wrote, a file of texts, or a dataset of the Hub."""
    path = Path(name)
    if path.is_dir():
        return Dataset.load_from_disk(name)
    if not path.is_file():
        return load_dataset(name, split="train")
    if path.suffix not in FORMATS:
        raise SystemExit(f"{name} must end in {', '.join(FORMATS)}, or be a folder of a saved dataset")
    return load_dataset(FORMATS[path.suffix], data_files=name, split="train")


def tokenise(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Returns the column `text` as `input_ids`. Few tokenizers add the end by themselves."""
    end = tokenizer.eos_token_id
    if "text" not in texts.column_names:
        raise SystemExit(f"expected a column 'text', found {texts.column_names}")
    if end is None:
        raise SystemExit("the tokenizer has no eos_token, which ends documents: set one and save the tokenizer again")

    def ids_of(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(rows["text"])["input_ids"]
        return {"input_ids": [document if document[-1:] == [end] else [*document, end] for document in ids]}

    return texts.map(ids_of, batched=True, remove_columns=texts.column_names)


def main(model: str, texts: str, folder: str) -> None:
    tokenised = tokenise(load_documents(texts), AutoTokenizer.from_pretrained(model))
    tokenised.save_to_disk(folder)
    lengths = [len(ids) for ids in tokenised["input_ids"]]
    print(
        f"{folder}: {len(lengths):,} documents, {sum(lengths):,} tokens, the longest has {max(lengths, default=0):,}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: {sys.argv[0]} MODEL TEXTS FOLDER")
    main(*sys.argv[1:])
