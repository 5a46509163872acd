"""Which of the models that people ask for run on distca, as the first section of docs/models.md.

    python scripts/models/families.py [--out PAGE.md]

Of each family tiny models are built (`distca_hf/analysis/check/tiny_config.py`) with the windows, rotary embeddings
and layers of published checkpoints, and given to the check that `attach` and `enable` make. The longest documents that
it accepts are found by bisection. The script fails if a family is refused for another reason than the one here.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from distca_hf.analysis.check.tiny_config import HEAD_DIM, tiny_config
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.check import check_model
from distca_hf.integrations.models.mixers import needs_whole_documents
from distca_hf.integrations.models.structure import IMPLEMENTATION
from page_sections import file_to_write, introduction, parser_of, write_section


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
    """Published checkpoints that have something in common, as families.yaml has them."""

    name: str
    model_types: list[str]  # model types of their configurations
    # What published checkpoints have, other than the tiny configuration: a window in tokens or "none", and "longrope".
    window: int | str = ""
    rope: str = ""
    sign: str = ""  # part of the refusal, if it is refused or has a longest document
    note: str = ""  # for people

    @property
    def settings(self) -> dict[str, Any]:
        """Returns settings of these configurations."""
        window = {"sliding_window": None if self.window == "none" else self.window} if self.window else {}
        return window | (LONGROPE if self.rope else {})


LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FAMILIES = [Family(**family) for family in LISTED["families"]]


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
    table = ""
    for (told, note), of in groups.items():
        model_types = dict.fromkeys(model_type for family in of for model_type in family.model_types)
        names = "; ".join(family.name for family in of)
        table += f"| {names} | {', '.join(model_types)} | {told} | {note} |\n"
    return table


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
    write_section(options.out, introduction("families") + rows(FAMILIES))


if __name__ == "__main__":
    main()
