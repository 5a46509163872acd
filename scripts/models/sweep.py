"""Which models of the installed Transformers run on distca, and how exactly, as two sections of a Markdown page.

    python scripts/models/sweep.py [--kind text|images] [--only MODEL_TYPE ...] [--out PAGE.md]

Of every class that AutoModelForCausalLM or AutoModelForImageTextToText knows a tiny model is built
(`distca_hf/analysis/check/trial.py`) and checked. An accepted one trains one step on documents of text that are placed
on 1, 2 and 3 ranks, and on the same documents one by one with sdpa: loss and gradients must agree. Every layer must
attend with the window that placement counts for it. A class that is accepted but differs, or fails in another way than
by a refusal, makes the script exit with 1.
"""

import argparse
import re
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from datasets.utils.logging import disable_progress_bar
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from distca_hf.analysis.check import trial
from distca_hf.analysis.check.tiny_config import LONGEST_TOKENS, WINDOW_TOKENS, tiny_config
from distca_hf.analysis.check.trial import TinyModel, largest, step_alone
from distca_hf.comm.transport import LocalTransport
from distca_hf.cost import Mask
from distca_hf.errors import ConfigError, UnsupportedAttentionError
from distca_hf.integrations.models.check import REMEDY, check_model
from distca_hf.integrations.models.decoder_layers import masks_of_layers
from distca_hf.integrations.models.forward_watch import enable
from distca_hf.integrations.models.structure import IMPLEMENTATION
from page_sections import add_classes, introduction, parser_of, write_section


PAGE = Path(__file__).parent / "classes.md"
RANKS = (1, 2, 3)
LARGEST_DIFFERENCE = 1e-5
# Trained in fp64: scores without a scale, and random weights of norms, make rounding in fp32 larger.
IN_DOUBLE = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
MOST_PARAMETERS = 10_000_000
REASON_CHARACTERS = 110
RANDOM_IN_TRAINING = ("phimoe",)
# In the order of the page. The last two are faults of distca.
WORKS, REFUSED, NOT_BUILT, WRONG, CRASH = VERDICTS = ("works", "refused", "not built", "WRONG", "CRASH")

TABLE_HEAD = ("| outcome | largest relative difference, or reason | model types |", "|---|---|---|")


@dataclass(frozen=True)
class Kind:
    """Classes of one section of the page."""

    name: str  # of its introduction
    auto_class: type[_BaseAutoModelClass]  # builds them
    mapping: Mapping[type[PreTrainedConfig], type[PreTrainedModel]]  # classes by their configurations

    def config_classes(self, only: Iterable[str] = ()) -> list[type[PreTrainedConfig]]:
        """Returns the configuration classes of all models, or of those model types, each once."""
        wanted = set(only)
        classes = {config_class.model_type: config_class for config_class in self.mapping}
        return [config_class for model_type, config_class in classes.items() if not wanted or model_type in wanted]


