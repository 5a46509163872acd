"""Simulated: what distca_hf brings on 8, 64 and 512 GPUs, by `distca simulate` from the shipped profile.

    python scripts/pictures/draw_simulated.py              # simulates, and writes everything anew
    python scripts/pictures/draw_simulated.py --as-stored  # draws the stored figures again

Simulating takes two minutes. It writes docs/benchmarks/simulated-steps.json, the picture, and in
docs/will-it-help.md the output of the command and the text of the picture. Run it whenever the shipped profile or the
simulation changes.
"""

import argparse
import io
import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import SimulatedModel, preset
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile, gpu_gib_of
from distca_hf.analysis.simulate.command import print_results
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, simulate
from distca_hf.recipe import LENGTHS
from style import BENCHMARKS, ROOT, Bar, Style, draw_grid, headed, save


STORED, PAGE = BENCHMARKS / "simulated-steps.json", ROOT / "docs" / "will-it-help.md"
MIXES = {"pretrain": "a pretraining mix", "prolong": "ProLong"}
GPUS = (8, 64, 512)
MODEL, PROFILE, TOKENS_PER_RANK, CONTEXT_TOKENS = "llama3-8b", "h200", 131_072, 524_288
# As the command has them by default.
BATCHES = 20
# The command whose output the page shows, and the mix and number of GPUs of the choice that it quotes.
COMMAND = f"distca simulate prolong --gpus 8,64,512 --context {CONTEXT_TOKENS} --liger"
QUOTED_MIX, QUOTED_GPUS = "prolong", 64
# Ways that are drawn, by their family or key, from top to bottom.
WAYS = {
    "plain": "plain packing",
    "whole_documents": "whole documents",
    "ring": "zigzag ring",
    "ulysses": "Ulysses",
    "placed": "distca_hf",
}
# Of one mix of lengths (`mix`) and number of `gpus`: `ways` by their names, as `distca simulate --json` has them.
Panel = dict[str, Any]


def simulated() -> dict[str, Any]:
    """Simulates all panels; returns the content of the stored file: the profile that they were simulated from, the
    command on the page, and lines of its output that the page shows."""
    of_mixes = {mix: [result_of(mix, gpus) for gpus in GPUS] for mix in MIXES}
    profile = find_profile(PROFILE)
    panels = [{"mix": mix, "gpus": one.gpus, "ways": drawn(one)} for mix, of in of_mixes.items() for one in of]
    made = {"date": profile.made.date, "remarks": profile.made.remarks}
    lines = quoted(of_mixes[QUOTED_MIX], profile)
    return {"profile": made, "command": COMMAND, "quoted": lines, "panels": panels}


def result_of(mix: str, gpus: int) -> Result:
    """Simulates one mix of lengths on some GPUs, as the command does."""
    profile, tokens = find_profile(PROFILE), read_lengths(LENGTHS.find(mix)).tokens
    model = SimulatedModel.of(preset(MODEL))
    request = SimulationRequest(
        model, gpus, TOKENS_PER_RANK, CONTEXT_TOKENS, liger=True, gpu_gib=gpu_gib_of(profile), batches=BATCHES
    )
    return simulate(request, profile, tokens)[0]


def drawn(result: Result) -> dict[str, dict[str, Any]]:
    """Returns the ways that are drawn."""
    found = {
        way.key.split("_")[0] if way.key.startswith(("ring_", "ulysses_")) else way.key: way for way in result.ways
    }
    return {
        key: {
            "tokens_per_second": round(found[key].tokens_per_second, 1),
            "times_as_fast": round(found[key].times_as_fast, 4),
            "whole": found[key].whole,
            "fits": found[key].fits,
        }
        for key in WAYS
        if key in found
    }


