"""The section about Transformers' own tests on the page of classes."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable

from upstream.outcomes import ASSERTS_SDPA, BOTH, OTHER, REFUSED, Failure, Run, without_numbers


MESSAGE_CHARACTERS = 130
OF_TRANSFORMERS = """## Transformers' own tests

Transformers' tests of model classes run with distca instead of sdpa; what does not pass runs once more with sdpa:

```
pip install parameterized httpx
python scripts/models/upstream_tests.py --transformers CHECKOUT --page scripts/models/classes.md
```

CHECKOUT is a source tree of about the installed version. Suite *models* is each family's test file with distca as the
default; suite *attention* holds its tests of sdpa and FlashAttention 2, with distca instead.
"""
OF_TRL = """## TRL's own tests

TRL's tests of its trainers run with distca as the default attention and `DistCAPlugin().attach(trainer)` before every
training, in one process; what does not pass runs once more without distca:

```
python scripts/models/upstream_tests.py --trl CHECKOUT --page scripts/models/classes.md
```

Models and datasets are made with TRL's scripts; tests that need the Hub or torchvision fail with both. On two ranks
`tests/integration/test_padded_trainers.py` compares losses, gradient norms and weights with sdpa.
"""
COLUMNS = ("suite", "passed", REFUSED, ASSERTS_SDPA, OTHER, f"fails {BOTH}")
UNLIKE = "They fail with sdpa, too, but with another error:"


def section(run: Run, suites: tuple[str, ...]) -> str:
    """Writes all of a run in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    failures = list(run.failures())
    made = f"Made on {run.made} with {versions}. Test files: {', '.join(run.trees)}."
    introduction = OF_TRL if "trl" in run.versions else OF_TRANSFORMERS
    families = f"Families: {', '.join(run.families)}."
    parts = [introduction, textwrap.fill(f"{made} {families} {summary(run, suites, failures)}", 119) + "\n"]
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
