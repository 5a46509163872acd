"""Pages of `distca report` in a browser: they open fast and without an error, are read on a phone, in the dark and
without pictures, and change with the step that is chosen."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distca_hf.analysis import answer as estimates
from distca_hf.cli import app
from support.browser import Browser, Opened, browser
from support.made_answers import made_simulation
from support.made_traces import write_run, write_served_run


MOST_BYTES, MOST_MS = 2_000_000, 2000
# What a reader sees, and how long it took to draw.
LOOK = """
const texts = (name) => [...document.querySelectorAll(name)].map((each) => each.textContent);
const look = () => ({
  headings: texts("h2"), step: document.getElementById("step").selectedOptions[0].textContent,
  pictures: [...document.querySelectorAll("svg[role=img]")].map((each) => each.getAttribute("aria-label")),
  captions: texts("figcaption"), findings: texts(".findings li"),
  page: getComputedStyle(document.body).backgroundColor,
  fills: [...new Set([...document.querySelectorAll("svg path[fill^='#']")].map((each) => each.getAttribute("fill")))],
  wide: document.documentElement.scrollWidth - innerWidth,
  ms: performance.getEntriesByName("drawn")[0].startTime, elements: document.querySelectorAll("*").length,
});
"""
# Every table is opened, the step before is chosen, and the first picture is saved.
USE = f"""{LOOK}
const before = look();
for (const each of document.querySelectorAll("details")) each.open = true;
await new Promise((resolve) => setTimeout(resolve, 50));
const rows = Object.fromEntries([...document.querySelectorAll("figure details")].map((each) =>
  [each.querySelector("summary").textContent, each.querySelectorAll("tbody tr").length]));
