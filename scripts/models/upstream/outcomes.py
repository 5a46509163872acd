"""Outcomes of Transformers' tests with distca and with sdpa, the meaning of failures, and differences of two runs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
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

    def passed(self, suite: str) -> int:
        """Counts tests of a suite that pass with distca, of all families."""
        outcomes = (suites[suite][DISTCA].values() for suites in self.families.values())
        return sum(outcome.result == PASSED for of_family in outcomes for outcome in of_family)

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


def without_numbers(message: str) -> str:
    """Replaces all numbers, so that messages of several layers and shapes are the same."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", message)
