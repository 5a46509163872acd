"""Which of the models that people ask for run on distca, as the first section of docs/models.md.

    python scripts/models/families.py [--out PAGE.md]

Of each family tiny models are built (`distca_hf/analysis/check/tiny_config.py`) with the windows, rotary embeddings
and layers of published checkpoints, and given to the check that `attach` and `enable` make. The longest documents that
it accepts are found by bisection. The script fails if a family is refused for another reason than the one here.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import distca_hf
from distca_hf.analysis.check.tiny_config import HEAD_DIM, tiny_config
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.check import check_model
from distca_hf.integrations.models.mixers import needs_whole_documents
from distca_hf.integrations.models.structure import IMPLEMENTATION
from shared.page_sections import file_to_write, parser_of, write_section


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LONGEST_TOKENS = 1 << 20
LONGROPE = {
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096},
        **{"short_factor": [1.0] * (HEAD_DIM // 2), "long_factor": [2.0] * (HEAD_DIM // 2)},
    }
}
STATES = "layers carry a state from token to token, which travels with cut documents"
WHOLE = "layers carry a state that cannot travel: documents stay whole on a GPU"
WIDTHS = "on GPUs FlashAttention 4: keys and values have different widths"
IMAGES = "text, and images in your own batches. Its towers attend with sdpa"


@dataclass(frozen=True)
class Family:
    """Published checkpoints that have something in common."""

    name: str
    model_types: tuple[str, ...]  # model types of their configurations
    # Settings in which the published checkpoints differ from the tiny configuration.
    settings: dict[str, Any] = field(default_factory=dict)
    sign: str = ""  # part of the refusal, if it is refused or has a longest document
    note: str = ""  # for people


def windows(tokens: int | None) -> dict[str, Any]:
    return {"sliding_window": tokens}


FAMILIES = (
    Family("Llama 2, 3, 3.1, 3.2, 3.3", ("llama",)),
    Family("Qwen 2.5", ("qwen2",)),
    Family("Qwen 3", ("qwen3",)),
    Family("Qwen 3 MoE", ("qwen3_moe",)),
    Family("Mistral from v0.2 on, Nemo, Small, Ministral 3", ("mistral", "ministral3"), windows(None)),
    Family("Mistral v0.1", ("mistral",), windows(4096)),
    Family("Ministral 8B", ("ministral",), windows(32768)),
    Family("Mixtral", ("mixtral",), windows(None)),
    Family("DeepSeek-V3, R1", ("deepseek_v3",), note=WIDTHS),
    Family("Phi-4", ("phi3",), windows(None)),
    Family("Phi-3 4K", ("phi3",), windows(2047)),
    Family("OLMo 2", ("olmo2",)),
    Family("SmolLM3", ("smollm3",)),
    Family("GLM-4.5, 4.6", ("glm4_moe",)),
    Family("Granite 3", ("granite",)),
    Family(
        "Qwen2.5-VL, Qwen3-VL, InternVL, LLaVA, SmolVLM, Kimi K2.5",
        ("qwen2_5_vl", "qwen3_vl", "internvl", "llava", "smolvlm", "kimi_k25"),
        note=IMAGES,
    ),
    Family("Mistral Small 3.1, Ministral 3 with images", ("mistral3",), windows(None), note=IMAGES),
    Family("Command A Vision", ("cohere2_vision",), windows(4096), note=IMAGES),
    Family(
        "Gemma 2",
        ("gemma2",),
        windows(4096),
        note="softcap: on GPUs FlashAttention 4, 3 or 2; torch's kernel has none",
    ),
    Family("Gemma 3", ("gemma3_text", "gemma3"), windows(1024), note="documents of text, no images"),
    Family(
        "Gemma 4",
        ("gemma4_text", "gemma4"),
        windows(1024),
        note="documents of text. Heads of 512 in full layers: on GPUs only Hopper, with ffpa-attn",
    ),
    Family("GPT-OSS", ("gpt_oss",), windows(128), note="sinks train, or are frozen under LoRA"),
    Family("OLMo 3", ("olmo3",), windows(4096)),
    Family("Command A, R7B", ("cohere2",), windows(4096)),
    Family("EXAONE 4", ("exaone4",), windows(4096)),
    Family("MiMo-V2-Flash", ("mimo_v2_flash",), windows(128), note=WIDTHS),
    Family(
        "Phi-3 128K, Phi-4-mini", ("phi3",), windows(None) | LONGROPE, "longrope", "RoPE changes with the batch beyond"
    ),
    Family(
        "Llama 4",
        ("llama4_text", "llama4"),
        note="layers attend inside of chunks; on text: Transformers' own multimodal class fails in training",
    ),
    Family(
        "Qwen 3.5, Qwen3-Next, Nemotron-H, Falcon-H1, Granite 4 hybrid, LFM2, OLMo-Hybrid, Bamba, Jamba, Zamba2",
        (
            *("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2"),
            *("olmo_hybrid", "bamba", "jamba", "zamba2"),
        ),
        note=STATES,
    ),
    Family("Kimi Linear, Bailing hybrid", ("kimi_linear", "bailing_hybrid"), note=f"{STATES}; {WIDTHS}"),
    Family(
        "DeepSeek-V3.2, GLM-5",
        ("deepseek_v32", "glm_moe_dsa"),
        sign="indexed_attention",
        note="every query chooses its keys",
    ),
    Family("MiniMax-Text-01, RecurrentGemma", ("minimax", "recurrent_gemma"), note=WHOLE),
    Family("Mamba", ("mamba", "mamba2"), sign="none of its layers", note="no attention at all"),
)
INTRODUCTION = f"""# Models and limits