def quoted(results: Sequence[Result], profile: ClusterProfile) -> list[str]:
    """Returns the lines of the command's output that the page shows: one choice, and the table of all."""
    printed = io.StringIO()
    print_results("", results, profile, (), Console(file=printed, width=80))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    choice = next(at for at, line in enumerate(lines) if line.startswith(f"{QUOTED_GPUS} GPUs x "))
    end = lines.index("", choice)
    table = next(at for at, line in enumerate(lines) if re.match(r"GPUs +micro-steps", line))
    return [*lines[choice:end], "...", *lines[table : table + 1 + len(results)]]


def draw(style: Style, panels: Sequence[Panel]) -> Figure:
    """Draws a row for each mix, and a column for each number of GPUs."""
    details = (
        f"Times as fast as plain packing, and tokens per second and GPU within the bars. {TOKENS_PER_RANK // 1024}K "
        f"tokens per H200,\ncontext {CONTEXT_TOKENS // 1024}K, Liger; longer is better. "
        "* cuts documents and leaves their attention across cuts out."
    )
    figure = headed(style, 5.9, "What distca_hf brings, simulated for an 8B Llama", details)
    longest = max(bar["times_as_fast"] for panel in panels for bar in panel["ways"].values())
    rows: dict[str, dict[str, dict[str, Bar]]] = {name: {} for name in MIXES.values()}
    for panel in panels:
        bars = {name: bar_of(style, panel, way) for way, name in WAYS.items()}
        rows[MIXES[panel["mix"]]][f"{panel['gpus']} GPUs"] = bars
    draw_grid(figure, style, rows, 1.22 * longest, 0.04)
    return figure


def bar_of(style: Style, panel: Panel, way: str) -> Bar:
    """Returns the bar of a way."""
    found = panel["ways"].get(way)
    if found is None or not found["fits"]:
        return Bar("cannot hold the context" if found is None else "does not fit the GPU's memory")
    ours = way == "placed"
    return Bar(
        f"{found['tokens_per_second'] / panel['gpus']:,.0f}",
        found["times_as_fast"],
        mark="" if found["whole"] else " *",
        colour=style.ours if ours else style.others,
        on_colour=style.on_ours if ours else style.on_others,
        is_ours=ours,
    )


def described(panels: Sequence[Panel]) -> str:
    """Returns the picture as text."""
    of_mixes = {mix: list[str]() for mix in MIXES}
    for panel in panels:
        shown = {way: bar for way, bar in panel["ways"].items() if way != "plain" and bar["fits"]}
        ways = [f"{WAYS[way]} {bar['times_as_fast']:.2f}" for way, bar in shown.items()]
        of_mixes[panel["mix"]].append(f"{panel['gpus']} GPUs: {', '.join(ways)}")
    told = [f"{MIXES[mix]}, {'; '.join(parts)}." for mix, parts in of_mixes.items()]
    return " ".join(["Simulated steps of an 8B Llama, times as fast as plain packing.", *told]).replace(". a ", ". A ")


def with_figures(page: str, stored: dict[str, Any]) -> str:
    """Returns the page with the output of the command, and the text of the picture."""
    block = "\n".join(["```", stored["command"], "```", "", "```text", "...", *stored["quoted"], "...", "```"])
    found = re.compile(r"```\ndistca simulate prolong .*?\n```\n\n```text\n.*?\n```", re.DOTALL)
    picture = re.compile(r"!\[Simulated[^]]*(\]\(pictures/simulated-light)")
    assert len(found.findall(page)) == len(picture.findall(page)) == 1, "the page has no such block or picture"
    written = found.sub(lambda _: block, page)
    wrapped = textwrap.fill(f"![{described(stored['panels'])}", 118, break_on_hyphens=False)
    return picture.sub(lambda match: wrapped + match[1], written)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-stored", action="store_true", help="do not simulate")
    stored = json.loads(STORED.read_text()) if parser.parse_args().as_stored else simulated()
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    save("simulated", described(stored["panels"]), lambda style: draw(style, stored["panels"]))
    PAGE.write_text(with_figures(PAGE.read_text(), stored))


if __name__ == "__main__":
    main()
