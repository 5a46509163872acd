"""Outcomes of Transformers' tests with distca and with sdpa, the meaning of failures, and differences of two runs."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
DISTCA, SDPA = IMPLEMENTATIONS = ("distca", "sdpa")
# Meanings of a failure with distca. The last one is a fault of distca until somebody explains it.
BOTH, REFUSED, ASSERTS_SDPA, OTHER = ("with sdpa, too", "refused by name", "asserts sdpa", "other")


class KnownAssertion(NamedTuple):
    """Tests that assert the name of the default implementation: patterns of function and error."""

    function: str
    error: str

    def explains(self, test: str, error: str) -> bool:
        """Tells whether the test is one of these, and ended with this assertion instead of wrong numbers."""
        return fnmatchcase(test.rpartition("::")[2], self.function) and fnmatchcase(error, self.error)


ASSERT_SDPA = (
    # The attention of its model is not named.
    KnownAssertion("test_sdpa_can_dispatch_non_composite_models", "AssertionError: False is not true"),
    # Fails before it computes anything.
    KnownAssertion(
        "test_cached_forward_with_and_without_attention_mask",
        "AssertionError: This test assumes the model to have the SDPA implementation *",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The result of one test; of a failure also the error's type and first line, and whether it is a DistCAError."""

    result: str
    error: str = ""
    refused: bool = False

    def same_error(self, other: "Outcome") -> bool:
        """Tells whether both errors say the same, but for numbers."""
        return without_numbers(self.error) == without_numbers(other.error)


Outcomes = dict[str, Outcome]  # by test


@dataclass(frozen=True)
class Failure:
    """A test that did not pass with distca, and the meaning of that."""

    family: str
    suite: str
    test: str
    meaning: str
    distca: Outcome
    sdpa: Outcome


@dataclass(frozen=True)
class Run:
    """Outcomes of all families by family, suite, implementation and test; versions, source trees and date.

    With sdpa only those tests ran that did not pass with distca.
    """

    made: str
    versions: dict[str, str]
    trees: list[str]
    families: dict[str, dict[str, dict[str, Outcomes]]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Run":
        facts = json.loads(path.read_text())
        families = {
            family: {
                suite: {
                    name: {test: Outcome(**outcome) for test, outcome in outcomes.items()}
                    for name, outcomes in implementations.items()
                }
                for suite, implementations in suites.items()
            }
            for family, suites in facts.pop("families").items()
        }
        return cls(**facts, families=families)

    def passed(self, suite: str, family: str | None = None) -> int:
        """Counts tests of a suite that pass with distca, of one family or of all."""
        return sum(
            outcome.result == PASSED
            for name, suites in self.families.items()
            if family in (None, name)
            for outcome in suites[suite][DISTCA].values()
        )

    def failures(self) -> Iterator[Failure]:
        """Yields all tests that failed with distca, and those that were skipped and pass with sdpa."""
        for family, suites in self.families.items():
            for suite, outcomes in suites.items():
                for test, distca in outcomes[DISTCA].items():
                    sdpa = outcomes[SDPA].get(test, Outcome(SKIPPED))
                    if distca.result == FAILED or (distca.result == SKIPPED and sdpa.result == PASSED):
                        yield Failure(family, suite, test, meaning(test, distca, sdpa), distca, sdpa)


def meaning(test: str, distca: Outcome, sdpa: Outcome) -> str:
    """Names the meaning of a test's failure with distca."""
    if sdpa.result == FAILED:
        return BOTH
    if distca.refused:
        return REFUSED
    if any(known.explains(test, distca.error) for known in ASSERT_SDPA):
        return ASSERTS_SDPA
    return OTHER


def no_longer_passing(earlier: Run, now: Run) -> dict[str, Outcome | None]:
    """Finds tests of the families of both runs that passed with distca earlier and do not now; returns their outcomes
    now by family, suite and test, None of one that did not run."""
    return {
        f"{family}, {suite}: {test}": outcome
        for family in earlier.families.keys() & now.families.keys()
        for suite, outcomes in earlier.families[family].items()
        for test, before in outcomes[DISTCA].items()
        if before.result == PASSED
        for outcome in [now.families[family].get(suite, {}).get(DISTCA, {}).get(test)]
        if outcome is None or outcome.result != PASSED
    }


def without_numbers(message: str) -> str:
    """Replaces all numbers, so that messages of several layers and shapes are the same."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", message)
