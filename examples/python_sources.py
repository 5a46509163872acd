"""Real text with a long tail that every machine has: the sources of Python's standard library, tokenised.

A byte-level BPE tokenizer is trained on the spot. Documents are files, from a few tokens to far over 100,000.
"""

import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


VOCABULARY = 4096
END_OF_FILE = "<|endoffile|>"
# Left out: packages installed into the library, and its tests, which are as large as the rest together.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def read_sources() -> list[str]:
    """All source files of the standard library, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return [text for text in texts if text]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with one special token, which ends every document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(cache: Path) -> Dataset:
    """The tokenised dataset; made once, then read from `cache`."""
    if (cache / "dataset").is_dir():
        return Dataset.load_from_disk(str(cache / "dataset"))
    texts = read_sources()
    tokenizer = train_tokenizer(texts)
    end = tokenizer.token_to_id(END_OF_FILE)
    documents = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(cache / "tokenizer.json"))
    Dataset.from_dict({"input_ids": documents}).save_to_disk(str(cache / "unfinished"))
    (cache / "unfinished").rename(cache / "dataset")  # a folder of this name is whole
    return Dataset.load_from_disk(str(cache / "dataset"))
