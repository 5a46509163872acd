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
import yaml
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


@dataclass(frozen=True)
class Family:
    """Published checkpoints that have something in common."""

    name: str
    model_types: tuple[str, ...]  # model types of their configurations
    # Settings in which the published checkpoints differ from the tiny configuration.
    settings: dict[str, Any] = field(default_factory=dict)
    sign: str = ""  # part of the refusal, if it is refused or has a longest document
    note: str = ""  # for people


def _family(name: str, model_types: list[str], *, window: int | str = "", rope: str = "", **told: str) -> Family:
    """Returns a family as families.yaml has it."""
    settings = {"sliding_window": None if window == "none" else window} if window else {}
    return Family(name, tuple(model_types), settings | (LONGROPE if rope else {}), **told)


LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FAMILIES = [_family(**family) for family in LISTED["families"]]
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
    if stay_whole != [family.note == LISTED["notes"]["whole"]] * len(models):
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
