"""The page on attention servers: its arithmetic is that of its formulas, its bytes are those of the planner."""

import re

import numpy as np
import pytest

from distca_hf.cost import TokenBytes, causal_pairs
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import bytes_between
from distca_hf.servers.served_plans import Servers
from support.commands import REPOSITORY


PAGE = (REPOSITORY / "docs" / "attention-servers.md").read_text()
# Rates on the page: seconds of a pair of query and key, forward and backward, and of all else per token and layer.
FORWARD, BACKWARD, ELSE = 16384 / 650e12, 40960 / 600e12, 2.76e-6
HEAD_GROUPS = 8


def rows_under(head: str) -> list[list[str]]:
    """Cells of the table whose head begins so."""
    lines = PAGE[PAGE.index(f"\n| {head}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def lengths_in(words: str) -> list[int]:
    """Documents named as "one of 64K, 48 of 4K", or "all 64K"."""
    found = re.findall(r"(one|\d+) of (\d+)K", words) or [("one", words.removeprefix("all ").removesuffix("K"))]
    return [int(thousands) * 1024 for count, thousands in found for _ in range(1 if count == "one" else int(count))]


def numbers_in(*cells: str) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def speed_up(servers_per_trainer: float, share: float, speed: float = 1.0) -> float:
    gained = servers_per_trainer * speed
    return (1 + gained) / (1 + gained * (1 - share))


@pytest.mark.parametrize("row", rows_under("documents | *a*"), ids=lambda row: str(row[0]))
def test_speed_ups_follow_from_the_formula(row: list[str]) -> None:
    documents = lengths_in(row[0])
    seconds = sum(causal_pairs(0, tokens) for tokens in documents) * (FORWARD + BACKWARD)
    share = seconds / (seconds + sum(documents) * ELSE)
    pairs = [(speed_up(1 / n, share), 1 / (1 + (1 - share) / n)) for n in (1, 3, 7)]
    expected = [
        share,
        *(number for pair in pairs for number in pair),
        speed_up(1, share, 0.5),
        speed_up(1, share, 0.2),
    ]

    assert numbers_in(*row[1:]) == pytest.approx(expected, abs=0.0051)


def test_trainers_that_do_not_attend_are_as_slow_as_the_page_says() -> None:
    seconds = causal_pairs(0, 131072) * (FORWARD + BACKWARD)
    share = seconds / (seconds + 131072 * ELSE)

    assert f"{1 / (1 - share + share / (1 / 3)):.2f} of the speed of the three without a server" in PAGE


@pytest.mark.parametrize("row", rows_under("*L*"), ids=lambda row: str(row[0]))
def test_whole_document_on_a_server_has_these_bytes(row: list[str]) -> None:
    """Forward sends query, key, value; then output and log-sum-exps. Backward sends more of each query row."""
    (tokens,), sizes, lse = lengths_in(row[0]), TokenBytes(), 32 * 4
    forward = tokens * (sizes.query + sizes.key_value)
    backward = forward + tokens * (2 * sizes.output + lse)
    returned = tokens * (sizes.output + lse), tokens * (sizes.query + sizes.key_value)
    kernels = causal_pairs(0, tokens) * FORWARD, causal_pairs(0, tokens) * BACKWARD
    megabytes = [number / 1e6 for number in (forward, returned[0], backward, returned[1])]
    shares = [
        100 * received / (rate * kernel)
        for rate in (300e9, 30e9)
        for received, kernel in zip((forward, backward), kernels, strict=True)
    ]

    assert numbers_in(*row[1:3]) == pytest.approx(megabytes, abs=0.51)
    assert numbers_in(row[3]) == pytest.approx([1e3 * kernel for kernel in kernels], rel=0.01, abs=0.051)
    assert numbers_in(*row[4:]) == pytest.approx(shares, abs=0.51)


@pytest.mark.parametrize("row", rows_under("documents, trainers"), ids=lambda row: str(row[0]))
def test_planned_bytes_are_those_of_the_planner(row: list[str]) -> None:
    words, trainers = re.fullmatch(r"(.*), (\d+) \+ 1", row[0]).groups()  # type: ignore[union-attr]
    n = int(trainers)
    layout = place(np.array(lengths_in(words)), n, head_groups=HEAD_GROUPS)
    without, served = plan_in_place(layout, HEAD_GROUPS), Servers((1.0,)).plan(layout, HEAD_GROUPS)
    before, after = (bytes_between(plan, TokenBytes()) / 1e6 for plan in (without, served))
    for moved in (before, after):
        np.fill_diagonal(moved, 0)
    seconds = [1e3 * FORWARD * plan.work / plan.tasks.head_groups for plan in (without, served)]

    assert numbers_in(row[1]) == pytest.approx([after[:, n].sum(), after[n].sum()], abs=0.51)
    assert numbers_in(row[2]) == pytest.approx([before.sum(axis=1).max(), after[:n].sum(axis=1).max()], abs=0.51)
    expected = [seconds[0].max(), seconds[1][:n].max(), seconds[1][n]]
    assert numbers_in(row[3]) == pytest.approx(expected, abs=0.51)
