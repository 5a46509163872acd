"""`distca simulate`: from lengths, a model and a measured cluster to tables or JSON."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.memory import gradient_bytes
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.options import SimulateOptions
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile, known_gib
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.request import assumed, pipeline_of
from distca_hf.analysis.simulate.request import GPUS_PER_SERVER, SimulationRequest
from distca_hf.analysis.simulate.result import Result, simulate
from distca_hf.analysis.tables import PlanProgress, Terminal, counted, of_lengths, plain_table, print_json
from distca_hf.analysis.training_setup import GIB
from distca_hf.errors import ConfigError


# Tokens that a rank holds in a micro-step by default.
DEFAULT_TOKENS_PER_RANK = 131_072
# Most digits of a number in a list.
MOST_DIGITS = 18
# Most tokens for which GPU-hours are counted: the hours are finite, however long a step takes.
MOST_BUDGET = 1e30


def run_simulate(options: SimulateOptions) -> None:
    """Runs `distca simulate`. Prints output at the very end: nothing is printed before an error."""
    profile, model = find_profile(options.cluster), SimulatedModel.of(find_model(options.model))
    if not 0 < options.token_budget <= MOST_BUDGET:
        raise ConfigError(f"--token-budget {options.token_budget:g} must be above 0, and at most {MOST_BUDGET:g}")
    if None not in (options.tokens_per_rank, options.batch_size):
        raise ConfigError(
            f"--tokens-per-rank {options.tokens_per_rank} asks for placed batches, and --batch-size "
            f"{options.batch_size} for your own; leave one of them out"
        )
    tokens_per_rank = DEFAULT_TOKENS_PER_RANK if options.tokens_per_rank is None else options.tokens_per_rank
    pipeline = pipeline_of(options.pipeline, options.chunks)
    requests = [
        SimulationRequest(
            *(model, gpus, tokens_per_rank, options.context, micro_steps),
            *(options.ranks_per_node, options.tensor, options.batches, pipeline),
            *(options.sync_each_batch, options.batch_size),
            **assumed(options, profile),
        )
        for gpus in _numbers("--gpus", options.gpus)
        for micro_steps in _numbers("--micro-steps", options.micro_steps)
    ]
    progress, notes = PlanProgress(), Notes()
    results: list[Result] = []
    with progress.shown():
        with progress.stage(f"reading {options.lengths.name}"):
            documents = read_lengths(options.lengths)
        for request in requests:
            label = f"{request.gpus} GPUs, {request.accumulation} micro-steps"
            with progress.counting(label, request.batches) as count:
                result, of_result = simulate(
                    request, profile, documents.tokens, options.token_budget, count, groups=documents.groups
                )
            results.append(result)
            notes.merge(of_result)
    of_batches = OF_PACKED if options.batch_size is None else OF_GIVEN
    assumptions = [*of_batches, *ASSUMPTIONS, *_assumptions(options, requests, profile), *notes.lines()]
    if documents.groups is not None:
        saved = 100 * max(way.shared_share for result in results for way in result.ways)
        dealt = " Groups are dealt as TRL's GRPO trainer deals them." if saved else ""
        alike = documents.groups.in_words(requests[0].unshared)
        assumptions.append(f"{alike} {saved:.0f} % of the tokens are not computed again.{dealt}")
    if options.as_json:
        print_json(
            {
                "kind": "distca_hf simulation",
                "lengths": str(options.lengths),
                "model": model.name,
                "profile": profile.summary(),
                "token_budget": options.token_budget,
                "assumptions": assumptions,
                "simulations": [result.as_json() for result in results],
            }
        )
        return
    world = f"{of_lengths(documents.source, documents.tokens)}. {model.name}, {options.batches} steps."
    print_results(world, results, profile, assumptions, Terminal())


# Assumptions of every simulation; docs/simulation.md has the equations.
ASSUMPTIONS = (
    "FSDP2 in bf16: ranks wait for each other in every layer, and each layer's weights are gathered twice in a "
    "micro-step, while GPUs compute; at both ends of a micro-step GPUs wait for the network",
    "not counted: data loading, the host's time, other jobs on the network, GPUs of unequal speed",
)
# And for batches that are packed, or made by --batch-size.
OF_PACKED = (
    "plain packing: as TRL packs (bfd), whole documents in packs of equal tokens; longer ones are cut",
    "distca, your packs: the packs of plain packing; rows are placed inside the model, head and loss stay",
    "rings and Ulysses: the fastest group size that holds the context; backward recomputes their attention, as in "
    "their code",
    f"distca, with servers: one of {GPUS_PER_SERVER} GPUs serves attention, the others hold its tokens",
    "`distca plan` prints the same figures for the same training",
)
OF_GIVEN = (
    "your batches: rows in random order, without padding; every way has the same rows in a step",
    "rows are placed inside the model, unless tokens and time are even within 2 %; GPUs wait for both exchanges "
    "at its borders; a thread plans during the step before",
    "results return: hidden states return, and head and loss run on your rows; placed loss: they run on placed rows",
)


def _assumptions(
    options: SimulateOptions, requests: Sequence[SimulationRequest], profile: ClusterProfile
) -> list[str]:
    request = requests[0]
    kept = {
        "saved": "layers are checkpointed; distca keeps attention outputs, by default",
        "offloaded": "layers are checkpointed; distca keeps their inputs and attention outputs on the host; "
        "copies take no time",
        "recomputed": "layers are checkpointed, and attention is recomputed in every way",
        "none": "no activation checkpointing",
    }[request.checkpointing]
    lines = [
        f"{kept}{'; Liger kernels' if options.liger else ''}",
        f"{min(request.gpus, request.ranks_per_node)} GPUs per node; GPU-hours for {options.token_budget:,.0f} "
        f"tokens; 90 % of {request.gpu_gib:.0f} GiB may be used (!: does not fit)",
    ]
    if options.gpu_gib is None and known_gib(profile) is None:
        lines.append(
            f"the memory of {profile.made.device!r}, which the profile was measured on, is not known: that of an H100 "
            "is assumed; give yours with --gpu-gib"
        )
    lines += [f"limit of the model: {limit}" for limit in request.model.limits]
    lines += [_accumulation(one) for one in requests if one.accumulation > 1][:1]
    if request.tensor_ranks > 1:
        lines.append(
            f"{request.tensor_ranks} GPUs divide every layer; no computation hides their exchanges of activations"
        )
    if request.pipeline is not None:
        stages, chunks = request.pipeline.num_stages, request.pipeline.chunks
        lines += [
            f"pipeline: {stages} stages of {request.stage_ranks} data ranks, {chunks} chunk{'s' * (chunks > 1)} each, "
            f"on the same GPUs; a micro-step is {stages} micro-batches of a stage, and all ways pack documents for "
            "these",
            "pipeline: parts have equal shares of the layers, the last part also the head; weights of a stage are "
            "gathered once per step and stay, gradients are summed once; transfers between stages slow nothing down",
            "pipeline: transfers of interleaved stages wait for each other as over NCCL with torch 2.12; with 2.11 "
            "they wait much longer",
            "pipeline: memory is for the stage that needs most, with room for everything that other stages send in a "
            "step, as torch allocates it; this estimate was not compared with measurements",
        ]
    return lines


def _accumulation(request: SimulationRequest) -> str:
    """Returns text: when gradients are summed over ranks, and how much of them each GPU keeps before."""
    parameters = request.model.size.parameters
    weights = parameters // request.tensor_ranks, parameters // request.gpus
    whole, share = (gradient_bytes(way, *weights, request.accumulation) / GIB for way in ("fsdp2", "fsdp2_synced"))
    if request.sync_each_batch:
        return (
            f"gradients are summed in each micro-step (sync_each_batch), and {share:.1f} GiB are kept on each of "
            f"{request.gpus} GPUs; without it, as Trainer does by default, {whole:.1f} GiB"
        )
    return (
        f"gradients are summed only in the last micro-step, as Trainer does by default, and {whole:.1f} GiB are kept "
        f"before; with --sync-each-batch {share:.1f} GiB on each of {request.gpus} GPUs"
    )


def _numbers(option: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and len(part) <= MOST_DIGITS for part in parts):
        raise ConfigError(f"{option} {given}: write whole numbers with commas between them, such as 8,64")
    return [int(part) for part in parts]


def print_results(
    world: str, results: Sequence[Result], profile: ClusterProfile, assumptions: Sequence[str], console: Console
) -> None:
    """Prints the simulated training, the choice and a table for each number of GPUs, a summary, and assumptions."""
    console.print(Text(world))
    for result in results:
        title = (
            f"{result.gpus} GPUs x {result.of_rank}, {counted(result.accumulation, 'micro-step')}, context "
            f"{result.context_tokens:,}"
        )
        if result.num_stages > 1:
            chunks = f" of {result.chunks} chunks" if result.chunks > 1 else ""
            title += f"; pipeline: {result.num_stages} stages{chunks}"
        for block in ("", Text(title), Text(result.in_short(), style="bold"), "", _table(result)):
            console.print(block)
        if result.missing:
            console.print(Text(f"Left out: {'; '.join(result.missing)}."))
    if any(not way.whole for result in results for way in result.ways):
        console.print(Text("* cuts documents, and leaves more than 0.5 % of attended pairs out."))
    if len(results) > 1:
        console.print("")
        console.print(_summary(results))
    console.print("")
    made = profile.made
    remarks = f"; {made.remarks}" if made.remarks else ""
    times = f"{profile.source}, {made.processes} x {made.device}, {made.kernel}, measured {made.date}{remarks}"
    for line in (f"Times: {times}.", "Assumptions", *(f"- {line}" for line in assumptions)):
        console.print(Text(line))


def _table(result: Result) -> Table:
    table = plain_table("step s", "tokens/s/GPU", "MFU", "GiB", "GPU-hours", "x plain")
    for way in sorted(result.ways, key=lambda way: -way.step_seconds):
        memory = f"{way.memory_bytes / GIB:.0f}"
        table.add_row(
            way.label + ("" if way.whole else " *"),
            f"{way.step_seconds:.2f}",
            f"{way.tokens_per_second / result.gpus:,.0f}",
            "-" if way.utilisation is None else f"{100 * way.utilisation:.0f} %",
            memory if way.fits else f"{memory} !",
            f"{way.gpu_hours:,.0f}",
            f"{way.times_as_fast:.2f}",
        )
    return table


def _summary(results: Sequence[Result]) -> Table:
    table = plain_table("micro-steps", "plain s", "other s", "distca s", "x plain", "x other")
    for result in results:
        ways = result.plain, result.other, result.ours
        seconds = [None if way is None else way.step_seconds for way in ways]
        numbers = [*seconds, None if result.ours is None else result.ours.times_as_fast, result.gain]
        cells = ("-" if number is None else f"{number:.2f}" for number in numbers)
        table.add_row(f"{result.gpus} GPUs", str(result.accumulation), *cells)
    return table