TEXT = Kind("text", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
IMAGES = Kind("images", AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
KINDS = {"text": TEXT, "images": IMAGES}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one class; `detail` is the largest relative difference, or the reason."""

    model_class: str
    model_type: str
    verdict: str
    detail: str


def examine(config_class: type[PreTrainedConfig], kind: Kind = TEXT) -> Outcome:
    """Builds, checks and compares one class."""
    verdict, detail = _verdict(config_class, kind)
    model_class = kind.mapping[config_class].__name__
    detail = detail.removeprefix(f"{model_class} cannot run on distca: ").removeprefix(f"{model_class}: ")
    detail = detail.removesuffix(f". {REMEDY}")
    detail = textwrap.shorten(detail.replace("|", "/"), REASON_CHARACTERS, placeholder=" ...")
    return Outcome(model_class, config_class.model_type, verdict, detail)


def _verdict(config_class: type[PreTrainedConfig], kind: Kind) -> tuple[str, str]:
    """Returns the verdict, and the difference or the reason in full."""
    try:
        parameters = tiny_model(config_class, kind).num_parameters()
    except Exception as error:
        return NOT_BUILT, _named(error)
    if parameters > MOST_PARAMETERS:
        return NOT_BUILT, f"{parameters} parameters are too many for a tiny model"
    try:
        model = tiny_model(config_class, kind).build(IMPLEMENTATION)
    except Exception as error:
        return REFUSED if IMPLEMENTATION in str(error) else CRASH, f"by Transformers: {_named(error)}"
    try:
        check_model(model, LONGEST_TOKENS)
        return _verdict_of_steps(config_class, kind)
    except (ConfigError, UnsupportedAttentionError) as error:
        return REFUSED, str(error)
    except Exception as error:
        return CRASH, _named(error)


def _verdict_of_steps(config_class: type[PreTrainedConfig], kind: Kind) -> tuple[str, str]:
    """Compares the steps of an accepted model."""
    try:
        expected = step_alone(tiny_model(config_class, kind).build_plain())
    except Exception as error:
        return NOT_BUILT, f"fails without distca, too: {_named(error)}"
    tiny = tiny_model(config_class, kind)
    difference = largest([trial.step_placed(tiny, num_ranks).difference(expected) for num_ranks in RANKS])
    for name, (planned, passed) in windows(tiny_model(config_class, kind).build(IMPLEMENTATION)).items():
        if planned != passed:
            return WRONG, f"{name} attends with {passed.in_words} and is planned with {planned.in_words}"
    return WORKS if difference <= LARGEST_DIFFERENCE else WRONG, f"{difference:.1e}"


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def tiny_model(config_class: type[PreTrainedConfig], kind: Kind = TEXT) -> TinyModel:
    """Returns the tiny model of a class, which is built when it is asked for."""
    trains = config_class.model_type not in RANDOM_IN_TRAINING
    return TinyModel(tiny_config(config_class), kind.auto_class.from_config, trains, dtype_of(config_class))


def dtype_of(config_class: type[PreTrainedConfig]) -> torch.dtype:
    """Returns the dtype that a class is compared in."""
    return torch.float64 if config_class.model_type in IN_DOUBLE else torch.float32


def windows(model: PreTrainedModel) -> dict[str, tuple[Mask, Mask]]:
    """Returns the masks of all attention layers by name, as they are planned and as the first pass has them."""
    enable(model, trial.context_for(1), LONGEST_TOKENS)
    planned = masks_of_layers(model)
    (batch,) = trial.loader_of(LocalTransport(), trial.planner_of(model, 1))
    model(**batch)
    made, names = batch["distca_plan"].forward_pass, list(planned)
    passed = {names[int(layer)]: mask for layer, mask in zip(made.layers, made.made.masks, strict=True)}
    return {name: (planned[name], mask) for name, mask in passed.items()}


def section(outcomes: list[Outcome], kind: Kind) -> str:
    """Returns the outcomes of a kind in Markdown."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    groups = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.model_type):
        groups[outcome.verdict, _group(outcome)].append(outcome)
    ordered = sorted(groups.items(), key=lambda group: (VERDICTS.index(group[0][0]), -len(group[1])))
    rows = []
    for (verdict, _), of in ordered:
        largest_told = f"up to {max((outcome.detail for outcome in of), key=float)}" if verdict == WORKS else ""
        told = largest_told or ("printed by the script" if verdict == NOT_BUILT else of[0].detail)
        rows.append(f"| {verdict} | {told} | {', '.join(outcome.model_type for outcome in of)} |")
    begins = introduction(
        kind.name,
        window_tokens=WINDOW_TOKENS,
        longest_tokens=LONGEST_TOKENS,
        largest_difference=LARGEST_DIFFERENCE,
        random_in_training=", ".join(RANDOM_IN_TRAINING),
    )
    return "\n".join([begins, f"{len(outcomes)} classes: {summary}.\n", *TABLE_HEAD, *rows]) + "\n"


def _group(outcome: Outcome) -> str:
    """Returns what classes in one row of the table have in common."""
    if outcome.verdict == WORKS:
        return str(outcome.model_type in IN_DOUBLE)
    return "" if outcome.verdict == NOT_BUILT else re.sub(r"\d+(, \d+)*", "#", outcome.detail)


def be_quiet() -> None:
    """Sets one thread, and no message of libraries about tiny models."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    disable_progress_bar()


def check_model_types(parser: argparse.ArgumentParser, only: Iterable[str], kinds: Iterable[Kind]) -> None:
    """Ends with a message if one of the model types of `--only` is of no such kind."""
    known = {config_class.model_type for kind in kinds for config_class in kind.mapping}
    if unknown := set(only) - known:
        parser.error(f"--only: not in the mappings of Transformers: {', '.join(sorted(unknown))}")


def main() -> None:
    parser = parser_of(__doc__)
    add_classes(parser)
    parser.add_argument("--kind", choices=KINDS, help="only this section; both by default")
    options = parser.parse_args()
    kinds = [KINDS[options.kind]] if options.kind else list(KINDS.values())
    check_model_types(parser, options.only, kinds)
    be_quiet()
    out = options.out or (None if options.only else PAGE)
    outcomes = []
    for kind in kinds:
        of_kind = []
        for config_class in kind.config_classes(options.only):
            began = time.perf_counter()
            outcome = examine(config_class, kind)
            seconds = time.perf_counter() - began
            print(f"{outcome.model_type}: {outcome.verdict}: {outcome.detail} ({seconds:.1f} s)", flush=True)
            of_kind.append(outcome)
        if out is not None:
            write_section(out, section(of_kind, kind))
        outcomes += of_kind
    if any(outcome.verdict in (WRONG, CRASH) for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
