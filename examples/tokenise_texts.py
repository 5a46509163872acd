"""Tokenises texts into a folder that `distca plan` and training read: whole documents, each with its end, no padding.

    python "$(distca examples tokenise_texts)" MODEL documents.jsonl tokenised

Texts are a file (.jsonl, .json, .parquet, .csv with a column `text`; .txt with a document on every line) or a dataset
of the Hub. MODEL is the name or folder of a model with a tokenizer. No GPU is needed.
"""

import difflib
import sys
from pathlib import Path

from datasets import Dataset, load_dataset, load_from_disk
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import AutoTokenizer, PreTrainedTokenizerBase


FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_documents(name: str, streaming: bool = False) -> Dataset:
    """Loads a folder that `Dataset.save_to_disk` wrote, a file of texts, or a dataset of the Hub.

    With `streaming` rows of a file are read one by one.
    """
    path = Path(name)
    if path.is_dir():
        try:
            documents = load_from_disk(name)
        except FileNotFoundError:
            raise SystemExit(f"{name} was not written by Dataset.save_to_disk; give a file that is in it") from None
        if not isinstance(documents, Dataset):
            parts = " or ".join(f"{name}/{part}" for part in documents)
            raise SystemExit(f"{name} holds several datasets; give {parts}")
        return documents
    if not path.is_file():
        refuse_missing("dataset", name)
        return load_dataset(name, split="train", streaming=streaming)
    if path.suffix not in FORMATS:
        raise SystemExit(f"{name} must end in {', '.join(FORMATS)}, or be a folder of a saved dataset")
    return load_dataset(FORMATS[path.suffix], data_files=name, split="train", streaming=streaming)


def refuse_missing(kind: str, name: str) -> None:
    """Ends with a message if a name is that of a file or folder that is not there, and none that the Hub may have."""
    path = Path(name)
    in_folder = path.parent.is_dir() and path.parent != Path()
    try:
        validate_repo_id(name)
        on_hub = path.suffix not in FORMATS and not in_folder
    except HFValidationError:
        on_hub = False
    if not path.exists() and not on_hub:
        there = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        hint = f". Did you mean {path.parent / near[0]}?" if near else ""
        raise SystemExit(f"there is no {kind} {name}: no such file or folder{hint}")


def check_documents(name: str) -> list[str]:
    """Returns the columns of a dataset after a look at its first row; none of one on the Hub, which is not asked.

    Ends with a message if the dataset is missing, empty, of another format, or that row has neither text nor tokens.
    """
    path = Path(name)
    if not path.exists():
        refuse_missing("dataset", name)
        return []
    is_empty = path.is_file() and not path.stat().st_size
    try:
        first = None if is_empty else next(iter(load_documents(name, streaming=True)), None)
    except Exception as error:  # each reader has its own
        said = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(f"{name} cannot be read as {path.suffix}: {said}") from error
    if first is None:
        raise SystemExit(f"{name} is empty: it has no row")
    if not {"text", "input_ids"} & first.keys():
        raise SystemExit(
            f"{name} has neither a column 'text' nor 'input_ids'; it has {', '.join(first)}. Rename the "
            "column of texts, or make texts of chats with tokenizer.apply_chat_template(..., tokenize=False)"
        )
    if "input_ids" not in first and not isinstance(first["text"], str):
        raise SystemExit(f"{name}: the column 'text' holds a {type(first['text']).__name__} in row 0, not a text")
    return list(first)


def tokenise(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Returns the column `text` as `input_ids`. Few tokenizers add the end by themselves."""
    end = tokenizer.eos_token_id
    if "text" not in texts.column_names:
        raise SystemExit(f"expected a column 'text', found {texts.column_names}")
    if end is None:
        raise SystemExit("the tokenizer has no eos_token, which ends documents: set one and save the tokenizer again")

    def ids_of(rows: dict[str, list[str]], numbers: list[int]) -> dict[str, list[list[int]]]:
        for number, text in zip(numbers, rows["text"], strict=True):
            if not isinstance(text, str):
                raise SystemExit(f"the column 'text' holds a {type(text).__name__} in row {number}, not a text")
        ids = tokenizer(rows["text"])["input_ids"]
        return {"input_ids": [document if document[-1:] == [end] else [*document, end] for document in ids]}

    return texts.map(ids_of, batched=True, with_indices=True, remove_columns=texts.column_names)


def main(model: str, texts: str, folder: str) -> None:
    refuse_missing("model", model)
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
