"""Makes the models and datasets that TRL's tests load from the Hub, with TRL's own scripts and without the Hub.

    python -m upstream.hub TREE

TREE holds the folder `scripts` of TRL's sources. Models and datasets go to TREE/trl-internal-testing, whose folders
have the names of the Hub's repositories: a process that runs in TREE finds them under these names. Weights are random,
as those on the Hub are; tokenizers know few words, and have TRL's chat templates. Prints what it could not make.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import trl
from datasets import DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    GenerationConfig,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


# Template and end of a turn by a part of a checkpoint's name; the first that fits.
TOKENIZERS = {
    "Qwen2.5": ("qwen2_5", "<|im_end|>"),
    "2507": ("qwen3_instruct_2507", "<|im_end|>"),
    "Qwen3": ("qwen3", "<|im_end|>"),
    "Llama-3.2": ("llama3_2", "<|eot_id|>"),
    "Llama-3.1": ("llama3_1", "<|eot_id|>"),
    "Llama-3-": ("llama3", "<|eot_id|>"),
    "gpt-oss": ("gptoss", "<|return|>"),
    "GLM": ("glm4moe", "<|user|>"),
    "gemma": ("gemma", "<end_of_turn>"),
    "aya-expanse": ("cohere", "<|END_OF_TURN_TOKEN|>"),
    "aya-earth": ("cohere2", "<|END_OF_TURN_TOKEN|>"),
    "R1": ("deepseekv3", "<|end_of_sentence|>"),
    "LFM2.5": ("lfm2_2_5", "<|im_end|>"),
    "LFM2": ("lfm2", "<|im_end|>"),
    "Nemotron-3-Nano": ("nemotron_3_nano", "<|im_end|>"),
    "Phi-3.5": ("phi3_5", "<|end|>"),
    "Phi-3": ("phi3", "<|end|>"),
    "llava": ("llava_next", "<|endoftext|>"),
    "": (None, "<|endoftext|>"),
}
CONFIGS = {"Qwen2.5": "qwen2", "Qwen3-30B": "qwen3_moe", "Qwen3": "qwen3", "Llama": "llama", "pythia": "gpt_neox"}
# Small images, so that each is few tokens.
IMAGES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
PARTS_OF_IMAGES = {"image_grid_pinpoints": [[28, 56], [56, 28]]}
DATASETS = ("zen", "zen_image", "zen_multi_image", "toolcall", "harmony")
SPECIAL_TOKEN = re.compile(r"</?[|\w][\w|]*>|\[/?[A-Z_]+\]")


def first_fitting(table: dict[str, Any], checkpoint: str) -> Any:
    return next(value for part, value in table.items() if part in checkpoint)


def tokenizer(checkpoint: str, **_: Any) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of bytes and a few words, with a checkpoint's chat template and its special tokens."""
    name, end = first_fitting(TOKENIZERS, checkpoint)
    template = None if name is None else (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    special = dict.fromkeys(["<|endoftext|>", end, *SPECIAL_TOKEN.findall(template or "")])
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    learned.train([str(Path("scripts") / "generate_zen_dataset.py")], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=learned, eos_token=end, pad_token="<|endoftext|>", chat_template=template
    )


def processor(checkpoint: str, **_: Any) -> LlavaProcessor | LlavaNextProcessor:
    """Makes a processor of small images; raises KeyError for another kind of checkpoint, which would need torchvision
    or further files."""
    kind, images = {
        "llava-hf/llava-1.5-7b-hf": (LlavaProcessor, CLIPImageProcessorPil(**IMAGES)),
        "llava-hf/llava-v1.6-mistral-7b-hf": (
            LlavaNextProcessor,
            LlavaNextImageProcessorPil(**IMAGES, **PARTS_OF_IMAGES),
        ),
    }[checkpoint]
    text_tokenizer = tokenizer(checkpoint)
    text_tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return kind(
        images,
        text_tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=text_tokenizer.chat_template,
    )


def config(checkpoint: str, **settings: Any) -> Any:
    """Makes the config of a checkpoint's kind, with the words that its tokenizer knows."""
    if "vision_config" in settings:
        text_tokenizer = processor(checkpoint).tokenizer
        text = {"model_type": "llama", "vocab_size": len(text_tokenizer), "pad_token_id": 0, "intermediate_size": 32}
        vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "intermediate_size": 32}
        return AutoConfig.for_model(
            "llava_next" if "v1.6" in checkpoint else "llava",
            text_config=text | settings["text_config"] | {"dtype": "float32"},
            vision_config=vision | settings["vision_config"],
            image_token_index=text_tokenizer.convert_tokens_to_ids("<image>"),
            **PARTS_OF_IMAGES if "v1.6" in checkpoint else {},
        )
    kind = first_fitting(CONFIGS, checkpoint)
    layers = {"num_hidden_layers": 2} | settings
    return AutoConfig.for_model(kind, vocab_size=len(tokenizer(checkpoint)), pad_token_id=0, **layers)


def save_model(
    folder: Path, model: PreTrainedModel, text_tokenizer: Any, generation: Any, prefix: str = "", suffix: str = ""
) -> None:
    """Writes a model under the name that TRL's `push_to_hub` gives it."""
    target = folder / "-".join(filter(None, (prefix, type(model).__name__, suffix)))
    for part in (model, text_tokenizer, generation):
        if part is not None:
            part.save_pretrained(target)


def save_dataset(folder: Path, dataset: DatasetDict, repository: str, config_name: str) -> None:
    """Writes the splits of a configuration, and names them on the dataset's card."""
    target = folder / repository.partition("/")[2]
    target.mkdir(exist_ok=True)
    card = target / "README.md"
    lines = card.read_text().splitlines()[:-1] if card.exists() else ["---", "configs:"]
    lines += [f"- config_name: {config_name}", "  data_files:"]
    for split, rows in dataset.items():
        rows.to_parquet(target / config_name / f"{split}.parquet")
        lines += [f"  - split: {split}", f"    path: {config_name}/{split}.parquet"]
    card.write_text("\n".join([*lines, "---", ""]))


def main(tree: Path) -> None:
    folder = tree / "trl-internal-testing"
    folder.mkdir()
    sys.path.insert(0, str(tree / "scripts"))
    for auto, stand_in in ((AutoTokenizer, tokenizer), (AutoConfig, config), (AutoProcessor, processor)):
        auto.from_pretrained = stand_in
    GenerationConfig.from_pretrained = lambda *_, **__: GenerationConfig(eos_token_id=1, pad_token_id=0)
    DatasetDict.push_to_hub = lambda dataset, *names, **more: save_dataset(folder, dataset, *names, **more)
    for name in DATASETS:
        script = importlib.import_module(f"generate_{name}_dataset")
        script.main(0.1, True, f"trl-internal-testing/{name.replace('_', '-')}")
    common: Any = importlib.import_module("generate_tiny_models._common")
    common.push_to_hub = lambda *parts, **more: save_model(folder, *parts, **more)
    for check in ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test"):
        setattr(common, check, lambda *_, **__: None)
    for path in sorted((tree / "scripts" / "generate_tiny_models").glob("for_*/[a-z]*.py")):
        try:
            importlib.import_module(f"generate_tiny_models.{path.parent.name}.{path.stem}")
        except Exception as error:
            print(f"not made: {path.stem}: {type(error).__name__}: {str(error)[:150]!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