```
distca check llama3-8b --gpus 16 --tokens-per-rank 65536 --liger
```

says whether a model trains on distca_hf, with which limits and kernels, and whether it fits. It reads no weights and
needs no GPU ([more](#distca-check)). Models that people ask for, with the settings of their published checkpoints:

- *Works*: it passes the check of `attach` and `enable`, and its class trains with the losses and gradients of sdpa
  ([all classes](../scripts/models/classes.md)). Documents longer than a limit are refused by name; documents beyond
  `max_position_embeddings` bring a warning.
- *Refused*: before the first step. Train it as you do now, with `flash_attention_2` for example.

Made by `python scripts/models/families.py` with Transformers {transformers.__version__} and
distca_hf {distca_hf.__version__}.

| families | model types | outcome | note |
|---|---|---|---|
"""


def build(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Returns a tiny model without weights."""
    config = tiny_config(CONFIG_MAPPING[model_type])
    for name, value in settings.items():
        setattr(config.get_text_config(), name, value)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, attn_implementation=IMPLEMENTATION)


def longest_accepted_tokens(model: PreTrainedModel, sign: str) -> int:
    """Returns the longest documents with which the check accepts the model; at most `LONGEST_TOKENS`, 0 if with none.
    It may refuse the model only for the reason with this sign."""

    def is_accepted(tokens: int) -> bool:
        try:
            check_model(model, tokens)
        except UnsupportedAttentionError as error:
            if not sign or sign not in str(error):
                raise
            return False
        return True

    if is_accepted(LONGEST_TOKENS):
        return LONGEST_TOKENS
    # The first of the lengths that is refused, less one.
    return bisect_left(range(1, LONGEST_TOKENS), True, key=lambda tokens: not is_accepted(tokens))


def rows(families: Iterable[Family]) -> str:
    """Returns the rows of the table: families with the same outcome and the same note share one."""
    groups = defaultdict(list)
    for family in families:
        groups[outcome(family), family.note].append(family)
    return "".join(
        f"| {'; '.join(family.name for family in of)} | {', '.join(_model_types(of))} | {told} | {note} |\n"
        for (told, note), of in groups.items()
    )


def _model_types(families: Iterable[Family]) -> dict[str, None]:
    """Returns the model types of families in order, each once."""
    return dict.fromkeys(model_type for family in families for model_type in family.model_types)


def outcome(family: Family) -> str:
    """Returns whether a family works, and the longest document if there is a limit."""
    models = [build(model_type, family.settings) for model_type in family.model_types]
    accepted = {longest_accepted_tokens(model, family.sign) for model in models}
    if len(accepted) > 1:
        raise ValueError(f"{family.name}: longest documents of its model types are {sorted(accepted)}; split it")
    stay_whole = [needs_whole_documents(model) for model in models]
    if stay_whole != [family.note == WHOLE] * len(models):
        raise ValueError(f"{family.name}: documents stay whole in {stay_whole}, and the note is {family.note!r}")
    (tokens,) = accepted
    if not tokens:
        return "refused"
    return "works" if tokens == LONGEST_TOKENS else f"works up to {tokens:,} tokens a document"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=file_to_write, default=PAGE, help="the page whose first section is replaced")
    options = parser.parse_args()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    write_section(options.out, INTRODUCTION + rows(FAMILIES))


if __name__ == "__main__":
    main()