const saved = new Promise((resolve) => {{ URL.createObjectURL = (blob) => {{ resolve(blob); return "#"; }}; }});
document.querySelector("figure button").click();
const blob = await saved;
const image = await createImageBitmap(blob);
[...document.querySelectorAll("nav button")].find((each) => each.textContent === "Previous").click();
return {{ before, rows, after: look(), png: [blob.type, blob.size, image.width, image.height] }};
"""


@pytest.fixture(scope="module")
def plan_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan for 64 ranks, whose speed is simulated in one step."""
    folder = tmp_path_factory.mktemp("plan")
    options = ["--gpus", "64", "--tokens-per-rank", "65536", "--micro-steps", "2", "--compare", "--json"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(estimates, "MOST_STEPS", 1)
        planned = CliRunner().invoke(app, ["plan", "pretrain", *options])
    assert planned.exit_code == 0, planned.output
    (folder / "plan.json").write_text(planned.stdout)
    return make_page(folder / "plan.json", folder / "plan.html")


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run on 64 ranks."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder / "traces", ranks=64, steps=2, layers=6, slow_rank=5)
    return make_page(folder / "traces", folder / "run.html")


def make_page(source: Path, page: Path) -> Path:
    made = CliRunner().invoke(app, ["report", str(source), "--output", str(page)])
    assert made.exit_code == 0, made.output
    return page


def test_page_needs_no_network_and_is_small(plan_page: Path, run_page: Path) -> None:
    for page in (plan_page, run_page):
        text = page.read_text()
        assert len(text.encode()) < MOST_BYTES
        assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\((?!#|["']?data:)|fetch\(|XMLHttp""", text)
        assert {"http://www.w3.org/2000/svg"} == set(re.findall(r"https?://[^\s\"'`<)]+", text))
        assert '<meta name="viewport"' in text
        assert "default-src 'none'" in text


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def fastest(chromium: Browser, page: Path) -> Opened:
    """The page opened up to three times; the first that was drawn in time counts, or the last. A busy machine takes
    a multiple of the time, and the limit is many times what an idle one takes."""
    for _ in range(3):
        opened = chromium.open(page, USE)
        if opened.found["before"]["ms"] < MOST_MS:
            break
    return opened


def test_plan_of_64_ranks_opens_without_errors_in_two_seconds(chromium: Browser, plan_page: Path) -> None:
    opened = fastest(chromium, plan_page)
    before = opened.found["before"]

    assert opened.errors == []
    assert before["ms"] < MOST_MS
    assert before["headings"][:4] == ["Work of each rank", "Who sends how much to whom", "Predicted seconds", "Memory"]
    assert before["headings"][-1] == "Ways to train, simulated"
    assert before["step"] in ("micro-step 0 of 2", "micro-step 1 of 2")
    assert len(before["pictures"]) == len(before["captions"]) == 4
    assert all(len(label) > 30 for label in before["pictures"])
    assert opened.found["rows"]["Work of each rank as a table"] == 64


def test_run_shows_the_straggler_and_changes_with_the_step(chromium: Browser, run_page: Path) -> None:
    opened = fastest(chromium, run_page)
    before, after = opened.found["before"], opened.found["after"]

    assert opened.errors == []
    assert before["ms"] < MOST_MS
    assert "One layer, from within" in before["headings"]
    assert (before["step"], after["step"]) == ("step 200, micro-batch 199", "step 100, micro-batch 99")
    assert any("Others wait for rank 5" in sentence for sentence in before["findings"])
    assert before["pictures"] != after["pictures"]
    assert set(opened.found["rows"].values()) == {64, 250, 6 * 48}
    kind, size, width, height = opened.found["png"]
    assert (kind, size > 5000, width > 1000, height > 500) == ("image/png", True, True, True)


def test_servers_are_named_behind_the_ranks(chromium: Browser, tmp_path: Path) -> None:
    page = make_page(write_served_run(tmp_path), tmp_path / "served.html")
    opened = chromium.open(page, 'return [...document.querySelectorAll("svg")].map((each) => each.textContent)')
    work, matrix, timeline, seconds, memory = opened.found

    assert opened.errors == []
    assert all("server 0" in drawn and "server 3" in drawn for drawn in (work, timeline, seconds, memory))
    assert "s0" in matrix
    assert "s3" in matrix


def test_waiting_for_servers_is_said_to_be_an_upper_bound(chromium: Browser, tmp_path: Path) -> None:
    """Above the picture, and in the heading of the column; without servers there is neither."""
    for name, folder in (
        ("served", write_served_run(tmp_path / "served")),
        ("alone", write_run(tmp_path / "alone", 2, given=True)),
    ):
        opened = chromium.open(
            make_page(folder, tmp_path / f"{name}.html"),
            """
            for (const each of document.querySelectorAll("details")) each.open = true;
            await new Promise((resolve) => setTimeout(resolve, 50));
            return [...document.querySelectorAll("figcaption, th")].map((each) => each.textContent);
            """,
        )
        words = [text for text in opened.found if "aiting for servers" in text]

        assert opened.errors == []
        assert [("at most" in text) for text in words] == ([True, True] if name == "served" else [])
        assert any("Operations" in text for text in opened.found) == (name == "alone")


def test_servers_keep_their_names_beside_many_ranks_by_node(chromium: Browser, tmp_path: Path) -> None:
    """Their rows and columns, the sentences on every cell, and the table."""
    page = make_page(write_served_run(tmp_path, ranks=136), tmp_path / "many.html")
    opened = chromium.open(
        page,
        """
        const sections = [...document.querySelectorAll("section")];
        const figure = sections.find((each) => each.textContent.startsWith("Who sends"));
        figure.querySelector("details").open = true;
        await new Promise((resolve) => setTimeout(resolve, 50));
        const texts = (name) => [...figure.querySelectorAll(name)].map((each) => each.textContent);
        const [labels, titles, said, rows] = ["svg text", "svg title", "figcaption", "tbody tr"].map(texts);
        return { labels, titles, said, rows };
        """,
    )
    found = opened.found

    assert opened.errors == []
    assert (found["labels"].count("s0"), found["labels"].count("s3")) == (2, 2)
    assert {"node 0 to server 3: 8.0 MB", "node 16 to server 0: 8.0 MB"} <= set(found["titles"])
    assert not any("node 17" in title or "node 18" in title for title in found["titles"])
    assert any("server 3" in row for row in found["rows"])
    assert re.search(r"\d+ of 359 pairs", found["said"][0])  # 19 x 19 without a server to itself


def test_numbers_of_many_ranks_do_not_touch(chromium: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "run", ranks=520, layers=1)
    opened = chromium.open(
        make_page(tmp_path / "run", tmp_path / "wide.html"),
        """
        return [...document.querySelector("section svg").querySelectorAll("text")].map((each) => {
          const box = each.getBBox();
          return [Math.round(box.y), box.x, box.x + box.width];
        });
        """,
    )
    rows: dict[int, list[tuple[float, float]]] = {}
    for y, left, right in opened.found:
        rows.setdefault(y, []).append((left, right))
    gaps = [later[0] - earlier[1] for row in rows.values() for earlier, later in pairwise(sorted(row))]

    assert len(gaps) > 10
    assert min(gaps) > 2


def test_page_is_read_on_a_phone_and_in_the_dark(chromium: Browser, run_page: Path, plan_page: Path) -> None:
    for page in (run_page, plan_page):
        light, dark = (chromium.open(page, f"{LOOK} return look();", width=390, dark=dark) for dark in (False, True))

        assert light.errors == dark.errors == []
        assert [view.found["wide"] for view in (light, dark)] == [0, 0]
        assert (light.found["page"], dark.found["page"]) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)")
        assert set(light.found["fills"]).isdisjoint(dark.found["fills"])


def test_simulation_is_drawn_without_steps(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "simulation.json").write_text(json.dumps(made_simulation()))
    page = make_page(tmp_path / "simulation.json", tmp_path / "simulation.html")
    opened = chromium.open(page, 'return [...document.querySelectorAll("svg")].map((each) => each.ariaLabel)', 390)

    assert opened.errors == []
    assert [label.endswith("plain packing 3, distca, placed 2") for label in opened.found] == [True, True]


def test_errors_of_a_page_are_noticed(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text('<body><script>console.error("no")</script><script>nothing.at.all</script><img src="missing.png">')

    assert len(chromium.open(page, "return 1").errors) == 3


def test_words_of_a_file_cannot_become_part_of_the_page(plan_page: Path, tmp_path: Path) -> None:
    content = json.loads((plan_page.parent / "plan.json").read_text())
    content["source"] = "</script><script>document.title='taken'</script>{{script}}"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    text = make_page(tmp_path / "plan.json", tmp_path / "plan.html").read_text()

    assert "<script>document.title" not in text
    assert text.count("<script") == 2
    assert "{{script}}" in text
