"""Outcomes of Transformers' and TRL's tests with distca and with sdpa, the meaning of failures, and their section of a
page."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from page_sections import introduction


PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
DISTCA, SDPA = IMPLEMENTATIONS = ("distca", "sdpa")
# Meanings of a failure with distca. The last one is a fault of distca until somebody explains it.
BOTH, REFUSED, ASSERTS_SDPA, OTHER = ("with sdpa, too", "refused by name", "asserts sdpa", "other")
MESSAGE_CHARACTERS = 130
COLUMNS = ("suite", "passed", REFUSED, ASSERTS_SDPA, OTHER, f"fails {BOTH}")
UNLIKE = "They fail with sdpa, too, but with another error:"


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


def section(run: Run, suites: tuple[str, ...]) -> str:
    """Writes all of a run in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    failures = list(run.failures())
    made = f"Made on {run.made} with {versions}. Test files: {', '.join(run.trees)}."
    begins = introduction("trl_tests" if "trl" in run.versions else "transformers_tests")
    families = f"Families: {', '.join(run.families)}."
    parts = [begins, textwrap.fill(f"{made} {families} {summary(run, suites, failures)}", 119) + "\n"]
    if len(suites) > 1:
        parts += suite_table(run, suites, failures)
    refused = [failure for failure in failures if failure.meaning == REFUSED]
    if refused:
        parts += ["Refused tests:\n", *error_table(refused)]
    others = [failure for failure in failures if failure.meaning == OTHER]
    if others:
        parts += ["What fails for another reason:\n", *error_table(others)]
    unlike = [
        failure
        for failure in failures
        if failure.meaning == BOTH and not failure.distca.refused and not failure.distca.same_error(failure.sdpa)
    ]
    if unlike:
        parts += [UNLIKE + "\n", *error_table(unlike)]
    return "\n".join(parts)


def summary(run: Run, suites: tuple[str, ...], failures: list[Failure]) -> str:
    """Counts all tests that did not skip themselves, by the way they ended."""
    passed = sum(run.passed(suite) for suite in suites)
    means = Counter(failure.meaning for failure in failures)
    return (
        f"{passed + len(failures)} tests ran, {passed} passed. {means[REFUSED]} were refused by name, "
        f"{means[ASSERTS_SDPA]} assert that the default is sdpa, {means[BOTH]} fail with sdpa, too, and "
        f"{means[OTHER]} fail for another reason."
    )


def suite_table(run: Run, suites: tuple[str, ...], failures: list[Failure]) -> list[str]:
    """Counts the tests of every suite."""
    rows = []
    for suite in suites:
        means = Counter(failure.meaning for failure in failures if failure.suite == suite)
        rows.append([suite, run.passed(suite), *(means[meaning] for meaning in (*COLUMNS[2:5], BOTH))])
    return table(COLUMNS, rows)


def error_table(failures: Iterable[Failure]) -> list[str]:
    """Groups failures by their message, and counts and names their tests."""
    groups = defaultdict(list)
    for failure in failures:
        groups[without_numbers(shortened(failure.distca.error or failure.distca.result))].append(failure)
    rows = [
        (
            len(group),
            len({failure.family for failure in group}),
            shortened(group[0].distca.error or group[0].distca.result),
            ", ".join(sorted({f"`{named(failure.test)}`" for failure in group})),
        )
        for group in sorted(groups.values(), key=len, reverse=True)
    ]
    return table(("tests", "families", "message, for example", "which"), rows)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Makes the lines of a table, and an empty one."""
    titles = list(columns)
    head, *lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in [titles, *rows]]
    return [head, f"|{'---|' * len(titles)}", *lines, ""]


def shortened(error: str) -> str:
    """Cuts an error: the layer that met it, and a long end."""
    message = re.sub(r"\w+ of layer \S+: ", "", error)
    return textwrap.shorten(message, MESSAGE_CHARACTERS, placeholder=" ...")


def named(test: str) -> str:
    """Cuts a test's name: its class, and the number formats it was called with."""
    return re.sub(r"_\d+_b?fp?\d+.*", "", test.rpartition("::")[2])
