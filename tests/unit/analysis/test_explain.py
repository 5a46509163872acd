"""What `distca explain` says: its pairs are those of the plan, and rows that leave arrive."""

import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from distca_hf.analysis.explain import LEGEND, Explained, documents_of, explain
from distca_hf.cli import app
from distca_hf.cost import Mask
from distca_hf.errors import ConfigError
from distca_hf.placement.place import place


LENGTHS = [64, 24, 24, 7, 1, 90]
RANK_1 = """\
rank 1 of 2 holds 56 tokens: d0[0:48] d2[16:24]

  forward
    send     keys: 48 rows to rank 0; 16 rows from rank 0
    local    d0[0:48] d2[16:24], causal                               1,212 pairs
    wait     keys
    remote   d2[16:24] to d2[0:16], all                               128 pairs

  backward
    local    d0[0:48] d2[16:24], causal, heads [0:6]                  1,212 pairs
    remote   d2[16:24] to d2[0:16], all                               128 pairs
    send     key gradients: 16 rows to rank 0; 48 rows from rank 0
    local    d0[0:48] d2[16:24], causal, heads [6:8]                  1,212 pairs
    wait     key gradients
"""


def test_command_says_what_a_rank_does() -> None:
    result = CliRunner().invoke(app, ["explain", "64,2x24", "--gpus", "2", "--rank", "1"])
    assert result.output == f"{RANK_1}\n{LEGEND}\n"


# What ranks do in order, without rows and pairs: keys that come in two chunks and are sent again in backward, and a
# stripe, whose queries move.
CHUNKS = """\
send     keys
send     keys
local    d0[0:6] d1[0:24] d2[0:7] d0[67:90], causal
wait     keys
remote   d0[67:90] to d0[0:33], all
wait     keys
remote   d0[67:90] to d0[33:67], all

send     keys
local    d0[0:6] d1[0:24] d2[0:7] d0[67:90], causal, heads [0:4]
wait     keys
remote   d0[67:90] to d0[0:67], all
send     key gradients
local    d0[0:6] d1[0:24] d2[0:7] d0[67:90], causal, heads [4:8]
wait     key gradients
"""
STRIPE = """\
send     keys
send     queries
local    d1[2:4], causal, heads [0:2]
wait     keys
remote   d1[2:4] to d1[0:2], all
wait     queries
remote   d0[2896:4096] to d0[0:4096], causal, heads [0:1]
remote   results
local    d1[2:4], causal, heads [2:4]
wait     results

send     queries
local    d1[2:4], causal, heads [0:2]
remote   d1[2:4] to d1[0:2], all
wait     queries
remote   d0[2896:4096] to d0[0:4096], causal, heads [0:1]
send     key gradients
send     results
local    d1[2:4], causal, heads [2:4]
wait     key gradients
wait     results
"""


@pytest.mark.parametrize(
    ("explained", "expected"),
    [
        (lambda: explain([90, 24, 7], 2, num_chunks=2, refetches=True)[0], CHUNKS),
        (lambda: explain([4096, 8, 8], 8, kv_heads=4, head_groups=4)[1], STRIPE),
    ],
    ids=["chunks", "stripe"],
)
def test_order_is_that_which_was_recorded(explained: Callable[[], Explained], expected: str) -> None:
    """Equal results and exchanges do not show what runs while an exchange is under way."""
    one = explained()
    lines = [re.sub(r"(: .*| +[\d,]+ pairs)$", "", line) for line in [*one.forward, "", *one.backward]]
    assert lines == expected.splitlines()


@pytest.mark.parametrize("mask", [Mask(), Mask(16), Mask(16, chunked=True)])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_pairs_are_those_of_the_plan_and_rows_that_leave_arrive(mask: Mask, num_chunks: int) -> None:
    of_ranks = explain(LENGTHS, 3, mask, num_chunks=num_chunks)
    pairs = [sum(_numbers(one.forward, r"([\d,]+) pairs")) for one in of_ranks]
    assert pairs == place(LENGTHS, 3).rank_work_of(mask).tolist()
    ways = [rf"([\d,]+)(?: rows)? {way} rank" for way in ("to", "from")]
    sent, received = (sum(sum(_numbers(one.forward, way)) for one in of_ranks) for way in ways)
    assert sent == received > 0


@pytest.mark.parametrize(("tokens", "kv_heads"), [([10**9, 10**9], 8), ([64], 10**8)])
def test_more_rows_than_memory_holds_are_refused(tokens: list[int], kv_heads: int) -> None:
    with pytest.raises(ConfigError, match="too many to follow"):
        explain(tokens, 2, kv_heads=kv_heads)


@pytest.mark.parametrize("text", ["", "12,", "3 4", "3y4", "x5", "-1", "0x5", "99999999999x1"])
def test_text_that_says_no_lengths_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths in tokens"):
        documents_of(text)


@pytest.mark.parametrize(
    ("options", "expected"), [(["--gpus", "100000"], "more than 1024"), (["--chunked"], "--chunked needs --window")]
)
def test_layers_and_ranks_that_cannot_be_shown_are_refused(options: list[str], expected: str) -> None:
    refused = CliRunner().invoke(app, ["explain", "64", *options])
    assert refused.exit_code == 2
    assert expected in refused.stderr


def _numbers(lines: list[str], pattern: str) -> list[int]:
    return [int(found.replace(",", "")) for line in lines for found in re.findall(pattern, line)]
