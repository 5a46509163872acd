"""Whether `distca check` says of every class what training showed of it: the sections of docs/models.md.

    python scripts/models/check_classes.py [--kind text|images] [--only MODEL_TYPE ...]

Every class is judged as the command judges it, by the tiny configuration that `sweep.py` trains, on a CPU. Prints
every class of which the two say something else, and seconds of the slowest. Exits with 1 if a class is said to work
that was refused in training, or the other way round.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from distca_hf.analysis.check.find import Candidate
from distca_hf.analysis.check.tiny_config import LONGEST_TOKENS, tiny_config
from distca_hf.analysis.check.verdict import judge
from distca_hf.gpus import find_gpu
from sweep import KINDS, NOT_BUILT, PAGE, REFUSED, WORKS, Kind, be_quiet, check_model_types


HEADINGS = {"text": "## All classes", "images": "## Image-text-to-text classes"}
ROW = re.compile(r"^\| (\S+) \| (\S+) \| (works|refused|not built) \| (.*) \|$", re.MULTILINE)
# The page says that a class was tried in evaluation mode; here it is tried in training mode, and nothing is compared.
UNTRIED = "it was not tried"


@dataclass(frozen=True)
class Compared:
    """One class: the outcome on the page, and the verdict here.

    Attributes:
        detail: the reason against it, or what the verdict could not try.
        seconds: of this process, imports of the class included.
    """

    model_class: str
    model_type: str
    on_page: str
    verdict: str
    detail: str
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether both say the same, or the page could not build the class and so says nothing."""
        return self.on_page in (self.verdict, NOT_BUILT)

    @property
    def is_false(self) -> bool:
        """Whether the verdict says that a class works which was refused in training."""
        return self.verdict == WORKS and self.on_page == REFUSED


def outcomes_of_page(kind: str) -> dict[tuple[str, str], str]:
    """Returns the outcomes of a section, by class and model type."""
    section = PAGE.read_text().split(HEADINGS[kind])[1].split("\n## ")[0]
    return {(row[1], row[2]): row[3] for row in ROW.finditer(section)}


def compare(config_class: type[PreTrainedConfig], kind: Kind, on_page: str) -> Compared:
    """Judges a class, and compares."""
    model_class, began = kind.mapping[config_class].__name__, time.process_time()
    try:
        config = tiny_config(config_class)
        candidate = Candidate(config_class.model_type, config, kind.auto_class.from_config, model_class)
        verdict, _ = judge(candidate, find_gpu("cpu"), LONGEST_TOKENS)
    except Exception as error:  # of a configuration or a class that does not go with small sizes
        said, detail = NOT_BUILT, f"{type(error).__name__}: {error}"
    else:
        said = REFUSED if verdict.status == "refused" else WORKS
        untried = [limit for limit in verdict.limits if limit.startswith(UNTRIED)]
        detail = "; ".join(verdict.reasons or untried)
    return Compared(model_class, config_class.model_type, on_page, said, detail, time.process_time() - began)


def compare_all(kind_name: str, only: Iterable[str] = ()) -> list[Compared]:
    """Judges all classes of a section, or those model types."""
    kind, outcomes = KINDS[kind_name], outcomes_of_page(kind_name)
    found = []
    for config_class in kind.config_classes(only):
        key = kind.mapping[config_class].__name__, config_class.model_type
        if key in outcomes:
            found.append(compare(config_class, kind, outcomes[key]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL_TYPE", help="these alone")
    parser.add_argument("--kind", choices=KINDS, help="only this section; both by default")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else list(KINDS)
    check_model_types(parser, options.only, [KINDS[kind] for kind in kinds])
    be_quiet()
    wrong = False
    for kind in kinds:
        found = compare_all(kind, options.only)
        counts = Counter((each.on_page, each.verdict) for each in found)
        print(f"{HEADINGS[kind].removeprefix('## ')}: {len(found)} classes")
        for (on_page, verdict), count in sorted(counts.items()):
            print(f"  {count}: {on_page} on the page, {verdict} by distca check")
        for each in found:
            if each.on_page != each.verdict:
                print(f"  {each.model_class} ({each.model_type}): {each.on_page}, {each.verdict}: {each.detail[:200]}")
        if not found:  # all of `--only` are of the other section
            continue
        slowest = max(found, key=lambda each: each.seconds)
        total = sum(each.seconds for each in found)
        print(f"  {total:.0f} s of CPU; the slowest took {slowest.seconds:.1f} s ({slowest.model_type})")
        wrong |= any(not each.agrees for each in found)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
