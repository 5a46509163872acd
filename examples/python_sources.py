"""Real text with a long tail that every machine has: the sources of Python's standard library, tokenised.

A byte-level BPE tokenizer is trained on the spot. Documents are whole modules of a few thousand tokens, and functions
and classes of a few dozen. Half of all tokens are in a few long documents, as in many collections of text.
"""

import re
import secrets
import sysconfig
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distca_hf.whole_file import replaced


VOCABULARY = 4096
END_OF_FILE = "<|endoffile|>"
# Characters of modules and, at most, of functions: about 3,000 to 4,000 tokens, and 400.
MODULE_CHARACTERS = range(9_000, 13_000)
FUNCTION_CHARACTERS = 1_500
# Left out, too: tables whose characters are a token each.
LONGEST_TOKENS = 4096
# Left out: packages installed into the library, and its tests, which are as large as the rest together.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def read_sources() -> list[str]:
    """Reads all source files of the standard library, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return [text for text in texts if text]


def functions_of(text: str) -> list[str]:
    """Returns the parts of a module that begin with one of its functions or classes."""
    return re.split(r"^(?=(?:async )?def |class )", text, flags=re.MULTILINE)[1:]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with one special token, which ends every document."""
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


def choose_documents(texts: list[str]) -> list[str]:
    """Returns modules, and about as much text in functions, taken evenly from all modules."""
    modules = [text for text in texts if len(text) in MODULE_CHARACTERS]
    functions = [part for text in texts for part in functions_of(text) if len(part) <= FUNCTION_CHARACTERS]
    every = sum(map(len, functions)) // max(1, sum(map(len, modules)))
    return modules + functions[:: max(1, every)]


def load(cache: Path) -> Dataset:
    """Returns the tokenised dataset; it is made once, then read from `cache`."""
    if (cache / "dataset").is_dir():
        return Dataset.load_from_disk(str(cache / "dataset"))
    texts = read_sources()
    tokenizer = train_tokenizer(texts[::4])  # a part is enough to learn 4,096 words
    end = tokenizer.token_to_id(END_OF_FILE)
    encodings = tokenizer.encode_batch(choose_documents(texts))
    documents = [[*encoding.ids, end] for encoding in encodings if len(encoding) < LONGEST_TOKENS]
    cache.mkdir(parents=True, exist_ok=True)
    with replaced(cache / "tokenizer.json") as unfinished:
        tokenizer.save(str(unfinished))
    made = cache / f"unfinished-{secrets.token_hex(8)}"
    Dataset.from_dict({"input_ids": documents}).save_to_disk(str(made))
    made.rename(cache / "dataset")  # a folder of this name is whole
    return Dataset.load_from_disk(str(cache / "dataset"))


def load_tokenizer(cache: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the dataset in `cache`, as Transformers has tokenizers."""
    return PreTrainedTokenizerFast(tokenizer_file=str(cache / "tokenizer.json"), eos_token=END_OF_FILE)
