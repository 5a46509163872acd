"""Makes what the programs of compare.py train: a small Llama with random weights, its tokenizer, and documents.

    python scripts/frameworks/material.py FOLDER

Every byte is a token, so texts have as many tokens as characters. Runs in the environment of a framework, whose
Transformers reads what it wrote.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


# A few documents are much longer than the others, as in the data that distca_hf is for.
LENGTHS = (700, 520, 60, 40, 30, 90, 25, 10, 380, 45, 70, 20, 35, 55, 15, 240)
SPECIAL = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=4096
    )
    made.chat_template = CHAT
    return made


def model(vocabulary: int) -> LlamaForCausalLM:
    """Returns a Llama with random weights, in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def reward(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    """Returns rewards of answers, for GRPO: how many of their characters are small letters."""
    return [sum(letter.islower() for letter in answer[0]["content"]) / 10 for answer in completions]


def text(length: int, draw: random.Random) -> str:
    """Returns that many characters of words."""
    words = " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(length))
    return words[:length].rstrip().ljust(length, ".")


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Writes a .jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    made, draw = tokenizer(), random.Random(0)
    made.save_pretrained(folder / "model")
    model(len(made)).save_pretrained(folder / "model")
    questions = [text(12, draw) for _ in LENGTHS]
    answers = [text(length, draw) for length in LENGTHS]
    worse = [text(draw.randint(10, 300), draw) for _ in LENGTHS]
    together = list(zip(questions, answers, worse, strict=True))
    write_rows(folder / "texts/train.jsonl", [{"text": answer} for answer in answers])
    write_rows(folder / "prompts/train.jsonl", [{"prompt": [{"role": "user", "content": q}]} for q in answers])
    write_rows(folder / "pairs/train.jsonl", [{"prompt": q, "chosen": a, "rejected": w} for q, a, w in together])
    write_rows(
        folder / "messages.jsonl",
        [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a, _ in together],
    )
    write_rows(folder / "instructions.jsonl", [{"instruction": q, "input": "", "output": a} for q, a, _ in together])
    (folder / "dataset_info.json").write_text(json.dumps({"documents": {"file_name": "instructions.jsonl"}}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
