"""Texts in files, and a small model with a tokenizer of their words."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.models import tiny_model


WORDS = ["the", "rank", "holds", "rows", "of", "one", "long", "document", "and", "sends", "keys"]
END = "<end>"


def save_word_model(folder: Path, kind: str = "llama") -> Path:
    """A folder with a model of random weights and a tokenizer of a few words."""
    vocabulary = {word: number for number, word in enumerate([END, "<unknown>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    tiny_model(kind, max_position_embeddings=4096).save_pretrained(folder)
    return folder


def write_documents(path: Path, lengths: Sequence[int]) -> Path:
    """A .jsonl file with a text of so many words on every line."""
    texts = [" ".join(WORDS[(place * length) % len(WORDS)] for place in range(length)) for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
